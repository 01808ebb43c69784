"""Visual retrieval (V-LoRA, section 6.1): search a folder of images for what a query describes.

For every image one program asks, side by side, for a caption and whether the query matches (by an adapter, and by its
yes/no head if it has one); where it does, it asks for the place. Writes ``retrieval.jsonl`` and ``retrieval.png``, the
best matches first. Without ``--images`` the embedded model searches drawn scenes, real photographs and real faces that
it has never seen; frames and average precision say how well it does.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from photographs import all_photographs
from PIL import Image
from serving import Served, argument_parser, serving
from sheets import contact_sheet, framed

import vlora_sgl as vlora

SHOWN = 8


@dataclass(frozen=True)
class Search:
    """A query over some images, and how this model wants to be asked.

    Attributes:
        images: the files, each with whether it is wanted (None: nobody knows).
        caption, match: the questions.
        wanted, answers: the answer to ``match`` that makes an image match, and all that may be given.
        place: the question for the place; None does not ask.
        grid: whether the place comes as cells of the embedded model's grid instead of the paper's ``<box>``.
        expert, head: the adapter that describes and decides, and its head that decides instead of the language model.
    """

    query: str
    images: Sequence[tuple[Path, bool | None]]
    caption: str
    match: str
    wanted: str = "yes"
    answers: tuple[str, ...] = ("yes", "no")
    place: str | None = None
    grid: bool = False
    expert: str | None = None
    head: str | None = None


@dataclass(frozen=True)
class Hit:
    """What came back about one image."""

    path: Path
    wanted: bool | None
    probability: float
    caption: str
    boxes: vlora.Boxes


@vlora.function
def inspect(s: vlora.ProgramState, path: Path, search: Search) -> None:
    """Caption and match of one image, in parallel; the place of what is sought, where it was found."""
    described, matched = s.fork(2)
    with vlora.adapter(search.expert):
        described += vlora.user(vlora.image(path) + search.caption) + vlora.assistant(vlora.caption("caption", 24))
        matched += vlora.user(vlora.image(path) + search.match)
        if search.head:
            matched += vlora.assistant(vlora.classify("match", head=search.head))
        else:
            matched += vlora.assistant(vlora.classify("match", search.answers))
    s["caption"], s["match"] = described["caption"], matched["match"]
    if search.place and matched.get("match", vlora.Label) == search.wanted:
        s += vlora.user(vlora.image(path) + search.place)
        s += vlora.assistant(_place(search))


def _place(search: Search) -> object:
    if not search.grid:
        return vlora.ground("boxes", search.query, 64)
    from embedded import BOX_REGEX

    return vlora.gen("cells", 12, regex=BOX_REGEX)


def run(search: Search, served: Served) -> list[Hit]:
    """All images, the best match first; one that failed is reported and left out."""
    batch = [{"path": path, "search": search} for path, _ in search.images]
    states = inspect.run_batch(batch, backend=served.backend, num_threads=8, progress_bar=True)
    hits = []
    for (path, wanted), state in zip(search.images, states, strict=True):
        if state.error():
            print(f"{path.name}: {state.error()}")
            continue
        found = state.variables()
        boxes = found.get("boxes", vlora.Boxes())
        if "cells" in found:
            from embedded import grid_box

            boxes = grid_box(found["cells"], search.query)
        probability = found["match"].probabilities.get(search.wanted, 0.0)
        hits.append(Hit(path, wanted, probability, found["caption"], boxes))
    return sorted(hits, key=lambda hit: -hit.probability)


def average_precision(ranked: Sequence[bool]) -> float:
    """Mean, over the wanted images, of the share of wanted ones among those ranked up to it."""
    places = [place for place, wanted in enumerate(ranked, start=1) if wanted]
    return sum(number / place for number, place in enumerate(places, start=1)) / len(places)


def searches(options: object, served: Served, scratch: Path) -> list[Search]:
    """What to search for: the embedded model's galleries, or the query over a folder in the paper's words."""
    if not (served.embedded and served.trained) or options.images or options.query:
        query = options.query or "cat"
        files = sorted(options.images.iterdir()) if options.images else [one.path for one in all_photographs()]
        return [
            Search(
                query,
                [(file, None) for file in files[: options.limit]],
                caption=vlora.prompts.CAPTION,
                match=f"Is there a {query}?",
                place=vlora.prompts.ground(query),
                expert=options.expert,
                head=options.head,
            )
        ]
    import embedded

    pictures, query = embedded.drawn(scratch)
    found = [
        Search(
            query,
            [(picture.path, query in picture.shows) for picture in pictures],
            caption="Describe the image.",
            match=f"Is there a {query}?",
            place=f"Give the box of the {query}.",
            grid=True,
        )
    ]
    if "photos" in served.adapters:
        photos = embedded.held_out("photos", scratch, each=2)
        classes = tuple(sorted({name for picture in photos for name in picture.shows}))
        asked = embedded.question("photos")
        images = [(picture.path, "cat" in picture.shows) for picture in photos]
        head = embedded.head_of("photos", "classify")
        found.append(Search("cat", images, asked, asked, "cat", classes, expert="photos", head=head))
    asked = embedded.question("faces")
    images = [(picture.path, "yes" in picture.shows) for picture in embedded.held_out("faces", scratch, each=10)]
    found.append(Search("face", images, caption=asked, match=asked))
    return found


def main() -> None:
    """Serve, search, print, draw."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--images", type=Path, help="a folder of images to search")
    parser.add_argument("--query", help="what to look for, in words")
    parser.add_argument("--expert", help="the adapter that describes and decides; by default the base model")
    parser.add_argument("--head", help="the expert's yes/no head")
    parser.add_argument("--limit", type=int, default=100, help="at most so many images of a folder")
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    tiles: list[tuple[Image.Image, str]] = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        serving(options) as served,
        (options.out / "retrieval.jsonl").open("w") as rows,
    ):
        for search in searches(options, served, Path(scratch)):
            hits = run(search, served)
            by = (
                f"adapter {search.expert}{f', head {search.head}' if search.head else ''}" if search.expert else "base"
            )
            print(f"\n{search.query!r} in {len(hits)} of {len(search.images)} images, by the {by}")
            for place, hit in enumerate(hits):
                row = {"query": search.query, "image": hit.path.name, "match": hit.probability, "wanted": hit.wanted}
                row |= {"caption": hit.caption, "boxes": [[box.x0, box.y0, box.x1, box.y1] for box in hit.boxes]}
                rows.write(json.dumps(row) + "\n")
                if place < SHOWN:
                    mark = "" if hit.wanted is None else " ✓" if hit.wanted == (hit.probability > 0.5) else " ✗"
                    print(f"  {hit.probability:5.2f}{mark}  {hit.path.name:<24}{hit.caption!r}")
                    picture = framed(hit.boxes.draw(hit.path), hit.wanted)
                    tiles.append((picture, f"{search.query}: {hit.probability:.2f}\n{hit.path.name}\n{hit.caption}"))
            truth = [hit.wanted for hit in hits]
            if None not in truth and any(truth):
                share = sum(map(bool, truth)) / len(truth)
                print(f"  average precision {average_precision(truth):.2f} (about {share:.2f} by chance)")
    if not tiles:
        raise SystemExit("no image could be analysed")
    contact_sheet(tiles, columns=SHOWN if len(tiles) > SHOWN else 4).save(options.out / "retrieval.png")
    print(f"\nsee {options.out}/retrieval.jsonl and {options.out}/retrieval.png (green frame: wanted, red: not)")


if __name__ == "__main__":
    main()
