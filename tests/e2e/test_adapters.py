"""Adapters loaded at run time: every layout answers as PEFT does, every fault is a 4xx, and the server goes on."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from tests.conftest import Server
from tests.support.lora_adapters import tiny_adapter

pytestmark = pytest.mark.e2e

PROMPT = "<|im_start|>user\nHow many objects are there?<|im_end|>\n<|im_start|>assistant\n"
TOKENS = 8
WEIGHTS = "adapter_model.safetensors"
LANGUAGE = r".*\blayers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj"

FORMS: dict[str, dict[str, Any]] = {
    "q_only": {"target_modules": r".*layers\.\d+\.self_attn\.q_proj"},
    "q_v": {"target_modules": r".*layers\.\d+\.self_attn\.(q|v)_proj"},
    "q_k": {"target_modules": r".*layers\.\d+\.self_attn\.(q|k)_proj"},
    "k_v": {"target_modules": r".*layers\.\d+\.self_attn\.(k|v)_proj"},
    "down_only": {"target_modules": r".*layers\.\d+\.mlp\.down_proj"},
    "first_layer": {"target_modules": r".*\blayers\.0\.(self_attn|mlp)\.\w+_proj"},
    "rslora": {"target_modules": LANGUAGE, "use_rslora": True},
    "patterns": {
        "target_modules": LANGUAGE,
        "rank_pattern": {"q_proj": 2, "up_proj": 3},
        "alpha_pattern": {"v_proj": 20},
    },
}


def load(server: Server, name: str, path: Path) -> requests.Response:
    return requests.post(
        f"{server.url}/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)}, timeout=120
    )


def unload(server: Server, name: str) -> requests.Response:
    return requests.post(f"{server.url}/unload_lora_adapter", json={"lora_name": name}, timeout=120)


def answer(server: Server, name: str | None) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    return list(server.generate(text=PROMPT, lora_path=name, sampling_params=sampling)["output_ids"])


def base_model(server: Server) -> Qwen2_5_VLForConditionalGeneration:
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(server.model.path, dtype=torch.float32)


def reference(server: Server, adapter: Path) -> list[int]:
    """Greedy tokens of transformers + PEFT on the same weights."""
    tokenizer = AutoTokenizer.from_pretrained(server.model.path)
    model = PeftModel.from_pretrained(base_model(server), adapter).eval()
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        for _ in range(TOKENS):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, -TOKENS:].tolist()


@pytest.mark.parametrize("form", FORMS)
def test_every_layout_answers_as_peft_does(server: Server, form: str, tmp_path: Path) -> None:
    tiny_adapter(base_model(server), tmp_path, seed=7, strength=0.5, lora_alpha=16, **FORMS[form])
    reply = load(server, form, tmp_path)
    assert reply.status_code == 200, reply.text
    count = len(load_file(tmp_path / WEIGHTS))
    assert f"matched all {count} LoRA tensors" in reply.json()["report"]
    try:
        served = answer(server, form)
        assert served != answer(server, None), "the adapter must change the answer"
        assert served == reference(server, tmp_path)
    finally:
        assert unload(server, form).status_code == 200


@pytest.mark.parametrize("prefix", ["base_model.model.model.", "base_model.model.language_model.model.", "model."])
def test_every_key_prefix_is_the_same_adapter(server: Server, prefix: str, tmp_path: Path) -> None:
    shutil.copytree(server.model.adapters["A"], tmp_path / "renamed")
    tensors = load_file(tmp_path / "renamed" / WEIGHTS)
    save_file({prefix + k[k.index("layers.") :]: t for k, t in tensors.items()}, tmp_path / "renamed" / WEIGHTS)
    assert load(server, "renamed", tmp_path / "renamed").status_code == 200
    try:
        assert answer(server, "renamed") == answer(server, "A") != answer(server, None)
    finally:
        unload(server, "renamed")


def _config(directory: Path, **options: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **options}))


def _first_tensor(directory: Path, change: Any) -> None:
    tensors = load_file(directory / WEIGHTS)
    key = sorted(tensors)[0]
    tensors[key] = change(tensors[key]).contiguous()
    save_file(tensors, directory / WEIGHTS)


def _rename(directory: Path, new: str) -> None:
    tensors = load_file(directory / WEIGHTS)
    save_file({k.replace("layers.0.self_attn.q_proj", new): t for k, t in tensors.items()}, directory / WEIGHTS)


FAULTS: dict[str, tuple[Any, str]] = {
    "hidden_size": (lambda d: _first_tensor(d, lambda t: t[:, :-8]), "of this model is"),
    "rank": (lambda d: _config(d, r=3), "the configuration says 3"),
    "nan": (lambda d: _first_tensor(d, lambda t: t * float("nan")), "NaN"),
    "truncated": (lambda d: (d / WEIGHTS).write_bytes((d / WEIGHTS).read_bytes()[:-99]), "not a complete safetensors"),
    "not_json": (lambda d: (d / "adapter_config.json").write_text("{"), "not readable as JSON"),
    "dora": (lambda d: _config(d, use_dora=True), "lora_magnitude_vector is missing"),
    "pickle": (lambda d: (d / WEIGHTS).rename(d / "adapter_model.bin"), "pickle"),
    "past_depth": (lambda d: _rename(d, "layers.40.self_attn.q_proj"), "layer 40 is past the depth"),
    "tower": (lambda d: _rename(d, "visual.blocks.0.attn.qkv"), "visual.blocks.0.attn.qkv of this model is"),
    "patches": (lambda d: _rename(d, "visual.patch_embed.proj"), "vision tower or projector"),
}


def test_a_bad_adapter_is_refused_while_a_stream_goes_on(server: Server, tmp_path: Path) -> None:
    request = {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}}
    alone = server.generate(**request)["output_ids"]
    streamed: list[list[int]] = []
    thread = threading.Thread(target=lambda: streamed.append(server.generate(**request)["output_ids"]))
    thread.start()
    for name, (inject, message) in FAULTS.items():
        shutil.copytree(server.model.adapters["A"], tmp_path / name)
        inject(tmp_path / name)
        reply = load(server, name, tmp_path / name)
        assert reply.status_code == 400 and message in reply.text, (name, reply.text)
    thread.join(timeout=120)
    assert streamed == [alone]
    assert requests.get(f"{server.url}/health", timeout=30).status_code == 200


def test_an_unloaded_name_is_gone_and_may_mean_another_adapter(server: Server) -> None:
    answers = {name: answer(server, name) for name in ("A", "B")}
    assert answers["A"] != answers["B"]
    for name in ("A", "B"):
        assert load(server, "fresh", server.model.adapters[name]).status_code == 200
        assert answer(server, "fresh") == answers[name]
        assert unload(server, "fresh").status_code == 200
        gone = requests.post(f"{server.url}/generate", json={"text": PROMPT, "lora_path": "fresh"}, timeout=60)
        assert gone.status_code in (400, 404) and "no adapter named" in gone.text, gone.text


def outside(server: Server, tmp_path: Path) -> dict[str, Path]:
    """Ways out of the allowed roots, all to adapters that exist."""
    elsewhere = Path(tempfile.mkdtemp(dir="/var/tmp"))
    shutil.copytree(server.model.adapters["A"], elsewhere / "adapter")
    (tmp_path / "link").symlink_to(elsewhere / "adapter")
    shutil.copytree(server.model.adapters["A"], tmp_path / "linked_file")
    (tmp_path / "linked_file" / WEIGHTS).unlink()
    (tmp_path / "linked_file" / WEIGHTS).symlink_to(elsewhere / "adapter" / WEIGHTS)
    up = Path(*[".."] * len(tmp_path.parts))
    return {
        "path": elsewhere / "adapter",
        "dots": tmp_path / up / Path(*elsewhere.parts[1:]) / "adapter",
        "link": tmp_path / "link",
        "linked_file": tmp_path / "linked_file",
    }


def test_ways_out_of_the_allowed_roots_are_refused(server: Server, tmp_path: Path) -> None:
    ways = outside(server, tmp_path)
    try:
        for name, path in ways.items():
            assert (path / WEIGHTS).is_file(), "the way leads to an adapter"
            reply = load(server, name, path)
            assert reply.status_code == 400 and "allowed adapter root" in reply.text, (name, reply.text)
    finally:
        shutil.rmtree(ways["path"].parent)


@pytest.mark.parametrize("path", ["missing/adapter", "organisation/repository"])
def test_a_path_that_is_no_directory_is_refused(server: Server, path: str, tmp_path: Path) -> None:
    reply = load(server, "nowhere", tmp_path / path)
    assert reply.status_code == 400 and "not a directory" in reply.text


def test_a_request_names_an_adapter_and_never_a_path(server: Server) -> None:
    path = str(server.model.adapters["A"])
    reply = requests.post(f"{server.url}/generate", json={"text": PROMPT, "lora_path": path}, timeout=60)
    assert reply.status_code in (400, 404) and "no adapter named" in reply.text


def test_serialized_tensors_are_refused(server: Server) -> None:
    body = {"lora_name": "t", "config_dict": {"r": 4}, "serialized_named_tensors": ["gASVAAAAAA=="]}
    reply = requests.post(f"{server.url}/load_lora_adapter_from_tensors", json=body, timeout=60)
    assert reply.status_code in (400, 422) and 'success":true' not in reply.text.replace(" ", "")
