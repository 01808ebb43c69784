"""What reading an adapter found: returned by the load call, printed by ``vlora inspect``, logged once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from vlora_sgl.core import JsonDict

T = TypeVar("T")


@dataclass(frozen=True)
class LoadReport:
    """What matched, of which kind and size.

    Attributes:
        path: the adapter's directory.
        digest: hex digest of the content (canonical names, scales, shapes, bytes); key prefixes do not enter it.
        tensors: LoRA tensors in the file; all of them matched, or there would be no report.
        modules: kind of module (``q_proj``, in the vision tower ``visual attn.qkv``) -> how many of them are adapted.
        layers: decoder layers adapted.
        ranks: rank -> number of modules.
        scales: scale -> number of modules.
        prefixes: key prefixes seen, before the canonical name.
        heads: tensors saved whole, ``name -> shape``.
        nbytes: bytes of the LoRA factors as stored.
        notes: anything a person should know and no error covers.
    """

    path: str
    digest: str
    tensors: int
    modules: dict[str, int]
    layers: int
    ranks: dict[int, int]
    scales: dict[float, int]
    prefixes: tuple[str, ...]
    heads: dict[str, tuple[int, ...]] = field(default_factory=dict)
    nbytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def max_rank(self) -> int:
        """The largest rank over the modules: what a device slot must hold."""
        return max(self.ranks, default=0)

    def to_dict(self) -> JsonDict:
        """The report as JSON-ready values."""
        return {**asdict(self), "max_rank": self.max_rank}

    def __str__(self) -> str:
        modules = ", ".join(f"{kind} x{count}" for kind, count in sorted(self.modules.items()))
        ranks = "/".join(map(str, sorted(self.ranks)))
        scales = "/".join(f"{scale:g}" for scale in sorted(self.scales))
        text = (
            f"matched all {self.tensors} LoRA tensors: {modules}; {self.layers} layers, rank {ranks}, scale {scales}, "
            f"{self.nbytes / 2**20:.1f} MiB, digest {self.digest[:12]}"
        )
        if self.heads:
            text += "; heads " + ", ".join(f"{name}{list(shape)}" for name, shape in self.heads.items())
        return "; ".join((text, *self.notes))


def count(values: Iterable[T]) -> dict[T, int]:
    """Occurrences of each value, the values in order."""
    return dict(sorted(Counter(values).items()))
