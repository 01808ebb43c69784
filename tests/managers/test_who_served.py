"""Answers say who served them, in every form of batch."""

from __future__ import annotations

import random
from typing import Any

import pytest

from vlora_sgl import _sgl
from vlora_sgl.managers.admission import Limits, RequestGate
from vlora_sgl.managers.tokenizer_manager import show_all

GATE = RequestGate(Limits(vocabulary=1000, context=64, text_chars=4096))

FORMS: dict[str, dict[str, Any]] = {
    "one prompt": {"text": "x", "lora_path": "a"},
    "one prompt, the base": {"text": "x"},
    "one prompt, a list of one": {"text": "x", "lora_path": ["a"]},
    "a list of one prompt": {"text": ["x"], "lora_path": ["a"]},
    "a name for all": {"text": ["x", "y", "z"], "lora_path": "a"},
    "names": {"text": ["x", "y"], "lora_path": ["a", "b"]},
    "names and the base": {"text": ["x", "y", "z"], "lora_path": ["a", None, "b"]},
    "the base for all": {"text": ["x", "y"], "lora_path": [None, None]},
    "ids": {"input_ids": [[1], [2, 3]], "lora_path": [None, "b"]},
}


@pytest.mark.parametrize("answers", [1, 2, 5])
@pytest.mark.parametrize("form", FORMS)
def test_each_answer_names_the_adapter_that_the_engine_was_asked_for(form: str, answers: int) -> None:
    request = _sgl.GenerateReqInput(**FORMS[form], sampling_params={"n": answers})
    GATE.check(request)
    asked = request.lora_path
    request.normalize_batch_and_arguments()
    # SGLang's order: all answers to the first prompt, then all to the second.
    rows = [request] if request.is_single else [request[i] for i in range(request.batch_size) for _ in range(answers)]
    served = [row.lora_path for row in rows]

    whole: list[dict[str, Any]] = [{"text": "", "meta_info": {}} for _ in served]
    show_all(whole, asked, request.parallel_sample_num)
    assert [one["meta_info"]["vlora"]["adapter"] for one in whole] == served

    events: list[dict[str, Any]] = [{"text": "", "meta_info": {}, "index": index} for index in range(len(served))]
    random.Random(0).shuffle(events)  # in a stream, answers take turns
    for event in events:
        show_all(event, asked, request.parallel_sample_num)
        assert event["meta_info"]["vlora"]["adapter"] == served[event["index"]]
