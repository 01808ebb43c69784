"""The in-process endpoint's way with the engine's event loop, on an engine that only pretends."""

from __future__ import annotations

import asyncio
import threading
import types
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import vlora_sgl as vlora
from vlora_sgl.errors import RequestError
from vlora_sgl.lang.endpoint import EngineEndpoint, as_endpoint, head_value


class PretendEngine:
    """Answers with the request's text after a pause, on one event loop, as SGLang's engine does."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.running = 0
        self.most_running = 0
        self.server_args = types.SimpleNamespace(model_path="none")
        config = types.SimpleNamespace(hf_config=types.SimpleNamespace(model_type="qwen2_5_vl"))
        self.tokenizer_manager = types.SimpleNamespace(model_config=config)

    async def async_generate(self) -> None: ...

    async def answers(self, data: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        if data["text"] == "bad":
            raise ValueError("no such thing")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0.05)
        self.running -= 1
        for end in (1, len(data["text"])):
            if data.get("stream") or end > 1:
                yield {"text": data["text"][:end], "meta_info": {}}

    def generate(self) -> str:
        async def answer() -> str:
            return "blocking"

        return self.loop.run_until_complete(answer())


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> PretendEngine:
    engine = PretendEngine()
    monkeypatch.setattr(EngineEndpoint, "_answers", lambda self, data: engine.answers(data))
    return engine


def test_many_threads_share_the_engines_loop(engine: PretendEngine) -> None:
    endpoint = as_endpoint(engine)
    assert as_endpoint(engine) is endpoint
    with ThreadPoolExecutor(16) as pool:
        texts = [f"text {i}" for i in range(64)]
        answers = list(pool.map(lambda text: endpoint.send({"text": text}), texts))
    assert [answer["text"] for answer in answers] == texts
    assert engine.most_running > 8, "requests of different threads must be in flight together"
    assert engine.generate() == "blocking", "the engine's own blocking calls work when no program runs"


def test_streams_and_errors_cross_the_loop(engine: PretendEngine) -> None:
    endpoint = as_endpoint(engine)
    other = threading.Thread(target=lambda: endpoint.send({"text": "other"}))
    other.start()
    assert [piece["text"] for piece in endpoint.stream({"text": "hello", "stream": True})] == ["h", "hello"]
    other.join()
    with pytest.raises(RequestError, match="no such thing"):
        endpoint.send({"text": "bad"})
    assert engine.generate() == "blocking"


def test_head_answer_of_another_task_is_refused() -> None:
    with pytest.raises(RequestError, match="a detect head answers with 'boxes'"):
        head_value({"count": 3}, "detect")


def test_chat_template_follows_the_models_type_not_its_directory(engine: PretendEngine) -> None:
    assert as_endpoint(engine).chat_template.name == "qwen2-vl"


def test_client_does_not_import_the_engine() -> None:
    import subprocess
    import sys

    code = (
        "import sys, vlora_sgl as vlora; vlora.gen, vlora.Runtime\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_every_exported_name_is_there() -> None:
    from vlora_sgl import lang

    assert all(hasattr(lang, name) for name in lang.__all__)
    assert {name for name in lang.__all__ if name[0].islower()} <= set(vlora.__all__)
