"""Images as users have them: lying on their side, transparent, cut, too large; on every route, streamed too."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from PIL import Image

from tests.conftest import Server
from tests.e2e.test_heads import make_headed
from tests.e2e.test_serving import QUESTION, picture, prompt
from tests.support.image_files import bombs, exif_of, saved, stored

pytestmark = pytest.mark.e2e
PNG = saved(picture(1), "PNG")


def base_64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base_64(data)}"


def part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data)}}


def ask(server: Server, data: bytes) -> list[list[int]]:
    """The answers of ``/generate`` and of chat about an image."""
    server.flush()
    first = server.generate(text=prompt(QUESTION, image=True), image_data=base_64(data), lora_path="A")["output_ids"]
    chat = {
        "model": "A",
        "messages": [{"role": "user", "content": [part(data), {"type": "text", "text": QUESTION}]}],
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": True,
    }
    reply = requests.post(f"{server.url}/v1/chat/completions", json=chat, timeout=120)
    assert reply.status_code == 200, reply.text
    return [first, [token["bytes"] for token in reply.json()["choices"][0]["logprobs"]["content"]]]


def test_an_image_that_is_turned_by_exif_is_answered_as_the_upright_one(server: Server) -> None:
    upright = picture(3).resize((112, 84))
    expected = ask(server, saved(upright, "PNG"))
    assert ask(server, saved(upright.transpose(Image.Transpose.ROTATE_90), "PNG")) != expected
    for orientation in (3, 6, 7):
        lying = Image.fromarray(stored(np.asarray(upright), orientation))
        assert ask(server, saved(lying, "PNG", exif=exif_of(orientation))) == expected
    # JPEG loses something: compare with what is left, upright.
    lying = saved(Image.fromarray(stored(np.asarray(upright), 6)), "JPEG", quality=95, exif=exif_of(6))
    left = np.rot90(np.asarray(Image.open(io.BytesIO(lying))), -1)
    assert ask(server, lying) == ask(server, saved(Image.fromarray(left), "PNG"))


def test_transparency_is_white(server: Server) -> None:
    colours = np.asarray(picture(4)).copy()
    alpha = np.full(colours.shape[:2], 255, np.uint8)
    alpha[:56] = 0
    clear = saved(Image.fromarray(np.dstack([colours, alpha])), "PNG")
    colours[:56] = 255
    assert ask(server, clear) == ask(server, saved(Image.fromarray(colours), "PNG"))


@pytest.fixture(scope="module")
def headed(server: Server, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An adapter with heads."""
    path = make_headed(tmp_path_factory.mktemp("seen") / "S1", server.model.path, 21, ["cat", "dog"])
    body = {"lora_name": "S1", "lora_path": str(path)}
    assert requests.post(f"{server.url}/load_lora_adapter", json=body, timeout=60).status_code == 200
    return "S1"


