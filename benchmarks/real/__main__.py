"""``make real``: adapters trained on a real model, served in every mode and exported, beside transformers + PEFT.

200 test prompts, a third of them to the base model, are answered greedily in mixed batches unmerged and in mixture, in
batches of one adapter merged, and by the exported model. transformers + PEFT then reads each answer: every token must
be its own best one, or lie within rounding of it (docs/design/modes.md has the bound). Figures:

- ``real.mode_mismatches``: answers, over all modes, with a token that is neither.
- ``real.max_logit_difference``: of the log-probability of a token, between an engine and the reference.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.real.model import TextProcessor, fetch
from benchmarks.real.tasks import tasks
from benchmarks.summary import ROOT, SUMMARY, record
from tests.support.engine_runs import EngineProcess
from tests.support.rounding import logprob_bounds
from vlora_sgl.export.run import main as export
from vlora_sgl.generate.trainer import LoraSettings, chat, exact_match, save_adapter, train_lora

TOKENS, BATCH = 12, 20
MODES = ("unmerged", "merged", "mixture")


@dataclass(frozen=True)
class Case:
    """One prompt, and the adapter that answers it; ``None`` for the base model."""

    adapter: str | None
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Reading:
    """What transformers + PEFT says of an answer.

    Attributes:
        logprobs: of the answer's tokens.
        wrong: the first token that is not the best one, if any.
        behind: how far its log-probability is behind the best one's.
    """

    logprobs: list[float]
    wrong: int | None
    behind: float


def train(model_dir: Path, cache: Path, args: argparse.Namespace) -> tuple[dict[str, Path], list[Case]]:
    """An adapter for each task, trained once and kept in ``cache``; and the test prompts."""
    processor: Any = TextProcessor(AutoTokenizer.from_pretrained(model_dir))
    adapters, cases = {}, []
    share = args.prompts // 2
    for name, (learn, test) in tasks(args.examples, share).items():
        adapters[name] = cache / name
        if not (adapters[name] / "adapter_config.json").is_file():
            base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
            before = sum(exact_match(base, processor, test[:40], 8))
            settings = LoraSettings(rank=16, steps=args.steps, batch_size=8, learning_rate=1e-3)
            adapted = train_lora(base, processor, learn, settings, name)
            save_adapter(adapted, adapters[name])
            after = sum(exact_match(adapted, processor, test[:40], 8))
            print(f"{name}: {after} of 40 right, {before} before", flush=True)
        for number, one in enumerate(test):
            text = processor.apply_chat_template(chat(one.question, 0), add_generation_prompt=True)
            cases.append(Case(None if number % 3 == 2 else name, tuple(processor.tokenizer(text)["input_ids"])))
    return adapters, [case for pair in zip(cases[:share], cases[share:], strict=True) for case in pair]


def answer(engine: EngineProcess, cases: list[Case]) -> Iterator[tuple[Case, list[int], list[float]]]:
    """Tokens and their log-probabilities, batch by batch."""
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    for start in range(0, len(cases), BATCH):
        chosen = cases[start : start + BATCH]
        run = engine.generate(
            input_ids=[list(case.ids) for case in chosen], lora_path=[case.adapter for case in chosen],
            sampling_params=sampling, return_logprob=True,
        )  # fmt: skip
        for case, found in zip(chosen, run.answers, strict=True):
            yield case, found["output_ids"], [one[0] for one in found["meta_info"]["output_token_logprobs"]]


def served(model_dir: Path, adapters: dict[str, Path], cases: list[Case], modes: Iterable[str]) -> Iterator[Any]:
    """(mode, case, tokens, log-probabilities) of every case in every mode; ``exported`` forces none."""
    options: dict[str, Any] = {"model_path": str(model_dir), "enable_lora": True, "max_total_tokens": 16384}
    if adapters:
        options |= {"lora_paths": [f"{name}={path}" for name, path in adapters.items()], "max_loras_per_batch": 3}
    with EngineProcess(options) as engine:
        engine.ready()
        for mode in modes:
            if mode in MODES:
                engine.force_mode(mode)
            engine.flush()
            groups = [[c for c in cases if c.adapter == a] for a in (None, *adapters)] if mode == "merged" else [cases]
            for group in groups:
                for one in answer(engine, group):
                    yield mode, *one
            print(f"{mode}: answered; steps by mode {engine.state()['batches_by_mode']}", flush=True)


class Reference:
    """transformers + PEFT, in float32; an answer that came before is not read again."""

    def __init__(self, model_dir: Path, adapters: dict[str, Path]) -> None:
        base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        (first, path), *others = adapters.items()
        self.model = PeftModel.from_pretrained(base, path, adapter_name=first)
        for name, path in others:
            self.model.load_adapter(path, adapter_name=name)
        self.model.eval()
        self._read: dict[tuple[Case, tuple[int, ...]], Reading] = {}

    def read(self, case: Case, ids: list[int]) -> Reading:
        """What it says of an answer."""
        key = case, tuple(ids)
        if key not in self._read:
            self._read[key] = self._reading(case, ids)
        return self._read[key]

    @torch.inference_mode()
    def _reading(self, case: Case, ids: list[int]) -> Reading:
        tokens = torch.tensor([[*case.ids, *ids]])
        if case.adapter is None:
            with self.model.disable_adapter():
                logits = self.model(input_ids=tokens).logits
        else:
            self.model.set_adapter(case.adapter)
            logits = self.model(input_ids=tokens).logits
        scores = logits[0, len(case.ids) - 1 : -1].log_softmax(-1)
        best, found = scores.max(-1), scores[torch.arange(len(ids)), torch.tensor(ids)]
        wrong = next((i for i, one in enumerate(ids) if best.indices[i] != one), None)
        behind = 0.0 if wrong is None else float(best.values[wrong] - found[wrong])
        return Reading(found.tolist(), wrong, behind)


def bound(model_dir: Path, adapters: dict[str, Path], case: Case, ids: list[int]) -> float:
    """How far rounding may move the last token's log-probability."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    if case.adapter is not None:
        model = PeftModel.from_pretrained(model, adapters[case.adapter]).merge_and_unload()
    return logprob_bounds(model.eval(), case.ids, ids, torch.float32)[-1]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real", description=__doc__)
    parser.add_argument("--cache", type=Path, default=ROOT / "runs" / "real", help="model and adapters, kept")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--examples", type=int, default=240, help="to train on, a task")
    parser.add_argument("--steps", type=int, default=24, help="of training, a task")
    parser.add_argument("--summary", type=Path, default=SUMMARY, help="file that takes the figures")
    args = parser.parse_args()
    model_dir = fetch(args.cache)
    adapters, cases = train(model_dir, args.cache, args)
    exported = args.cache / "exported"
    if not (exported / "vlora_export.json").is_file():
        hot, cold = adapters
        export(["--model", str(model_dir), "--hot", f"{hot}={adapters[hot]}", "--cold", f"{cold}={adapters[cold]}",
                "--out", str(exported)])  # fmt: skip
    gc.collect()
    answers = [*served(model_dir, adapters, cases, MODES), *served(exported, {}, cases, ["exported"])]
    reference = Reference(model_dir, adapters)
    largest: dict[str, float] = dict.fromkeys((*MODES, "exported"), 0.0)
    swapped: Counter[str] = Counter()
    mismatches = 0
    for mode, case, ids, logprobs in answers:
        said = reference.read(case, ids)
        same = len(ids) if said.wrong is None else said.wrong
        apart = (torch.tensor(logprobs) - torch.tensor(said.logprobs))[:same].abs()
        largest[mode] = max(largest[mode], float(apart.max()) if same else 0.0)
        if said.wrong is not None:
            swapped[mode] += 1
            mismatches += said.behind > 2 * bound(model_dir, adapters, case, ids[: said.wrong + 1])
    print(json.dumps({"largest difference": largest, "near ties that fell otherwise": swapped}), flush=True)
    record("real.mode_mismatches", mismatches, "answers", False, summary=args.summary)
    record("real.max_logit_difference", max(largest.values()), "logit", False, summary=args.summary)
    assert not mismatches, f"{mismatches} of {len(answers)} answers differ from transformers + PEFT"


if __name__ == "__main__":
    main()
