"""Every protocol of ``_sgl_types`` describes SGLang's class of the same name: nothing in it is only ours."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Protocol

import pytest

from vlora_sgl import _sgl, _sgl_types

PROTOCOLS = {
    name: found
    for name, found in vars(_sgl_types).items()
    if isinstance(found, type) and found.__module__ == _sgl_types.__name__
}


def own_names(cls: type) -> set[str]:
    """Attributes that a class itself has or annotates, and those that its methods set on ``self``."""
    names = {*vars(cls), *vars(cls).get("__annotations__", {})}
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # written in C
        return names
    for node in ast.walk(tree):
        is_target = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_target and isinstance(node.value, ast.Name) and node.value.id == "self":
            names.add(node.attr)
    return names


def names_of(cls: type) -> set[str]:
    return {name for one in cls.__mro__ if one is not object for name in own_names(one)}


def described(protocol: type) -> set[str]:
    """What a protocol lists: annotated attributes, properties and methods."""
    return {
        *protocol.__annotations__,
        *(name for name, value in vars(protocol).items() if inspect.isfunction(value) or isinstance(value, property)),
    } - {"__init__", "__subclasshook__"}


def lacking(name: str) -> set[str]:
    """What SGLang's class lacks of its protocol."""
    return described(PROTOCOLS[name]) - names_of(getattr(_sgl, name)) - _sgl_types.OURS.get(name, frozenset())


@pytest.mark.parametrize("name", sorted(PROTOCOLS))
def test_sglangs_class_has_all_that_its_protocol_lists(name: str) -> None:
    assert described(PROTOCOLS[name])
    assert lacking(name) == set()


def test_a_name_that_sglang_lacks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Req(Protocol):
        rid: str
        row: int

        def ended(self) -> bool: ...

    monkeypatch.setitem(PROTOCOLS, "Req", Req)
    assert lacking("Req") == {"row", "ended"}


def test_a_field_that_sglang_renames_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class LoRARef:
        lora_id: str

        def __init__(self) -> None:
            self.lora_name = self.path = ""

    monkeypatch.setitem(_sgl.__dict__, "LoRARef", LoRARef)
    assert lacking("LoRARef") == {"lora_path", "pinned"}


@pytest.mark.parametrize("name", sorted(_sgl_types.OURS))
def test_what_we_add_is_nowhere_sglangs(name: str) -> None:
    assert not _sgl_types.OURS[name] & names_of(getattr(_sgl, name))


def test_every_protocol_says_where_sglang_keeps_its_class() -> None:
    for name, protocol in PROTOCOLS.items():
        path = (protocol.__doc__ or "").partition("``:")[0].lstrip("`")
        assert _sgl.NAMES[name].partition(":")[0] == f"sglang.srt.{path.replace('/', '.')}"
