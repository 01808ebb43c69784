"""What can be merged into the base weights, and the switch, ordered on the forward stream."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import torch

from vlora_sgl import _sgl
from vlora_sgl._sgl_types import LoRAAdapter
from vlora_sgl.core import AdapterId
from vlora_sgl.errors import UnknownAdapterError
from vlora_sgl.kernels.merge import BiasTarget, FoldTable, MergeTable, loss
from vlora_sgl.lora.expert_layers import with_linears
from vlora_sgl.lora.layout import layer_of
from vlora_sgl.lora.merge_bound import BaseSize, base_sizes, merge_refusal, module_of
from vlora_sgl.lora.merge_targets import fold_targets, is_folded, largest_of_ranks, merge_targets, why_not_mergeable
from vlora_sgl.lora.mode_switcher import MergeOperand, ModeSwitcher
from vlora_sgl.lora.packed import Layers, PackedPool, kind_in_pool, not_finite
from vlora_sgl.lora.row_routing import RowRouting
from vlora_sgl.lora.tower import Tower, tower_of

logger = logging.getLogger(__name__)


class Merger:
    """Merges adapters of one rank.

    Args:
        adapters: SGLang's adapters by id.
        pool: their slots.
        rows: says which slot an adapter holds.
        modules: the wrapped modules by layer.
        target_modules: SGLang's names of the kinds of modules that adapters may target, here called groups.
        device: that the batches run on.
        copy: where the copy of the base weights lies (``base_copies``), or ``None``: nothing is ever merged.
        tower: the slots of the vision tower, whose part of an adapter is merged with the rest.
        tolerance: what folding into FP8 weights may lose; 0, and nothing is folded.

    Attributes:
        switcher: the mode switch, or ``None`` when nothing may or can be merged.
    """

    def __init__(
        self,
        adapters: Mapping[str, LoRAAdapter],
        pool: PackedPool,
        rows: RowRouting,
        modules: Layers,
        target_modules: set[str],
        device: torch.device,
        copy: str | None,
        tower: Tower | None = None,
        tolerance: float = 0.0,
    ) -> None:
        self._adapters, self._pool, self._rows, self._tower = adapters, pool, rows, tower
        self._target_modules, self._device = target_modules, device
        self._unmergeable: dict[str, str] = dict.fromkeys(_sgl.EMBEDDING_NAMES, "embeddings are shared with the input")
        self._groups: dict[str, frozenset[str]] = {}
        self._refused: dict[str, str | None] = {}
        self._tolerance, self._losses = tolerance, dict[str, float | None]()
        self._forward_stream: torch.cuda.Stream | None = None
        self._base_sizes: dict[str, tuple[BaseSize, ...]] = {}
        self._weights: dict[Any, torch.Tensor] = {}  # copies of the base model's, by module
        self._biases: dict[Any, torch.Tensor] = {}
        self.switcher = None if copy is None else self._make_switcher(modules, copy)
        self._measure()

    def _make_switcher(self, layers: Layers, copy: str) -> ModeSwitcher | None:
        modules: list[tuple[str, str, Any]] = []
        for layer in layers:
            for name, module in with_linears(layer).items():
                group = self._group_of(name)
                reason = why_not_mergeable(module, folding=self._tolerance > 0)
                if reason is None:
                    modules.append((group, name, module))
                else:
                    self._unmergeable.setdefault(group, f"{name}: {reason}")
        modules = [entry for entry in modules if entry[0] not in self._unmergeable]
        for group, reason in sorted(self._unmergeable.items()):
            if group in self._target_modules:
                logger.warning("%s is never merged into the weights (%s)", group, reason)
        if not modules:
            logger.warning("no module can be merged: every batch runs unmerged")
            return None
        modules.sort(key=lambda entry: entry[0])
        plain = [entry for entry in modules if not is_folded(entry[2])]
        folded = fold_targets([entry for entry in modules if is_folded(entry[2])], copy)
        targets = merge_targets(plain, copy, self._weights)
        table = MergeTable(
            targets, biases=self._bias_targets(layers), folded=FoldTable(folded, self._pool.dtype) if folded else None
        )
        table.warm_up(self._pool.max_lora_rank)
        size = table.nbytes(table.groups) / 2
        logger.info(
            "copy of the base weights of %d mergeable weights: %.2f GB on %s", len(modules), size / 2**30, copy
        )
        return ModeSwitcher(table)

    def _bias_targets(self, layers: Layers) -> list[BiasTarget]:
        """Every bias that an adapter may shift, and note the copies."""
        found = []
        for module in (module for layer in layers for module in layer.values()):
            bias = None if getattr(module, "vectors", None) is None else module.own_bias
            if bias is not None:
                self._biases[module] = bias.detach().clone()
                found.append(BiasTarget(bias.detach(), self._biases[module], module.vectors[:, 1]))
        return found

    def base(self, module: Any) -> tuple[Any, torch.Tensor | None]:
        """A wrapped linear's weight and bias as the base model has them, whatever is merged."""
        return self._weights.get(module, getattr(module.base_layer, "weight", None)), self._biases.get(
            module, module.own_bias
        )

    @property
    def merged(self) -> AdapterId:
        """The adapter merged into the weights now, ``None`` while they are the base model's."""
        return None if self.switcher is None else self.switcher.merged

    def refusal(self, adapter: str) -> str | None:
        """Why this adapter cannot be merged into the weights, or ``None`` if it can.

        Raises:
            UnknownAdapterError: it is not loaded.
        """
        if adapter not in self._adapters:
            raise UnknownAdapterError(adapter, self._adapters)
        if adapter not in self._refused:
            self._refused[adapter] = self._find_refusal(adapter)
            if self._refused[adapter] is not None:
                logger.warning("adapter %s is never merged: %s", adapter, self._refused[adapter])
        return self._refused[adapter]

    def _find_refusal(self, adapter: str) -> str | None:
        if self.switcher is None:
            return "merging is off"
        outside = self._groups_of(adapter) - self.switcher.table.groups
        if outside:
            group = min(outside)
            return f"it has weights for {group} ({self._unmergeable.get(group, 'not a wrapped module')})"
        lora = self._adapters[adapter]
        if getattr(lora, "unmergeable", None) is not None:
            return lora.unmergeable
        packed = getattr(lora, "packed", None)
        if packed is not None and len(packed.buffer) and not_finite(packed.buffer):
            return "its weights are not finite"
        tower = tower_of(lora)
        if tower is not None and (self._tower is None or (reason := self._tower.refusal(tower)) is not None):
            return reason
        scale, dtype = float(lora.scaling), self.switcher.table.dtype
        return merge_refusal(lora.update_sizes, self._base_sizes, scale, dtype) or self._loses_too_much(adapter)

    def _loses_too_much(self, adapter: str) -> str | None:
        lost = self.loss(adapter)
        if lost is None or lost <= self._tolerance:
            return None
        return (
            f"folded into FP8 weights it would lose {lost:.3g} of a layer's output "
            f"(--vlora-merge-tolerance {self._tolerance:g})"
        )

    def loss(self, adapter: str) -> float | None:
        """The largest relative error that folding it makes in a layer (``kernels.merge.loss``), measured once.

        ``None`` where nothing of it is folded into FP8 weights. All ranks say the same, and come here together.
        """
        if adapter not in self._losses:
            self._losses[adapter] = self._measure_loss(adapter)
        return self._losses[adapter]

    @torch.no_grad()
    def _measure_loss(self, adapter: str) -> float | None:
        if self.switcher is None or self.switcher.table.folded is None:
            return None
        lora, found = self._adapters[adapter], []
        rank, scale = int(lora.config.r), float(lora.scaling)
        targets = self.switcher.table.folded.members(self._groups_of(adapter))
        for name, slices in groupby(targets, lambda target: module_of(target.name)):
            layer = layer_of(name)
            weights = {} if layer is None else lora.layers[layer].weights
            if f"{name}.lora_A.weight" not in weights:
                continue
            a, b = (weights[f"{name}.lora_{side}.weight"].to(self._device) for side in "AB")
            row = 0
            for part, target in enumerate(slices):
                rows = slice(row, row := row + target.lora_b.shape[1])
                found.append(loss(target, a[part * rank : (part + 1) * rank], b[rows], scale))
        return float(largest_of_ranks(torch.stack(found).max()[None])) if found else None

    def _measure(self) -> None:
        """Take the sizes of the base weights, and forget what was said of adapters beside others."""
        self._refused.clear()
        self._losses.clear()
        if self.switcher is not None:
            self._base_sizes = base_sizes(self.switcher.table.everything, largest_of_ranks)

    def _group_of(self, name: str) -> str:
        return kind_in_pool(name, self._target_modules)

    def _groups_of(self, adapter: str) -> frozenset[str]:
        if adapter not in self._groups:
            lora = self._adapters[adapter]
            found = set()
            for name in [name for layer in lora.layers for name in layer.weights] + list(lora.embedding_layers or ()):
                # The pool skips (with a warning) weights of modules it has no buffers for.
                with contextlib.suppress(ValueError):
                    found.add(self._group_of(name))
            self._groups[adapter] = frozenset(found)
        return self._groups[adapter]

    def carry_out(self, merged: AdapterId) -> AdapterId:
        """Bring the weights to the state that the next batch wants, on the current stream, which runs it.

        Args:
            merged: the adapter to be merged, which holds a slot; ``None`` for the base weights.

        Returns:
            The adapter merged now.
        """
        if self._device.type == "cuda":
            self._forward_stream = torch.cuda.current_stream()
        if self.switcher is None:
            return None
        if merged is None:
            self._restore()
        elif self.switcher.merged != merged or self._tower is not None:
            adapter, slot = self._adapters[merged], self._rows.slot_of(merged)
            place, groups = self._pool.places[slot], self._groups_of(merged)
            vectors = None if getattr(adapter, "vectors", None) is None else slot
            self.switcher.merge(MergeOperand(merged, place, adapter.config.r, float(adapter.scaling), groups, vectors))
            if self._tower is not None:
                self._tower.merge(merged, tower_of(adapter), slot)
        return merged

    def _restore(self) -> None:
        if self.switcher is not None:
            self.switcher.restore()
        if self._tower is not None:
            self._tower.restore()

    # Between batches

    def unmerge(self, only: AdapterId = None) -> None:
        """Bring the base weights back before the current stream's next work, from any thread of control.

        The copy runs on the forward stream, behind a step that may still be in flight, and the current stream waits
        for both. Call it before adapters are unloaded and before weights are read, replaced, saved or freed.

        Args:
            only: leave the weights if another adapter than this is merged.
        """
        with self._on_forward_stream():
            if only in (None, self.merged):
                self._restore()

    def forget(self, adapter: str) -> None:
        """Unmerge an adapter that will be unloaded.

        The pool clears its slot from the scheduler's stream, which waits for a step that may still subtract it.
        """
        self.unmerge(adapter)
        self._refused.pop(adapter, None)
        self._losses.pop(adapter, None)
        self._groups.pop(adapter, None)

    def rebase(self) -> None:
        """Take the present weights as the base model's, after they were updated."""
        if self.switcher is not None:
            self.switcher.rebase()
            if self._tower is not None:
                self._tower.rebase()
            self._measure()

    @contextlib.contextmanager
    def _on_forward_stream(self) -> Iterator[None]:
        if self._forward_stream is None:
            yield
            return
        caller = torch.cuda.current_stream()
        self._forward_stream.wait_stream(caller)
        with torch.cuda.stream(self._forward_stream):
            yield
        caller.wait_stream(self._forward_stream)
