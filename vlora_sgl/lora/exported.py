"""What an exported model directory says of itself, and how a server of ours keeps its adapters' names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlora_sgl.combined import is_combined, parts, written
from vlora_sgl.core import AdapterId, JsonDict
from vlora_sgl.errors import ConfigError

MANIFEST = "vlora_export.json"
FORMAT = 1
UNFINISHED = "vlora_export.unfinished.json"
BASE_DELTA = "base"


@dataclass(frozen=True)
class ExportedModel:
    """A merged base and the adapters that go with it.

    Attributes:
        directory: of the merged base.
        hot: name of the merged adapter.
        adapters: name -> directory: the deltas, ``base`` among them, and the merged adapter's own name and heads.
    """

    directory: Path
    hot: str
    adapters: Mapping[str, Path]

    def serving(self, asked: AdapterId, head: bool = False) -> AdapterId:
        """The adapter that answers as ``asked`` did on the original base.

        The merged adapter is the model itself, unless a head of its own is asked; no adapter is the delta that
        gives the original base back; any other name is its delta's. Several as one lack, or have too often, what
        their deltas take out of the merged base once each.

        Raises:
            RequestError: several as one with the delta of the base are too many.
        """
        if asked is None:
            return BASE_DELTA
        if is_combined(asked):
            scales = dict(parts(asked))
            base = 1 - sum(scales.values())
            scales = {name: scale for name, scale in scales.items() if name != self.hot}
            return written(scales | ({BASE_DELTA: base} if base or not scales else {}))
        return None if asked == self.hot and not head else asked

    def lora_paths(self) -> list[str]:
        """The adapters as ``--lora-paths`` takes them."""
        return [f"{name}={path}" for name, path in self.adapters.items()]


def read_exported(model: str | Path) -> ExportedModel | None:
    """The exported model in a directory; ``None`` for any other model, be it a directory or a name on a hub.

    Raises:
        ConfigError: the directory holds an unfinished export, or the manifest is of a format we do not know.
    """
    directory = Path(model)
    path = directory / MANIFEST
    if not path.is_file():
        if (directory / UNFINISHED).is_file():
            raise ConfigError(
                f"{directory} is an unfinished export; run python -m vlora_sgl.export again to finish it"
            )
        return None
    data: Any = json.loads(path.read_text())
    if data.get("format") != FORMAT:
        raise ConfigError(f"{path}: expected format {FORMAT}, got {data.get('format')!r}")
    adapters = {name: directory / place for name, place in data["adapters"].items()}
    return ExportedModel(directory, data["hot"]["name"], adapters)


def adapter_options(model: str | Path, given: bool) -> JsonDict:
    """``ServerArgs`` that serve an exported model's adapters; none for other models, or where some are ``given``."""
    exported = read_exported(model) if model and not given else None
    return {} if exported is None else {"enable_lora": True, "lora_paths": exported.lora_paths()}
