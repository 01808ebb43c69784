"""Memory that an adapter is read to: where the copy of its slot will lie, wherever nothing changes on the way there.

What lies there already is not copied again when it is stacked and packed. What does not (another type or rank, a stack
that lacks a part, a rank's shard) is read to memory of its own, and copied then: so nothing depends on this but time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from vlora_sgl.heads.saved import without_wrappers
from vlora_sgl.lora.checkpoint import module_and_side
from vlora_sgl.lora.experts import is_expert
from vlora_sgl.lora.layout import EMBEDDING_MODULES, BaseLayout, canonical_name, is_tower
from vlora_sgl.lora.packed import Packed
from vlora_sgl.lora.stacking import stacks
from vlora_sgl.lora.weight_files import Saved

Reserve = Callable[[Collection[str], int], tuple[Packed, Mapping[str, torch.Tensor]]]
"""Makes the memory of an adapter of this rank, and of each of its matrices, by their names in a ``StackedAdapter``."""


MOST_SPARE = 2
"""What is reserved may be as many times what the file has for it: parts may be missing, or of lower rank."""


class Reservation:
    """``weight_files.Room`` of an adapter that is to be stacked for an engine with this layout and type.

    Attributes:
        packed: what was reserved, once it was read.
    """

    def __init__(self, reserve: Reserve, layout: BaseLayout, dtype: torch.dtype) -> None:
        self._reserve, self._layout, self._dtype = reserve, layout, dtype
        self.packed: Packed | None = None

    def __call__(self, table: Mapping[str, Saved]) -> Mapping[str, torch.Tensor]:
        """The memory of those that go there as they are."""
        keys = _factors(table)
        known = all(name in self._layout.shapes for name, _ in keys)
        if not keys or not known or any(len(table[key].shape) != 2 for key in keys.values()):
            return {}  # of what is refused, or lies otherwise
        rank = max(table[key].shape[0] for (_, side), key in keys.items() if side == "A")
        of_part = stacks(self._layout)
        names = dict.fromkeys(of_part.get(name, name) for name, _ in keys)
        sizes = [self._layout.shapes[part] for name in names for part in self._layout.parts_of(name)]
        wanted = rank * sum(map(sum, sizes)) * self._dtype.itemsize
        if wanted > MOST_SPARE * sum(table[key].nbytes for key in keys.values()):
            return {}  # one large matrix must not ask for memory as if all were of its rank
        whole = {f"{name}.lora_{side}.weight": (name, side) for name in names for side in "AB"}
        self.packed, matrices = self._reserve(whole, rank)
        found: dict[str, torch.Tensor] = {}
        for matrix, (name, side) in whole.items():
            if matrix in matrices:
                found.update(self._parts(matrices[matrix], name, side, rank, keys, table))
        return found

    def _parts(
        self,
        matrix: torch.Tensor,
        name: str,
        side: str,
        rank: int,
        keys: Mapping[tuple[str, str], str],
        table: Mapping[str, Saved],
    ) -> Mapping[str, torch.Tensor]:
        """By key, the parts of a stacked matrix; none if it is not just what the file has for them."""
        parts = self._layout.parts_of(name)
        sizes = {part: self._layout.shapes[part] for part in parts}
        wanted = {part: (rank, size[1]) if side == "A" else (size[0], rank) for part, size in sizes.items()}
        rows = [shape[0] for shape in wanted.values()]
        if matrix.shape != (sum(rows), wanted[parts[0]][1]) or matrix.dtype != self._dtype:
            return {}
        found = dict(zip(parts, matrix.split(rows), strict=True))
        own = {part: table.get(keys.get((part, side), "")) for part in parts}
        if any(one is None or (one.shape, one.dtype) != (wanted[part], self._dtype) for part, one in own.items()):
            return {}
        return {keys[part, side]: view for part, view in found.items()}


def _factors(table: Mapping[str, Saved]) -> dict[tuple[str, str], str]:
    """The keys of the language model's factors, by module and side; none where there are those of experts.

    Of two keys of one, which is refused later, one is left out: nothing else is read to its place.
    """
    found: dict[tuple[str, str], str] = {}
    for key in table:
        path, side = module_and_side(without_wrappers(key))
        name = canonical_name(path)
        if name is None or side not in ("A", "B") or name in EMBEDDING_MODULES or is_tower(name):
            continue
        if is_expert(name):
            return {}
        found.setdefault((name, side), key)
    return found
