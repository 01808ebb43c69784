"""What adapters do to a linear's output beside adding to it: DoRA's factors, and biases.

DoRA (arXiv 2402.09353, equation 5) gives the rows of ``W + s B A`` the norms m that were trained, and PEFT leaves the
bias out of that. So an output is ``g (x W^T + s x A^T B^T) + b`` with ``g = m / |W + s B A|``, a number for each row
of W. It is computed once, when the adapter is loaded, from the base weights and the factors that are served. What
``lora_bias`` and a trained bias of the base model add is a number an output as well. Both lie in one table by slot.

A tensor-parallel rank has its outputs' numbers. Where ranks share the inputs instead (o_proj, down_proj), every rank
scales its part of the sum, the squares of the norms are summed over ranks at load, and the first rank shifts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from vlora_sgl import _sgl
from vlora_sgl._sgl_types import LoRAAdapter
from vlora_sgl.errors import AdapterError
from vlora_sgl.lora.layers import Atmm, plain_weight
from vlora_sgl.lora.layout import canonical_name, layer_of
from vlora_sgl.lora.merge_bound import LIMIT
from vlora_sgl.lora.merge_targets import largest_of_ranks
from vlora_sgl.lora.packed import Layers

FACTORS = 1 / 16, 16.0
"""Of an adapter that may be merged: a row that takes it out divides by its factors."""
ROWS = 4096
"""Of a weight whose norms are computed at a time."""

Base = Callable[[nn.Module], tuple[torch.Tensor, torch.Tensor | None]]
"""A wrapped linear's weight and bias (``None``: it adds none) as the base model has them, whatever is merged."""

_REASONS = (
    None,
    "DoRA's factors reach beyond 1/16 to 16, so that taking it out of other rows would cost them their accuracy",
    "it adds a bias to a linear that has none in the base model",
    "its biases are too large beside the base model's",
)


