"""Contact sheets: many small pictures with a line of text each, in one image."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

TILE = 224
_FRAMES = {True: "#2e9e44", False: "#d0342c"}


def framed(picture: Image.Image, right: bool | None) -> Image.Image:
    """The picture as a tile, in a green frame if it is right, a red one if it is wrong, none if nobody knows."""
    scale = TILE / max(picture.size)
    tile = picture.convert("RGB").resize((round(picture.width * scale), round(picture.height * scale)))
    if right is not None:
        ImageDraw.Draw(tile).rectangle((0, 0, tile.width - 1, tile.height - 1), outline=_FRAMES[right], width=5)
    return tile


def contact_sheet(pictures: Sequence[tuple[Image.Image, str]], columns: int = 4) -> Image.Image:
    """Lay pictures out in rows, each with up to three lines of text under it."""
    font = ImageFont.load_default(size=13)
    high = TILE + 54
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * (TILE + 8), rows * high), "white")
    pen = ImageDraw.Draw(sheet)
    for number, (picture, text) in enumerate(pictures):
        left, top = number % columns * (TILE + 8) + 4, number // columns * high + 4
        small = picture.convert("RGB")
        small.thumbnail((TILE, TILE))
        sheet.paste(small, (left, top))
        # The default font has Latin letters only; anything else becomes a question mark.
        printable = text.encode("latin-1", "replace").decode("latin-1")
        lines = [line[:34] for line in printable.splitlines()[:3]]
        pen.multiline_text((left, top + TILE + 2), "\n".join(lines), fill="black", font=font, spacing=2)
    return sheet
