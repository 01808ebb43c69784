"""Two tasks of real text that lies in installed packages: which country a region is in, whose function it is."""

from __future__ import annotations

import ast
import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path

from vlora_sgl.generate.datasets import Example

COUNTRIES = {"DE": "Germany", "ES": "Spain", "FR": "France", "IN": "India", "IT": "Italy", "JP": "Japan"}
COUNTRIES |= {"MX": "Mexico", "PL": "Poland", "SE": "Sweden", "TH": "Thailand", "TR": "Turkey", "VN": "Vietnam"}
PACKAGES = ("numpy", "pandas", "scipy", "torch")
EACH = 400
"""First lines of a package's documentation that are used."""


def tasks(train: int, test: int, seed: int = 0) -> dict[str, tuple[list[Example], list[Example]]]:
    """Examples to train and to test on, by task; the same for the same seed."""
    found = {}
    for name, make in (("places", _places), ("functions", _functions)):
        examples = sorted(make(), key=lambda one: one.question)
        random.Random(seed).shuffle(examples)
        found[name] = (examples[test : test + train], examples[:test])
    return found


def _places() -> list[Example]:
    import pycountry

    regions = {
        (one.name, one.type, one.country_code) for one in pycountry.subdivisions if one.country_code in COUNTRIES
    }
    return [Example((), f"In which country is {n} ({kind})?", COUNTRIES[code]) for n, kind, code in regions]


def _functions() -> list[Example]:
    found = []
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None
        lines = sorted(set(_first_lines(Path(spec.origin).parent)))
        random.Random(0).shuffle(lines)
        found += [Example((), f"Which library has this function? {line}", package) for line in lines[:EACH]]
    return found


def _first_lines(root: Path) -> Iterator[str]:
    files = sorted(path for path in root.rglob("*.py") if "test" not in path.as_posix())
    for path in files[:: max(1, len(files) // 150)]:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                line = (ast.get_docstring(node) or "").partition("\n")[0]
                if 30 <= len(line) <= 90:
                    yield line
