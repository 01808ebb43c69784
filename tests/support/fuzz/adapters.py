"""Adapter directories that hold something else than an adapter, or almost one."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save, save_file

from tests.support.fuzz.raw import broken, spoiled
from tests.support.fuzz.values import hostile

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
OTHERS = ("vlora_adapter.json", "vlora_heads.safetensors", "vlora_routed.json", "vlora_router.safetensors")
OTHERS += ("adapter_model.safetensors.index.json", "added_tokens.json", "adapter_model.bin", "README.md")


def directory(pick: random.Random, root: Path, good: Path) -> Path:
    """A copy of a good adapter below ``root``, one or two things of it wrong; whole once in a while."""
    path = root / f"spoiled-{pick.getrandbits(48):012x}"
    shutil.rmtree(path, ignore_errors=True)  # of the same request, sent before
    shutil.copytree(good, path)
    for _ in range(pick.choice((0, 1, 1, 1, 1, 1, 1, 1, 2, 2))):
        pick.choice((_spoil_config, _spoil_config, _spoil_tensors, _spoil_tensors, _spoil_file, _add_file))(pick, path)
    return path


def _is_plain(file: Path) -> bool:
    return file.is_file() and not file.is_symlink()


def _spoil_config(pick: random.Random, path: Path) -> None:
    if not _is_plain(path / CONFIG):
        return
    try:
        config: Any = json.loads((path / CONFIG).read_text())
    except (ValueError, RecursionError):
        return
    if not isinstance(config, dict):
        return
    for _ in range(pick.choice((1, 1, 2))):
        options = ["rank_pattern", "alpha_pattern", "use_rslora", "modules_to_save", "layers_to_transform", "new"]
        name = pick.choice([*config, *options, "r", "lora_alpha", "target_modules"])
        if pick.random() < 0.1:
            config.pop(name, None)
        elif name.endswith("_pattern"):
            config[name] = {pick.choice(("q_proj", ".*", "(", "(a+)+$", "")): hostile(pick, 1)}
        else:
            config[name] = hostile(pick)
    (path / CONFIG).write_text(json.dumps(config))


def _spoil_tensors(pick: random.Random, path: Path) -> None:
    if not _is_plain(path / WEIGHTS):
        return
    try:
        tensors = load_file(path / WEIGHTS)
    except Exception:  # it is spoiled already
        return
    if not tensors or not all(one.dim() for one in tensors.values()):
        return
    name = pick.choice(sorted(tensors))
    tensor = tensors[name]
    kind = pick.randrange(10)
    if kind == 0:
        tensor[pick.randrange(tensor.shape[0]), 0] = pick.choice((float("nan"), float("inf"), float("-inf")))
    elif kind == 1:
        tensors = {key: (one * pick.choice((1e18, 1e30, 1e38))).to(one.dtype) for key, one in tensors.items()}
    elif kind == 2:
        shape = pick.choice(((0,), (0, 0), (1,), (), (3, 5), (1, *tensor.shape), (*reversed(tensor.shape),)))
        tensors[name] = torch.zeros(shape, dtype=tensor.dtype)
    elif kind == 3:
        types = (torch.int8, torch.uint8, torch.bool, torch.int64, torch.float64, torch.bfloat16, torch.float8_e4m3fn)
        tensors[name] = tensor.to(pick.choice(types))
    elif kind == 4:
        del tensors[name]
    elif kind == 5:
        wrong = ("", ".", "lora_A.weight", name + ".x", name.replace("lora_A", "lora_C"), "\u202e", "x" * 5_000)
        tensors[pick.choice((*wrong, name.replace("layers.0", "layers.99")))] = tensors.pop(name)
    elif kind == 6:
        tensors[name + ".magnitude"] = torch.zeros(3)
    elif kind == 7:
        tensors = {}
    elif kind == 8:
        tensors = {key: torch.zeros_like(one) for key, one in tensors.items()}
    else:
        tensors[name] = torch.zeros(pick.choice((tensor.shape[0] + 1, 4096)), *tensor.shape[1:], dtype=tensor.dtype)
    save_file(tensors, path / WEIGHTS)


def _spoil_file(pick: random.Random, path: Path) -> None:
    file = path / pick.choice((CONFIG, WEIGHTS))
    if not _is_plain(file):
        return
    data = file.read_bytes()
    kind = pick.randrange(8)
    if kind < 2:
        file.write_bytes(spoiled(data, pick))
    elif kind == 2:
        file.write_bytes(broken(pick))
    elif kind == 3:
        file.write_bytes(_header(pick) + data[8:])
    else:
        file.unlink()
        if kind == 4:
            os.mkfifo(file)
        elif kind == 5:
            file.mkdir()
        elif kind == 6:
            file.symlink_to(pick.choice((file.name, "/dev/zero", "/etc/hostname", "nothing")))


def _header(pick: random.Random) -> bytes:
    """The length with which a safetensors file begins, and what follows it."""
    length = pick.choice((0, 1, 8, 2**20, 2**31, 2**63, 2**64 - 1))
    tensor = {
        "dtype": pick.choice(("F32", "F99", "")),
        "shape": [2**62, 2**62],
        "data_offsets": [0, pick.choice((0, 8))],
    }
    return length.to_bytes(8, "little") + pick.choice((b"", json.dumps({"a": tensor}).encode()))


def _add_file(pick: random.Random, path: Path) -> None:
    file = path / pick.choice(OTHERS)
    if file.suffix == ".safetensors":
        file.write_bytes(pick.choice((broken(pick), save({"x": torch.zeros(2)}))))
    elif pick.random() < 0.3:
        file.write_bytes(broken(pick))
    else:
        keys = ("format", "invocation", "prompt", "heads", "metrics", "members", "router", "weight_map", "x")
        content: dict[str, Any] = {key: hostile(pick, 1) for key in pick.sample(keys, 3)}
        content |= {"format": 1} if pick.random() < 0.7 else {}
        file.write_text(json.dumps(content))
