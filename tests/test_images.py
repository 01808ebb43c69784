"""Images of every format, mode, depth and orientation are seen as a viewer shows them, or refused with one line."""

from __future__ import annotations

import base64
import io
import os
import random
import resource
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support import image_files
from tests.support.fuzz.images import damaged
from tests.support.image_files import ImageFile, picture, png, saved, stored
from vlora_sgl.errors import ImageError
from vlora_sgl.images import FORMATS, MAX_SCANS, image_size, is_plain_jpeg, open_frames, open_image

FILES = [pytest.param(file, id=file.kind) for files in image_files.KINDS.values() for file in files()]


def difference(found: Image.Image, file: ImageFile) -> int:
    pixels = np.asarray(found)
    assert pixels.shape == file.shown.shape
    blocks, shown = pixels.astype(int), file.shown.astype(int)
    if file.tolerance > 20:  # a lossy format blurs edges: compare blocks of 4 x 4
        blocks, shown = (x.reshape(x.shape[0] // 4, 4, -1, 4, 3).mean((1, 3)) for x in (blocks, shown))
    return int(np.abs(blocks - shown).max())


def refusal(data: bytes, **options: int) -> str:
    """What an image is refused with: one line of bounded length."""
    with pytest.raises(ImageError) as caught:
        open_image(data, **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    return message


@pytest.mark.parametrize("file", FILES)
def test_an_image_is_what_a_viewer_shows(file: ImageFile, tmp_path: Path) -> None:
    shown = open_image(file.data)
    assert (type(shown.size), shown.mode) == (tuple, "RGB")
    assert difference(shown, file) <= file.tolerance
    assert image_size(file.data) == shown.size
    # Opened again, an image stays as it is: it is not turned twice.
    assert difference(open_image(shown), file) <= file.tolerance
    (tmp_path / "x").write_bytes(file.data)
    for source in (tmp_path / "x", str(tmp_path / "x"), io.BytesIO(file.data), Image.open(io.BytesIO(file.data))):
        assert np.array_equal(open_image(source), shown)


def test_every_place_sees_the_same_pixels(tmp_path: Path) -> None:
    from vlora_sgl.generate.datasets import Example
    from vlora_sgl.generate.tasks import TASKS
    from vlora_sgl.generate.teachers import label_images
    from vlora_sgl.lang.media import load_image
    from vlora_sgl.lang.values import Boxes
    from vlora_sgl.multimodal import opening

    def serve(source: object) -> Image.Image:
        image, _ = opening.load_image(lambda *_: pytest.fail("not for SGLang"), source)
        assert isinstance(image, Image.Image)
        return image

    for kind in image_files.KINDS.values():
        for file in list(kind())[::5]:
            path = tmp_path / "x.png"
            path.write_bytes(file.data)
            expected = np.asarray(open_image(file.data))
            encoded = base64.b64encode(file.data).decode()
            seen: list[Image.Image] = []
            label_images(lambda images, seen=seen: seen.extend(images) or ["x"], [path], TASKS["vqa"])
            for found in (
                *(load_image(path), *Example((path,), "", "").load_images(), Boxes([]).draw(path), *seen),
                *(serve(one) for one in (file.data, encoded, f"data:image/png;base64,{encoded}", str(path))),
                *(serve(f"file://{path}"), serve(Image.open(path)), serve(type("ImageData", (), {"url": encoded})())),
            ):
                assert np.array_equal(found, expected), file.kind


def test_pillow_images_of_every_mode_are_shown() -> None:
    shown = Image.fromarray(picture())
    clear = shown.convert("RGBA")
    clear.putalpha(0)
    for mode in ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV", "I", "F", "I;16", "RGBA", "LA", "PA"):
        source = shown.convert("L").convert(mode) if mode in ("1", "I", "F", "I;16") else shown.convert(mode)
        assert open_image(source).mode == "RGB", mode
    for mode in ("RGBA", "RGBa", "LA", "PA"):
        assert np.asarray(open_image(clear.convert(mode))).min() == 255, mode
    assert np.asarray(open_image(Image.new("La", (4, 4)))).min() == 255


def test_pixels_are_opened() -> None:
    assert np.array_equal(open_image(picture()), picture())
    assert np.array_equal(open_image(picture()[:, :, 0]), image_files.grey(picture()[:, :, 0]))
    with pytest.raises(ImageError, match=r"expected pixels, uint8 \[height, width, 3\], got float64 \[2, 3, 4\]"):
        open_image(np.zeros((2, 3, 4)))


def test_frames_of_an_animation_keep_apart() -> None:
    frames = [np.full((8, 8, 3), value, np.uint8) for value in (10, 120, 240)]
    first, *rest = map(Image.fromarray, frames)
    for format in ("GIF", "PNG", "WEBP"):
        data = saved(
            first, format, save_all=True, append_images=rest, **({"lossless": True} if format == "WEBP" else {})
        )
        found = open_frames(data, lambda count: range(count))
        assert [int(np.asarray(frame)[0, 0, 0]) for frame in found] == [10, 120, 240]


@pytest.mark.parametrize(
    "format",
    [
        "PNG",
        "JPEG",
        "JPEG progressive",
        "WEBP",
        "GIF",
        "BMP",
        "TIFF",
        "TIFF tiff_lzw",
        "JPEG2000",
        "PPM",
        "QOI",
        "AVIF",
        "GIF of two frames",
        "PNG of two frames",
    ],
)
def test_a_cut_file_is_right_or_refused(format: str) -> None:
    (file,) = (file for file in image_files.formats() if file.kind == format)
    for cut in range(len(file.data)):
        if cut > 200 and cut < len(file.data) - 200 and cut % 7:
            continue
        try:
            found = open_image(file.data[:cut])
        except ImageError as error:
            assert "\n" not in str(error)
        else:
            assert difference(found, file) <= file.tolerance, cut


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_file_is_an_image_or_refused(seed: int) -> None:
    """Never another exception, and no hang; of every kind of file, cut, overwritten, joined with another."""
    pick = random.Random(seed)
    for _ in range(200):
        data, began = damaged(pick), time.perf_counter()
        for use in (open_image, image_size, lambda data: open_frames(data, lambda count: range(min(count, 3)))):
            try:
                use(data)
            except ImageError as error:
                assert "\n" not in str(error)
        assert time.perf_counter() - began < 10


@pytest.mark.parametrize(("kind", "data"), [pytest.param(*bomb, id=bomb[0]) for bomb in image_files.bombs()])
def test_a_bomb_is_refused_by_its_header(kind: str, data: bytes, recwarn: pytest.WarningsRecorder) -> None:
    open_image(png(picture(), 8, 2))  # Pillow's plugins are imported
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    message = refusal(data)
    assert "expected at most 67108864 pixels (--vlora-max-image-pixels), got" in message
    side = {"WEBP": 16383, "WEBP lossless": 16383, "AVIF": 16000}.get(kind, 60000)
    assert f"{side} x {side}" in message
    with pytest.raises(ImageError, match="at most"):
        image_size(data)
    assert time.perf_counter() - start < 0.5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB
    assert not recwarn.list


def test_the_bound_is_exact_and_pillows_own_is_no_other_path(monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(Image.fromarray(picture()), "PNG")
    assert open_image(data, max_pixels=48 * 32).size == (48, 32)
    assert "at most 1535 pixels" in refusal(data, max_pixels=48 * 32 - 1)
    with pytest.raises(ImageError, match="at most 1535 pixels"):
        open_image(Image.open(io.BytesIO(data)), max_pixels=48 * 32 - 1)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert open_image(data).size == (48, 32)
    assert "at most 1535 pixels" in refusal(data, max_pixels=48 * 32 - 1)


@pytest.mark.parametrize("progressive", [True, False])
def test_a_jpeg_of_thousands_of_scans_is_refused(progressive: bool) -> None:
    data = saved(Image.fromarray(picture()), "JPEG", progressive=progressive)
    last = data.rindex(b"\xff\xda")
    scan = data[last:-2] if progressive else b"\xff\xda\0\x08\1\1\0\0\x3f\0"  # of one component of three
    assert f"at most {MAX_SCANS} scans" in refusal(data[:last] + scan * 2000 + data[-2:])


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "got 0 bytes"),
        (b"abc", "got 3 bytes that begin b'abc'"),
        (b"\0\0\0\x18ftypheic" + b"\0" * 20, "got HEIC, 32 bytes"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "got EPS"),
        (b"<svg xmlns='x'/>", "got SVG"),
        (b"%PDF-1.7", "got PDF"),
        (b"<!doctype html>", "got HTML"),
        (saved(Image.new("RGB", (16, 16)), "ICO"), "got ICO"),
        (saved(Image.new("RGB", (16, 16)), "TGA"), "got TGA"),
        (saved(Image.new("RGB", (16, 16)), "EPS"), "got EPS"),
    ],
    ids=["empty", "text", "HEIC", "EPS", "SVG", "PDF", "HTML", "ICO", "TGA", "Pillow's EPS"],
)
def test_what_is_not_opened_is_refused_by_name(data: bytes, named: str) -> None:
    message = refusal(data)
    assert named in message
    assert "expected an image (PNG, JPEG, WEBP, " in message


def test_images_without_pixels_are_refused() -> None:
    empty = png(np.zeros((1, 1, 1), np.uint8), 8, 0).replace(b"IHDR\0\0\0\1\0\0\0\1", b"IHDR\0\0\0\0\0\0\0\1")
    assert "got" in refusal(empty)
    with pytest.raises(ImageError, match="with pixels, got image of 0 x 5"):
        open_image(Image.new("RGB", (0, 5)))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, reason in (
        (tmp_path / "nowhere.png", "No such file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "pipe", "not a regular file"),  # reading it would never end
        (Path("/dev/zero"), "not a regular file"),
        ("x" * 5000, "File name too long"),
        ("a\0b", "null byte"),
    ):
        with pytest.raises(ImageError, match=reason) as caught:
            open_image(path)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("source", [None, 5, {"bytes": b""}, []])
def test_what_is_no_source_is_refused(source: object) -> None:
    with pytest.raises(ImageError, match=f"expected an image, its path or its content, got {type(source).__name__}"):
        open_image(source)  # type: ignore[arg-type]


def test_only_what_any_decoder_shows_rightly_is_plain() -> None:
    image = Image.fromarray(picture())
    exif = image_files.exif_of(6)
    assert is_plain_jpeg(saved(image, "JPEG"))
    for data in (
        saved(image, "JPEG", exif=exif),
        saved(image.convert("L"), "JPEG"),
        saved(image.convert("CMYK"), "JPEG"),
        saved(image, "PNG"),
    ):
        assert not is_plain_jpeg(data)
    with pytest.raises(ImageError, match="at most 9 pixels"):
        is_plain_jpeg(saved(image, "JPEG"), 9)


def test_the_formats_are_pillows() -> None:
    Image.init()
    assert set(FORMATS) - {"HEIF"} <= set(Image.OPEN)
    assert stored(picture(), 6).shape == (48, 32, 3)
