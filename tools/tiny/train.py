"""``python -m tools.tiny.train``: makes the embedded model, its adapters and a routed adapter over them.

A fixed number of steps is split over three stages: the vision tower alone with an auxiliary head that says what lies
in each image cell; then tower and language model together; then the same without the head while the learning rate
falls.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tqdm import tqdm

from tools.tiny import batches, build, domains
from tools.tiny import scenes as S
from tools.tiny.card import LOG
from vlora_sgl.generate import trainer
from vlora_sgl.generate.datasets import SPLITS, Example, read_jsonl
from vlora_sgl.generate.token_router import RouterSettings, joint, make_routed
from vlora_sgl.heads.store import build_head, save_heads
from vlora_sgl.models import tiny

TOWER_SHARE, JOINT_SHARE = 0.12, 0.74  # of the steps; the rest is the last stage
AUXILIARY_WEIGHT = 0.5
STAGES = ("pretraining", "base", "adapters", "routed")
STEPS, ADAPTER_STEPS, ROUTER_STEPS = 4750, 450, 300
RANK = 8  # 0.5 MB each; rank 16 answers no better
PEAK_RATE, WARM_UP_SHARE = 1e-3, 0.04
TEST_SCENES, TEST_SEED = 2000, 12345
WORKERS: dict[str, Any] = {"num_workers": 12, "multiprocessing_context": "fork", "prefetch_factor": 4}
"""What makes batches for a GPU; forked, as the tokenizer's memory is not to be pickled."""


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
        loss = F.binary_cross_entropy_with_logits(present[..., 0], (target["colour"] >= 0).float())
        for name, guess in (("colour", colour), ("shape", shape), ("digit", self.digit(tokens.mean(1)).float())):
            wanted = target[name].flatten()
            wrong = F.cross_entropy(guess.flatten(0, -2), wanted, ignore_index=batches.IGNORE, reduction="sum")
            loss = loss + wrong / (wanted != batches.IGNORE).sum().clamp(min=1)
        return loss


