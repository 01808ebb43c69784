"""One server of the embedded model for all examples."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="package")
def embedded() -> Iterator[str]:
    """The address of the embedded model's server, started as the examples start it."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        from serving import argument_parser, serving

        with serving(argument_parser("").parse_args([])) as served:
            assert served.embedded and served.trained
            yield served.backend.url
    finally:
        sys.path.remove(str(EXAMPLES))
