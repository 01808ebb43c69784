"""Image files of every kind, beside what a viewer shows of them. PNG and TIFF are written here, sample by sample."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image


@dataclass(frozen=True)
class ImageFile:
    """A file.

    Attributes:
        kind: what is particular about it.
        data: its content.
        shown: what a viewer shows, uint8 ``[height, width, 3]``.
        tolerance: by how much a pixel may be off.
    """

    kind: str
    data: bytes
    shown: np.ndarray
    tolerance: int = 0


def picture(width: int = 48, height: int = 32) -> np.ndarray:
    """Four colours and a dark corner: no turn and no exchange of colours leaves it as it is."""
    shown = np.empty((height, width, 3), np.uint8)
    shown[: height // 2, : width // 2] = 240, 40, 40
    shown[: height // 2, width // 2 :] = 40, 200, 60
    shown[height // 2 :, : width // 2] = 40, 60, 220
    shown[height // 2 :, width // 2 :] = 230, 220, 60
    shown[: height // 4, : width // 4] = 10, 10, 10
    return shown


def ramp(width: int = 48, height: int = 32) -> np.ndarray:
    """Grey between 0 and 1 that rises to the right and falls below, float64 ``[height, width]``."""
    across = np.linspace(0, 1, width)[None, :] * np.linspace(1, 0.5, height)[:, None]
    return across


def grey(values: np.ndarray) -> np.ndarray:
    """Grey of eight bits as it is shown."""
    return np.repeat(values.astype(np.uint8)[:, :, None], 3, axis=2)


def on_white(colours: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """Colours with alpha of 0 to 255, laid on white."""
    share = alpha[:, :, None] / 255
    return np.asarray(np.rint(colours * share + 255 * (1 - share)), np.uint8)


def stored(shown: np.ndarray, orientation: int) -> np.ndarray:
    """The pixels that an image with this EXIF orientation holds.

    EXIF 2.32, section 4.6.4: the side of the shown image that the first row and the first column of the stored are.
    """
    row, column = {
        **{1: ("top", "left"), 2: ("top", "right"), 3: ("bottom", "right"), 4: ("bottom", "left")},
        **{5: ("left", "top"), 6: ("right", "top"), 7: ("right", "bottom"), 8: ("left", "bottom")},
    }[orientation]
    pixels = shown if row in ("top", "bottom") else shown.transpose(1, 0, 2)
    if row in ("bottom", "right"):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels[:, ::-1] if column in ("bottom", "right") else pixels)


def exif_of(orientation: int) -> bytes:
    """EXIF that tells an orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return bytes(exif.tobytes())


def saved(image: Image.Image, format: str, **options: object) -> bytes:
    """A file's content, written by Pillow."""
    buffer = io.BytesIO()
    image.save(buffer, format=format, **options)
    return buffer.getvalue()


def packed(samples: np.ndarray, bits: int, order: str = ">") -> list[bytes]:
    """Rows of samples (``[height, width, channels]``) of so many bits, each row filled up to whole bytes."""
    height = len(samples)
    if bits >= 8:
        kind = {8: "u1", 16: f"{order}u2", 32: f"{order}u4"}[bits]
        return [row.astype(kind).tobytes() for row in samples.reshape(height, -1)]
    rows = samples.reshape(height, -1).astype(np.uint16)
    high_first = (rows[:, :, None] >> np.arange(bits - 1, -1, -1)) & 1
    return [np.packbits(row).tobytes() for row in high_first.reshape(height, -1).astype(np.uint8)]