JPEG = saved(picture(1), "JPEG")
REFUSED = {
    "PNG less 30 bytes": (PNG[:-30], "expected a whole PNG of 112 x 112"),
    "JPEG cut": (JPEG[: len(JPEG) // 2], "expected a whole JPEG of 112 x 112"),
    "WebP cut": (saved(picture(1), "WEBP")[:-200], "expected a whole WEBP"),
    "GIF cut": (saved(picture(1), "GIF")[:-3000], "expected a whole GIF of 112 x 112"),
    "bomb": (dict(bombs())["PNG"], "at most 67108864 pixels (--vlora-max-image-pixels), got PNG of 60000 x 60000"),
    "HEIC": (b"\0\0\0\x18ftypheic" + b"\0" * 20, "got HEIC"),
    "text": (b"no image", "got 8 bytes that begin b'no image'"),
    "no bytes": (b"", "got 0 bytes"),
}


@pytest.mark.parametrize(("data", "reason"), REFUSED.values(), ids=REFUSED)
def test_an_image_that_cannot_be_opened_is_a_400_on_every_route(
    server: Server, headed: str, data: bytes, reason: str
) -> None:
    """One line for the client and one in the log, before a stream begins, and the server goes on."""
    parts = [part(PNG), part(data), {"type": "text", "text": QUESTION}]
    text = "<|vision_start|><|image_pad|><|vision_end|>" * 2 + QUESTION
    chat: dict[str, Any] = {"model": headed, "messages": [{"role": "user", "content": parts}], "max_tokens": 4}
    generate: dict[str, Any] = {"text": text, "image_data": [base_64(PNG), base_64(data)], "lora_path": headed}
    batch = {"text": [text] * 2, "image_data": [[base_64(PNG)] * 2, [base_64(PNG), base_64(data)]]}
    asked = [
        ("generate", generate),
        ("generate", {**generate, "stream": True}),
        ("generate", {**generate, "image_data": [generate["image_data"]], "sampling_params": {"n": 2}}),
        ("generate", batch),
        ("v1/chat/completions", chat),
        ("v1/chat/completions", {**chat, "stream": True}),
        *((f"v1/vision/{task}", {"model": headed, "input": parts}) for task in ("classify", "count", "detect")),
    ]
    for route, body in asked:
        before = len(server.log.read_text())
        reply = requests.post(f"{server.url}/{route}", json=body, timeout=60)
        assert reply.status_code == 400, (route, body.get("stream"), reply.status_code, reply.text)
        assert "image 2 of " in reply.text and json.dumps(reason)[1:-1] in reply.text, (route, reply.text)
        assert len(reply.text) < 600
        assert reply.json()
        logged = [line for line in server.log.read_text()[before:].splitlines() if line.strip()]
        assert len(logged) == 1 and "refused: image 2 of " in logged[0], (route, logged)
    assert server.generate(text=prompt(QUESTION, image=True), image_data=base_64(PNG))["output_ids"]


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (4000, 4), (3, 3), (28, 28)])
def test_sizes_that_the_model_does_not_take_are_a_400(server: Server, size: tuple[int, int]) -> None:
    data = saved(Image.new("RGB", size), "PNG")
    body = {
        "text": prompt(QUESTION, image=True),
        "image_data": base_64(data),
        "sampling_params": {"max_new_tokens": 2},
    }
    reply = requests.post(f"{server.url}/generate", json=body, timeout=60)
    assert reply.status_code in (200, 400), reply.text


def test_images_by_other_ways(server: Server, tmp_path: Path) -> None:
    """A file, and a JPEG in base64, which begins with a slash too."""
    (tmp_path / "x.jpg").write_bytes(JPEG)
    answers = [
        server.generate(text=prompt(QUESTION, image=True), image_data=source)["output_ids"]
        for source in (base_64(JPEG), url(JPEG), str(tmp_path / "x.jpg"), f"file://{tmp_path / 'x.jpg'}")
    ]
    assert answers == answers[:1] * 4


def test_detected_boxes_are_in_the_image_as_it_is_shown(server: Server, headed: str) -> None:
    upright = picture(3).resize((140, 84))
    answers = []
    for data in (
        saved(upright, "PNG"),
        saved(Image.fromarray(stored(np.asarray(upright), 6)), "PNG", exif=exif_of(6)),
    ):
        body = {"model": headed, "input": [part(data), {"type": "text", "text": QUESTION}]}
        reply = requests.post(f"{server.url}/v1/vision/detect", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        answers.append({key: reply.json()[key] for key in ("boxes", "image_sizes")})
    assert answers[0] == answers[1] and answers[0]["image_sizes"] == [[140, 84]]


def test_nothing_was_left_behind(server: Server, headed: str) -> None:
    """Refused requests hold no adapter: it unloads at once. No traceback was ever logged."""
    reply = requests.post(f"{server.url}/unload_lora_adapter", json={"lora_name": headed}, timeout=60)
    assert reply.status_code == 200, reply.text
    assert "Traceback" not in server.log.read_text()