def pretrain(
    model: Any, processor: Any, steps: int, batch_size: int, seed: int, kinds: tuple[str, ...] = S.QUESTION_TYPES
) -> list[dict[str, float]]:
    """Train ``model`` in place for ``steps`` on ``kinds`` of questions; about fifty rows of log."""
    device = next(model.parameters()).device
    encoder = batches.Encoder(processor.tokenizer)
    head = CellHead(model.config.text_config.hidden_size).to(device)
    model.train()
    parameters = [*model.parameters(), *head.parameters()]
    fast = device.type == "cuda"
    vision_block = torch.compile(batches.vision_block, dynamic=False) if fast else batches.vision_block
    for layer in model.model.language_model.layers if fast else ():
        layer.compile(dynamic=False)
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.02, fused=fast)

    def make(number: Any) -> dict[str, Any]:
        moving = number % 8 == 7 and "motion" in kinds
        size = batch_size // 2 if moving else batch_size
        return batches.make_batch(encoder, size, seed * 1_000_003 + number, kinds, moving)

    numbers: Any = range(steps)
    loader = torch.utils.data.DataLoader(
        numbers, batch_size=None, collate_fn=make, pin_memory=fast, **(WORKERS if fast else {})
    )
    generator = torch.Generator(device).manual_seed(seed)
    log: list[dict[str, float]] = []
    log_every = max(1, steps // 50)
    sums = torch.zeros(2, device=device)
    started = time.monotonic()
    bar = tqdm(loader, desc="pretraining", mininterval=10)
    for step, batch in enumerate(bar, 1):
        share = (step - 1) / steps
        rate = PEAK_RATE * min(1.0, share / WARM_UP_SHARE) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        cells = {k: v.to(device) for k, v in (batch["cells"] or {}).items()}
        frames = torch.stack([S.render(frame, device, generator) for frame in batch["frames"]], 1)
        loss, auxiliary = torch.zeros(2, device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=fast):
            pixels = batches.patches(frames.flatten(0, 1), processor)
            tokens = batches.encode_images(model.model.visual, pixels, vision_block)
            if cells and share < TOWER_SHARE + JOINT_SHARE:
                auxiliary = head.loss(tokens, cells)
            if not cells or share >= TOWER_SHARE:
                ids, index, segment, where, wanted = (
                    batch[k].to(device, non_blocking=True) for k in ("ids", "index", "segment", "where", "wanted")
                )
                hidden = batches.forward(model, ids, tokens.flatten(0, 1), index, segment)
                loss = F.cross_entropy(model.lm_head(hidden.flatten(0, 1)[where]).float(), wanted)
        optimizer.zero_grad(set_to_none=True)
        (loss + AUXILIARY_WEIGHT * auxiliary).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        sums += torch.stack([loss.detach(), auxiliary.detach()])
        if step % log_every == 0:
            answer, cell = (sums / log_every).tolist()
            sums.zero_()
            if not math.isfinite(answer + cell):
                raise FloatingPointError(f"the training loss is not finite at step {step}")
            log.append({"step": step, "seconds": round(time.monotonic() - started, 1), "answer_loss": round(answer, 4),
                        "cell_loss": round(cell, 4), "learning_rate": rate})  # fmt: skip
            bar.set_postfix(loss=f"{answer:.3f}", cells=f"{cell:.3f}")
    return log


def make_base(directory: Path, device: torch.device, steps: int, batch_size: int, seed: int) -> list[dict[str, float]]:
    """Pretrain a new model with a tokenizer of its own and write it in bfloat16; returns the log of ``pretrain``."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(seed)
    processor = build.build_processor(build.build_tokenizer(S.corpus()))
    model: Any = Qwen2_5_VLForConditionalGeneration(build.build_config(processor.tokenizer))
    log = pretrain(model.to(device), processor, steps, batch_size, seed)
    model.bfloat16()
    model.generation_config.eos_token_id = model.config.text_config.eos_token_id
    model.generation_config.pad_token_id = processor.tokenizer.pad_token_id
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return log


def accuracy(
    model: Any, processor: Any, scenes: int, seed: int, kinds: tuple[str, ...] = S.QUESTION_TYPES
) -> dict[str, dict[str, float]]:
    """Greedy exact match on unseen scenes for each of ``kinds`` of questions, at most one of a kind about a scene.

    Every question is asked alone, in a fresh dialogue. ``accuracy`` is with the image, ``blind`` without it, and
    ``chance`` that of the commonest answer.
    """
    drawn = S.sample(scenes, np.random.default_rng(seed), test=True, digit_share=0.3)
    clips, directions = S.motion(scenes, np.random.default_rng(seed + 1), test=True)
    rng = random.Random(seed)
    examples: dict[str, list[Example]] = defaultdict(list)
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        stills, *frames = (_save(batch, Path(folder) / str(n), seed) for n, batch in enumerate([drawn, *clips]))
        for i, still in enumerate(stills):
            first = {kind: pair for kind, *pair in reversed(S.questions(drawn, i, rng, kinds))}
            for kind, (question, answer) in first.items():
                examples[kind].append(Example((still,), question, answer))
        if "motion" in kinds:
            of_clip = zip(zip(*frames, strict=True), directions, strict=True)
            examples["motion"] = [Example(images, S.MOTION_QUESTION, direction) for images, direction in of_clip]
        for kind in filter(examples.get, kinds):
            asked = examples[kind]
            unseen = [replace(example, images=()) for example in asked]
            row: dict[str, Any] = {
                "accuracy": np.mean(trainer.exact_match(model, processor, asked)),
                "chance": max(Counter(example.answer for example in asked).values()) / len(asked),
                "questions": len(asked),
                "blind": np.mean(trainer.exact_match(model, processor, unseen)),
            }
            result[kind] = {name: round(float(value), 4) for name, value in row.items()}
    return result


def _save(scenes: S.Scenes, folder: Path, seed: int) -> list[Path]:
    """The scenes, drawn, as PNG files in a new folder."""
    folder.mkdir()
    images = S.render(scenes, generator=torch.Generator().manual_seed(seed)).permute(0, 2, 3, 1).numpy()
    paths = [folder / f"{i}.png" for i in range(len(scenes))]
    for path, image in zip(paths, images, strict=True):
        Image.fromarray(image).save(path)
    return paths


def card(device: torch.device) -> str:
    """What trains, as the log names it."""
    return torch.cuda.get_device_name() if device.type == "cuda" else "cpu"


def load(directory: Path, device: torch.device) -> tuple[Any, Any]:
    """A saved model, in float32, and its processor."""
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    return model.to(device), AutoProcessor.from_pretrained(directory)


def train_adapter(
    name: str, model_directory: Path, data: Path, out: Path, device: torch.device, steps: int, seed: int
) -> dict[str, Any]:
    """Train one adapter and its heads with the project's trainer, write it to ``out/name``, and measure it.

    Args:
        steps: of 32 examples.
    Returns:
        accuracy on the test split of the base, of the adapter's decoded answer and of each head; sizes of the splits.
    """
    (domain, activate), tower = domains.EVERY[name], name in domains.TOWERS
    model, processor = load(model_directory, device)
    splits = {s: trainer.Prepared(model, processor, read_jsonl(data / domain / f"{s}.jsonl"), tower) for s in SPLITS}
    train, validation, test = splits.values()
    before = float(np.mean(trainer.exact_match(model, processor, test)))
    settings = trainer.LoraSettings(rank=RANK, alpha=2 * RANK, activate=activate, seed=seed, steps=steps, tower=tower)
    heads = [build_head(one, model.config.text_config.hidden_size) for one in domains.HEADS[domain]]
    adapter = trainer.train_lora(model, processor, train, settings, f"adapter {name}", heads)
    adapter.peft_config["default"].base_model_name_or_path = "vlora_sgl/models/tiny/model"
    trainer.save_adapter(adapter, out / name)
    measured = {}
    for head in heads:
        trainer.keep_better_start(head, adapter, processor, validation)
        value = trainer.head_accuracy(adapter, processor, head, test)
        measured[head.name] = {"kind": head.kind, "metric": head.metric_name, "value": value}
    report: dict[str, Any] = {
        "invocation": activate,
        "tower": tower,
        "card": card(device),
        "steps": steps,
        "base": before,
        "adapter": float(np.mean(trainer.exact_match(adapter, processor, test))),
        "heads": measured,
        "examples": {split: len(examples) for split, examples in splits.items()},
    }
    metrics = {"training steps": steps, "test accuracy": report["adapter"]}
    metrics |= {f"{head} head": row["value"] for head, row in measured.items()}
    save_heads(out / name, heads, activate, domains.QUESTIONS[domain], metrics)
    print(name, json.dumps(report), flush=True)
    return report


def train_routed(
    model_directory: Path,
    adapters: Path,
    data: Path,
    out: Path,
    device: torch.device,
    steps: int,
    seed: int,
    together: bool = False,
) -> dict[str, Any]:
    """Train a token router over the adapters that start at the first token, without telling it the domains.

    Args:
        together: train the adapters with it, and tell it the domains.
    Returns:
        what ``generate.token_router.make_routed`` reports, on the test splits; the routed adapter is in ``out``.
    """
    members = {name: domain for name, (domain, invocation) in domains.ADAPTERS.items() if invocation is None}
    paths = {name: adapters / name for name in members}
    train, test = (
        {domain: read_jsonl(data / domain / f"{split}.jsonl") for domain in members.values()}
        for split in ("train", "test")
    )
    model, processor = load(model_directory, device)
    settings = RouterSettings(steps=steps, seed=seed)
    return make_routed(model, processor, paths, train, test, out, joint(settings) if together else settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="*", choices=STAGES, default=STAGES, help="base: measures the model")
    parser.add_argument("--adapters", nargs="*", choices=tuple(domains.EVERY), default=tuple(domains.ADAPTERS))
    parser.add_argument("--out", type=Path, default=tiny.path().parent, help="where models and train_log.json go")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default, what in (
        ("steps", STEPS, "of pretraining"),
        ("batch-size", 512, "scenes of a step of pretraining"),
        ("adapter-steps", ADAPTER_STEPS, "of each adapter, of 32 examples"),
        ("router-steps", ROUTER_STEPS, "of the router, of 16 examples"),
        ("seed", 0, "of all training"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=what)
    args = parser.parse_args()
    model, adapters, log_file = args.out / "model", args.out / "adapters", args.out / LOG
    args.out.mkdir(parents=True, exist_ok=True)
    log: dict[str, Any] = json.loads(log_file.read_text()) if log_file.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        if {"adapters", "routed"} & {*args.stages}:
            domains.prepare(data)
        for stage in args.stages:
            started = time.monotonic()
            if stage == "pretraining":
                log["settings"] = {k: getattr(args, k) for k in ("steps", "batch_size", "adapter_steps", "seed")}
                log["card"] = card(args.device)
                log["versions"] = {"torch": torch.__version__}
                log[stage] = make_base(model, args.device, args.steps, args.batch_size, args.seed)
            elif stage == "base":
                log[stage] = accuracy(*load(model, args.device), TEST_SCENES, TEST_SEED)
            elif stage == "adapters":
                settings = (model, data, adapters, args.device, args.adapter_steps, args.seed)
                log[stage] = log.get(stage, {}) | {name: train_adapter(name, *settings) for name in args.adapters}
            else:
                routed = args.out / stage
                log[stage] = train_routed(model, adapters, data, routed, args.device, args.router_steps, args.seed)
            log.setdefault("minutes", {})[stage] = round((time.monotonic() - started) / 60, 2)
            log_file.write_text(json.dumps(log, indent=1))


if __name__ == "__main__":
    main()
