"""What bench_batching counts and says; its times are a server's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.serving.bench_batching import PROMPT, UNDER_WAY, figures, numbers_of_adapter, numbers_of_model, times
from benchmarks.serving.client import Client
from vlora_sgl.models import tiny


class Engine:
    """Answers at once, and notes for whom and how many it had at a time."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        vocabulary = {f"t{number}": number for number in range(100)}
        tokenizer = SimpleNamespace(get_vocab=lambda: vocabulary, added_tokens_decoder={98: "<image>", 99: "<video>"})
        self.tokenizer_manager = SimpleNamespace(tokenizer=tokenizer)
        self.asked: list[dict[str, Any]] = []
        self.now = self.most = 0

    async def async_generate(self, **request: Any) -> dict[str, Any]:
        self.asked.append(request)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        self.now -= 1
        return {"meta_info": {}}


def test_a_server_of_two_is_asked_as_the_tables_say() -> None:
    engine = Engine()
    rows = list(times(Client(engine), ["a0", "a1"], 40))
    assert [(row["table"], row.get("under_way")) for row in rows] == [
        *[("batching", n) for n in UNDER_WAY],
        ("one_by_one", None),
    ]
    warm = 2 * sum(UNDER_WAY)
    assert len(engine.asked) == warm + 40 * 4 and engine.most == 32
    for run in range(3):
        names = [request["lora_path"] for request in engine.asked[warm + 40 * run :][:40]]
        assert names.count("a0") == names.count("a1") == 20
    assert {request["lora_path"] for request in engine.asked[-40:]} == {"a0"}
    assert all(len(request["input_ids"]) == PROMPT for request in engine.asked)
    assert not any({98, 99} & {*request["input_ids"]} for request in engine.asked), "no token marks an image"
    assert len({tuple(request["input_ids"]) for request in engine.asked}) == len(engine.asked), "distinct requests"
    engine.loop.close()


def test_a_server_of_one_has_no_first_table() -> None:
    engine = Engine()
    assert [row["table"] for row in times(Client(engine), ["a0"], 4)] == ["one_by_one"]
    engine.loop.close()


def test_numbers_are_those_of_the_files(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5)}, tmp_path / "adapter_model.safetensors")
    assert numbers_of_adapter(tmp_path) == 17
    assert 8e6 < numbers_of_model(tiny.path()) < 9e6


def test_figures_are_ratios() -> None:
    rows: list[dict[str, Any]] = [{"table": "numbers", "adapters": 4, "together": 12, "separate": 40}]
    rows += [{"table": "batching", "adapters": 4, "under_way": n, "seconds": s} for n, s in ((1, 8.0), (32, 2.0))]
    rows += [{"table": "one_by_one", "adapters": n, "seconds": s} for n, s in ((1, 8.0), (4, 8.4))]
    assert figures(rows) == pytest.approx(
        {
            "batching.time32_over_1": 0.25,
            "batching.numbers4_over_separate": 0.3,
            "batching.one_by_one4_over_1": 1.05,
        }
    )