def chunk(name: bytes, content: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(samples: np.ndarray, bits: int, colour: int, before: bytes = b"", after: bytes = b"") -> bytes:
    """A PNG of these samples (``[height, width, channels]``), with chunks before and after its pixels."""
    height, width = samples.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    rows = b"".join(b"\0" + row for row in packed(samples, bits))
    pixels = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + before + pixels + after + chunk(b"IEND", b"")


def tiff(pixels: bytes, width: int, height: int, order: str = "<", **tags: tuple[int, ...]) -> bytes:
    """A TIFF of one strip; tags are given as ``t258=(16,)``."""
    given = {256: (width,), 257: (height,), 259: (1,), 262: (1,), 277: (1,), 258: (8,)}
    given |= {int(name[1:]): value for name, value in tags.items()}
    given |= {278: (height,), 279: (len(pixels),), 273: (8,)}
    entries, extra = b"", b""
    behind = 8 + len(pixels) + 2 + 12 * len(given) + 4
    for tag, values in sorted(given.items()):
        data = struct.pack(f"{order}{len(values)}I", *values)
        if len(values) > 1:
            data, extra = struct.pack(f"{order}I", behind + len(extra)), extra + data
        entries += struct.pack(f"{order}HHI", tag, 4, len(values)) + data
    start = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}I", 8 + len(pixels))
    return start + pixels + struct.pack(f"{order}H", len(given)) + entries + b"\0\0\0\0" + extra


def formats() -> Iterator[ImageFile]:
    """The same picture in every format."""
    shown, image = picture(), Image.fromarray(picture())
    for format, options in {
        "PNG": {},
        "WEBP": {"lossless": True},
        "BMP": {},
        "TIFF": {},
        "JPEG2000": {},
        "PPM": {},
        "QOI": {},
        "GIF": {},
    }.items():
        yield ImageFile(format, saved(image, format, **options), shown)
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "packbits"):
        yield ImageFile(f"TIFF {compression}", saved(image, "TIFF", compression=compression), shown)
    for format, options in {
        "JPEG": {"quality": 95, "subsampling": 0},
        "JPEG 4:2:0": {"quality": 95},
        "JPEG progressive": {"quality": 95, "progressive": True},
        "WEBP lossy": {"quality": 95},
        "AVIF": {"quality": 95},
    }.items():
        tolerance = 45 if format in ("JPEG 4:2:0", "WEBP lossy", "AVIF", "JPEG progressive") else 12
        yield ImageFile(format, saved(image, format.split()[0], **options), shown, tolerance)
    second = Image.fromarray(shown[::-1])
    for format in ("GIF", "PNG", "WEBP", "TIFF", "MPO", "AVIF"):
        exact = {"lossless": True} if format == "WEBP" else {"quality": 95} if format in ("MPO", "AVIF") else {}
        data = saved(image, format, save_all=True, append_images=[second], **exact)
        yield ImageFile(f"{format} of two frames", data, shown, 45 if format in ("MPO", "AVIF") else 0)


def orientations() -> Iterator[ImageFile]:
    """Every orientation in every format that carries one."""
    shown = picture()
    for orientation in range(1, 9):
        image = Image.fromarray(stored(shown, orientation))
        exif = exif_of(orientation)
        for format, options, tolerance in (
            ("JPEG", {"quality": 95, "subsampling": 0}, 12),
            ("PNG", {}, 0),
            ("WEBP", {"lossless": True}, 0),
            ("TIFF", {}, 0),
            ("TIFF", {"compression": "tiff_lzw"}, 0),
            ("AVIF", {"quality": 95}, 45),
        ):
            name = f"{format} {' '.join(map(str, options.values()))} orientation {orientation}"
            yield ImageFile(name, saved(image, format, exif=exif, **options), shown, tolerance)
        late = png(np.asarray(image), 8, 2, after=chunk(b"eXIf", exif[6:]))
        yield ImageFile(f"PNG orientation {orientation} after its pixels", late, shown)
        grey_16 = png(np.asarray(image)[:, :, :1].astype(np.uint16) * 256, 16, 0, chunk(b"eXIf", exif[6:]))
        yield ImageFile(f"PNG grey of 16 bits orientation {orientation}", grey_16, grey(shown[:, :, 0]))
    broken = png(picture(), 8, 2, chunk(b"eXIf", b"II*\0\xff\xff\xff\xff"))
    yield ImageFile("PNG with damaged EXIF", broken, shown)
    for value in (0, 9, 255):
        exif = exif_of(value)
        yield ImageFile(f"PNG orientation {value}", saved(Image.fromarray(shown), "PNG", exif=exif), shown)


