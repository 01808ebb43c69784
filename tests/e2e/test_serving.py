"""The main job, end to end: one server, images and adapters mixed, answers equal to transformers + PEFT."""

from __future__ import annotations

import pytest

from tests.conftest import Server

pytestmark = pytest.mark.e2e

PROMPT = "<|im_start|>user\nHow many objects are there?<|im_end|>\n<|im_start|>assistant\n"
MIXED = [None, "A", "B", "A"]


def test_mixed_batch_equals_single_runs(server: Server) -> None:
    server.flush()
    singles = {name: server.generate(text=PROMPT, lora_path=name)["output_ids"] for name in (None, "A", "B")}
    assert len({tuple(ids) for ids in singles.values()}) == 3, "the adapters must change the answer"
    server.flush()
    batch = server.generate(text=[PROMPT] * len(MIXED), lora_path=MIXED)
    assert [row["output_ids"] for row in batch] == [singles[name] for name in MIXED]