def present_base(module: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A ``Base`` while nothing is merged."""
    return module.base_layer.weight, module.own_bias


class SlotVectors:
    """The table, and what fills it.

    Args:
        modules: the wrapped modules by layer, with their slots. Each linear gets its part of the table, ``vectors``.
        slots: of the pool.
        device: of the pool.

    Attributes:
        table: [slots, T] float32; of every linear, N factors and N shifts.
        base: where the base model's weights are.
    """

    def __init__(self, modules: Layers, slots: int, device: torch.device) -> None:
        self._places: dict[str, tuple[Any, int]] = {}
        self.base: Base = present_base
        end = 0
        for layer in modules:
            for path, module in layer.items():
                if isinstance(module, Atmm):
                    self._places[canonical_name(path) or path] = module, end
                    end += 2 * module.columns[-1]
        self.table = torch.zeros(slots, end, dtype=torch.float32, device=device)
        for module, begin in self._places.values():
            n = module.columns[-1]
            module.vectors = self.table[:, begin : begin + 2 * n].view(slots, 2, n)

    def load(self, slot: int, adapter: LoRAAdapter) -> None:
        """Fill a slot's row, if the adapter has vectors, on the current stream."""
        vectors: torch.Tensor | None = getattr(adapter, "vectors", None)
        if vectors is not None:
            self.table[slot].copy_(vectors, non_blocking=True)

    @torch.no_grad()  # the base's biases are parameters, and a start is in no inference mode
    def attach(self, adapter: LoRAAdapter) -> None:
        """Compute an adapter's vectors, once its factors are this rank's: ``vectors`` and ``unmergeable``.

        All ranks come here together.

        Raises:
            AdapterError: they cannot be computed, on any rank.
        """
        given, places = adapter.output_vectors, self._places
        for name, vectors in given.items():
            if name not in places:
                raise AdapterError(f"{name} is no linear whose adapters can have {adapter.form}")
            module = places[name][0]
            if vectors.magnitude is not None and not plain_weight(module):
                raise AdapterError(f"{name}: DoRA needs the base weight as a plain matrix, and it is quantised")
            if _shares_inputs(module) and module.base_layer.tp_size != _sgl.get_tp_group().world_size:
                raise AdapterError(f"{name}: {adapter.form} cannot be served with data-parallel attention")
        norms = self._norms(adapter)
        row = torch.zeros(self.table.shape[1], pin_memory=self.table.device.type == "cuda")
        reasons = [0]
        for name, (module, begin) in places.items():
            n = module.columns[-1]
            factor, shift = row[begin : begin + 2 * n].view(2, n)
            factor.fill_(1.0)
            if name in given:
                self._fill(factor, shift, module, given[name], norms.get(name))
                reasons.append(self._reason(factor, shift, module))
        worst = torch.tensor([float(not bool(torch.isfinite(row).all())), float(max(reasons))], dtype=torch.float64)
        spoiled, reason = largest_of_ranks(worst).tolist()
        if spoiled:
            raise AdapterError("DoRA: a row of W + s B A is zero, or too large, and has no norm to give it another")
        adapter.vectors, adapter.unmergeable = row, _REASONS[int(reason)]

    def _norms(self, adapter: LoRAAdapter) -> dict[str, torch.Tensor]:
        """``|W + s B A|`` of every row, [n] float64, by name, of the linears with magnitudes."""
        scaled = sorted(name for name, vectors in adapter.output_vectors.items() if vectors.magnitude is not None)
        squares = {name: self._squares(name, adapter) for name in scaled}
        shared = [name for name in scaled if _shares_inputs(self._places[name][0])]
        if shared:
            total = sum_of_ranks(torch.cat([squares[name] for name in shared]))
            squares |= zip(shared, total.split([len(squares[name]) for name in shared]), strict=True)
        return {name: found.sqrt() for name, found in squares.items()}

    def _squares(self, name: str, adapter: LoRAAdapter) -> torch.Tensor:
        """The squares of this rank's part of the norms."""
        module, _ = self._places[name]
        layer, device, rank = layer_of(name), self.table.device, int(adapter.config.r)
        assert layer is not None
        weights = adapter.layers[layer].weights
        a, b = (weights[f"{name}.lora_{side}.weight"].to(device, torch.float32) for side in "AB")
        base = self.base(module)[0]
        found = []
        for part, (start, end) in enumerate(pairwise(module.columns)):
            low = a[part * rank : (part + 1) * rank]
            for at in range(start, end, ROWS):
                rows = slice(at, min(at + ROWS, end))
                total = torch.addmm(base[rows].to(device, torch.float32), b[rows], low, alpha=float(adapter.scaling))
                found.append(torch.linalg.vector_norm(total, dim=1, dtype=torch.float64).square())
        return torch.cat(found).cpu()

    def _fill(
        self, factor: torch.Tensor, shift: torch.Tensor, module: Any, given: Any, norms: torch.Tensor | None
    ) -> None:
        """This rank's numbers of one linear: [n] each."""

        def part(whole: torch.Tensor) -> torch.Tensor:
            return module.slice_lora_b_weights(whole[:, None])[:, 0]

        if norms is not None:
            magnitude = part(given.magnitude).double()
            factor.copy_(torch.where(magnitude.isnan(), 1.0, magnitude / norms))
        if _shares_inputs(module) and module.base_layer.tp_rank > 0:
            return  # the first rank's shift is in the sum
        if given.added is not None:
            shift += part(given.added)
        if given.bias is not None:
            bias, base = part(given.bias), self.base(module)[1]
            before = 0.0 if base is None else base.cpu().float()
            shift += torch.where(bias.isnan(), 0.0, bias - before)

    def _reason(self, factor: torch.Tensor, shift: torch.Tensor, module: Any) -> int:
        """Which of ``_REASONS`` keeps the adapter from being merged."""
        sizes = factor.abs()
        if bool((sizes < FACTORS[0]).any() | (sizes > FACTORS[1]).any()):
            return 1
        largest = float(shift.abs().max())
        if not largest:
            return 0
        weight, bias = self.base(module)
        if bias is None:
            return 2
        if not plain_weight(module):
            return 0  # never merged anyhow
        row = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).max()
        return 3 * (largest > LIMIT * (float(bias.abs().max()) + float(row)))


def _shares_inputs(module: Any) -> bool:
    """Whether each rank has the products of its part of a linear's inputs, and the output is their sum."""
    return isinstance(module, _sgl.RowParallelLinearWithLoRA) and bool(module.base_layer.tp_size > 1)


def sum_of_ranks(numbers: torch.Tensor) -> torch.Tensor:
    """The sum over all tensor-parallel ranks of float64 ``[n]`` on the host, elementwise; on one rank as it is."""
    group = _sgl.get_tp_group()
    if group.world_size > 1:
        torch.distributed.all_reduce(numbers, group=group.cpu_group)
    return numbers


def has_vectors(adapters: Iterable[LoRAAdapter]) -> bool:
    """Whether any of these adapters is more than plain LoRA."""
    return any(getattr(adapter, "output_vectors", None) for adapter in adapters)
