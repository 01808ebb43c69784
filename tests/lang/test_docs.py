"""Every Python snippet of the language's documents runs, in order, as a reader would run them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import vlora_sgl as vlora
from tests.conftest import Server
from tests.lang import programs
from tests.lang.conftest import Recorder
from vlora_sgl.lang import api

pytestmark = pytest.mark.e2e

DOCS = Path(__file__).parents[2] / "docs"
HEADS = {
    "defect": {"labels": ["hole", "none"], "probabilities": [0.9, 0.1]},
    "holes": {"count": 2, "probability": 0.7},
    "where": {"boxes": [{"box": [0.1, 0.1, 0.4, 0.4], "label": "hole", "score": 0.8}]},
}


def snippets(page: str) -> list[tuple[int, str, str]]:
    """(line number, what follows ``python`` on the fence, code) of each Python snippet of a page."""
    text = (DOCS / page).read_text()
    found = re.finditer(r"^```python ?(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(text[: match.start()].count("\n") + 2, match[1], match[2]) for match in found]


@pytest.mark.parametrize("page", ["lang.md", "openai.md"])
def test_every_snippet_runs(page: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    frames = [programs.photograph(i) for i in range(5)]
    frames[0].save("street.jpg")
    frames[0].save("clip.gif", save_all=True, append_images=frames[1:])
    names: dict[str, Any] = {}
    pieces = snippets(page)
    assert len(pieces) >= 2
    try:
        for line, kind, code in pieces:
            # The padding makes a failure's line number that of the document.
            source = "\n" * (line - 1) + code.replace("http://127.0.0.1:30000", server.url)
            live = api.up.global_config.default_backend
            if kind == "heads":
                # The shared server's adapters have no heads; what a head's answer looks like is tested with the heads.
                vlora.set_default_backend(Recorder(lambda r: {"vlora_head": HEADS[_head(r)]}))
            exec(compile(source, str(DOCS / page), "exec"), names)
            if kind == "heads":
                vlora.set_default_backend(live)
    finally:
        vlora.set_default_backend(None)


def _head(request: dict[str, Any]) -> str:
    return str(request["sampling_params"]["custom_params"]["vlora_head"])
