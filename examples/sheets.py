"""Contact sheets: many small pictures with a line of text each, in one image."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

TILE = 224


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
