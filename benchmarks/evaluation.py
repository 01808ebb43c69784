"""Every figure and table of the texts that this project builds on, beside ours: ``docs/evaluation.md``.

    python -m benchmarks.evaluation                            # how many rows there are, and which have no value yet
    python -m benchmarks.evaluation --markdown docs/evaluation.md

The rows are in ``evaluation.yaml``; our values are the newest figures of ``results/summary.json``. A row has a value,
or says why not. ``--record`` writes the figures ``evaluation.*``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from benchmarks.campaign import JOBS
from benchmarks.summary import SUMMARY, newest, read, record

ROWS = Path(__file__).with_suffix(".yaml")
HEAD = """# The sources' evaluation, row by row

Written by `python -m benchmarks.evaluation --markdown docs/evaluation.md` from `benchmarks/evaluation.yaml` and
`benchmarks/results/summary.json`. Cards and models differ: the sources measured trained models on A100, H100 or T4, we
random weights of a 7B shape on an H200 where a row says nothing else. "Ahead" is said only where both numbers are the
same quantity.
"""


@dataclass(frozen=True)
class Row:
    """One result of a source.

    Attributes:
        title: the source's.
        place: where in it.
        what: the quantity.
        theirs: its value there, in words.
        aim: the same as a number, where ours is the same quantity.
        better: whether ours should be lower or higher than it.
        figure: ours.
        note: what makes them differ, or why there is none of ours.
    """

    title: str
    place: str
    what: str
    theirs: str
    aim: float | None = None
    better: Literal["lower", "higher"] = "lower"
    figure: str | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if not (self.figure or self.note):
            raise ValueError(f"{self.place}, {self.what}: neither a figure nor a reason")

    @property
    def ours(self) -> dict[str, Any] | None:
        """The newest measurement of our figure."""
        return figures().get(self.figure or "")

    @property
    def ahead(self) -> bool | None:
        """Whether ours is at least as good; ``None`` where the two cannot be compared."""
        if self.ours is None or self.aim is None:
            return None
        return bool(self.ours["value"] <= self.aim if self.better == "lower" else self.ours["value"] >= self.aim)

    @property
    def reason(self) -> str:
        """The note, and what would measure a figure that has no value yet."""
        if self.figure is None or self.ours is not None:
            return self.note
        return "; ".join(filter(None, [self.note, f"not measured yet: `{writer(self.figure)}`"]))


@cache
def figures() -> dict[str, dict[str, Any]]:
    """The newest row of every figure."""
    return {row["name"]: row for row in newest(read())}


def writer(figure: str) -> str:
    """The command that measures a figure.

    Raises:
        LookupError: no job of the campaign does.
    """
    jobs = [job for job in JOBS if figure.startswith(job.figures)]
    if jobs:
        best = max(jobs, key=lambda job: max(len(start) for start in job.figures if figure.startswith(start)))
        return f"python -m benchmarks.campaign --only {best.name}"
    raise LookupError(f"no job of the campaign writes {figure}")


def rows() -> Iterator[Row]:
    """All rows, source by source."""
    for source in yaml.safe_load(ROWS.read_text()):
        for row in source["rows"]:
            yield Row(source["title"], **{**row, "theirs": str(row["theirs"])})


def page() -> str:
    """The page, with a table for each source."""
    parts, title = [HEAD], ""
    for row in rows():
        if row.title != title:
            title = row.title
            parts.append(f"\n## {title}\n\n| where | what | there | ours | | card, date | why it differs |")
            parts.append("\n|---|---|---|---:|---|---|---|\n")
        parts.append(line(row))
    return "".join(parts)


def line(row: Row) -> str:
    """A row of the table."""
    ours = row.ours
    value = f"{ours['value']:.4g} (`{row.figure}`)" if ours else "-"
    said = {True: "ahead", False: "behind", None: ""}[row.ahead]
    where = f"{ours['card']}, {ours['date'][:10]}" if ours else ""
    return f"| {row.place} | {row.what} | {row.theirs} | {value} | {said} | {where} | {row.reason} |\n"


def counts() -> dict[str, int]:
    """The figures ``evaluation.*``."""
    every = list(rows())
    return {
        "rows": len(every),
        "rows_measured": sum(row.ours is not None for row in every),
        "rows_ahead": sum(row.ahead is True for row in every),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print what is missing; write the page; record the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, help="write the page there")
    parser.add_argument("--record", action="store_true", help="record the counts")
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    args = parser.parse_args(argv)
    for name, count in counts().items():
        print(f"{name}: {count}")
        if args.record:
            record(f"evaluation.{name}", count, "rows", higher_is_better=True, summary=args.summary)
    for row in rows():
        if row.ours is None:
            print(f"no value: {row.place}, {row.what}: {row.reason}")
    if args.markdown:
        args.markdown.write_text(page())


if __name__ == "__main__":
    main()
