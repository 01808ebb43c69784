"""Adapter directories with anything but files in them: refused by name, at once, whichever file it is."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vlora_sgl.errors import AdapterError, HeadError, VLoraError
from vlora_sgl.files import MOST_JSON, open_regular
from vlora_sgl.heads.store import load_heads, read_description
from vlora_sgl.lora.access import allowed_directory
from vlora_sgl.lora.checkpoint import read_adapter
from vlora_sgl.routed.spec import member_names, read_routed

Spoil = Callable[[Path], object]


def bind(path: Path) -> None:
    """A socket: bound by a relative name, for the absolute one may be too long for it."""
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


def grow(path: Path) -> None:
    """A file of a gigabyte, which takes no place on the disk."""
    path.touch()
    os.truncate(path, 1 << 30)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def forbid(path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    path.write_text("{}")
    path.chmod(0)


KINDS: dict[str, tuple[Spoil, str]] = {
    "a FIFO": (os.mkfifo, "is a FIFO"),
    "a link to a device": (lambda path: path.symlink_to("/dev/zero"), "is a device"),
    "a socket": (bind, "is a socket"),
    "a directory": (Path.mkdir, "is a directory"),
    "a link to itself": (loop, "symbolic links"),
    "a link to nothing": (lambda path: path.symlink_to("nothing"), "No such file"),
    "no permission": (forbid, "Permission denied"),
    "empty": (Path.touch, "is empty|not readable as JSON"),
    "huge": (grow, "has 1073741824 bytes|not a complete safetensors file|cannot be read"),
    "nested": (lambda path: path.write_text("[" * 100_000), "not readable as JSON|not a complete|cannot be read"),
    "binary": (lambda path: path.write_bytes(b"\xff\xfe\x00"), "not readable as JSON|not a complete|cannot be read"),
}


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter as PEFT saves it."""
    directory = tmp_path / "adapter"
    directory.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    factors = {key.format("A"): torch.ones(2, 4), key.format("B"): torch.ones(4, 2)}
    save_file(factors, directory / "adapter_model.safetensors")
    return directory


def load(directory: Path) -> None:
    """All that a load reads of files."""
    allowed_directory(str(directory), ())
    if (directory / "vlora_routed.json").exists() or (directory / "vlora_routed.json").is_symlink():
        read_routed(directory, "routed", 4, 100)
    else:
        read_adapter(directory)
    load_heads(directory, 4, torch.device("cpu"), read_description(directory))


HEAD = {"format": 1, "heads": [{"name": "h", "kind": "count", "maximum": 1}]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    [
        *("adapter_config.json", "adapter_model.safetensors", "adapter_model.safetensors.index.json"),
        *("vlora_adapter.json", "vlora_heads.safetensors", "vlora_routed.json"),
    ],
)
def test_what_is_no_file_is_refused_by_name(adapter: Path, name: str, kind: str) -> None:
    load(adapter)  # as it is, it is fine
    if name == "vlora_heads.safetensors":
        (adapter / "vlora_adapter.json").write_text(json.dumps(HEAD))
    spoil, reason = KINDS[kind]
    (adapter / name).unlink(missing_ok=True)
    spoil(adapter / name)
    began = time.monotonic()
    with pytest.raises((AdapterError, HeadError), match=reason) as refused:
        load(adapter)
    assert name in str(refused.value) and "\n" not in str(refused.value)
    assert time.monotonic() - began < 5


def test_a_file_that_is_exchanged_for_a_fifo_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("{}")
    status = os.stat(path)
    path.unlink()
    os.mkfifo(path)
    monkeypatch.setattr(os, "stat", lambda *_: status)
    with pytest.raises(AdapterError, match="is a FIFO"):
        open_regular(path)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/tmp/" + "a" * 300, "must be a path"),
        ("ü" * 200, "must be a path"),
        ("/".join(["a" * 200] * 40), "names no directory|is not a directory|must be a path"),
        ("a\0b", "must be a path"),
        ("\ud800", "must be a path"),
        ("", "must be a path"),
        ("/dev/null", "is not a directory"),
        ("/dev/null/x", "is not a directory"),
    ],
    ids=["long", "long in bytes", "long as a whole", "NUL", "a surrogate", "empty", "a device", "below a device"],
)
@pytest.mark.parametrize("roots", [(), ("/",)], ids=["anywhere", "below a root"])
def test_what_names_no_directory_is_refused_by_name(path: str, reason: str, roots: tuple[str, ...]) -> None:
    with pytest.raises(AdapterError, match=reason) as refused:
        allowed_directory(path, roots)
    str(refused.value).encode()  # it can be sent, and logged
    assert len(str(refused.value)) < 10_000


def test_directories_that_cannot_be_read_or_hold_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop(tmp_path / "loop")
    with pytest.raises(AdapterError, match="loop"):
        allowed_directory(str(tmp_path / "loop"), ())
    monkeypatch.setattr("vlora_sgl.files.MOST_FILES", 3)
    for number in range(4):
        (tmp_path / str(number)).touch()
    with pytest.raises(AdapterError, match="more than 3 files"):
        allowed_directory(str(tmp_path), ())


@pytest.mark.parametrize("where", ["inner", "inner/checkpoint-7"])
def test_a_refusal_names_the_sub_folder_that_holds_the_adapter(adapter: Path, where: str) -> None:
    target = adapter.parent / "outer" / where
    target.parent.mkdir(parents=True)
    shutil.move(adapter, target)
    with pytest.raises(AdapterError, match=f"one is in .*{where}$"):
        load(adapter.parent / "outer")
    load(target)


def test_settings_that_are_large_but_possible_are_read(adapter: Path) -> None:
    config: dict[str, Any] = json.loads((adapter / "adapter_config.json").read_text())
    config["target_modules"] = ["q_proj"] * (MOST_JSON // 20)
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    load(adapter)


def test_members_of_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "vlora_routed.json")
    with pytest.raises(VLoraError, match="is a FIFO"):
        member_names(tmp_path, "routed")
