"""Whether answers equal transformers + PEFT's: the tests that compare them, counted and recorded by subject.

    python -m benchmarks.equality                 # all subjects, one after the other
    python -m benchmarks.equality tower formats

``SUBJECT.mismatches`` is the number of a subject's tests that fail; each compares whole answers, and those of several
adapters in one batch.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.summary import SUMMARY, record

SUBJECTS = {
    "tower": ("tests/lora/test_tower.py", "tests/e2e/test_tower.py"),
    "formats": (
        "tests/e2e/test_adapter_forms.py",
        "tests/e2e/test_combined.py",
        "tests/e2e/test_vocabulary.py",
        "tests/lora/test_vectors.py",
        "tests/lora/test_invocation.py",
        "tests/lora/test_token_rows.py",
        "tests/lora/test_vocabulary.py",
    ),
    "moe": (
        "tests/lora/test_experts.py",
        "tests/kernels/test_experts.py",
        "tests/e2e/test_families.py::test_adapters_answer_as_peft_does_in_every_mode",
    ),
}
SELECTED = {"moe": "experts or moe"}
"""Pytest's ``-k``, where a file has more than the subject."""
COUNTS = re.compile(r"(\d+) (passed|failed|error)")


def count(subject: str) -> tuple[int, int, str]:
    """(tests that passed, tests that did not, the end of what was printed) of a subject."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-o",
        "addopts=",
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "--slow",
    ]
    command += [*SUBJECTS[subject], *(["-k", SELECTED[subject]] if subject in SELECTED else [])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    found = {kind: int(number) for number, kind in COUNTS.findall(done.stdout.strip().rpartition("\n")[2])}
    failed = found.get("failed", 0) + found.get("error", 0)
    return found.get("passed", 0), failed + int(done.returncode != 0 and not failed), done.stdout[-3000:]


def main(argv: Sequence[str] | None = None) -> int:
    """Count them. Returns 1 if an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=f"of {', '.join(SUBJECTS)}; by default all")
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    args = parser.parse_args(argv)
    if unknown := {*args.subjects} - {*SUBJECTS}:
        parser.error(f"no subjects: {', '.join(sorted(unknown))}")
    wrong = 0
    for subject in args.subjects or SUBJECTS:
        passed, failed, printed = count(subject)
        print(f"{subject:8s} {passed} tests passed, {failed} failed", flush=True)
        if failed:
            print(printed, flush=True)
        if passed or failed:
            record(f"{subject}.mismatches", failed, f"of {passed + failed} tests", False, summary=args.summary)
        wrong += failed
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
