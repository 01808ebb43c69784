"""Images and videos as programs name them, turned into what a request carries."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image

from vlora_sgl.errors import ImageError, MissingDependencyError, RequestError
from vlora_sgl.images import open_frames, open_image, read

T = TypeVar("T")

ImageSource = str | Path | bytes | Image.Image | np.ndarray
"""A file, an ``http(s)://`` address, encoded bytes, a Pillow image, or uint8 RGB pixels, [height, width, 3]."""

VideoSource = str | Path | Sequence[ImageSource]
"""A video file, an animated image, a folder of frames (in name order), or the frames themselves."""

_ANIMATED = {".gif", ".webp", ".png", ".apng"}
_FRAMES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}


def is_url(source: object) -> bool:
    """Whether the server, not the client, has to fetch this image."""
    return isinstance(source, str) and source.startswith(("http://", "https://"))


def load_image(source: ImageSource) -> Image.Image:
    """Decode an image on this machine: RGB, as a viewer shows it (``images.open_image``).

    Raises:
        ImageError: there is no such file, it is no image, or it is an address, which only the server fetches.
    """
    return open_image(_local(source))


def image_url(source: ImageSource) -> str:
    """The image as a request carries it: an address unchanged, all else as a ``data:`` URL, files byte for byte.

    Raises:
        ImageError: there is no such file, or no pixels in what is none.
    """
    if is_url(source):
        return str(source)
    if isinstance(source, (Image.Image, np.ndarray)):
        buffer = io.BytesIO()
        load_image(source).save(buffer, format="PNG")
        data = buffer.getvalue()
    else:
        data = read(source)
    # The server sniffs the format from the bytes, so the type named here does not matter.
    return "data:image/png;base64," + base64.b64encode(data).decode()


def sample_frames(source: VideoSource, num_frames: int) -> list[Image.Image]:
    """At most ``num_frames`` frames spread evenly over a video, first and last included, in order.

    Raises:
        MissingDependencyError: a video file, but PyAV is not installed.
        RequestError: there is no such file, or it holds no frames.
    """
    if num_frames < 1:
        raise RequestError(f"a video needs at least one frame, got num_frames={num_frames}")
    if not isinstance(source, (str, Path)):
        return [load_image(frame) for frame in _spread(list(source), num_frames)]
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in _FRAMES)
        return [load_image(file) for file in _spread(files, num_frames, path)]
    if not path.is_file():
        raise RequestError(f"no such video: {path}")
    if path.suffix.lower() in _ANIMATED:
        return open_frames(path, lambda count: _spread(list(range(count)), num_frames))
    return _decode_video(path, num_frames)


def _decode_video(path: Path, num_frames: int) -> list[Image.Image]:
    try:
        import av
    except ImportError as error:
        raise MissingDependencyError("av", f"reading the video {path}") from error
    try:
        with av.open(str(path)) as container:
            # Containers state their frame count unreliably: decode once and keep only what is asked for.
            total = sum(1 for _ in container.decode(video=0))
        wanted = set(_spread(list(range(total)), num_frames, path))
        with av.open(str(path)) as container:
            return [frame.to_image() for i, frame in enumerate(container.decode(video=0)) if i in wanted]
    except av.FFmpegError as error:
        raise RequestError(f"not a video that PyAV can read: {path} ({error})") from error


def _spread(items: list[T], count: int, source: object = "the video") -> list[T]:
    if not items:
        raise RequestError(f"no frames in {source}")
    if len(items) <= count:
        return items
    return [items[round(i)] for i in np.linspace(0, len(items) - 1, count)]


def _local(source: ImageSource) -> ImageSource:
    if isinstance(source, str) and is_url(source):
        raise ImageError(f"{source} is an address, which only the server fetches; download it to use it here")
    return source
