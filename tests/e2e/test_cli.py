"""Commands about a running server: what they print, and what they change."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.conftest import Server
from tests.support.head_reference import make_image
from vlora_sgl.cli import main

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def address(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLORA_URL", server.url)


def said(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    """What a command answers in JSON."""
    assert main([*arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_an_adapter_comes_is_pinned_is_replaced_and_goes(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    name, directory = "from the command line", str(server.model.adapters["A"])

    def listed() -> dict[str, Any]:
        return {row["name"]: row for row in said(capsys, "ls")}

    assert said(capsys, "add", name, directory)["success"]
    assert listed()[name]["path"] == directory
    assert main(["add", name, directory]) == 1
    assert "is loaded already" in capsys.readouterr().err
    said(capsys, "pin", name)
    assert listed()[name]["pinned"]
    said(capsys, "pin", name, "--off")
    assert not listed()[name]["pinned"]
    said(capsys, "reload", name, str(server.model.adapters["B"]))
    assert listed()[name]["digest"] == listed()["B"]["digest"] != listed()["A"]["digest"]
    assert main(["ls"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("name") and len({row.index(directory[:3]) for row in rows if directory[:3] in row}) == 1
    said(capsys, "rm", name)
    assert name not in listed()
    assert main(["rm", name]) == 1
    assert "no adapter named" in capsys.readouterr().err


def test_ps_shows_mode_requests_slots_and_tiers(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.generate(text="x", lora_path="A")
    state = said(capsys, "ps")
    assert set(state["steps"]) == {"unmerged", "merged", "mixture"} and sum(state["steps"].values()) > 0
    assert len(state["pool"]["ranks"]) >= 6 and state["requests"] == {"running": {}, "waiting": {}}
    (tier,) = (row["residency"] for row in state["adapters"] if row["name"] == "A")
    assert tier == "device"
    assert main(["ps"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("mode auto") and any(line.split()[:2] == ["A", "device"] for line in shown.splitlines())


def test_ask_asks_the_base_beside_an_adapter(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_image(0).save(tmp_path / "photo.png")
    told = said(capsys, "ask", str(tmp_path / "photo.png"), "What is it?", "-a", "A", "-a", "B", "--max-tokens", "8")
    rows = {row["adapter"]: row for row in told["answers"]}
    assert set(rows) == {None, "A", "B"} and told["boxes"] is None
    assert len({row["answer"] for row in rows.values()}) == 3, "the adapters must change the answer"
    again = said(capsys, "ask", str(tmp_path / "photo.png"), "What is it?", "-a", "A", "--max-tokens", "8")
    assert [row["answer"] for row in again["answers"]] == [rows[None]["answer"], rows["A"]["answer"]]
    assert all(row["cached"] > 0 and row["seconds"] > 0 and row["mode"] for row in again["answers"])


def ask(server: Server, **body: Any) -> requests.Response:
    body = {"model": "A", "input": [{"type": "text", "text": "one two three"}], "max_tokens": 12, **body}
    return requests.post(f"{server.url}/v1/vision/ask", json=body, timeout=120)


def test_an_answer_is_the_same_whole_and_streamed_and_the_chat_route_s(server: Server) -> None:
    whole = ask(server).json()
    events = [line[6:] for line in ask(server, stream=True).text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]" and len(events) > 3
    texts = [json.loads(event)["text"] for event in events[:-1]]
    assert texts[-1] == whole["text"]
    assert all(later.startswith(sooner) for sooner, later in pairwise(texts))
    message = {"role": "user", "content": "one two three"}
    chat = {"model": "A", "messages": [message], "max_tokens": 12, "temperature": 0}
    answer = requests.post(f"{server.url}/v1/chat/completions", json=chat, timeout=120).json()
    assert answer["choices"][0]["message"]["content"] == whole["text"] != ask(server, model="default").json()["text"]
    assert len(whole["modes"]) == whole["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": "nobody"}, 404, "no adapter named"),
        ({"input": []}, 400, "a question or an image"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"input": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/x.png"}}]}, 400, "allowed host"),
        ({"input": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}, 400, "image"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_its_status(
    body: dict[str, Any], status: int, message: str, stream: bool, server: Server
) -> None:
    answer = ask(server, stream=stream, **body)
    assert answer.status_code == status and message in answer.text
    assert all(row["users"] == 0 for row in requests.get(f"{server.url}/lora_adapters", timeout=30).json()["adapters"])
