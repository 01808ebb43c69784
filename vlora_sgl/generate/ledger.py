"""What training has shown so far: every step is made once, written down, and never repeated, not even after a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from vlora_sgl.core import JsonDict
from vlora_sgl.errors import ConfigError

Names = tuple[str, ...]
"""Data sets in the order in which one adapter learns them; it identifies the adapter's state."""


class Trainer(Protocol):
    """What the packer needs of training. It must keep the state of every sequence that it trained."""

    def fuse(self, sequence: Names) -> dict[str, float]:
        """Train the adapter of ``sequence[:-1]`` (a fresh one, if that is empty) on ``sequence[-1]`` and keep both.

        Returns:
            the held-out accuracy of every data set of the sequence.
        """

    def probe(self, names: Names) -> dict[str, float]:
        """A short run of a fresh adapter on ``names`` together; nothing is kept. Accuracy of each."""


class Ledger:
    """Answers from memory what was trained before, and asks the trainer for the rest.

    Args:
        trainer: trains and measures.
        floors: least held-out accuracy with which each data set counts as kept (``floors.bar`` of what is wanted).
        path: where every finished step is appended at once; ``None`` keeps them in memory only.
        digest: identity of the configuration; a ledger of another one is refused.
        write: whether this process appends; of several that train together, one does.
    Raises:
        ConfigError: ``path`` holds the ledger of another configuration, or is damaged before its last line.
    """

    def __init__(
        self,
        trainer: Trainer,
        floors: Mapping[str, float],
        path: Path | None = None,
        digest: str = "",
        write: bool = True,
    ) -> None:
        self.floors = dict(floors)
        self.held: dict[frozenset[str], Names] = {}
        """Sets that keep every floor, and the sequence that was trained so."""
        self.steps: dict[Names, dict[str, float]] = {}
        """Accuracy after each sequence, in the order of training."""
        self.probes: dict[Names, dict[str, float]] = {}
        self._trainer = trainer
        self._path = path if write else None
        if path is None:
            return
        if path.exists():
            self._replay(path, digest)
        else:
            self._append({"kind": "run", "digest": digest})

    @property
    def trainings(self) -> int:
        """Full trainings made so far, in all processes that shared this ledger."""
        return len(self.steps)

    def fuse(self, sequence: Names) -> dict[str, float]:
        """Accuracies after learning ``sequence``; the adapter of ``sequence[:-1]`` must have been trained."""
        if sequence not in self.steps:
            accuracy = self._trainer.fuse(sequence)
            self._append({"kind": "fuse", "names": list(sequence), "accuracy": accuracy})
            self._learn(sequence, accuracy)
        return self.steps[sequence]

    def probe(self, names: Names) -> dict[str, float]:
        """Accuracies after a short run on ``names`` together."""
        if names not in self.probes:
            accuracy = self._trainer.probe(names)
            self._append({"kind": "probe", "names": list(names), "accuracy": accuracy})
            self.probes[names] = accuracy
        return self.probes[names]

    def broken(self, sequence: Names) -> list[str]:
        """Data sets of a trained sequence that lie below their floor."""
        return [name for name in sequence if self.steps[sequence][name] < self.floors[name]]

    def holds(self, sequence: Names) -> bool:
        """Train ``sequence`` if need be; whether every floor holds after it."""
        self.fuse(sequence)
        return not self.broken(sequence)

    def failed(self) -> dict[frozenset[str], Names]:
        """Smallest sets that broke a floor in every order tried, and the order tried first.

        A set inside a larger one that holds is left out: its failure says nothing about larger sets.
        """
        found: dict[frozenset[str], Names] = {}
        for sequence in sorted(self.steps, key=len):
            group = frozenset(sequence)
            if not any(group <= held for held in self.held) and not any(bad <= group for bad in found):
                found[group] = sequence
        return found

    def _learn(self, sequence: Names, accuracy: dict[str, float]) -> None:
        self.steps[sequence] = accuracy
        if not self.broken(sequence):
            self.held.setdefault(frozenset(sequence), sequence)

    def _append(self, row: JsonDict) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _replay(self, path: Path, digest: str) -> None:
        lines = path.read_bytes().split(b"\n")
        # A kill can tear only the line being written, which is the last: drop it, its step is made again.
        whole = [line for line in lines[:-1] if line]
        if lines[-1]:
            path.write_bytes(b"".join(line + b"\n" for line in whole))
        try:
            rows = [json.loads(line) for line in whole]
            found = rows[0]["digest"] if rows else digest
            if found != digest:
                raise ConfigError(
                    f"{path} belongs to another configuration (digest {found}, this one is {digest}): "
                    "choose another output directory or remove that one"
                )
            if not rows:
                self._append({"kind": "run", "digest": digest})
            for row in rows[1:]:
                names = tuple(row["names"])
                if row["kind"] == "fuse":
                    self._learn(names, row["accuracy"])
                else:
                    self.probes[names] = row["accuracy"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is damaged: {type(error).__name__}: {error}") from error
