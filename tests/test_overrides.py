"""Methods of ours that replace SGLang's take its arguments by its names: some are called by name, on a GPU only."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

import vlora_sgl

NEEDS_AN_EXTRA = {"vlora_sgl.cluster.on_ray": "ray"}


def modules() -> Iterator[ModuleType]:
    """All of the package that can be imported here."""
    for found in pkgutil.walk_packages(vlora_sgl.__path__, "vlora_sgl."):
        try:
            yield importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            assert error.name == NEEDS_AN_EXTRA.get(found.name), found.name


def overrides(classes: list[type], of: str) -> Iterator[tuple[str, Callable[..., object], Callable[..., object]]]:
    """(name, ours, theirs) of every method that replaces one of a class whose module begins with ``of``."""
    for cls in classes:
        for name, member in vars(cls).items():
            bases = (base for base in cls.__mro__[1:] if base.__module__.startswith(of) and name in vars(base))
            base = next(bases, None)
            if name.startswith("__") or not inspect.isfunction(member) or base is None:
                continue
            theirs = vars(base)[name]
            if inspect.isfunction(theirs):
                yield f"{cls.__name__}.{name}", member, inspect.unwrap(theirs)


def refused(ours: Callable[..., object], theirs: Callable[..., object]) -> list[str]:
    """The parameters of ``theirs`` that ``ours`` does not take, and those of its own that it needs."""
    own, other = (inspect.signature(function).parameters.values() for function in (ours, theirs))
    kinds = {parameter.kind for parameter in own}
    named = {parameter.name for parameter in own}
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [] if kinds & {*variable} else [p.name for p in other if p.name not in named and p.kind not in variable]
    needed = [
        p.name
        for p in own
        if p.default is p.empty and p.kind not in variable and p.name not in {q.name for q in other}
    ]
    return missing + needed


def test_overrides_take_what_sglang_passes() -> None:
    classes = [
        cls
        for module in modules()
        for cls in vars(module).values()
        if isinstance(cls, type) and cls.__module__ == module.__name__
    ]
    found = list(overrides(classes, "sglang."))
    assert len(found) > 100
    assert {name: names for name, ours, theirs in found if (names := refused(ours, theirs))} == {}


class Theirs:
    def capture(self, size: int, num_tokens: int) -> None: ...


class Renamed(Theirs):
    def capture(self, size: int, tokens: int) -> None: ...  # type: ignore[override]


class Wider(Theirs):
    def capture(self, size: int, num_tokens: int, more: int = 0) -> None: ...


@pytest.mark.parametrize(("cls", "names"), [(Renamed, ["num_tokens", "tokens"]), (Wider, [])])
def test_a_renamed_parameter_is_noticed(cls: type, names: list[str]) -> None:
    ((_, ours, theirs),) = overrides([cls], __name__)
    assert refused(ours, theirs) == names
