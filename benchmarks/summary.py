"""The project's measured figures: ``record`` appends one, ``python -m benchmarks.summary`` prints the newest of each.

``results/summary.json`` is a list of rows; only benchmarks write it, never a hand. The newest row of a name wins.
``--markdown docs/figures.md`` writes them as a page, with where, when and by which command each was measured.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SUMMARY = RESULTS / "summary.json"
PACKAGES = ("torch", "triton", "sglang", "transformers", "peft")


def card_name() -> str:
    """Name of the first CUDA device, or the kind of machine where there is none."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def package_versions() -> dict[str, str]:
    """Versions of the packages that move a figure; a package that is absent is left out."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git_revision() -> str:
    """Short revision of the tree, with ``+`` if it has uncommitted changes; ``unknown`` outside a repository."""
    root = Path(__file__).parent

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def running_command() -> str:
    """The running command line as it would be typed at the repository's root, without paths outside of it."""
    script, *rest = sys.argv
    rest = without_outside_paths(rest)
    try:
        module = Path(script).resolve().relative_to(ROOT).with_suffix("")
        return shlex.join(["python", "-m", ".".join(module.parts).removesuffix(".__main__"), *rest])
    except ValueError:
        return shlex.join(["python", Path(script).name, *rest])


def without_outside_paths(arguments: Sequence[str]) -> list[str]:
    """The arguments less options that name a file outside the repository: where results went is no part of them."""
    kept: list[str] = []
    for argument in arguments:
        if argument.startswith("/") and not Path(argument).is_relative_to(ROOT):
            if kept and kept[-1].startswith("--"):
                kept.pop()
        else:
            kept.append(argument)
    return kept


def read(path: Path = SUMMARY) -> list[dict[str, Any]]:
    """All rows, oldest first; an absent file has none."""
    return json.loads(path.read_text()) if path.exists() else []


def record(
    name: str,
    value: float,
    unit: str,
    higher_is_better: bool,
    *,
    command: str | None = None,
    card: str | None = None,
    summary: str | Path = SUMMARY,
) -> dict[str, Any]:
    """Append one figure and return its row.

    Args:
        name: the figure's name, exactly as the documents spell it.
        value: the measured number.
        unit: its unit, ``ratio`` for a quotient of one run on one card.
        higher_is_better: the direction of an improvement.
        command: what to run to measure it again; by default the running command line.
        card: where the rows that it is computed from were measured; by default this machine's.
        summary: the file to append to.
    """
    path = Path(summary)
    row = {
        "name": name,
        "value": float(value),
        "unit": unit,
        "higher_is_better": bool(higher_is_better),
        "card": card or card_name(),
        "versions": package_versions(),
        "revision": git_revision(),
        "command": command or running_command(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    rows = [*read(path), row]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(rows, indent=1) + "\n")
    temporary.replace(path)
    return row


def newest(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest row of each name, by name."""
    return [row for _, row in sorted({row["name"]: row for row in sorted(rows, key=lambda r: r["date"])}.items())]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of rows."""
    lines = ["| figure | value | unit | better | card | revision | date |", "|---|---:|---|---|---|---|---|"]
    for row in rows:
        better = "higher" if row["higher_is_better"] else "lower"
        lines.append(
            f"| `{row['name']}` | {row['value']:.4g} | {row['unit']} | {better} | {row['card']} "
            f"| {row['revision']} | {row['date'][:10]} |"
        )
    return "\n".join(lines)


PAGE = """\
# Figures

Written by `python -m benchmarks.summary --markdown docs/figures.md` from `benchmarks/results/summary.json`, which only
benchmarks write. A ratio is of one run on one card. The number behind a figure names its command, below its table.
"""


def page(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown page of rows: a section for each first word of a name, its commands below its table."""
    sections: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        sections.setdefault(row["name"].partition(".")[0], []).append(row)
    return "\n".join([PAGE, *(f"## {name}\n\n{section(found)}\n" for name, found in sections.items())]).rstrip() + "\n"


def section(rows: Sequence[dict[str, Any]]) -> str:
    """The table of a section, and the commands that measured it."""
    commands = list(dict.fromkeys(row["command"] for row in rows))
    lines = ["| figure | value | unit | better | card | date | |", "|---|---:|---|---|---|---|---|"]
    for row in rows:
        better = "higher" if row["higher_is_better"] else "lower"
        lines.append(
            f"| `{row['name']}` | {row['value']:.4g} | {row['unit']} | {better} | {row['card']} | {row['date'][:10]} "
            f"| {commands.index(row['command']) + 1} |"
        )
    return "\n".join([*lines, "", *(f"{number}. `{command}`" for number, command in enumerate(commands, 1))])


def merge(source: Path, into: Path = SUMMARY) -> int:
    """Append the rows of another summary (measured on another machine) that are not here yet; return how many."""
    rows = read(into)
    new = [row for row in read(source) if row not in rows]
    into.parent.mkdir(parents=True, exist_ok=True)
    into.write_text(json.dumps([*rows, *new], indent=1) + "\n")
    return len(new)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--summary", type=Path, default=SUMMARY, help="the file to read")
    parser.add_argument("--merge", type=Path, metavar="FILE", help="first append FILE's rows")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the figures as a page to FILE")
    args = parser.parse_args(argv)
    if args.merge:
        print(f"merged {merge(args.merge, args.summary)} rows")
    found = newest(read(args.summary))
    if args.markdown:
        args.markdown.write_text(page(found))
    else:
        print(table(found))


if __name__ == "__main__":
    main()