def depths() -> Iterator[ImageFile]:
    """Grey and colours of every bit depth, palettes of every size, integers and floats."""
    share, shown = ramp(), picture()
    for bits in (1, 2, 4, 8, 16):
        samples = np.rint(share * (2**bits - 1)).astype(np.uint16)
        eight = samples >> 8 if bits == 16 else np.rint(samples * (255 / (2**bits - 1)))
        yield ImageFile(f"PNG grey of {bits} bits", png(samples[:, :, None], bits, 0), grey(eight))
        chosen = int(samples[3, 40])
        clear = np.where(samples == chosen, 255, eight)
        with_clear = png(samples[:, :, None], bits, 0, chunk(b"tRNS", struct.pack(">H", chosen)))
        yield ImageFile(f"PNG grey of {bits} bits, one of them clear", with_clear, grey(clear))
    for bits in (1, 2, 4, 8):
        numbers = (np.indices(share.shape).sum(0) // 3 % min(2**bits, 7)).astype(np.uint8)
        colours = np.random.default_rng(bits).integers(0, 255, (7, 3), dtype=np.uint8)
        alphas = np.random.default_rng(9).integers(0, 255, 7, dtype=np.uint8)
        entries = min(2**bits, 7)
        palette = chunk(b"PLTE", colours[:entries].tobytes())
        yield ImageFile(f"PNG palette of {bits} bits", png(numbers[:, :, None], bits, 3, palette), colours[numbers])
        clear = png(numbers[:, :, None], bits, 3, palette + chunk(b"tRNS", alphas[:entries].tobytes()))
        yield ImageFile(
            f"PNG clear palette of {bits} bits", clear, on_white(colours[numbers], alphas[numbers]), tolerance=1
        )
    fine = shown.astype(np.uint16) * 256 + 77
    yield ImageFile("PNG colours of 16 bits", png(fine, 16, 2), shown)
    red = (shown == shown[8, 20]).all(2)
    for bits, samples in ((8, shown), (16, fine)):
        clear = png(samples, bits, 2, chunk(b"tRNS", struct.pack(">HHH", *map(int, samples[8, 20]))))
        yield ImageFile(f"PNG colours of {bits} bits, one clear", clear, np.where(red[:, :, None], 255, shown))
    high, wide = share.shape
    sixteen = np.rint(share * 65535).astype(np.uint16)
    for order in "<>":
        data = b"".join(packed(sixteen[:, :, None], 16, order))
        yield ImageFile(f"TIFF {order} grey of 16 bits", tiff(data, wide, high, order, t258=(16,)), grey(sixteen >> 8))
    inverted = tiff(b"".join(packed(sixteen[:, :, None], 16, "<")), wide, high, t258=(16,), t262=(0,))
    yield ImageFile("TIFF grey of 16 bits, 0 is white", inverted, grey(255 - (sixteen >> 8)))
    twelve = sixteen >> 4
    pairs = twelve.reshape(high, -1, 2).astype(np.uint32)
    three = np.stack([pairs[..., 0] >> 4, (pairs[..., 0] & 15) << 4 | pairs[..., 1] >> 8, pairs[..., 1] & 255], -1)
    data = three.astype(np.uint8).tobytes()
    yield ImageFile("TIFF grey of 12 bits", tiff(data, wide, high, t258=(12,)), grey(twelve >> 4))
    for kind, values, sample_format in (
        ("u4", share * (2**32 - 1), 1),
        ("i4", share * (2**32 - 1) - 2**31, 2),
        ("f4", share, 3),
        ("f4", share * 6 - 3, 3),
    ):
        for order in "<" if kind == "u4" else "<>":
            data = values.astype(f"{order}{kind}").tobytes()
            tags = {"t258": (32,), "t339": (sample_format,)}
            name = f"TIFF {order}{kind} from {values.min():.3g} to {values.max():.3g}"
            yield ImageFile(name, tiff(data, wide, high, order, **tags), grey(np.floor(share * 255.99)), tolerance=1)
    holes = share.astype("<f4")
    holes[2, 3:6] = np.nan, np.inf, -np.inf
    shown_holes = np.floor(share * 255.99)
    shown_holes[2, 3:6] = 0, 255, 0
    yield ImageFile(
        "TIFF float with NaN and infinities",
        tiff(holes.tobytes(), wide, high, t258=(32,), t339=(3,)),
        grey(shown_holes),
        tolerance=1,
    )
    pgm = b"P5 %d %d 65535\n" % (wide, high) + b"".join(packed(sixteen[:, :, None], 16))
    yield ImageFile("PGM of 16 bits", pgm, grey(sixteen >> 8))
    yield ImageFile("GIF of two colours", saved(Image.fromarray(share > 0.4), "GIF"), grey((share > 0.4) * 255))
    yield ImageFile("TIFF of one bit", saved(Image.fromarray(share > 0.4), "TIFF"), grey((share > 0.4) * 255))


def alphas() -> Iterator[ImageFile]:
    """Every way of being transparent."""
    shown, alpha = picture(), np.rint(ramp() * 255).astype(np.uint8)
    colours = np.dstack([shown, alpha])
    expected = on_white(shown, alpha)
    for format, options in {"PNG": {}, "WEBP": {"lossless": True, "exact": True}, "TIFF": {}, "JPEG2000": {}}.items():
        yield ImageFile(f"{format} RGBA", saved(Image.fromarray(colours), format, **options), expected, tolerance=1)
    yield ImageFile("PNG RGBA of 16 bits", png(colours.astype(np.uint16) * 257, 16, 6), expected, tolerance=1)
    pair = np.dstack([shown[:, :, 0], alpha])
    on_grey = on_white(grey(shown[:, :, 0]), alpha)
    yield ImageFile("PNG LA", png(pair, 8, 4), on_grey, tolerance=1)
    yield ImageFile("PNG LA of 16 bits", png(pair.astype(np.uint16) * 257, 16, 4), on_grey, tolerance=1)
    high, wide = alpha.shape
    for extra, name in ((2, "LA"), (1, "La")):
        samples = pair.copy()
        if extra == 1:
            samples[:, :, 0] = np.rint(samples[:, :, 0] * (alpha / 255))
        data = tiff(samples.tobytes(), wide, high, t258=(8, 8), t277=(2,), t338=(extra,))
        yield ImageFile(f"TIFF {name}", data, on_grey, tolerance=2)
    premultiplied = np.dstack([np.rint(shown * (alpha[:, :, None] / 255)).astype(np.uint8), alpha])
    data = tiff(premultiplied.tobytes(), wide, high, t258=(8,) * 4, t277=(4,), t338=(1,), t262=(2,))
    yield ImageFile("TIFF RGBa", data, expected, tolerance=2)
    numbers = (np.indices(alpha.shape).sum(0) // 3 % 5).astype(np.uint8)
    colours_5 = np.random.default_rng(1).integers(0, 255, (5, 3), dtype=np.uint8)
    palette = Image.fromarray(numbers)
    palette.putpalette(colours_5.tobytes())
    clear = np.where((numbers == 3)[:, :, None], 255, colours_5[numbers])
    for format in ("GIF", "PNG"):
        yield ImageFile(f"{format} with a clear index", saved(palette, format, transparency=3), clear)
    # The first frame covers a part of the screen; what it leaves out is empty.
    gif = bytearray(saved(palette, "GIF"))
    place = gif.index(b"\x2c\0\0\0\0")
    gif[6:10] = struct.pack("<HH", wide + 10, high + 6)
    gif[place + 1 : place + 5] = struct.pack("<HH", 4, 2)
    whole = np.full((high + 6, wide + 10, 3), 255, np.uint8)
    whole[2 : 2 + high, 4 : 4 + wide] = colours_5[numbers]
    yield ImageFile("GIF whose frame is smaller than its screen", bytes(gif), whole)


def colour_spaces() -> Iterator[ImageFile]:
    """CMYK, YCCK, YCbCr, LAB."""
    shown = picture()
    image = Image.fromarray(shown)
    cmyk = Image.fromarray(np.dstack([255 - shown, np.zeros_like(shown[:, :, :1])]), mode="CMYK")
    yield ImageFile("JPEG CMYK", saved(cmyk, "JPEG", quality=95), shown, 12)
    yield ImageFile("TIFF CMYK", saved(cmyk, "TIFF"), shown, 1)
    yield ImageFile("TIFF JPEG YCbCr", saved(image, "TIFF", compression="jpeg", quality=95), shown, 45)
    yield ImageFile("JPEG grey", saved(Image.fromarray(shown[:, :, 0]), "JPEG", quality=95), grey(shown[:, :, 0]), 12)
    white = Image.new("LAB", (48, 32), (255, 128, 128))
    yield ImageFile("TIFF LAB", saved(white, "TIFF"), np.full((32, 48, 3), 255, np.uint8), 3)


KINDS: dict[str, Callable[[], Iterator[ImageFile]]] = {
    "formats": formats,
    "orientations": orientations,
    "depths": depths,
    "alphas": alphas,
    "colour spaces": colour_spaces,
}


def bombs(side: int = 60000) -> Iterator[tuple[str, bytes]]:
    """Small files whose headers claim ``side x side`` pixels (what the format can say of them)."""
    tiny = Image.fromarray(picture())
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    yield "PNG", b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    gif = bytearray(saved(tiny, "GIF"))
    gif[6:10] = struct.pack("<HH", side, side)
    yield "GIF", bytes(gif)
    bmp = bytearray(saved(tiny, "BMP"))
    bmp[18:26] = struct.pack("<II", side, side)
    yield "BMP", bytes(bmp)
    jpeg = bytearray(saved(tiny, "JPEG"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", side, side)
    yield "JPEG", bytes(jpeg)
    yield "TIFF", tiff(b"\0" * 8, side, side)
    yield "TIFF with tiles", tiff(b"\0" * 8, 16, 16, t322=(side,), t323=(side,), t324=(8,), t325=(8,))
    yield "PPM", b"P6 %d %d 255\n" % (side, side)
    yield "QOI", b"qoif" + struct.pack(">IIBB", side, side, 3, 0) + b"\0" * 16
    webp = bytearray(saved(tiny, "WEBP"))
    webp[26:30] = struct.pack("<HH", 16383, 16383)
    yield "WEBP", bytes(webp)
    webp = bytearray(saved(tiny, "WEBP", lossless=True))
    webp[21:25] = struct.pack("<I", 16382 | 16382 << 14)
    yield "WEBP lossless", bytes(webp)
    webp = bytearray(saved(tiny, "WEBP", exif=b"II*\0"))
    webp[24:30] = (side - 1).to_bytes(3, "little") * 2
    yield "WEBP extended", bytes(webp)
    jp2 = saved(tiny, "JPEG2000")
    yield (
        "JPEG2000",
        jp2.replace(struct.pack(">II", 32, 48), struct.pack(">II", side, side)).replace(
            struct.pack(">II", 48, 32), struct.pack(">II", side, side)
        ),
    )
    avif = saved(tiny, "AVIF")
    size = b"ispe\0\0\0\0"
    yield "AVIF", avif.replace(size + struct.pack(">II", 48, 32), size + struct.pack(">II", 16000, 16000))
