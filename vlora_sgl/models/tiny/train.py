"""``python -m vlora_sgl.models.tiny.train``: makes the embedded model and its adapters from nothing.

The time budget is split over three stages: the vision tower alone with an auxiliary head that says what lies in each
image cell; then tower and language model together; then the same without the head while the learning rate falls.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from vlora_sgl.generation.datasets import Example, read_jsonl
from vlora_sgl.generation.trainer import LoraSettings, exact_match, train_lora
from vlora_sgl.models.tiny import batches, build, domains
from vlora_sgl.models.tiny import scenes as S

TOWER_SHARE, JOINT_SHARE = 0.12, 0.74  # of the time; the rest is the last stage
AUXILIARY_WEIGHT = 0.5


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
        if bool((target["digit"] >= 0).any()):
            terms.append(F.cross_entropy(self.digit(tokens.mean(1)).float(), target["digit"], ignore_index=-100))
        return sum(terms, torch.zeros((), device=tokens.device))


class _Stream(torch.utils.data.IterableDataset):
    """Endless batches; worker w of n makes those with number = w mod n, so the stream does not depend on timing."""

    def __init__(self, encoder: batches.Encoder, size: int, turns: int, seed: int, kinds: tuple[str, ...]) -> None:
        self.encoder, self.size, self.turns, self.seed, self.kinds = encoder, size, turns, seed, kinds

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = torch.utils.data.get_worker_info()
        number, stride = (info.id, info.num_workers) if info else (0, 1)
        while True:
            seed = self.seed * 1_000_003 + number
            if number % 8 == 7 and "motion" in self.kinds:
                yield batches.motion_batch(self.encoder, self.size // 2, seed)
            else:
                yield batches.scene_batch(self.encoder, self.size, self.turns, seed, self.kinds)
            number += stride


def pretrain(
    model: Any,
    processor: Any,
    device: torch.device,
    minutes: float,
    batch_size: int,
    workers: int,
    seed: int,
    kinds: tuple[str, ...] = S.QUESTION_TYPES,
    log_every: int = 100,
    steps: int | None = None,
) -> list[dict[str, float]]:
    """Train ``model`` in place on ``kinds`` of questions; a log row per ``log_every`` steps.

    It takes ``minutes``, or exactly ``steps`` where given, so that a slow machine trains the same model.
    """
    encoder = batches.Encoder(processor.tokenizer)
    mean = torch.tensor(processor.image_processor.image_mean, device=device)
    std = torch.tensor(processor.image_processor.image_std, device=device)
    head = CellHead(model.config.text_config.hidden_size).to(device)
    model.to(device).train()
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(
        parameters, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.02, fused=device.type == "cuda"
    )
    stream = iter(
        torch.utils.data.DataLoader(
            _Stream(encoder, batch_size, 6, seed, kinds),
            batch_size=None,
            num_workers=workers,
            prefetch_factor=4 if workers else None,
        )
    )
    generator = torch.Generator(device).manual_seed(seed)
    log: list[dict[str, float]] = []
    sums = torch.zeros(2, device=device)
    started, step = time.monotonic(), 0
    bar = tqdm(total=round(minutes * 60), desc="pretraining", unit="s", mininterval=5)
    while (share := step / steps if steps else (time.monotonic() - started) / (60 * minutes)) < 1:
        batch = next(stream)
        tower_only = share < TOWER_SHARE and batch["cells"] is not None
        warm = min(1.0, share / 0.05)
        rate = 1e-3 * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.no_grad():
            frames = [S.render(frame, device, generator) for frame in batch["frames"]]
            images = torch.stack(frames, 1).flatten(0, 1)
            pixels = batches.patches(images, mean, std)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            tokens = batches.encode_images(model.model.visual, pixels)
            loss = torch.zeros((), device=device)
            auxiliary = torch.zeros((), device=device)
            if batch["cells"] is not None and share < TOWER_SHARE + JOINT_SHARE:
                auxiliary = head.loss(tokens, {k: v.to(device) for k, v in batch["cells"].items()})
            if not tower_only:
                ids, labels = batch["ids"].to(device), batch["labels"].to(device)
                hidden = batches.forward(model, ids, tokens.flatten(0, 1), encoder.image_token)
                wanted = labels[:, 1:] != batches.IGNORE
                logits = model.lm_head(hidden[:, :-1][wanted]).float()
                loss = F.cross_entropy(logits, labels[:, 1:][wanted])
        optimizer.zero_grad(set_to_none=True)
        (loss + AUXILIARY_WEIGHT * auxiliary).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        sums += torch.stack([loss.detach(), auxiliary.detach()])
        step += 1
        if step % log_every == 0:
            answer, cells = (sums / log_every).tolist()
            sums.zero_()
            log.append({"step": step, "seconds": round(time.monotonic() - started, 1), "answer_loss": round(answer, 4),
                        "cell_loss": round(cells, 4), "learning_rate": rate})  # fmt: skip
            bar.set_postfix(step=step, loss=f"{answer:.3f}", cells=f"{cells:.3f}")
        bar.n = min(bar.total, round(time.monotonic() - started))
        bar.refresh() if step % 50 == 0 else None
    bar.close()
    if not math.isfinite(float(sums.sum())):
        raise FloatingPointError("the training loss is not finite")
    return log


@torch.no_grad()
def accuracy(
    model: Any, processor: Any, device: torch.device, scenes: int, seed: int, batch: int = 500
) -> dict[str, dict[str, float]]:
    """Greedy exact match on unseen scenes per question type, with the image, blind, and by the commonest answer.

    Every question is asked alone, in a fresh dialogue. ``blind`` removes the image from the prompt.
    """
    encoder = batches.Encoder(processor.tokenizer)
    mean = torch.tensor(processor.image_processor.image_mean, device=device)
    std = torch.tensor(processor.image_processor.image_std, device=device)
    drawn = S.sample(scenes, np.random.default_rng(seed), test=True, digit_share=0.3)
    rng = random.Random(seed)
    asked: list[tuple[int, str, str, str]] = []
    for i in range(scenes):
        per_type: dict[str, tuple[int, str, str, str]] = {}
        for kind, question, answer in S.questions(drawn, i, rng):
            per_type.setdefault(kind, (i, kind, question, answer))
        asked += per_type.values()
    images = S.render(drawn, device, torch.Generator(device).manual_seed(seed))
    model.to(device).eval()
    vision = torch.cat(
        [
            batches.encode_images(model.model.visual, batches.patches(images[s : s + batch], mean, std))
            for s in range(0, scenes, batch)
        ]
    )
    hits: dict[str, list[bool]] = {}
    blind: dict[str, list[bool]] = {}
    for start in range(0, len(asked), batch):
        part = asked[start : start + batch]
        for shown, into in ((True, hits), (False, blind)):
            ids, labels = encoder.pad_rows([encoder.dialogue([(q, a)], images=int(shown)) for _, _, q, a in part])
            ids, labels = ids.to(device), labels.to(device)
            tokens = vision[[i for i, *_ in part]] if shown else vision[:0]
            hidden = batches.forward(model, ids, tokens.flatten(0, 1), encoder.image_token)
            wrong = (labels[:, 1:] != batches.IGNORE) & (model.lm_head(hidden[:, :-1]).argmax(-1) != labels[:, 1:])
            for (_, kind, _, _), bad in zip(part, wrong.any(1).tolist(), strict=True):
                into.setdefault(kind, []).append(not bad)
    frames, directions = S.motion(scenes, np.random.default_rng(seed + 1), test=True)
    pictures = torch.stack([S.render(f, device) for f in frames], 1).flatten(0, 1)
    ids, labels = encoder.pad_rows(
        [encoder.dialogue([(S.MOTION_QUESTION, d)], images=len(frames)) for d in directions]
    )
    tokens = torch.cat(
        [
            batches.encode_images(model.model.visual, batches.patches(pictures[s : s + batch], mean, std))
            for s in range(0, len(pictures), batch)
        ]
    )
    guess = (
        model.lm_head(batches.forward(model, ids.to(device), tokens.flatten(0, 1), encoder.image_token)[:, :-1])
        .argmax(-1)
        .cpu()
    )
    hits["motion"] = (~((labels[:, 1:] != batches.IGNORE) & (guess != labels[:, 1:])).any(1)).tolist()
    answers: dict[str, list[str]] = {"motion": directions}
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


def train_adapters(
    model_directory: Path, data: Path, out: Path, device: torch.device, names: list[str], epochs: float
) -> dict[str, Any]:
    """Train one adapter per domain with the project's trainer; accuracy with and without it on the test split."""
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    report: dict[str, Any] = {}
    for name in names:
        processor = AutoProcessor.from_pretrained(model_directory)
        model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(model_directory, dtype=torch.float32)
        model.to(device)
        splits: dict[str, list[Example]] = {s: read_jsonl(data / name / f"{s}.jsonl") for s in domains.SPLITS}
        before = float(np.mean(exact_match(model, processor, splits["test"])))
        # As many steps for a small domain as for a large one.
        settings = LoraSettings(epochs=epochs * max(1.0, 1200 / len(splits["train"])))
        adapter = train_lora(model, processor, splits["train"], settings, progress=f"adapter {name}")
        after = float(np.mean(exact_match(adapter, processor, splits["test"])))
        validation = float(np.mean(exact_match(adapter, processor, splits["validation"])))
        for parameter in adapter.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
        adapter.peft_config["default"].base_model_name_or_path = "vlora_sgl/models/tiny/model"
        adapter.save_pretrained(out / name)
        (out / name / "README.md").unlink(missing_ok=True)
        report[name] = {
            "base": before,
            "adapter": after,
            "validation": validation,
            **{s: len(v) for s, v in splits.items()},
        }
        print(name, report[name], flush=True)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="where model/, adapters/ and train_log.json go"
    )
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="of pretraining; the shipped model took 5 on an H100"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--workers", type=int, default=10 if torch.cuda.is_available() else 0)
    parser.add_argument("--epochs", type=float, default=10.0, help="of each adapter, more for small domains")
    parser.add_argument("--test-scenes", type=int, default=2000)
    parser.add_argument("--small", action="store_true", help="a model of a third of the size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=Path("tiny-domains"), help="where the real domains are written")
    parser.add_argument("--domains", nargs="*", default=list(domains.DOMAINS))
    parser.add_argument("--stage", choices=("all", "pretrain", "adapters"), default="all")
    args = parser.parse_args()
    from transformers import Qwen2_5_VLForConditionalGeneration

    device = torch.device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    log_file = args.out / "train_log.json"
    log: dict[str, Any] = json.loads(log_file.read_text()) if log_file.exists() else {}
    if args.stage != "adapters":
        torch.manual_seed(args.seed)
        tokenizer = build.build_tokenizer(S.corpus())
        processor = build.build_processor(tokenizer)
        model = Qwen2_5_VLForConditionalGeneration(build.build_config(tokenizer, small=args.small))
        log["settings"] = {k: str(v) for k, v in vars(args).items()}
        log["card"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        log["versions"] = {"torch": torch.__version__}
        log["pretraining"] = pretrain(model, processor, device, args.minutes, args.batch_size, args.workers, args.seed)
        build.save(
            model, processor, args.out / "model"
        )  # before the evaluation: nothing after it may lose the weights
        log_file.write_text(json.dumps(log, indent=1))
        half = Qwen2_5_VLForConditionalGeneration.from_pretrained(args.out / "model", dtype=torch.float32)
        log["base"] = accuracy(half, processor, device, args.test_scenes, seed=12345)
        print(json.dumps(log["base"], indent=1), flush=True)
        log_file.write_text(json.dumps(log, indent=1))
    if args.stage != "pretrain":
        domains.prepare(args.data, args.domains)
        report = train_adapters(
            args.out / "model", args.data, args.out / "adapters", device, args.domains, args.epochs
        )
        log["adapters"] = {**log.get("adapters", {}), **report}
        log_file.write_text(json.dumps(log, indent=1))


if __name__ == "__main__":
    main()
