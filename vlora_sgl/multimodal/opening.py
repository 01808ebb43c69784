"""Where a request's images are opened in the tokenizer's process, and what is answered when one cannot be."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import requests
from PIL import Image
from urllib3.exceptions import HTTPError

from vlora_sgl import _sgl
from vlora_sgl.errors import ImageError
from vlora_sgl.images import BYTES_PER_PIXEL, is_plain_jpeg, open_image, read
from vlora_sgl.multimodal.image_requests import HOST_PIXELS
from vlora_sgl.platforms.cpu import is_plain_cpu
from vlora_sgl.server_args import VLoraArgs

logger = logging.getLogger(__name__)

FETCH_PATIENCE = 10
"""An image from an address may take as many times what a server may be silent for ($REQUEST_TIMEOUT, 3 s)."""

JPEG_IN_BASE64 = "/9j/"


class Request(Protocol):
    """What SGLang's requests are here."""

    image_data: Any


def load_image(original: Callable[..., Any], image_file: Any, gpu_image_decode: bool = True) -> tuple[Any, Any]:
    """Wraps SGLang's ``load_image``: an image as a viewer shows it, from wherever a request has it.

    A plain JPEG that is not small is left to SGLang's decoder on a GPU, where there is one.

    Args:
        image_file: a Pillow image, bytes, a ``data:`` or http(s) address, a file (``/...``, ``file://``), base64, or
            an object with one of these as its ``url``.
        gpu_image_decode: whether the model takes images decoded on the GPU.

    Returns:
        an RGB image, or from SGLang's decoder a uint8 tensor ``[3, height, width]``; and the size of what came as a
        Pillow image.

    Raises:
        ImageError: it cannot be had or opened.
    """
    source = getattr(image_file, "url", image_file)
    most = _max_pixels()
    try:
        if isinstance(source, Image.Image):
            shown = open_image(source, most)
            return shown, shown.size
        data = source if isinstance(source, bytes) else _bytes_of(source, most)
        if gpu_image_decode and not is_plain_cpu() and is_plain_jpeg(data, most, HOST_PIXELS):
            decoded, _ = original(data, True)
            if not isinstance(decoded, Image.Image):
                return decoded, None
        return open_image(data, most), None
    except ImageError as error:
        error.source = image_file
        raise


@lru_cache(maxsize=1)
def _max_pixels() -> int:
    return VLoraArgs.from_environment().max_image_pixels


def _bytes_of(source: object, max_pixels: int) -> bytes:
    if not isinstance(source, str):
        kinds = "base64, a data: or http(s) address or a file"
        raise ImageError(f"the image: expected {kinds}, got {type(source).__name__}")
    if source.startswith(("http://", "https://")):
        return _fetch(source, BYTES_PER_PIXEL * max_pixels)
    if source.startswith("file://"):
        return read(unquote(urlsplit(source).path), max_pixels)
    if source.startswith("/") and not source.startswith(JPEG_IN_BASE64):
        return read(source, max_pixels)
    try:
        return bytes(_sgl.get_image_bytes(source if source.startswith("data:") else f"data:,{source}"))
    except ValueError as error:
        raise ImageError(f"the image: expected base64, got {source[:40]!r}: {error}") from None


def _fetch(url: str, most: int) -> bytes:
    """What is at an address: at most ``most`` bytes, in bounded time."""
    session = _sgl.get_mm_http_session()  # the first call imports SGLang, which is not to count
    silence = int(os.getenv("REQUEST_TIMEOUT", "3"))
    end = time.monotonic() + FETCH_PATIENCE * silence
    data = bytearray()
    try:
        with session.get(url, timeout=silence, stream=True) as response:
            response.raise_for_status()
            while part := response.raw.read1(1 << 20, decode_content=True):
                data += part
                if len(data) > most or time.monotonic() > end:
                    raise ImageError(
                        f"the image at {url[:80]}: more than {most} bytes or {FETCH_PATIENCE * silence} s"
                    )
    except (requests.RequestException, HTTPError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = type(error).__name__ if status is None else f"HTTP status {status}"
        raise ImageError(f"the image at {url[:80]} cannot be fetched: {reason}") from None
    return bytes(data)


@contextmanager
def naming_images(request: Request) -> Iterator[None]:
    """Around a request's tokenization: turn what SGLang makes of an image's error into that error, and log it once.

    Raises:
        ImageError: says which of the request's images it was.
    """
    try:
        yield
    except Exception as error:
        found: BaseException | None = error
        while found is not None and not isinstance(found, ImageError):
            found = found.__cause__ or found.__context__
        if found is None:
            raise
        images = request.image_data if isinstance(request.image_data, list) else [request.image_data]
        place = next((n for n, one in enumerate(images, 1) if one is found.source), 1)
        text = str(found).removeprefix("the image: ")
        message = f"image {place} of {len(images)}: {text}"
        logger.warning("refused: %s", message)
        raise ImageError(message) from None
