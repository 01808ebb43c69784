"""How classes are scored when the language model, not a head, chooses among them."""

from __future__ import annotations

import math

from vlora_sgl.lang._upstream import ChoicesDecision, ChoicesSamplingMethod

TokenLogprob = tuple[float, int, str]
"""Log-probability, id and text of a token, as SGLang lists them."""


class SequenceProbability(ChoicesSamplingMethod):
    """Takes the choice of the greatest total log-probability; a softmax over the totals gives the probabilities.

    That is the model's probability of each choice, given that it answers with one of them. A choice that is the
    beginning of another one takes the other's share too.
    """

    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[list[TokenLogprob]],
        output_token_logprobs: list[list[TokenLogprob]],
        unconditional_token_logprobs: list[list[TokenLogprob]] | None = None,
    ) -> ChoicesDecision:
        totals = [sum(token[0] for token in tokens) for tokens in input_token_logprobs]
        top = max(totals)
        weights = [math.exp(total - top) for total in totals]
        probabilities = {choice: weight / sum(weights) for choice, weight in zip(choices, weights, strict=True)}
        meta_info = {"probabilities": probabilities, "input_token_logprobs": input_token_logprobs}
        return ChoicesDecision(choices[totals.index(top)], meta_info)


sequence_probability = SequenceProbability()
