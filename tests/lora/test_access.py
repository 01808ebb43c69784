"""Paths out of the allowed roots are refused, whichever way they lead out."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlora_sgl.errors import AdapterError
from vlora_sgl.lora.access import allowed_directory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("root/good", "root/linked_file", "outside", "root-beside/adapter"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "outside" / "secret.safetensors").write_bytes(b"")
    (tmp_path / "root" / "link_out").symlink_to(tmp_path / "outside")
    (tmp_path / "root" / "link_in").symlink_to(tmp_path / "root" / "good")
    (tmp_path / "root" / "linked_file" / "adapter_model.safetensors").symlink_to(
        tmp_path / "outside" / "secret.safetensors"
    )
    return tmp_path / "root"


def test_directories_below_a_root_are_allowed(root: Path) -> None:
    assert allowed_directory(str(root / "good"), [str(root)]) == root / "good"
    assert allowed_directory(str(root / "link_in"), ["/nowhere", str(root)]) == root / "good"
    assert allowed_directory(str(root.parent / "outside"), []) == root.parent / "outside"


@pytest.mark.parametrize("path", ["../outside", "good/../../outside", "link_out", "../root-beside/adapter", "/etc"])
def test_ways_out_are_refused(root: Path, path: str) -> None:
    with pytest.raises(AdapterError, match="does not lie below"):
        allowed_directory(str(root / path), [str(root)])


def test_a_file_that_links_out_is_refused(root: Path) -> None:
    with pytest.raises(AdapterError, match=r"adapter_model.safetensors links out"):
        allowed_directory(str(root / "linked_file"), [str(root)])


@pytest.mark.parametrize("path", ["missing", "organisation/repository"])
def test_names_of_repositories_are_not_fetched(root: Path, path: str) -> None:
    with pytest.raises(AdapterError, match="not a directory on this machine"):
        allowed_directory(str(root / path), [])
