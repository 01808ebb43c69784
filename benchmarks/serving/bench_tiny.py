"""Accuracy of the embedded model as served: ``python -m benchmarks.serving.bench_tiny --url URL``.

Asks a running server (started with the embedded model and all its adapters) every test question of every domain,
base and adapter, and 200 unseen scenes per question type; compares the adapters' answers with transformers + PEFT.
"""

from __future__ import annotations

import argparse
import base64
import io
import random
import shlex
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import requests
import torch
from PIL import Image
from tqdm import tqdm

from benchmarks.summary import SUMMARY, record
from vlora_sgl.generation.datasets import Example, read_jsonl
from vlora_sgl.generation.trainer import exact_match
from vlora_sgl.models import tiny
from vlora_sgl.models.tiny import domains
from vlora_sgl.models.tiny import scenes as S

FIGURES = ("colour", "shape", "count", "position", "digit")


def ask(url: str, images: list[Image.Image], question: str, adapter: str | None) -> str:
    """One greedy answer through the server's native route."""
    encoded = []
    for image in images:
        buffer = io.BytesIO()
        image.save(buffer, format="PNG")
        encoded.append(base64.b64encode(buffer.getvalue()).decode())
    seen = "<|vision_start|><|image_pad|><|vision_end|>" * len(images)
    body = {
        "text": f"<|im_start|>user\n{seen}{question}<|im_end|>\n<|im_start|>assistant\n",
        "sampling_params": {"temperature": 0, "max_new_tokens": 24},
        "lora_path": adapter,
    }
    reply = requests.post(f"{url}/generate", json={**body, "image_data": encoded} if encoded else body, timeout=120)
    reply.raise_for_status()
    return str(reply.json()["text"])


def served(url: str, cases: list[tuple[list[Image.Image], str, str]], adapter: str | None, label: str) -> list[bool]:
    """Whether each case (images, question, answer) is answered exactly."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            tqdm(pool.map(lambda c: ask(url, c[0], c[1], adapter), cases), total=len(cases), desc=label, mininterval=5)
        )
    return [answer == case[2] for answer, case in zip(answers, cases, strict=True)]


def scene_cases(per_type: int, seed: int) -> dict[str, list[tuple[list[Image.Image], str, str]]]:
    """Unseen scenes' questions by type."""
    drawn = S.sample(4 * per_type, np.random.default_rng(seed), test=True, digit_share=0.3)
    pictures = S.render(drawn, generator=torch.Generator().manual_seed(seed)).permute(0, 2, 3, 1).numpy()
    rng = random.Random(seed)
    cases: dict[str, list[tuple[list[Image.Image], str, str]]] = {kind: [] for kind in FIGURES}
    for i in range(len(drawn)):
        for kind in FIGURES:
            found = S.questions(drawn, i, rng, (kind,))
            if found and len(cases[kind]) < per_type:
                cases[kind].append(([Image.fromarray(pictures[i])], *found[0][1:]))
    return cases


def reference(name: str, examples: list[Example]) -> list[bool]:
    """The same answers by transformers + PEFT, float32."""
    from peft import PeftModel
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    processor = AutoProcessor.from_pretrained(tiny.path(), use_fast=False)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny.path(), dtype=torch.float32)
    return exact_match(PeftModel.from_pretrained(model, tiny.adapters()[name]), processor, examples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--per-type", type=int, default=200)
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    args = parser.parse_args()
    command = shlex.join(["python", "-m", "benchmarks.serving.bench_tiny", *sys.argv[1:]])

    def note(name: str, value: float, unit: str, higher: bool = True) -> None:
        print(f"{name}: {value:.4g} {unit}", flush=True)
        record(name, value, unit, higher, command=command, summary=args.summary)

    for kind, cases in scene_cases(args.per_type, seed=777).items():
        note(f"tiny.base.{kind}", float(np.mean(served(args.url, cases, None, kind))), "accuracy")
        blind = [([], question, answer) for _, question, answer in cases]
        note(f"tiny.blind.{kind}", float(np.mean(served(args.url, blind, None, f"{kind}, blind"))), "accuracy", False)
    with tempfile.TemporaryDirectory() as folder:
        domains.prepare(Path(folder), list(tiny.adapters()))
        for name in tiny.adapters():
            examples = read_jsonl(Path(folder) / name / "test.jsonl")
            cases = [(e.load_images(), e.question, e.answer) for e in examples]
            with_adapter = served(args.url, cases, name, name)
            without = served(args.url, cases, None, f"{name}, base")
            differing = sum(a != b for a, b in zip(with_adapter, reference(name, examples), strict=True))
            print(f"{name}: {differing} of {len(cases)} served answers differ in correctness from transformers + PEFT")
            note(f"tiny.adapter.{name}.gain_points", 100 * float(np.mean(with_adapter) - np.mean(without)), "points")
    size = sum(f.stat().st_size for f in tiny.path().parent.rglob("*") if f.suffix != ".pyc" and f.is_file())
    note("tiny.package_mb", size / 1e6, "MB", False)


if __name__ == "__main__":
    main()
