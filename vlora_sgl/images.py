"""Opens images as a viewer shows them: the one function behind serving, programs, making adapters and drawing.

What comes out is RGB, 8 bits, upright. What a file may hold, and what becomes of it:

- EXIF orientation is applied, in every format that carries it.
- Alpha, transparent palette entries and transparent colours are laid on white.
- 16 bits a sample show their high byte. Grey integers of 32 bits count as 16 bits and floats as 0 to 1; where an image
  of those has values outside, it is stretched from its least to its greatest. NaN is black.
- CMYK, YCCK, YCbCr, LAB and HSV are converted. Colour profiles and gamma are ignored.
- Of an animation or a document of several pages, the first is taken.

The number of pixels is read from the header; an image above the bound is refused before anything is decoded.
"""

from __future__ import annotations

import io
import os
import stat
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageFile

from vlora_sgl.core import MAX_IMAGE_PIXELS
from vlora_sgl.errors import ImageError

ImageSource = str | Path | bytes | BinaryIO | Image.Image | np.ndarray
"""A file's path or content, an open file, a Pillow image, or pixels: uint8 ``[height, width, 3]``, for example."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIF", "JPEG2000", "PPM", "QOI")
"""What is opened, in Pillow's names (HEIF where pillow_heif has registered it). Pillow knows more, which run programs
(EPS), hide images whose size no header tells (ICO), have no signature (TGA), or are shown by no browser."""

BYTES_PER_PIXEL = 8
"""What a file may have at most: as much as four channels of 16 bits, uncompressed."""

MAX_SCANS = 1000
"""A progressive JPEG may have that many; each costs a pass over all pixels. Encoders write about ten."""

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION, _BITS, _PHOTOMETRIC, _SAMPLE_FORMAT = 0x0112, 258, 262, 339
_TILE_WIDTH, _TILE_HEIGHT = 322, 323

# Where they stand in a file -> what begins there, for files that are not opened.
_OTHERS: tuple[tuple[int, bytes, str], ...] = (
    (4, b"ftyphei", "HEIC"),
    (4, b"ftypmif1", "HEIF"),
    (4, b"ftypavif", "AVIF"),
    (4, b"ftyp", "MP4 video"),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"\0\0\0\x0cJXL ", "JPEG XL"),
    (0, b"%PDF", "PDF"),
    (0, b"%!PS", "EPS"),
    (0, b"\xc5\xd0\xd3\xc6", "EPS"),
    (0, b"<svg", "SVG"),
    (0, b"<?xml", "SVG or XML"),
    (0, b"<", "HTML or XML"),
    (0, b"8BPS", "PSD"),
    (0, b"\0\0\1\0", "ICO"),
    (0, b"icns", "ICNS"),
    (0, b"DDS ", "DDS"),
    (0, b"PK\3\4", "ZIP"),
    (8, b"AVI ", "AVI video"),
    (0, b"\x1aE\xdf\xa3", "Matroska or WebM video"),
)


def open_image(source: ImageSource, max_pixels: int = MAX_IMAGE_PIXELS, name: str = "") -> Image.Image:
    """Decode an image as a viewer shows it.

    Args:
        source: the image. A Pillow image is treated like the file it came from, its orientation included.
        max_pixels: most pixels it may have.
        name: what errors call it; left out, its path.

    Returns:
        an RGB image, decoded. A Pillow image that is RGB and upright already is returned itself.

    Raises:
        ImageError: it cannot be read, is no image, has too many pixels, or is damaged or cut.
    """
    name = name or _name(source)
    if isinstance(source, np.ndarray):
        got = f"{source.dtype} {list(source.shape)}"
        try:
            source = Image.fromarray(source)
        except (TypeError, ValueError) as error:
            raise ImageError(f"{name}: expected pixels, uint8 [height, width, 3], got {got}") from error
    if isinstance(source, Image.Image):
        image = source
        _check_size(image, max_pixels, name)
    else:
        image = _header(io.BytesIO(read(source, max_pixels)), max_pixels, name)
    return _as_shown(image, name)


def open_frames(
    source: str | Path | bytes, choose: Callable[[int], Iterable[int]], max_pixels: int = MAX_IMAGE_PIXELS
) -> list[Image.Image]:
    """Chosen frames of an animation, each as ``open_image`` gives it.

    Args:
        choose: given how many there are, says which, from 0, in order.

    Raises:
        ImageError: as ``open_image``, of any frame.
    """
    name = _name(source)
    image = _header(io.BytesIO(read(source, max_pixels)), max_pixels, name)
    try:
        count = int(getattr(image, "n_frames", 1))
    except Exception as error:
        raise ImageError(f"{name}: expected a whole {image.format}, got a damaged one: {_line(error)}") from error
    # Copies, because Pillow decodes the next one into the same image.
    return [_as_shown(image, name, index).copy() for index in choose(count)]


def image_size(source: str | Path | bytes, max_pixels: int = MAX_IMAGE_PIXELS, name: str = "") -> tuple[int, int]:
    """Width and height of an image as a viewer shows it, read from its header.

    Raises:
        ImageError: as ``open_image``, as far as the header tells.
    """
    name = name or _name(source)
    data = read(source, max_pixels)
    image = _header(io.BytesIO(data), max_pixels, name)
    try:
        # A PNG may tell its orientation after its pixels; asking one that does not would decode it.
        if image.format == "PNG" and not any(key in data for key in (b"eXIf", b"Raw profile type", b"adobe.xmp")):
            return image.size
        # Pillow has turned the size of a TIFF already.
        turned = image.format != "TIFF" and _orientation(image) in (5, 6, 7, 8)
        return (image.height, image.width) if turned else image.size
    except Exception as error:
        raise ImageError(f"{name}: expected a whole {image.format}, got a damaged one: {_line(error)}") from error


def is_plain_jpeg(data: bytes, max_pixels: int = MAX_IMAGE_PIXELS, beyond: int = 0) -> bool:
    """Whether any decoder shows it rightly: an upright JPEG in YCbCr of three channels. Raises as ``image_size``.

    Args:
        beyond: only one of more pixels counts.
    """
    if not data.startswith(b"\xff\xd8"):
        return False
    image = _header(io.BytesIO(data), max_pixels, _name(data))
    plain = image.mode == "RGB" and image.info.get("adobe_transform", 1) == 1 and _orientation(image) == 1
    return plain and image.width * image.height > beyond


def _header(file: io.BytesIO, max_pixels: int, name: str) -> ImageFile.ImageFile:
    """The image of this file, its header read and its pixels counted."""
    data = file.getbuffer()
    start = bytes(data[:64])
    _check_pixels(*_webp_size(start), "WEBP", max_pixels, name)  # Pillow's decoder sets memory aside for them at once
    Image.init()
    for kind in FORMATS:
        # Image.open would also apply a bound of its own, which is a setting of the whole process.
        factory, accept = Image.OPEN.get(kind, (None, None))
        # Zeros, because some look at more bytes than a short file has.
        if not factory or not accept or accept(start[:16].ljust(16, b"\0")) is not True:
            continue
        file.seek(0)
        try:
            image = factory(file, "")
        except Exception as error:
            raise ImageError(f"{name}: expected a whole {kind}, got a damaged header: {_line(error)}") from error
        _check_size(image, max_pixels, name)
        if kind == "JPEG" and _has_scans(image, data):
            scans = bytes(data).count(b"\xff\xda")
            if scans > MAX_SCANS:
                raise ImageError(f"{name}: expected a JPEG of at most {MAX_SCANS} scans, got {scans}")
        return image
    kinds = ", ".join(kind for kind in FORMATS if kind in Image.OPEN)
    what = next((found for at, begin, found in _OTHERS if start[at:].startswith(begin)), None)
    if what is None and bytes(data[-18:-2]) == b"TRUEVISION-XFILE":
        what = "TGA"
    got = (
        f"{what}, {len(data)} bytes" if what else f"{len(data)} bytes" + (f" that begin {start[:8]!r}" if data else "")
    )
    raise ImageError(f"{name}: expected an image ({kinds}), got {got}")


def _has_scans(image: ImageFile.ImageFile, data: memoryview) -> bool:
    """Whether a JPEG may have several scans: it is progressive, or its first does not hold all components."""
    at = 2
    while at + 4 < len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    whole = at + 4 < len(data) and data[at] == 0xFF and data[at + 4] == getattr(image, "layers", 0)
    return not whole or bool(image.info.get("progressive"))


def _check_size(image: Image.Image, max_pixels: int, name: str) -> None:
    kind = image.format or "image"
    _check_pixels(*image.size, kind, max_pixels, name)
    tags = getattr(image, "tag_v2", {})
    tile = tags.get(_TILE_WIDTH, 0), tags.get(_TILE_HEIGHT, 0)  # a TIFF's tiles are decoded whole
    if all(isinstance(side, int) for side in tile):
        _check_pixels(*tile, "TIFF with tiles", max_pixels, name)
    if 0 in image.size:
        raise ImageError(f"{name}: expected an image with pixels, got {kind} of {image.width} x {image.height}")


def _check_pixels(width: int, height: int, kind: str, most: int, name: str) -> None:
    if width * height > most:
        raise ImageError(
            f"{name}: expected at most {most} pixels (--vlora-max-image-pixels), got {kind} of {width} x {height}"
        )


def _webp_size(start: bytes) -> tuple[int, int]:
    """Width and height of a WebP's canvas; zeros for any other file."""
    if start[:4] != b"RIFF" or start[8:12] != b"WEBP" or len(start) < 30:
        return 0, 0
    if start[12:16] == b"VP8X":
        return 1 + int.from_bytes(start[24:27], "little"), 1 + int.from_bytes(start[27:30], "little")
    if start[12:16] == b"VP8L":
        bits = int.from_bytes(start[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack("<HH", start[26:30])
    return width & 0x3FFF, height & 0x3FFF


def _as_shown(image: Image.Image, name: str, frame: int = 0) -> Image.Image:
    """Decode, convert and turn an image whose size is known to be fine."""
    kind = f"{image.format or 'image'} of {image.width} x {image.height}"
    try:
        if frame:
            image.seek(frame)
        tile = next(iter(getattr(image, "tile", ())), None)
        image.load()
        rgb = _rgb(image, tile)
        turn = _TURNS.get(_orientation(image))
        return rgb if turn is None else _plain(rgb.transpose(turn))
    except Exception as error:  # decoders raise whatever damaged data leads them to
        raise ImageError(f"{name}: expected a whole {kind}, got one that cannot be decoded: {_line(error)}") from error


def _plain(image: Image.Image) -> Image.Image:
    """Without what it says about orientation and transparency, which is done."""
    image.info = {}
    return image


def _orientation(image: Image.Image) -> int:
    try:
        found = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # a viewer shows an image whose EXIF is damaged
        return 1
    return found if isinstance(found, int) else 1


def _rgb(image: Image.Image, tile: Any) -> Image.Image:
    """The decoded image in RGB.

    Args:
        tile: how its first part was stored (Pillow's ``_Tile``), or ``None``.
    """
    transparent = image.info.get("transparency")
    if image.mode[0] in "IF":
        grey = _eight_bits(image)
        if isinstance(transparent, int):
            grey = np.where(np.asarray(image) == transparent, np.uint8(255), grey)
        return Image.fromarray(grey).convert("RGB")
    covered = None if tile is None else tile.extents
    if image.format == "GIF" and image.mode in ("P", "L") and covered not in (None, (0, 0, *image.size)):
        # The first frame leaves a part of the picture empty.
        whole = Image.new("RGB", image.size, "white")
        whole.paste(_on_white(image.crop(covered)), covered[:2])
        return whole
    if transparent is not None and image.format == "PNG" and tile is not None:
        # Pillow scales the samples to eight bits, and not the transparent one.
        raw = str(tile.args if isinstance(tile.args, str) else tile.args[0])
        if raw in ("L;2", "L;4"):
            transparent = transparent * 255 // (2 ** int(raw[-1]) - 1)
        elif raw == "RGB;16B":
            transparent = tuple(sample >> 8 for sample in transparent)
        image.info["transparency"] = transparent
    return _on_white(image)


def _on_white(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else _plain(image.convert("RGB"))
    if image.mode == "La":
        image = image.convert("LA")
    seen = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(seen, mask=seen)
    return white


def _eight_bits(image: Image.Image) -> np.ndarray:
    """Grey of more than eight bits, uint8 ``[height, width]``."""
    values = np.asarray(image)
    tags = getattr(image, "tag_v2", {})
    bits = (*tags.get(_BITS, ()), 16)[0]
    if image.mode.startswith("I;16"):
        grey = (values >> (4 if bits == 12 else 8)).astype(np.uint8)
    else:
        if bits == 32 and image.mode == "I" and tags.get(_SAMPLE_FORMAT, (1,))[0] == 1:
            values = values.view(np.uint32)
        top = 1.0 if image.mode == "F" else 65535.0
        finite = values[np.isfinite(values)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, top)
        if low == high or (low >= 0 and high <= top):
            low, high = 0.0, top
        grey = np.empty(values.shape, np.uint8)
        for first in range(0, len(values), 256):  # rows; all at once would take 16 bytes a pixel
            part = np.clip((values[first : first + 256].astype(np.float64) - low) / (high - low), 0, 1)
            grey[first : first + 256] = np.nan_to_num(part * 65535).astype(np.uint16) >> 8
    return 255 - grey if tags.get(_PHOTOMETRIC) == 0 else grey


def read(source: str | Path | bytes | BinaryIO, max_pixels: int = MAX_IMAGE_PIXELS) -> bytes:
    """What is in a file. Only of a regular one: reading a pipe or a device may never end.

    Raises:
        ImageError: it cannot be read, or has more bytes than an image of so many pixels needs.
    """
    if isinstance(source, bytes):
        return source
    most = max(BYTES_PER_PIXEL * max_pixels, 1 << 20)
    try:
        if not isinstance(source, (str, Path)):
            if not hasattr(source, "read"):
                raise ImageError(f"expected an image, its path or its content, got {type(source).__name__}")
            data = source.read(most + 1)
        elif stat.S_ISREG(os.stat(source).st_mode):
            with open(source, "rb") as file:
                data = file.read(most + 1)
        else:
            raise OSError("not a regular file")
    except ImageError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ImageError(f"cannot read the image {_name(source)}: {reason}") from error
    if len(data) > most:
        raise ImageError(f"{_name(source)}: expected an image of at most {most} bytes, got more")
    return data


def _name(source: object) -> str:
    if not isinstance(source, (str, Path)):
        return "the image"
    return str(source) if len(str(source)) < 200 else f"{str(source)[:80]}..."


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
