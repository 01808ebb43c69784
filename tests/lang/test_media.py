"""Images and video frames as requests carry them."""

from __future__ import annotations

import base64
import importlib.util
import io
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlora_sgl.errors import MissingDependencyError, RequestError
from vlora_sgl.lang.media import image_url, load_image, sample_frames


def shade(value: int) -> Image.Image:
    return Image.new("RGB", (32, 32), (value, value, value))


def shades(frames: list[Image.Image]) -> list[int]:
    return [round(float(np.asarray(frame.convert("L")).mean())) for frame in frames]


def test_a_file_travels_byte_for_byte(tmp_path: Path) -> None:
    file = tmp_path / "x.jpg"
    shade(7).save(file)
    for source in (file, str(file), file.read_bytes()):
        assert base64.b64decode(image_url(source).partition(",")[2]) == file.read_bytes()


def test_pixels_travel_without_loss() -> None:
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    data = base64.b64decode(image_url(pixels).partition(",")[2])
    assert (np.asarray(Image.open(io.BytesIO(data))) == pixels).all()


def test_bad_images_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"cannot read the image .*nowhere"):
        image_url(tmp_path / "nowhere.png")
    with pytest.raises(RequestError, match=r"expected an image \(PNG, .*\), got 3 bytes"):
        load_image(b"abc")
    with pytest.raises(RequestError, match="only the server fetches"):
        load_image("http://example.org/x.png")


@pytest.mark.parametrize("kind", ["gif", "folder", "frames"])
def test_frames_are_spread_from_first_to_last(kind: str, tmp_path: Path) -> None:
    values = list(range(0, 250, 25))  # 10 frames
    frames = [shade(value) for value in values]
    source: object = frames
    if kind == "gif":
        source = tmp_path / "x.gif"
        frames[0].save(source, save_all=True, append_images=frames[1:], duration=40)
    elif kind == "folder":
        source = tmp_path
        for i, frame in enumerate(frames):
            frame.save(tmp_path / f"{i:03}.png")
    assert shades(sample_frames(source, 4)) == [0, 75, 150, 225]
    assert shades(sample_frames(source, 1)) == [0]
    assert shades(sample_frames(source, 99)) == values


def test_videos_without_frames_are_refused(tmp_path: Path) -> None:
    for source in (tmp_path, []):
        with pytest.raises(RequestError, match="no frames in"):
            sample_frames(source, 4)
    with pytest.raises(RequestError, match="no such video"):
        sample_frames(tmp_path / "nowhere.mp4", 4)
    with pytest.raises(RequestError, match="num_frames=0"):
        sample_frames(tmp_path, 0)


def test_a_video_file_without_pyav_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "x.mp4").write_bytes(b"")
    with pytest.raises(MissingDependencyError, match=r"x.mp4 needs the package 'av': pip install av"):
        sample_frames(tmp_path / "x.mp4", 4)


@pytest.mark.skipif(importlib.util.find_spec("av") is None, reason="PyAV is optional and not installed")
def test_a_video_file_is_decoded(tmp_path: Path) -> None:
    import av

    with av.open(str(tmp_path / "x.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        for value in range(0, 250, 25):
            container.mux(stream.encode(av.VideoFrame.from_image(shade(value))))
        container.mux(stream.encode())
    assert np.allclose(shades(sample_frames(tmp_path / "x.mp4", 4)), [0, 75, 150, 225], atol=4)
    (tmp_path / "bad.mp4").write_bytes(b"not a video")
    with pytest.raises(RequestError, match="not a video that PyAV can read"):
        sample_frames(tmp_path / "bad.mp4", 4)
