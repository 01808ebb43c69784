"""Delta adapters: what an adapter becomes once another one is merged into the base (seed scheme, equations 2-5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import save_file

from vlora_sgl.lora.checkpoint import WEIGHTS_NAME, LoraPair
from vlora_sgl.lora.layout import BaseLayout, is_tower


def delta_modules(cold: Mapping[str, LoraPair], hot: Mapping[str, LoraPair]) -> dict[str, LoraPair]:
    """``[s_c B_c, -s_h B_h]`` and ``[A_c; A_h]`` per module; a module of one side alone is plain or subtracted.

    With an empty ``cold`` the result gives the original base model back.
    """
    delta = {}
    for name in sorted({*cold, *hot}):
        terms = [(pair, sign) for pair, sign in ((cold.get(name), 1.0), (hot.get(name), -1.0)) if pair is not None]
        dtype = torch.promote_types(terms[0][0].b.dtype, terms[-1][0].b.dtype)
        a = torch.cat([pair.a.to(dtype) for pair, _ in terms])
        b = torch.cat([(sign * pair.scale * pair.b.float()).to(dtype) for pair, sign in terms], dim=1)
        delta[name] = LoraPair(a, b, 1.0)
    return delta


@dataclass(frozen=True)
class Compression:
    """A compressed set of modules, and what was lost.

    Attributes:
        error, worst: relative Frobenius error over all modules together, and of the worst one.
        dropped: per module, the largest singular value that was left out: no input of norm one is changed by more.
    """

    modules: dict[str, LoraPair]
    error: float
    worst: float
    dropped: dict[str, float]


def compress(modules: Mapping[str, LoraPair], rank: int) -> Compression:
    """The best approximation of rank ``rank`` per module (SVD of ``B A`` through two thin QRs, in float64)."""
    smaller: dict[str, LoraPair] = {}
    largest: dict[str, float] = {}
    lost = total = worst = 0.0
    for name, pair in modules.items():
        qb, rb = torch.linalg.qr(pair.b.double() * pair.scale)
        qa, ra = torch.linalg.qr(pair.a.double().T)
        u, s, vt = torch.linalg.svd(rb @ ra.T)
        keep = min(rank, s.numel())
        root = s[:keep].sqrt()
        smaller[name] = LoraPair(
            (root[:, None] * (vt[:keep] @ qa.T)).to(pair.a.dtype), ((qb @ u[:, :keep]) * root).to(pair.b.dtype), 1.0
        )
        largest[name] = float(s[keep]) if keep < s.numel() else 0.0
        dropped, whole = float(s[keep:].square().sum()), float(s.square().sum())
        lost, total = lost + dropped, total + whole
        worst = max(worst, (dropped / whole) ** 0.5 if whole else 0.0)
    return Compression(smaller, (lost / total) ** 0.5 if total else 0.0, worst, largest)


def write_adapter(
    directory: Path,
    modules: Mapping[str, LoraPair],
    layout: BaseLayout,
    base: str,
    *,
    exact_ranks: bool = False,
    saved: Mapping[str, torch.Tensor] | None = None,
    task_type: str | None = None,
) -> int:
    """Writes ``modules`` as a PEFT adapter and returns its rank.

    Args:
        exact_ranks: keep each module's own rank (``rank_pattern``) instead of padding all to one rank with zeros.
            Stock SGLang needs one rank, and q, k and v (gate and up) together, so that is the default.
        saved: whole tensors to carry along, as ``modules_to_save``.
    """
    modules = _restacked(modules, layout)
    if not exact_ranks:
        modules = _with_partners(modules, layout)
    rank = max(pair.rank for pair in modules.values())
    tensors, ranks = {}, {}
    for name, pair in modules.items():
        path = layout.paths[name]
        r = pair.rank if exact_ranks else rank
        a = torch.nn.functional.pad(pair.a, (0, 0, 0, r - pair.rank))
        b = torch.nn.functional.pad((pair.b.float() * pair.scale).to(pair.b.dtype), (0, r - pair.rank))
        embedding = name == "embed_tokens"
        for side, factor in (("A", a), ("B", b)):
            key = f"lora_embedding_{side}" if embedding else f"lora_{side}.weight"
            tensors[f"base_model.model.{path}.{key}"] = factor.contiguous()
        if r != rank:
            ranks[path] = r
    tensors.update({f"base_model.model.{name}": tensor for name, tensor in (saved or {}).items()})
    config = LoraConfig(
        task_type=task_type,
        r=rank,
        lora_alpha=rank,
        target_modules=_targets({layout.paths[name] for name in modules}, layout),
        rank_pattern=ranks,
        alpha_pattern=dict(ranks),
        modules_to_save=sorted({name.split(".")[0] for name in saved}) if saved else None,
        base_model_name_or_path=base,
        inference_mode=True,
    )
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / WEIGHTS_NAME, metadata={"format": "pt"})
    config.save_pretrained(str(directory))
    return rank


def _targets(paths: set[str], layout: BaseLayout) -> list[str]:
    """The shortest list of names that targets exactly ``paths``: last names if nothing else ends in them.

    In a vision tower other modules than linear layers do: ``0``, or the ``proj`` of a convolution.
    """
    if any(map(is_tower, paths)):
        return sorted(paths)
    leaves = {path.rpartition(".")[2] for path in paths}
    everything: set[str] = {*layout.paths.values(), *layout.other_linears}
    matched = {path for path in everything if path.rpartition(".")[2] in leaves}
    return sorted(leaves if matched == paths else paths)


def _with_partners(modules: Mapping[str, LoraPair], layout: BaseLayout) -> dict[str, LoraPair]:
    """Adds a zero update for each part that engines stack with an adapted one."""
    whole = dict(modules)
    for name in modules:
        for parts in (p for p in layout.fused.values() if name in p):
            for part in parts:
                if part not in whole and part in layout.paths:
                    like, (out, inner) = modules[name], layout.shapes[part]
                    a, b = like.b.new_zeros(1, inner), like.b.new_zeros(out, 1)
                    whole[part] = LoraPair(a, b, 1.0)
    return whole


def _restacked(modules: Mapping[str, LoraPair], layout: BaseLayout) -> dict[str, LoraPair]:
    """Parts of a projection that the transformers model keeps stacked become one update of the stack again."""
    result = {name: pair for name, pair in modules.items() if name in layout.paths}
    for name, parts in layout.fused.items():
        present = [part for part in parts if part in modules]
        if name not in layout.paths or not present:
            continue
        first = modules[present[0]]
        shared = all(torch.equal(modules[p].a, first.a) for p in present)
        a = first.a if shared else torch.cat([modules[p].a for p in present])
        b = torch.zeros(sum(layout.shapes[p][0] for p in parts), a.shape[0], dtype=first.b.dtype)
        row = column = 0
        for part in parts:
            rows = layout.shapes[part][0]
            if part in modules:
                pair = modules[part]
                scaled = (pair.b.float() * pair.scale).to(b.dtype)
                b[row : row + rows, column : column + pair.rank] = scaled
                column += 0 if shared else pair.rank
            row += rows
        result[name] = LoraPair(a, b, 1.0)
    return result
