"""A tiny model of every family on a server of its own, compared with transformers + PEFT: a row for each.

    python -m benchmarks.families                       # on this machine, one after the other (minutes)
    python -m benchmarks.families --workers 6 --only llama qwen2_vl
    python -m benchmarks.families --rows FILE --only phi3       # FILE has those of the runs before

Each family is a run of tests/e2e/test_families.py. ``equal``: every check passed. ``equal for text``: those with
images were left out: the server refuses them by name, for the reason that the family's entry in
tests/support/served_families.py gives (``families.refused`` counts these). Anything else fails the command. What a
GPU's servers need besides is in ``VLORA_TEST_SERVER_ARGS``, which benchmarks.serving.smoke_gpu sets.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from benchmarks.summary import SUMMARY, record

EQUAL, TEXT, DIFFERS = "equal", "equal for text", "differs"
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|error)")


class Row(NamedTuple):
    """A family's outcome: its name, a word, checks passed, seconds, and the end of what was printed if it failed."""

    family: str
    outcome: str
    checks: int
    seconds: float
    failure: str = ""


def outcome(status: int, printed: str, blind: bool) -> tuple[str, int]:
    """The word for a run of pytest, and how many checks passed.

    Args:
        status: pytest's.
        printed: its output, whose last line counts.
        blind: whether a server here refuses the family's images, and their checks are skipped.
    """
    counts = {kind: int(number) for number, kind in COUNTS.findall(printed.strip().rpartition("\n")[2])}
    if status or not counts.get("passed"):
        return DIFFERS, counts.get("passed", 0)
    return (TEXT if blind else EQUAL), counts["passed"]


def check(family: str, blind: bool) -> Row:
    """Run one family's tests in a process of its own."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "--tb=short", "-p", "no:cacheprovider"]
    command += ["--slow", "tests/e2e/test_families.py", "-k", f"[{family}- or [{family}]"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    word, checks = outcome(done.returncode, done.stdout, blind)
    failure = done.stdout[-3000:] if word == DIFFERS else ""
    return Row(family, word, checks, time.perf_counter() - begun, failure)


def main(argv: Sequence[str] | None = None) -> int:
    """Check the families. Returns 1 if one differs."""
    from tests.support.served_families import FAMILIES
    from vlora_sgl.platforms.cpu import is_plain_cpu

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--workers", type=int, default=1, help="families at once")
    parser.add_argument("--rows", type=Path, help="JSON of the outcomes, which later runs go on with")
    parser.add_argument("--summary", type=Path, default=SUMMARY, help="where the figures go, once all families ran")
    args = parser.parse_args(argv)
    words = json.loads(args.rows.read_text()) if args.rows and args.rows.exists() else {}
    failed = False
    with ThreadPoolExecutor(args.workers) as pool:
        runs = [pool.submit(check, name, bool(FAMILIES[name].blind) and is_plain_cpu()) for name in args.only]
        for run in as_completed(runs):
            row = run.result()
            print(f"{row.family:16s} {row.outcome:14s} {row.checks} checks, {row.seconds:.0f} s", flush=True)
            print(row.failure, end="", flush=True)
            words[row.family], failed = row.outcome, failed or row.outcome == DIFFERS
            if args.rows:
                args.rows.write_text(json.dumps(words, indent=1) + "\n")
    if words.keys() == FAMILIES.keys():
        for name, word, more in (("equal", EQUAL, True), ("refused", TEXT, False)):
            count = list(words.values()).count(word)
            record(f"families.{name}", count, f"of {len(words)} families", more, summary=args.summary)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
