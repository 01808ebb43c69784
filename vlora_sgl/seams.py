"""What a replacement of foreign code is, how it is put in place, and what became of it in this process.

``plugin.TABLE`` lists every one. Rows of kind ``BUILT`` are put in place by ``install``; the others by ``own``,
``swapped`` and ``before_forward`` at the one moment that SGLang gives, or by SGLang's own registry of hooks
(``plugin.install``).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Any, NamedTuple

from vlora_sgl.errors import ContractError


class Stage(StrEnum):
    """When a row is put in place."""

    PROCESS = auto()  # a process starts, before or while it imports SGLang
    ENGINE = auto()  # SGLang is imported; its parts are built
    MODEL = auto()  # the model is built; ``install`` is given SGLang's model runner


class How(Enum):
    """How a row is put in place."""

    CLASS = "our subclass takes the class's place"
    WRAP = "our function takes the function's place and is called with it first"
    BUILT = "our function, given what the stage is about, returns what goes where, or why nothing does"
    OWN = "our object takes the place of SGLang's where SGLang has just made that"
    CALL = "for the length of a call"


@dataclass(frozen=True)
class Seam:
    """One replacement of foreign code.

    Attributes:
        target: what is replaced: a name of ``_sgl.NAMES``, or a module, and attributes from there.
        ours: ``module:name`` of what replaces it, or decides and builds that.
        why: why we replace it.
        without: what a user loses where it is not in place.
    """

    target: str
    ours: str
    stage: Stage
    how: How
    why: str
    without: str


class Place(NamedTuple):
    """``value`` goes to ``owner.key``; to ``owner[key]`` of a dict or list; to the end of a list without a key."""

    owner: Any
    key: Any
    value: Any

    def put(self) -> None:
        """Put it there.

        Raises:
            ContractError: the owner has no attribute of that name: nobody would look at it.
        """
        if self.key is None:
            self.owner.append(self.value)
        elif isinstance(self.owner, dict | list):
            self.owner[self.key] = self.value
        elif hasattr(self.owner, self.key):
            setattr(self.owner, self.key, self.value)
        else:
            raise ContractError(f"{type(self.owner).__name__} has no attribute {self.key}")

    def holds(self) -> bool:
        """Whether it is there, or wrapped by what is there."""
        if isinstance(self.owner, list):
            return self.value in self.owner
        found: Any = getattr(self.owner, str(self.key), None)
        if isinstance(self.owner, dict):
            found = self.owner.get(self.key)
        while found is not self.value and hasattr(found, "__wrapped__"):
            # SGLang keeps the function of a hook in the closure of its wrapper, and nowhere else.
            if any(cell.cell_contents is self.value for cell in found.__closure__ or ()):
                return True
            found = found.__wrapped__
        return found is self.value


Places = Sequence[Place] | str
"""What goes where, or why nothing does."""

Report = dict[str, dict[str, str | int]]

_rows: dict[str, Seam] = {}
_found: dict[str, Places] = {}
_absent = object()


def declare(rows: Iterable[Seam]) -> None:
    """Make these the rows of this process."""
    _rows.update((row.target, row) for row in rows)


def record(target: str, places: Places) -> None:
    """Remember where a row is, or why it is nowhere.

    Raises:
        ContractError: no row has this target.
    """
    if _rows and target not in _rows:
        raise ContractError(f"{target} is replaced, but plugin.TABLE has no row for it")
    _found[target] = places or "this model has none"


def place(target: str, places: Places) -> None:
    """Put a row in place.

    Raises:
        ContractError: as ``record`` and ``Place.put``.
    """
    record(target, places)
    for one in () if isinstance(places, str) else places:
        one.put()


def own(target: str, owner: Any, value: Any) -> None:
    """Put ``value`` where SGLang keeps its own: the attribute of ``owner`` that ends the row's target."""
    place(target, [Place(owner, target.rpartition(".")[2], value)])


@contextmanager
def swapped(target: str, owner: Any, key: str, value: Any) -> Iterator[None]:
    """While this lasts, ``value`` is in the place of an object's or module's attribute, or of a dict's entry."""
    held = owner if isinstance(owner, dict) else vars(owner)
    before = held.get(key, _absent)
    record(target, [Place(type(owner), key, None)])  # not the value: nothing is to be kept alive
    Place(owner, key, value).put()
    try:
        yield
    finally:
        if before is not _absent:
            Place(owner, key, before).put()
        elif held is owner:
            del owner[key]
        else:
            delattr(owner, key)


@contextmanager
def before_forward(target: str, module: Any, hook: Any) -> Iterator[None]:
    """While this lasts, a module's call gives its arguments to ``hook`` first, and takes what that returns."""
    record(target, [Place(type(module), target.rpartition(".")[2], None)])
    with module.register_forward_pre_hook(hook, with_kwargs=True):
        yield


def install(stage: Stage, given: Any = None) -> None:
    """Put the rows of a stage in place that our functions build, ``given`` this, and check all of the stage.

    Raises:
        ContractError: one is not in place, or no row has been declared in this process.
    """
    if not _rows:
        raise ContractError("plugin.TABLE has not been declared in this process")
    for row in _rows.values():
        if row.stage is stage and row.how is How.BUILT:
            place(row.target, pkgutil.resolve_name(row.ours)(given))
    verify(stage)


def verify(stage: Stage, *owners: str, otherwise: str | None = None) -> None:
    """Check that the rows of a stage are in place, or that it is known why not.

    Args:
        owners: beginnings of targets. Rows put in place where SGLang makes something (``OWN``, ``CALL``) are due once
            that has been made: then name what they belong to.
        otherwise: why those that are due may be nowhere.

    Raises:
        ContractError: names the first that is not. SGLang would only log it, and serve without it.
    """
    for row in _rows.values():
        if row.stage is not stage:
            continue
        if row.target.partition(".")[0] in owners and otherwise:
            _found.setdefault(row.target, otherwise)
        due = row.how in (How.CLASS, How.WRAP, How.BUILT) or row.target.partition(".")[0] in owners
        found = _found.get(row.target, "" if due else "not asked for yet")
        there = bool(found) if isinstance(found, str) or row.how is How.CALL else all(one.holds() for one in found)
        if not there:
            raise ContractError(
                f"{row.target} is not replaced by {row.ours}; this process would serve without it: {row.without}"
            )


def report(other: Report | None = None) -> Report:
    """What became of every row in this process, by target; of those elsewhere what ``other``, its report, says."""
    states: Report = {}
    for target in _rows:
        found = _found.get(target)
        if found is None:
            states[target] = (other or {}).get(target, {"state": "not in this process"})
        elif isinstance(found, str):
            states[target] = {"state": "not for this model", "why": found}
        else:
            states[target] = {"state": "in place", "places": len(found)}
    return states
