"""Every Python snippet of the language's documents runs, in order, as a reader would run them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import requests

import vlora_sgl as vlora
from tests.conftest import Server
from tests.e2e.test_heads import make_headed
from tests.support import programs

pytestmark = pytest.mark.e2e

DOCS = Path(__file__).parents[2] / "docs"
ADDRESS = "http://127.0.0.1:30000"


def snippets(page: str, language: str) -> list[tuple[int, str, str]]:
    """(line number, what follows the language on the fence, code) of each snippet of a page."""
    text = (DOCS / page).read_text()
    found = re.finditer(rf"^```{language} ?(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(text[: match.start()].count("\n") + 2, match[1], match[2]) for match in found]


@pytest.fixture(scope="module")
def inspector(server: Server, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The adapter with heads that the documents speak of."""
    path = make_headed(tmp_path_factory.mktemp("docs") / "inspector", server.model.path, 51, ["ok", "torn"])
    body = {"lora_name": "inspector", "lora_path": str(path)}
    reply = requests.post(f"{server.url}/load_lora_adapter", json=body, timeout=60)
    assert reply.status_code == 200, reply.text


@pytest.fixture
def street(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that the snippets read, in the working directory."""
    monkeypatch.chdir(tmp_path)
    frames = [programs.photograph(i) for i in range(5)]
    frames[0].save("street.jpg")
    frames[0].save("street.png")
    frames[0].save("clip.gif", save_all=True, append_images=frames[1:])


@pytest.mark.usefixtures("inspector", "street")
@pytest.mark.parametrize("page", ["programs.md", "serve.md"])
def test_every_snippet_runs(page: str, server: Server) -> None:
    names: dict[str, Any] = {}
    pieces = snippets(page, "python")
    assert len(pieces) >= 2 and any(kind == "heads" for _, kind, _ in pieces)
    try:
        for line, kind, code in pieces:
            if kind == "langchain" and importlib.util.find_spec("langchain_openai") is None:
                continue  # not a dependency; the requests it makes are those of the other snippets
            # The padding makes a failure's line number that of the document.
            source = "\n" * (line - 1) + code.replace(ADDRESS, server.url)
            exec(compile(source, str(DOCS / page), "exec"), names)
    finally:
        vlora.set_default_backend(None)


@pytest.mark.skipif(shutil.which("curl") is None, reason="the snippets call curl")
@pytest.mark.usefixtures("inspector", "street")
def test_every_curl_snippet_is_answered(server: Server) -> None:
    pieces = snippets("serve.md", "sh")
    assert len(pieces) == 2
    for line, _, code in pieces:
        command = code.replace(ADDRESS, server.url).replace("curl ", "curl -sS --fail-with-body ")
        done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, env=os.environ, timeout=60)
        assert done.returncode == 0, f"{DOCS}/serve.md:{line}: {done.stdout}{done.stderr}"
