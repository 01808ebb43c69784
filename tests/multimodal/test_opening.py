"""Where a request has its images, and what it is answered when one cannot be opened."""

from __future__ import annotations

import base64
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.image_files import exif_of, picture, saved
from vlora_sgl.errors import ImageError
from vlora_sgl.multimodal import opening

PNG = saved(Image.fromarray(picture()), "PNG")


def serve(source: object, decoder: Any = None, **options: Any) -> Any:
    return opening.load_image(decoder or (lambda *_: pytest.fail("not for SGLang")), source, **options)


class Host(BaseHTTPRequestHandler):
    """Images, and what hosts do instead of answering with one."""

    def do_GET(self) -> None:
        if self.path == "/gone":
            self.send_error(404)
            return
        self.send_response(200)
        if self.path == "/image":
            self.send_header("Content-Length", str(len(PNG)))
        self.end_headers()
        try:
            self.wfile.write(PNG if self.path == "/image" else b"x")
            while self.path in ("/slow", "/long"):
                self.wfile.write(b"x" * (1 if self.path == "/slow" else 1 << 20))
                time.sleep(0.05)
        except OSError:
            pass  # it hung up

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("REQUEST_TIMEOUT", "1")
    monkeypatch.setattr(opening, "FETCH_PATIENCE", 1)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_an_address_is_fetched(host: str) -> None:
    assert np.array_equal(serve(f"{host}/image")[0], picture())


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/gone", "HTTP status 404"),
        ("/slow", "or 1 s"),
        ("/long", "more than 8388608 bytes"),
        ("/text", "got 1 bytes"),
    ],
)
def test_what_an_address_does_not_give_is_refused_in_bounded_time(
    host: str, monkeypatch: pytest.MonkeyPatch, path: str, reason: str
) -> None:
    monkeypatch.setattr(opening, "_max_pixels", lambda: 1 << 20)
    start = time.monotonic()
    with pytest.raises(ImageError, match=reason):
        serve(host + path)
    assert time.monotonic() - start < 5


def test_an_address_where_nobody_listens_is_refused() -> None:
    with pytest.raises(ImageError, match="cannot be fetched: ConnectionError"):
        serve("http://127.0.0.1:9/x.png")


def test_a_jpeg_in_base64_is_no_file_though_it_begins_with_a_slash() -> None:
    encoded = base64.b64encode(saved(Image.fromarray(picture()), "JPEG")).decode()
    assert encoded.startswith("/")
    assert serve(encoded, gpu_image_decode=False)[0].size == (48, 32)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (5, "expected base64, a data: or http.* got int"),
        (None, "got NoneType"),
        ({"a": 1}, "got dict"),
        ([PNG], "got list"),
        ("not base64", "expected base64, got 'not base64'"),
        ("data:image/png;base64,%%%", "expected base64"),
        ("data:image/png;base64", "expected base64"),
        ("", "got 0 bytes"),
        ("/nowhere/x.png", "cannot read the image /nowhere/x.png: No such file"),
        ("file:///dev/zero", "not a regular file"),
        (PNG[:9], "expected a whole PNG, got a damaged header"),
    ],
)
def test_what_is_no_image_is_refused_by_what_it_is(source: object, reason: str) -> None:
    with pytest.raises(ImageError, match=reason) as caught:
        serve(source)
    assert caught.value.source is source
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_only_plain_jpegs_are_left_to_a_gpus_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "is_plain_cpu", lambda: False)
    monkeypatch.setattr(opening, "HOST_PIXELS", 48 * 32 - 1)
    image = Image.fromarray(picture())
    asked: list[bytes] = []

    def decoder(data: bytes, on_gpu: bool) -> tuple[str, None]:
        asked.append(data)
        return "a tensor", None

    plain = saved(image, "JPEG")
    assert serve(plain, decoder) == ("a tensor", None)
    for data in (saved(image, "JPEG", exif=exif_of(6)), saved(image.convert("L"), "JPEG"), PNG):
        assert serve(data, decoder)[0].mode == "RGB"
    assert serve(plain, decoder, gpu_image_decode=False)[0].mode == "RGB"
    # It could not, and opened the file in its own way.
    assert serve(plain, lambda *_: (Image.new("RGB", (1, 1)), None))[0].size == (48, 32)
    monkeypatch.setattr(opening, "HOST_PIXELS", 48 * 32)  # small images are the host's
    assert serve(plain, decoder)[0].size == (48, 32)
    assert asked == [plain]


def test_an_error_says_which_image_it_was_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    images = [PNG, PNG[:-30], PNG]

    def as_sglang_does() -> None:
        try:
            try:
                serve(images[1])
            except ValueError as error:
                raise ValueError(f"Error while loading data: {error}") from error
        except ValueError as error:
            raise RuntimeError(f"An exception occurred: {error}")  # noqa: B904

    request = SimpleNamespace(image_data=images)
    with caplog.at_level(logging.WARNING), pytest.raises(ImageError) as caught, opening.naming_images(request):
        as_sglang_does()
    assert str(caught.value).startswith(
        "image 2 of 3: expected a whole PNG of 48 x 32, got one that cannot be decoded"
    )
    assert caught.value.__suppress_context__
    assert [record.getMessage() for record in caplog.records] == [f"refused: {caught.value}"]

    with pytest.raises(KeyError), opening.naming_images(SimpleNamespace(image_data=None)):
        raise KeyError("another's")
