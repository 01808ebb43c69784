"""What a command answers with, and how it says that it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Result:
    """An answer.

    Attributes:
        data: for ``--json``.
        text: for people.
        status: the exit status.
    """

    data: Any
    text: str
    status: int = 0


class CommandError(Exception):
    """A command cannot be carried out; the message says why, and what to do.

    Args:
        status: the exit status.
    """

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def table(rows: Sequence[Sequence[object]], heads: Sequence[str]) -> str:
    """Rows in columns, under their heads; ``None`` is a dash. What cannot be printed is escaped."""
    shown = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(heads), *shown]) for i in range(len(heads))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [heads, *shown])
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: object) -> str:
    text = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
