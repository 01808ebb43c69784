"""How far rounding alone may move a log-probability: first-order error analysis by autograd, no fitted tolerance.

Take a model that rounds every value it stores with unit roundoff u: each weight w once when an adapter is merged in,
each activation y when it is written. Errors are |e| <= u |w| or u |y|, independent and of mean zero, and move a
log-probability l by the sum of dl/dw e_w + dl/dy e_y. Hoeffding: with V = u^2 sum((dl/dw w)^2 + (dl/dy y)^2), that sum
exceeds 6 sqrt(V) with probability 2 exp(-18), 3e-8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-9}
SIGMAS = 6.0
# Both of the two runs that are compared round; and besides the modules' outputs, which are seen here, about as many
# values are stored inside modules (rotary positions, attention, products with the gate, the adapters' own part).
RUNS, UNSEEN = 2, 2


def logprobs(model: nn.Module, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """Log-probability of every token of ``answer``, given all before it: float32 ``[len(answer)]``."""
    ids = torch.tensor([[*prompt, *answer]])
    scores = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return scores[torch.arange(len(answer)), torch.tensor(answer)]


def logprob_bounds(
    model: nn.Module, prompt: Sequence[int], answer: Sequence[int], dtype: torch.dtype, activations: bool = True
) -> list[float]:
    """How far two runs that round as ``dtype`` may differ in the log-probability of each answer token.

    Args:
        model: transformers model in float32, with the adapter merged in if there is one.
        prompt, answer: token ids.
        dtype: the engine's type.
        activations: whether activations round too; else only the merged weights do, in one of the runs.
    """
    seen: list[tuple[nn.Module, torch.Tensor, torch.Tensor]] = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        y = output[0] if isinstance(output, tuple) else output
        if torch.is_tensor(y) and y.requires_grad:
            seen.append((module, inputs[0] if inputs else y, y))

    inner: Any = model.model
    layers = getattr(inner, "language_model", inner).layers
    watched = [m for m in model.modules() if not list(m.children())] + list(layers)
    handles = [module.register_forward_hook(note) for module in watched]
    weights = [p for p in layers.parameters() if p.ndim == 2]
    try:
        for weight in weights:
            weight.requires_grad_(True)
        scores = logprobs(model, prompt, answer)
    finally:
        for handle in handles:
            handle.remove()
    unit, bounds = UNIT[dtype], []
    outputs = [y for _, _, y in seen] if activations else []
    # A float32 sum of products is off by about the roundoff of the sum of their sizes.
    sums = [
        UNIT[torch.float32] * (x.detach().abs() @ m.weight.detach().abs().T) if isinstance(m, nn.Linear) else None
        for m, x, _ in seen
    ]
    for score in scores:
        grads = torch.autograd.grad(score, [*weights, *outputs], retain_graph=True, allow_unused=True)
        variance = 0.0
        for value, grad in zip([*weights, *outputs], grads, strict=True):
            variance += 0.0 if grad is None else float((unit * value.detach() * grad).double().square().sum())
        for error, grad in zip(sums, grads[len(weights) :], strict=False):
            if error is not None and grad is not None:
                variance += float((error * grad).double().square().sum())
        bounds.append(SIGMAS * (variance * (RUNS * UNSEEN if activations else 1)) ** 0.5)
    return bounds
