"""``python -m tools.tiny.train``: makes the embedded model, its adapters and a routed adapter over them.

A fixed number of steps is split over three stages: the vision tower alone with an auxiliary head that says what lies
in each image cell; then tower and language model together; then the same without the head while the learning rate
falls.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import multiprocessing
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from tools.tiny import batches, build, domains
from tools.tiny import scenes as S
from vlora_sgl.generate.datasets import SPLITS, read_jsonl
from vlora_sgl.generate.trainer import (
    LoraSettings,
    Prepared,
    exact_match,
    head_accuracy,
    keep_better_start,
    load_adapter,
    save_adapter,
    train_lora,
)
from vlora_sgl.heads.store import DESCRIPTION_FILE, build_head, load_heads, read_description, save_heads
from vlora_sgl.models import tiny

TOWER_SHARE, JOINT_SHARE = 0.12, 0.74  # of the steps; the rest is the last stage
AUXILIARY_WEIGHT = 0.5
STEPS, ADAPTER_STEPS, ROUTER_STEPS = 4750, 450, 300
RANK = 8  # 0.5 MB each; rank 16 answers no better
PEAK_RATE, WARM_UP_SHARE = 1e-3, 0.04


class CellHead(torch.nn.Module):
    """Says what lies in each image token's cell and, from their mean, which digit is shown. Thrown away at the end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.sizes = (len(S.COLOURS), len(S.SHAPES), 1)
        self.cell = torch.nn.Linear(width, sum(self.sizes))
        self.digit = torch.nn.Linear(width, 10)

    def loss(self, tokens: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
        """Mean cross-entropy of colour, shape, presence and digit. ``tokens``: (B, 16, width)."""
        colour, shape, present = self.cell(tokens).float().split(self.sizes, -1)
        terms = [
            F.cross_entropy(colour.flatten(0, 1), target["colour"].flatten(), ignore_index=-100),
            F.cross_entropy(shape.flatten(0, 1), target["shape"].flatten(), ignore_index=-100),
            F.binary_cross_entropy_with_logits(present[..., 0], target["present"]),
        ]
        digit = F.cross_entropy(
            self.digit(tokens.mean(1)).float(), target["digit"], ignore_index=-100, reduction="sum"
        )
        terms.append(digit / (target["digit"] >= 0).sum().clamp(min=1))
        return sum(terms, torch.zeros((), device=tokens.device))


class _Stream(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Endless batches; worker w of n makes those with number = w mod n, so the stream does not depend on timing."""

    def __init__(self, encoder: batches.Encoder, size: int, seed: int, kinds: tuple[str, ...]) -> None:
        self.encoder, self.size, self.seed, self.kinds = encoder, size, seed, kinds

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = torch.utils.data.get_worker_info()
        number, stride = (info.id, info.num_workers) if info else (0, 1)
        while True:
            seed = self.seed * 1_000_003 + number
            if number % 8 == 7 and "motion" in self.kinds:
                yield batches.motion_batch(self.encoder, self.size // 2, seed)
            else:
                yield batches.scene_batch(self.encoder, self.size, seed, self.kinds)
            number += stride


def pretrain(
    model: Any,
    processor: Any,
    device: torch.device,
    steps: int,
    batch_size: int,
    workers: int,
    seed: int,
    kinds: tuple[str, ...] = S.QUESTION_TYPES,
    log_every: int = 100,
) -> list[dict[str, float]]:
    """Train ``model`` in place for ``steps`` on ``kinds`` of questions; a log row per ``log_every`` steps."""
    encoder = batches.Encoder(processor.tokenizer)
    mean = torch.tensor(processor.image_processor.image_mean, device=device)
    std = torch.tensor(processor.image_processor.image_std, device=device)
    head = CellHead(model.config.text_config.hidden_size).to(device)
    model.to(device).train()
    parameters = [*model.parameters(), *head.parameters()]
    fast = device.type == "cuda"
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.02, fused=fast)
    stream = iter(
        torch.utils.data.DataLoader(
            _Stream(encoder, batch_size, seed, kinds),
            batch_size=None,
            num_workers=workers,
            prefetch_factor=4 if workers else None,
            pin_memory=fast,
        )
    )
    generator = torch.Generator(device).manual_seed(seed)
    log: list[dict[str, float]] = []
    sums = torch.zeros(2, device=device)
    started = time.monotonic()
    bar = tqdm(range(1, steps + 1), desc="pretraining", mininterval=10)
    for step in bar:
        batch = next(stream)
        share = (step - 1) / steps
        tower_only = share < TOWER_SHARE and batch["cells"] is not None
        rate = PEAK_RATE * min(1.0, share / WARM_UP_SHARE) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))
        for group in optimizer.param_groups:
            group["lr"] = rate

        def to(name: str, batch: dict[str, Any] = batch) -> torch.Tensor:
            return batch[name].to(device, non_blocking=True)

        with torch.no_grad():
            frames = [S.render(frame, device, generator) for frame in batch["frames"]]
            images = torch.stack(frames, 1).flatten(0, 1)
            pixels = batches.patches(images, mean, std)
        with torch.autocast(device.type, torch.bfloat16, enabled=fast):
            tokens = batches.encode_images(model.model.visual, pixels, fast)
            loss = torch.zeros((), device=device)
            auxiliary = torch.zeros((), device=device)
            if batch["cells"] is not None and share < TOWER_SHARE + JOINT_SHARE:
                auxiliary = head.loss(tokens, {k: v.to(device) for k, v in batch["cells"].items()})
            if not tower_only:
                hidden = batches.forward(
                    model, to("ids"), tokens.flatten(0, 1), encoder.image_token, to("index"), to("segment"), fast
                )
                logits = model.lm_head(hidden.flatten(0, 1)[to("where")]).float()
                loss = F.cross_entropy(logits, to("wanted"))
        optimizer.zero_grad(set_to_none=True)
        (loss + AUXILIARY_WEIGHT * auxiliary).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        sums += torch.stack([loss.detach(), auxiliary.detach()])
        if step % log_every == 0:
            answer, cells = (sums / log_every).tolist()
            sums.zero_()
            if not math.isfinite(answer + cells):
                raise FloatingPointError(f"the training loss is not finite at step {step}")
            log.append({"step": step, "seconds": round(time.monotonic() - started, 1), "answer_loss": round(answer, 4),
                        "cell_loss": round(cells, 4), "learning_rate": rate})  # fmt: skip
            bar.set_postfix(loss=f"{answer:.3f}", cells=f"{cells:.3f}")
    return log


@torch.no_grad()
def accuracy(
    model: Any,
    processor: Any,
    device: torch.device,
    scenes: int,
    seed: int,
    batch: int = 500,
    kinds: tuple[str, ...] = S.QUESTION_TYPES,
) -> dict[str, dict[str, float]]:
    """Greedy exact match on unseen scenes for each of ``kinds`` of questions.

    Every question is asked alone, in a fresh dialogue. ``accuracy`` is with the image, ``blind`` without it, and
    ``chance`` that of the commonest answer.
    """
    encoder = batches.Encoder(processor.tokenizer)
    mean = torch.tensor(processor.image_processor.image_mean, device=device)
    std = torch.tensor(processor.image_processor.image_std, device=device)
    drawn = S.sample(scenes, np.random.default_rng(seed), test=True, digit_share=0.3)
    rng = random.Random(seed)
    asked: list[tuple[int, str, str, str]] = []
    for i in range(scenes):
        per_type: dict[str, tuple[int, str, str, str]] = {}
        for kind, question, answer in S.questions(drawn, i, rng, kinds):
            per_type.setdefault(kind, (i, kind, question, answer))
        asked += per_type.values()
    images = S.render(drawn, device, torch.Generator(device).manual_seed(seed))
    model.to(device).eval()
    vision = _see(model, images, mean, std, batch)
    hits: dict[str, list[bool]] = {}
    blind: dict[str, list[bool]] = {}
    for start in range(0, len(asked), batch):
        part = asked[start : start + batch]
        for shown, into in ((True, hits), (False, blind)):
            rows = [encoder.dialogue([(q, a)], images=int(shown)) for _, _, q, a in part]
            right = _right(model, encoder, rows, vision[[i for i, *_ in part]] if shown else vision[:0])
            for (_, kind, _, _), good in zip(part, right, strict=True):
                into.setdefault(kind, []).append(good)
    answers: dict[str, list[str]] = {}
    if "motion" in kinds:
        frames, directions = S.motion(scenes, np.random.default_rng(seed + 1), test=True)
        vision = _see(model, torch.stack([S.render(f, device) for f in frames], 1).flatten(0, 1), mean, std, batch)
        rows = [encoder.dialogue([(S.MOTION_QUESTION, d)], images=len(frames)) for d in directions]
        hits["motion"], answers["motion"] = _right(model, encoder, rows, vision), directions
    for _, kind, _, answer in asked:
        answers.setdefault(kind, []).append(answer)
    result = {}
    for kind in S.QUESTION_TYPES:
        if kind in hits:
            common = max(answers[kind].count(a) for a in set(answers[kind])) / len(answers[kind])
            row = {"accuracy": float(np.mean(hits[kind])), "chance": common, "questions": float(len(hits[kind]))}
            if kind in blind:
                row["blind"] = float(np.mean(blind[kind]))
            result[kind] = {k: round(v, 4) for k, v in row.items()}
    return result


def _see(model: Any, images: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, batch: int) -> torch.Tensor:
    """What the vision tower makes of images, ``batch`` at a time."""
    parts = (batches.patches(images[s : s + batch], mean, std) for s in range(0, len(images), batch))
    return torch.cat([batches.encode_images(model.model.visual, part) for part in parts])


def _right(
    model: Any, encoder: batches.Encoder, rows: list[tuple[list[int], list[int]]], vision: torch.Tensor
) -> list[bool]:
    """Whether greedy decoding gives each row's answer, from its images' tokens."""
    ids, labels = (part.to(vision.device) for part in encoder.pad_rows(rows))
    hidden = batches.forward(model, ids, vision.flatten(0, 1), encoder.image_token)
    wrong = (labels[:, 1:] != batches.IGNORE) & (model.lm_head(hidden[:, :-1]).argmax(-1) != labels[:, 1:])
    return (~wrong.any(1)).tolist()


def train_adapter(
    name: str, model_directory: Path, data: Path, out: Path, device: torch.device, steps: int, seed: int, resume: bool
) -> dict[str, Any]:
    """Train one adapter and its heads with the project's trainer, write it to ``out/name``, and measure it.

    Args:
        steps: of 32 examples.
        resume: do not train an adapter that is there already.
    Returns:
        accuracy on the test split of the base, of the adapter's decoded answer and of each head; sizes of the splits.
    """
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    domain, activate = domains.ADAPTERS[name]
    prompt = domains.QUESTIONS[domain]
    processor = AutoProcessor.from_pretrained(model_directory)
    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(model_directory, dtype=torch.float32)
    model.to(device)
    width = model.config.text_config.hidden_size
    examples = {s: read_jsonl(data / domain / f"{s}.jsonl") for s in SPLITS}
    splits = {s: Prepared(model, processor, examples[s]) for s in ("validation", "test")}
    before = float(np.mean(exact_match(model, processor, splits["test"])))
    if not (resume and (out / name / DESCRIPTION_FILE).is_file()):
        settings = LoraSettings(rank=RANK, alpha=2 * RANK, activate=activate, seed=seed, steps=steps)
        heads = [build_head(one, width) for one in domains.HEADS[domain]]
        trained = train_lora(model, processor, examples["train"], settings, f"adapter {name}", heads)
        trained.peft_config["default"].base_model_name_or_path = "vlora_sgl/models/tiny/model"
        save_adapter(trained, out / name, heads, activate, prompt, {"training steps": steps})
        model = trained.unload()
    adapter = load_adapter(model, out / name)
    heads = list(load_heads(out / name, width, device).values())
    for head in heads:
        keep_better_start(head, adapter, processor, splits["validation"])
    made = read_description(out / name).metrics.get("training steps", ADAPTER_STEPS)
    report: dict[str, Any] = {
        "domain": domain,
        "invocation": activate,
        "steps": made,
        "base": before,
        "adapter": float(np.mean(exact_match(adapter, processor, splits["test"]))),
        "validation": float(np.mean(exact_match(adapter, processor, splits["validation"]))),
        "heads": {
            head.name: {
                "kind": head.kind,
                "metric": head.metric_name,
                "value": head_accuracy(adapter, processor, head, splits["test"]),
            }
            for head in heads
        },
        "examples": {s: len(v) for s, v in examples.items()},
    }
    metrics = {
        "training steps": made,
        "test accuracy": report["adapter"],
        **{f"{h} head": r["value"] for h, r in report["heads"].items()},
    }
    save_heads(out / name, heads, activate, prompt, metrics)
    print(name, json.dumps(report), flush=True)
    return report


def train_adapters(
    names: Sequence[str],
    model_directory: Path,
    data: Path,
    out: Path,
    device: torch.device,
    steps: int,
    seed: int,
    resume: bool,
    processes: int,
) -> dict[str, Any]:
    """``train_adapter`` for every name, several at a time; the result does not depend on how many."""
    settings = (model_directory, data, out, device, steps, seed, resume)
    if processes < 2:
        return {name: train_adapter(name, *settings) for name in names}
    context = multiprocessing.get_context("spawn")  # a forked child cannot use CUDA
    with concurrent.futures.ProcessPoolExecutor(processes, context) as pool:
        jobs = {name: pool.submit(train_adapter, name, *settings) for name in names}
        return {name: job.result() for name, job in jobs.items()}


def train_routed(
    model_directory: Path, adapters: Path, data: Path, out: Path, device: torch.device, steps: int, seed: int
) -> dict[str, Any]:
    """Train a token router over the adapters that start at the first token, without telling it the domains.

    Returns:
        what ``generate.token_router.make_routed`` reports, on the test splits; the routed adapter is in ``out``.
    """
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    from vlora_sgl.generate.token_router import RouterSettings, make_routed

    members = {name: domain for name, (domain, invocation) in domains.ADAPTERS.items() if invocation is None}
    processor = AutoProcessor.from_pretrained(model_directory)
    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(model_directory, dtype=torch.float32)
    train, test = (
        {domain: read_jsonl(data / domain / f"{split}.jsonl") for domain in members.values()}
        for split in ("train", "test")
    )
    paths = {name: adapters / name for name in members}
    return make_routed(model.to(device), processor, paths, train, test, out, RouterSettings(steps=steps, seed=seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=tiny.path().parent, help="where model/, adapters/ and train_log.json go"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="of pretraining")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--workers", type=int, default=12 if torch.cuda.is_available() else 0)
    parser.add_argument("--adapter-steps", type=int, default=ADAPTER_STEPS, help="of each adapter, of 32 examples")
    parser.add_argument(
        "--processes", type=int, default=8 if torch.cuda.is_available() else 1, help="for the adapters"
    )
    parser.add_argument("--router-steps", type=int, default=ROUTER_STEPS, help="of the router, of 16 examples")
    parser.add_argument("--test-scenes", type=int, default=2000)
    parser.add_argument("--small", action="store_true", help="a model of a third of the size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=Path("tiny-domains"), help="where the real domains are written")
    parser.add_argument("--adapters", nargs="*", choices=tuple(domains.ADAPTERS), default=list(domains.ADAPTERS))
    parser.add_argument("--resume", action="store_true", help="measure adapters that are there, train the others")
    parser.add_argument("--stage", choices=("all", "pretrain", "adapters", "routed"), default="all")
    args = parser.parse_args()
    from transformers import Qwen2_5_VLForConditionalGeneration

    device = torch.device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    log_file = args.out / "train_log.json"
    log: dict[str, Any] = json.loads(log_file.read_text()) if log_file.exists() else {}
    if args.stage in ("all", "pretrain"):
        torch.manual_seed(args.seed)
        started = time.monotonic()
        processor = build.build_processor(build.build_tokenizer(S.corpus()))
        model = Qwen2_5_VLForConditionalGeneration(build.build_config(processor.tokenizer, small=args.small))
        log["settings"] = {k: getattr(args, k) for k in ("steps", "batch_size", "adapter_steps", "seed", "small")}
        log["card"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        log["versions"] = {"torch": torch.__version__}
        log["pretraining"] = pretrain(model, processor, device, args.steps, args.batch_size, args.workers, args.seed)
        # Before the evaluation: nothing after it may lose the weights.
        build.save(model, processor, args.out / "model")
        log["minutes"] = {"pretraining": round((time.monotonic() - started) / 60, 2)}
        log_file.write_text(json.dumps(log, indent=1))
        half = Qwen2_5_VLForConditionalGeneration.from_pretrained(args.out / "model", dtype=torch.float32)
        log["base"] = accuracy(half, processor, device, args.test_scenes, seed=12345)
        print(json.dumps({kind: row["accuracy"] for kind, row in log["base"].items()}), flush=True)
        log_file.write_text(json.dumps(log, indent=1))
    if args.stage in ("all", "adapters"):
        started = time.monotonic()
        _prepare_missing(args.data, args.adapters)
        report = train_adapters(
            args.adapters, args.out / "model", args.data, args.out / "adapters", device, args.adapter_steps,
            args.seed, args.resume, args.processes,
        )  # fmt: skip
        log = json.loads(log_file.read_text()) if log_file.exists() else {}  # the stage before may have added to it
        known = {name: row for name, row in log.get("adapters", {}).items() if name in domains.ADAPTERS}
        log["adapters"] = {**known, **report}
        log.setdefault("settings", {})["adapter_steps"] = args.adapter_steps
        log.setdefault("minutes", {})["adapters"] = round((time.monotonic() - started) / 60, 2)
        log_file.write_text(json.dumps(log, indent=1))
    if args.stage in ("all", "routed"):
        started = time.monotonic()
        _prepare_missing(args.data, domains.ADAPTERS)
        log["routed"] = train_routed(
            args.out / "model",
            args.out / "adapters",
            args.data,
            args.out / "routed",
            device,
            args.router_steps,
            args.seed,
        )
        log.setdefault("minutes", {})["routed"] = round((time.monotonic() - started) / 60, 2)
        log_file.write_text(json.dumps(log, indent=1))


def _prepare_missing(data: Path, adapters: Iterable[str]) -> None:
    """Write the domains of ``adapters`` that are not there yet."""
    wanted = sorted({domains.ADAPTERS[name][0] for name in adapters})
    domains.prepare(data, [name for name in wanted if not (data / name / "test.jsonl").is_file()])


if __name__ == "__main__":
    main()
