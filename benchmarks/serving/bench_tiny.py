"""Accuracy of the embedded model as served: ``python -m benchmarks.serving.bench_tiny --url URL``.

Asks a running server (started with the embedded model, all its adapters and its routed adapter) every test question of
every domain, and 200 unseen scenes per question type. Base, adapters, heads and the routed adapter answer; the answers
are compared with transformers + PEFT + head.
"""

from __future__ import annotations

import argparse
import base64
import io
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import requests
import torch
from PIL import Image
from tqdm import tqdm

from benchmarks.summary import SUMMARY, record
from tools.tiny import domains
from tools.tiny import scenes as S
from vlora_sgl.generate.datasets import Example, read_jsonl
from vlora_sgl.generate.heads import image_grids, target
from vlora_sgl.generate.token_router import load_members
from vlora_sgl.generate.trainer import Encoded, exact_match, head_answers, load_adapter
from vlora_sgl.heads import VisionHead, load_heads
from vlora_sgl.models import tiny
from vlora_sgl.routed.peft import RoutedModel
from vlora_sgl.routed.spec import member_names, read_routed

ROUTED = "routed"
"""The name the shipped routed adapter is served under."""
FIGURES = ("colour", "shape", "count", "position", "digit")


def ask(url: str, images: list[Image.Image], question: str, adapter: str | None, head: str | None = None) -> Any:
    """One greedy answer through the server's native route: its text, or the answer of a head."""
    encoded = []
    for image in images:
        buffer = io.BytesIO()
        image.save(buffer, format="PNG")
        encoded.append(base64.b64encode(buffer.getvalue()).decode())
    seen = "<|vision_start|><|image_pad|><|vision_end|>" * len(images)
    body: dict[str, Any] = {
        "text": f"<|im_start|>user\n{seen}{question}<|im_end|>\n<|im_start|>assistant\n",
        "sampling_params": {"temperature": 0, "max_new_tokens": 24},
        "lora_path": adapter,
    }
    if encoded:
        body["image_data"] = encoded
    if head is not None:
        body["sampling_params"]["custom_params"] = {"vlora_head": head}
    reply = requests.post(f"{url}/generate", json=body, timeout=120)
    reply.raise_for_status()
    return str(reply.json()["text"]) if head is None else reply.json()["meta_info"]["vlora"]["head"]


def ask_all(
    url: str, cases: list[tuple[list[Image.Image], str]], adapter: str | None, label: str, head: str | None = None
) -> list[Any]:
    """The answers to all (images, question), eight at a time."""
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda c: ask(url, c[0], c[1], adapter, head), cases)
        return list(tqdm(answers, total=len(cases), desc=label, mininterval=5))


def served(url: str, cases: list[tuple[list[Image.Image], str, str]], adapter: str | None, label: str) -> list[bool]:
    """Whether each case (images, question, answer) is answered exactly."""
    answers = ask_all(url, [case[:2] for case in cases], adapter, label)
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


class Reference:
    """An adapter and its heads by transformers + PEFT, float32.

    Args:
        directory: of the adapter's factors, where they are not the shipped ones.
    """

    def __init__(self, name: str, directory: Path | None = None) -> None:
        from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

        self.processor = AutoProcessor.from_pretrained(tiny.path(), use_fast=False)
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny.path(), dtype=torch.float32)
        self.config = model.config
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.heads = load_heads(tiny.adapters()[name], model.config.text_config.hidden_size, device)
        self.model = load_adapter(model.to(device), directory or tiny.adapters()[name])

    def right(self, examples: list[Example]) -> list[bool]:
        """Whether the decoded answer is exact, per example."""
        return exact_match(self.model, self.processor, examples)

    def answers(self, head: VisionHead, examples: list[Example]) -> list[dict[str, Any]]:
        """The head's answers."""
        return head_answers(self.model, self.processor, head, examples)

    def targets(self, head: VisionHead, examples: list[Example]) -> list[Any]:
        """What the head should answer."""
        if head.features == "last_token":
            return [target(head, example) for example in examples]
        rows = Encoded(self.processor, examples).rows
        return [target(head, e, image_grids(row, self.config)) for e, row in zip(examples, rows, strict=True)]


