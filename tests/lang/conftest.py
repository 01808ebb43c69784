"""A backend that answers by rule and remembers what it was asked, for tests of what programs send."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vlora_sgl.lang.endpoint import Endpoint


class Recorder(Endpoint):
    """Answers each request with ``rule(request)`` (a text, or a dict that replaces parts of ``meta_info``)."""

    def __init__(self, rule: Callable[[dict[str, Any]], Any] = lambda request: "yes") -> None:
        super().__init__({"model_path": "none", "model_type": "qwen2_5_vl"})
        self.rule = rule
        self.requests: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self._lock = threading.Lock()

    def send(self, data: dict[str, Any]) -> Any:
        with self._lock:
            self.requests.append(copy.deepcopy(data))
        answer = self.rule(data)
        if isinstance(answer, list):
            return [self._answer(one) for one in answer]
        return self._answer(answer)

    def stream(self, data: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._lock:
            self.requests.append(copy.deepcopy(data))
        text = self.rule(data)
        for end in range(1, len(text) + 1):
            yield self._answer(text[:end])

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    @staticmethod
    def _answer(answer: Any) -> dict[str, Any]:
        text, extra = ("", answer) if isinstance(answer, dict) else (answer, {})
        meta_info = {"finish_reason": {"type": "stop"}, "cached_tokens": 0, "prompt_tokens": 3, **extra}
        return {"text": text, "meta_info": meta_info}

    def asked(self) -> list[tuple[str | None, str]]:
        """(adapter, text) of every request, in order, those that only fill the prefix cache left out."""
        return [
            (request.get("lora_path"), request["text"])
            for request in self.requests
            if request["sampling_params"]["max_new_tokens"]
        ]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()
