"""Numbers in the README and the guides: measured ones are figures of ``summary.json``, the others were reviewed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.summary import newest, read

ROOT = Path(__file__).parents[1]
FIGURES = {row["name"]: float(row["value"]) for row in newest(read())}
GENERATED = ("figures.md", "evaluation.md")
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in GENERATED)]

UNITS = "ns|us|µs|ms|s|seconds?|minutes?|hours?|[KMGT]i?B|[GT]B/s|points?|times|tokens a second"
NUMBER = r"(?<![\w.,`-])\d[\d,]*(?:\.\d+)?"
QUANTITY = re.compile(rf"({NUMBER})\s?(?:%|(?:{UNITS})(?![\w/]))")

REVIEWED = {
    "adapters.md": {
        "11 MB": "computed: two numbers in 16 bits for each output of a 7B model's linears",
        "1.7 GB": "computed from the shapes of Qwen3-30B-A3B",
        "0.11 GB": "the same, of one unit of rank",
        "58 GB": "its weights in 16 bits",
        "1 GiB": "a default",
        "5 seconds": "a constant",
        "20 GiB": "a default",
        "16 MiB": "a bound",
        "5 s": "a bound",
        "5.0 MB": "computed: a unit of rank of a 7B model's linears",
        "2.58 GB": "computed from it",
        "2.26 GB": "computed from it",
        "0.81 GB": "computed from it",
        "0.57 GB": "computed from it",
        "64 MiB": "a bound",
        "1.4 MB": "computed: a unit of rank of a 7B model's tower",
    },
    "deploy.md": {"1.25 times": "a rule"},
    "quantization.md": {
        "6.5 GB": "computed: a byte for each weight of a 7B model's linears",
        "2.6 %": "follows from the format: the quadratic mean of rounding to three bits",
        "4 %": "the same of a product of two such numbers",
    },
    "routed.md": {"0.9 MB": "computed from the shapes"},
    "operate.md": {"5 s": "a rule", "10 s": "a rule"},
    "serve.md": {"30 s": "a default"},
}
"""Settings, bounds, and what follows from shapes, by page: the number as written, and what it is."""


def unexplained(text: str, reviewed: dict[str, str]) -> list[str]:
    """Numbers with a unit that are neither on a line with the figure that they are, rounded, nor reviewed; and figures
    that a line names beside another number."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found = []
    for line in text.splitlines():
        values = [value for name in re.findall(r"`([a-z0-9_.*]+)`", line) for value in values_of(name)]
        plain = re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)
        shown = [number for number in re.findall(NUMBER, plain) if any(is_rounded(number, one) for one in values)]
        found += [m[0] for m in QUANTITY.finditer(plain) if m[0] not in reviewed and m[1] not in shown]
        if values and re.search(NUMBER, plain) and not shown:
            found.append(f"{plain.strip()} is not {values}")
    return found


def values_of(name: str) -> list[float]:
    """A figure's value, or those of all figures that ``name.*`` stands for."""
    begins = name.removesuffix("*")
    return [value for full, value in FIGURES.items() if full == name or (begins != name and full.startswith(begins))]


def is_rounded(written: str, value: float) -> bool:
    """Whether a number is a value with as many decimals as were written."""
    written = written.replace(",", "")
    decimals = len(written.partition(".")[2])
    return abs(float(written) - value) <= 0.5 * 10**-decimals * (1 + 1e-9)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_measured_number_of_a_guide_is_a_figure(page: Path) -> None:
    assert unexplained(page.read_text(), REVIEWED.get(page.name, {})) == []


@pytest.mark.parametrize("page", REVIEWED)
def test_nothing_was_reviewed_that_is_not_there(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert [number for number in REVIEWED[page] if number not in text] == []


@pytest.mark.parametrize(
    "line",
    [
        "It takes 4 ms.",
        "3.5 times faster",
        "| 40 % |",
        "1,200 MB of it",
        "a switch takes 9 ms (`{figure}`)",
        "| 9 ms | 8 ms | `switch.*` |",
    ],
)
def test_a_number_that_nobody_measured_is_found(line: str) -> None:
    assert unexplained(line.format(figure="switch.all_linear_r64_ms"), {})


@pytest.mark.parametrize(
    "line", ["Qwen2.5-VL-7B has 28 layers.", "`--limit 4 s`", "{value:.1f} ms (`{figure}`)", "4 ms"]
)
def test_settings_and_figures_are_not_found(line: str) -> None:
    figure = "switch.all_linear_r64_ms"
    assert not unexplained(line.format(figure=figure, value=FIGURES[figure]), {"4 ms": "reviewed"})
