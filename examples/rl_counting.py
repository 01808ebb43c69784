"""Reinforcement learning: the embedded model learns to count handwritten digits by trial (GRPO, arXiv 2402.03300).

The server answers, and this program trains: it asks the policy several times about each picture, rewards the right
number, takes a step, and sends the new adapter over HTTP as the next version. With one policy alone the server merges
it into the weights. Run: ``python examples/rl_counting.py`` (minutes on two cores).
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import requests
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save
from transformers import AutoModelForImageTextToText, AutoProcessor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from serving import Model, server

from tools.tiny.domains import counting
from vlora_sgl.models import tiny

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FLAGS = ("--dtype", "float32", "--enable-lora", "--max-lora-rank", "16", "--lora-target-modules", *TARGETS)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ANYTHING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 4}


class Policy:
    """The trainer's copy of the policy, and its way to the server's."""

    def __init__(self, url: str, seed: int, rate: float = 1e-3) -> None:
        torch.manual_seed(seed)
        base = AutoModelForImageTextToText.from_pretrained(tiny.path(), dtype=torch.float32)
        config = LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS, exclude_modules=".*visual.*")
        self.model, self.url, self.version = get_peft_model(base, config), url, 0
        self.processor: Any = AutoProcessor.from_pretrained(tiny.path())
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], rate)

    def push(self) -> None:
        """Send the adapter, which is the next version from now on."""
        config = json.dumps(self.model.peft_config["default"].to_dict(), default=list)
        weights = save({name: t.contiguous() for name, t in get_peft_model_state_dict(self.model).items()})
        files = {name: (name, data) for name, data in ((CONFIG, config), (WEIGHTS, weights))}
        route = f"{self.url}/{'reload' if self.version else 'load'}_lora_adapter"
        self.version += 1
        requests.post(route, {"lora_name": f"policy@{self.version}"}, files=files, timeout=60).raise_for_status()

    def drop(self) -> None:
        """Have the server forget all versions."""
        self.version = 0
        requests.post(f"{self.url}/unload_lora_adapter", json={"lora_name": "policy"}, timeout=60).raise_for_status()

    def prompt(self, question: str) -> str:
        content = [{"type": "image"}, {"type": "text", "text": question}]
        return self.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)

    def ask(self, rows: list[Any], **sampling: Any) -> list[Any]:
        """The server's answers to rows of the data, each with the log-probabilities of its tokens."""
        images = []
        for (picture,), *_ in rows:
            picture.save(file := io.BytesIO(), "PNG")
            images.append(base64.b64encode(file.getvalue()).decode())
        body = {"text": [self.prompt(row[1]) for row in rows], "image_data": images, "lora_path": "policy"}
        body |= {"sampling_params": ANYTHING | sampling, "return_logprob": True}
        return requests.post(f"{self.url}/generate", json=body, timeout=600).json()

    def logprobs(self, rows: list[Any], answers: list[list[int]]) -> list[torch.Tensor]:
        """The trainer's log-probabilities of answers' tokens, with gradients."""
        texts = [self.prompt(row[1]) for row in rows]
        inputs = self.processor(text=texts, images=[row[0] for row in rows], return_tensors="pt")
        longest, (count, start) = max(map(len, answers)), inputs["input_ids"].shape
        tail = torch.tensor([one + [0] * (longest - len(one)) for one in answers])
        inputs["input_ids"] = torch.cat([inputs["input_ids"], tail], 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if "mm_token_type_ids" in inputs:
            inputs["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, longest))
        scores = self.model(**inputs).logits[:, start - 1 : -1].log_softmax(-1).gather(2, tail[..., None])[..., 0]
        return [scores[row, : len(answers[row])] for row in range(count)]


def step(policy: Policy, rows: list[Any], samples: int) -> tuple[float, float]:
    """One step of GRPO: its mean reward, and how far the server's log-probabilities are from the trainer's at most."""
    replies = policy.ask(rows, n=samples)
    weights: dict[tuple[int, tuple[int, ...]], float] = defaultdict(float)
    served, rewards = {}, torch.zeros(len(rows), samples)
    for number, reply in enumerate(replies):
        row, sample = divmod(number, samples)
        rewards[row, sample] = reply["text"].strip() == rows[row][2]
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    for number, reply in enumerate(replies):
        key = number // samples, tuple(reply["output_ids"])
        weights[key] += float(advantages[number // samples, number % samples])
        served[key] = [score for score, *_ in reply["meta_info"]["output_token_logprobs"]]
    keys = list(weights)  # equal answers are computed once
    scores = policy.logprobs([rows[row] for row, _ in keys], [list(answer) for _, answer in keys])
    apart = max((s - torch.tensor(served[k])).abs().max().item() for s, k in zip(scores, keys, strict=True))
    loss = -sum(weights[k] * s.sum() for s, k in zip(scores, keys, strict=True)) / rewards.numel()
    policy.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
    policy.optimizer.step()
    policy.push()
    return float(rewards.mean()), apart


def accuracy(policy: Policy, rows: list[Any]) -> float:
    """The share of pictures whose number the server's policy says, greedily."""
    replies = policy.ask(rows, temperature=0.0)
    return sum(reply["text"].strip() == row[2] for reply, row in zip(replies, rows, strict=True)) / len(rows)


def speed(policy: Policy, rows: list[Any], mode: str) -> float:
    """Tokens a second of a rollout, with the policy merged into the weights or not."""
    requests.post(f"{policy.url}/set_internal_state", json={"server_args": {f"vlora_mode:{mode}": 1}}, timeout=60)
    requests.post(f"{policy.url}/flush_cache", timeout=60)
    begin = time.perf_counter()
    policy.ask(rows, n=8, max_new_tokens=32, ignore_eos=True)
    return len(rows) * 8 * 32 / (time.perf_counter() - begin)


def learn(policy: Policy, seed: int, steps: int, pictures: int = 32, samples: int = 8) -> dict[str, float]:
    """Train a policy on a server that has none; what came of it."""
    (train, _, test), draw, apart = counting(), random.Random(seed), 0.0
    policy.push()
    before = accuracy(policy, test)  # an adapter that was never trained is the base model
    print(f"seed {seed}: the base model counts {before:.1%} of {len(test)} pictures right", flush=True)
    for number in range(1, steps + 1):
        begin = time.perf_counter()
        reward, differ = step(policy, draw.sample(train, pictures), samples)
        apart = max(apart, differ)
        seconds = time.perf_counter() - begin
        print(f"step {number}: reward {reward:.3f}, log-probabilities {differ:.1e} apart, {seconds:.1f} s", flush=True)
    after = accuracy(policy, test)
    speeds = {mode: max(speed(policy, test[:8], mode) for _ in range(3)) for mode in ("merged", "unmerged")}
    gain = 100 * (after - before)
    print(f"seed {seed}: version {policy.version} counts {after:.1%} right, {gain:+.1f} points; rollouts: ", end="")
    print(", ".join(f"{tokens:.0f} tokens a second {mode}" for mode, tokens in speeds.items()), flush=True)
    requests.post(f"{policy.url}/set_internal_state", json={"server_args": {"vlora_mode:auto": 1}}, timeout=60)
    return {"before": before, "after": after, "apart": apart, **speeds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    model = Model(tiny.path(), {}, trained=True)
    with tempfile.TemporaryDirectory() as scratch, server(model, Path(scratch) / "log", *FLAGS) as url:
        for seed in args.seeds:
            policy = Policy(url, seed)
            learn(policy, seed, args.steps)
            policy.drop()


if __name__ == "__main__":
    main()
