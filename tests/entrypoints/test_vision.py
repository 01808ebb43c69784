"""The HTTP side by itself: which URLs are fetched, where a head's name travels, what pixels mean."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.head_reference import data_url, make_image
from tests.support.image_files import exif_of
from vlora_sgl.core import RequestParams
from vlora_sgl.entrypoints.bodies import move_head
from vlora_sgl.entrypoints.vision import _events, check_image_urls, in_pixels_sent
from vlora_sgl.errors import HeadError, RequestError
from vlora_sgl.heads import ClassifyHead, DetectHead, save_heads
from vlora_sgl.heads.requests import answer_text, check_head_requests
from vlora_sgl.managers.tokenizer_manager import forget_claimed_hashes


@pytest.mark.parametrize(
    "url",
    ["http://10.0.0.1/x.png", "file:///etc/passwd", "/etc/passwd", "https://a.example.org.evil.net/x", "ftp://a"],
)
def test_only_data_urls_and_allowed_hosts(url: str) -> None:
    check_image_urls(["data:image/png;base64,AA==", "https://a.example.org/x.png"], ["a.example.org"])
    with pytest.raises(RequestError, match=r"a\.example\.org"):
        check_image_urls([url], ["a.example.org"])


def test_the_heads_name_moves_to_custom_params() -> None:
    body = {"text": "x", "head": "kind", "sampling_params": {"custom_params": {"a": 1}}}
    assert move_head(body, "/generate") == {
        "text": "x",
        "sampling_params": {"custom_params": {"a": 1, "vlora_head": "kind"}},
    }
    assert move_head({"head": "kind"}, "/v1/chat/completions") == {"custom_params": {"vlora_head": "kind"}}
    for untouched in ({"text": "x"}, {"head": 3}):
        assert move_head(untouched, "/generate") == untouched


def test_pixels_are_those_of_the_image_sent() -> None:
    box = {"image": 0, "label": "cat", "score": 0.9, "box": [0.5, 0.5, 1.0, 1.0], "pixels": [56, 42, 112, 84]}
    answer = {"kind": "detect", "image_sizes": [[112, 84]], "boxes": [box]}
    sent = in_pixels_sent(answer, [data_url(make_image(0, (200, 100)))])
    assert sent["image_sizes"] == [[200, 100]] and sent["boxes"][0]["pixels"] == [100, 50, 200, 100]
    lying = io.BytesIO()
    make_image(0, (100, 200)).save(lying, "JPEG", exif=exif_of(6))  # 100 wide, shown 200 wide
    url = "data:image/jpeg;base64," + base64.b64encode(lying.getvalue()).decode()
    assert in_pixels_sent(answer, [url]) == sent
    assert in_pixels_sent(answer, ["https://a.example.org/x.png"])["boxes"][0]["pixels"] == [56, 42, 112, 84]
    assert json.loads(answer_text(answer)) == [{"label": "cat", "box": [0.5, 0.5, 1.0, 1.0]}]


def request(head: str, lora_path: Any = "A", image: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        is_single=True,
        lora_path=lora_path,
        image_data=image,
        sampling_params={"max_new_tokens": 0, "custom_params": {"vlora_head": head}},
    )


def check(asked: Any, adapters: Any) -> None:
    check_head_requests(asked, [RequestParams.of(asked.sampling_params)], adapters)


def test_heads_are_checked_before_the_engine(tmp_path: Any) -> None:
    save_heads(tmp_path, [ClassifyHead("kind", 8, ["a", "b"]), DetectHead("find", 8, ["a"])])
    adapters = {"A": SimpleNamespace(lora_path=str(tmp_path))}
    good = request("kind")
    check(good, adapters)
    assert good.sampling_params["max_new_tokens"] == 1  # with 0 the answer would be lost on the way out
    check(SimpleNamespace(sampling_params={"temperature": 0}), {})
    for bad, message in (
        (request("kinds"), r"kind \(classify\), find \(detect\)"),
        (request("kind", None), "base model"),
        (request("find"), "none"),
    ):
        with pytest.raises(HeadError, match=message):
            check(bad, adapters)
    check(request("kind", "unknown"), adapters)  # the adapter is reported, not its head
    save_heads(tmp_path, [ClassifyHead("other", 8, ["a", "b"])])
    check(request("other"), adapters)  # files that changed are read again


def test_an_images_claim_about_itself_is_forgotten() -> None:
    image = {"format": "processor_output", "pixel_values": [1], "hash": 7, "pad_value": 9}
    forget_claimed_hashes(["data:,", [image]])
    assert image == {"format": "processor_output", "pixel_values": [1]}
    forget_claimed_hashes(None)


def answer(text: str, **finish: Any) -> dict[str, Any]:
    meta_info = {"finish_reason": finish or None, "prompt_tokens": 3, "completion_tokens": 1, "cached_tokens": 2}
    return {"text": text, "meta_info": {**meta_info, "vlora": {"adapter": "A", "modes": ["merged"]}}}


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ({"type": "abort", "status_code": 500, "message": "not finite"}, 500),
        ({"type": "abort", "status_code": 400, "message": "too long"}, 400),
        (ValueError("gone"), 400),
    ],
)
def test_a_stream_that_goes_wrong_ends_with_an_event_that_says_so(ending: Any, code: int) -> None:
    closed = []

    async def rest() -> Any:
        try:
            yield answer("a b")
            if isinstance(ending, Exception):
                raise ending
            yield answer("", **ending)
        finally:
            closed.append(True)

    async def sent() -> list[Any]:
        lines = [event async for event in _events("A", answer("a"), rest(), 0.0)]
        return [json.loads(line[6:]) if b"{" in line else line for line in lines]

    first, second, error, last = asyncio.run(sent())
    assert (first["text"], second["text"], second["modes"]) == ("a", "a b", ["merged"])
    assert error["error"]["code"] == code and error["error"]["message"] in ("not finite", "too long", "gone")
    assert last == b"data: [DONE]\n\n" and closed == [True]


def test_a_stream_whose_client_leaves_closes_what_it_reads() -> None:
    closed = []

    async def rest() -> Any:
        try:
            while True:
                yield answer("more")
        finally:
            closed.append(True)

    async def leave() -> None:
        events = _events("A", answer("a"), rest(), 0.0)
        await anext(events)
        await anext(events)
        await events.aclose()

    asyncio.run(leave())
    assert closed == [True]