def mix_right(examples: dict[str, list[Example]]) -> dict[str, list[bool]]:
    """Whether the routed adapter's answer is exact, per domain and example, by transformers + PEFT float32."""
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny.path(), dtype=torch.float32)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    text = model.config.text_config
    spec = read_routed(tiny.routed(), ROUTED, text.hidden_size, text.vocab_size)
    if spec.router is not None:
        spec.router.to(model.device)
    peft_model = load_members(model, {name: tiny.adapters()[name] for name in spec.members})
    processor = AutoProcessor.from_pretrained(tiny.path(), use_fast=False)
    with RoutedModel(peft_model, spec).applied():
        return {domain: exact_match(peft_model, processor, rows) for domain, rows in examples.items()}


def said(answer: dict[str, Any]) -> Any:
    """What of a head's answer must be the same everywhere: label, count, or labels and rounded boxes."""
    if "boxes" not in answer:
        return answer.get("label", answer.get("count"))
    return [(box["label"], *(round(p) for p in box["pixels"])) for box in answer["boxes"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--per-type", type=int, default=200)
    everything = ["base", *tiny.adapters(), ROUTED]
    parser.add_argument("--parts", nargs="*", default=everything, help="base, adapters and routed adapter to measure")
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    args = parser.parse_args()

    def note(name: str, value: float, unit: str, higher: bool = True) -> None:
        print(f"{name}: {value:.4g} {unit}", flush=True)
        record(name, value, unit, higher, summary=args.summary)

    for kind, cases in scene_cases(args.per_type, seed=777).items() if "base" in args.parts else ():
        note(f"tiny.base.{kind}", float(np.mean(served(args.url, cases, None, kind))), "accuracy")
        blind = [([], question, answer) for _, question, answer in cases]
        note(f"tiny.blind.{kind}", float(np.mean(served(args.url, blind, None, f"{kind}, blind"))), "accuracy", False)
    with tempfile.TemporaryDirectory() as folder:
        adapters = [name for name in tiny.adapters() if name in args.parts]
        domains.prepare(Path(folder), sorted({domains.EVERY[name][0] for name in adapters}))
        accuracy: dict[str, float] = {}
        for name in adapters:
            examples = read_jsonl(Path(folder) / domains.EVERY[name][0] / "test.jsonl")
            cases = [(e.load_images(), e.question, e.answer) for e in examples]
            with_adapter = served(args.url, cases, name, name)
            without = served(args.url, cases, None, f"{name}, base")
            reference = Reference(name)
            differing = sum(a != b for a, b in zip(with_adapter, reference.right(examples), strict=True))
            print(f"{name}: {differing} of {len(cases)} served answers differ in correctness from transformers + PEFT")
            decoded = accuracy[name] = float(np.mean(with_adapter))
            note(f"tiny.adapter.{name}.accuracy", decoded, "accuracy")
            note(f"tiny.adapter.{name}.gain_points", 100 * (decoded - float(np.mean(without))), "points")
            for head in reference.heads.values():
                label = f"{name}, head {head.name}"
                answers = ask_all(args.url, [case[:2] for case in cases], name, label, head.name)
                pairs = zip(answers, reference.answers(head, examples), strict=True)
                differing = sum(said(a) != said(b) for a, b in pairs)
                print(f"{label}: {differing} of {len(cases)} served answers differ from transformers + PEFT + head")
                quality = head.metric(answers, reference.targets(head, examples))
                note(f"tiny.head.{name}.{head.name}", quality, head.metric_name)
                if head.features == "last_token":
                    note(f"heads.accuracy_minus_lm_points.{name}", 100 * (quality - decoded), "points")
        for name, (domain, _) in domains.TOWERS.items():
            if accuracy.keys() >= {name, domain}:
                note(f"tiny.adapter.{domain}.tower_gain_points", 100 * (accuracy[name] - accuracy[domain]), "points")
        if ROUTED in args.parts:
            wanted = sorted({domains.ADAPTERS[name][0] for name in member_names(tiny.routed(), ROUTED)})
            domains.prepare(Path(folder), wanted)
            rows = {domain: read_jsonl(Path(folder) / domain / "test.jsonl") for domain in wanted}
            expected = mix_right(rows)
            for domain, examples in rows.items():
                cases = [(e.load_images(), e.question, e.answer) for e in examples]
                right = served(args.url, cases, ROUTED, f"routed, {domain}")
                differing = sum(a != b for a, b in zip(right, expected[domain], strict=True))
                print(f"routed, {domain}: {differing} of {len(cases)} served answers differ from transformers + PEFT")
                note(f"tiny.mix.{domain}.accuracy", float(np.mean(right)), "accuracy")
    size = sum(f.stat().st_size for f in tiny.path().parent.rglob("*") if f.suffix != ".pyc" and f.is_file())
    note("tiny.package_mb", size / 1e6, "MB", False)


if __name__ == "__main__":
    main()
