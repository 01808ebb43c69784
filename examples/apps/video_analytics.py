"""Video analytics (V-LoRA, section 6.1): several streams at once, in chunks of 30 frames.

Every chunk is asked for its action (consecutive frames) and for the objects of its middle frame. Writes
``analytics.jsonl`` and ``analytics.png``, the annotated middle frames. Without ``--video`` the embedded model watches
drawn objects that move (the base model) and real handwritten digits (the adapter ``actions``), all unseen, and the
truth is printed beside the answer; any other model watches cameras that pan over real photographs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from photographs import photograph
from PIL import Image
from serving import Served, argument_parser, serving
from sheets import contact_sheet, framed

import vlora_sgl as vlora
from vlora_sgl.images import open_image
from vlora_sgl.lang.media import sample_frames

CHUNK = 30
PANS = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}


@dataclass(frozen=True)
class Chunk:
    """Some frames of a stream, what to ask about them and whom, and the truth where it is known.

    Attributes:
        target: what to detect; None lets the model say first what is there, in the embedded model's words.
    """

    stream: str
    number: int
    frames: list[Image.Image]
    question: str
    expert: str | None = None
    target: str | None = None
    detects: bool = True
    action: str | None = None
    shows: str | None = None
    box: vlora.Box | None = None

    @property
    def middle(self) -> Image.Image:
        """The frame whose objects are asked for."""
        return self.frames[len(self.frames) // 2]


@vlora.function
def analyse(s: vlora.ProgramState, chunk: Chunk) -> None:
    """The action of a chunk and the objects of its middle frame, side by side."""
    action, objects = s.fork(2)
    with vlora.adapter(chunk.expert):
        action += vlora.user(vlora.video(chunk.frames, 3) + chunk.question)
        action += vlora.assistant(vlora.gen("action", 8, stop="\n"))
    if chunk.detects and chunk.target is not None:
        objects += vlora.user(vlora.image(chunk.middle) + vlora.prompts.detect(chunk.target))
        objects += vlora.assistant(vlora.detect("objects", chunk.target, 64))
        s["objects"] = objects["objects"]
    elif chunk.detects:
        s["objects"] = _name_then_place(objects, chunk.middle)
    else:
        s["objects"] = vlora.Boxes()
    s["action"] = action.get("action", str).strip()


def _name_then_place(s: vlora.ProgramState, picture: Image.Image) -> vlora.Boxes:
    """Ask what is there, then, for everything that is, where it is: one branch each."""
    from embedded import BOX_REGEX, grid_box

    told, *_ = s.fork(1)
    told += vlora.user(vlora.image(picture) + "What is in the picture?")
    told += vlora.assistant(vlora.caption("names", 24))
    names = [name for name in told.get("names", str).split(", ") if name]
    places = s.fork(len(names))
    for place, name in zip(places, names, strict=True):
        place += vlora.user(vlora.image(picture) + f"Give the box of the {name}.")
        place += vlora.assistant(vlora.gen("cells", 12, regex=BOX_REGEX))
    return vlora.Boxes(
        box for place, name in zip(places, names, strict=True) for box in grid_box(place.get("cells", str), name)
    )


def embedded_chunks(served: Served, count: int) -> list[Chunk]:
    """Streams of the embedded model: drawn objects for the base, real digits for the adapter ``actions``."""
    import embedded

    from tools.tiny.scenes import MOTION_QUESTION

    chunks = []
    for stream in range(2):
        for number in range(count):
            clip = embedded.moving_object(seed=10 * stream + number)
            truth = {"action": clip.action, "shows": clip.shows, "box": clip.box}
            chunks.append(Chunk(f"drawn {stream}", number, clip.frames, MOTION_QUESTION, **truth))
    if "actions" in served.adapters:
        for stream in range(2):
            for number, clip in enumerate(embedded.handwritten(count, seed=stream)):
                asked = embedded.question("actions")
                chunks.append(
                    Chunk(f"digits {stream}", number, clip.frames, asked, "actions", detects=False, action=clip.action)
                )
    return chunks


def pan(path: Path, direction: str, frames: int) -> Iterator[Image.Image]:
    """Frames of a camera that moves over a photograph."""
    picture = open_image(path).resize((448, 448))
    dx, dy = PANS[direction]
    for step in range(frames):
        shift = 112 * step / max(1, frames - 1)
        left = 112 + dx * (shift - 56)
        top = 112 + dy * (shift - 56)
        yield picture.crop((round(left), round(top), round(left) + 224, round(top) + 224))


def chunks_of(options: Any, served: Served) -> list[Chunk]:
    """The work: the videos given, the embedded model's streams, or panned photographs."""
    if served.embedded and served.trained and not options.video:
        return embedded_chunks(served, options.chunks)
    count = CHUNK * options.chunks
    streams: dict[str, tuple[list[Image.Image], str | None]] = {
        path.name: (sample_frames(path, count), None) for path in options.video
    }
    if not streams:
        names = ("astronaut.png", "china.jpg", "motorcycle_left.png")
        for name, way in zip(names, PANS, strict=False):
            streams[f"{name} {way}"] = list(pan(photograph(name).path, way, count)), f"camera moves {way}"
    return [
        Chunk(
            name,
            number,
            frames[number * CHUNK : (number + 1) * CHUNK],
            options.question,
            options.expert,
            options.target,
            action=truth,
        )
        for name, (frames, truth) in streams.items()
        for number in range(-(-len(frames) // CHUNK))
    ]


def main() -> None:
    """Serve, watch, print, draw."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--video", action="append", default=[], type=Path, help="a video file or a folder of frames")
    parser.add_argument("--target", default="person", help="what to detect in a video")
    parser.add_argument("--question", default=vlora.prompts.ACTION, help="what to ask about a chunk of a video")
    parser.add_argument("--expert", help="the adapter that names actions; by default the base model")
    parser.add_argument("--chunks", type=int, default=4, help="chunks of each stream")
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    with serving(options) as served:
        chunks = chunks_of(options, served)
        batch = [(chunk,) for chunk in chunks]
        states = analyse.run_batch(batch, backend=served.backend, num_threads=8, progress_bar=True)
    options.out.mkdir(parents=True, exist_ok=True)
    tiles, right, known = [], 0, 0
    with (options.out / "analytics.jsonl").open("w") as rows:
        for chunk, state in zip(chunks, states, strict=True):
            if state.error():
                print(f"{chunk.stream} chunk {chunk.number}: {state.error()}")
                continue
            action, objects = state.get("action", str), state.get("objects", vlora.Boxes)
            row = {"stream": chunk.stream, "chunk": chunk.number, "action": action, "truth": chunk.action}
            row["objects"] = [{"label": box.label, "box": [box.x0, box.y0, box.x1, box.y1]} for box in objects]
            verdict = None
            if served.embedded and chunk.action is not None:
                verdict = action == chunk.action
                right, known = right + verdict, known + 1
            found = ", ".join(box.label for box in objects) or "-"
            said = f"{chunk.stream:<26}chunk {chunk.number}: {action!r}"
            if chunk.action is not None:
                said += f" (is: {chunk.action})" + ("" if verdict is None else " ✓" if verdict else " ✗")
            if chunk.detects:
                said += f"; objects: {found}"
            if chunk.box is not None:
                overlap = max((box.iou(chunk.box) for box in objects if box.label == chunk.shows), default=0.0)
                said += f" (is: {chunk.shows}, overlap {overlap:.2f})"
                row |= {"shows": chunk.shows, "overlap": overlap}
            rows.write(json.dumps(row) + "\n")
            print(said)
            tiles.append(
                (framed(objects.draw(chunk.middle), verdict), f"{chunk.stream} chunk {chunk.number}\n{action}")
            )
    if not tiles:
        raise SystemExit("no chunk could be analysed")
    if known:
        print(f"{right} of {known} actions right")
    contact_sheet(tiles, columns=min(8, max(2, options.chunks))).save(options.out / "analytics.png")
    print(f"{len(tiles)} of {len(chunks)} chunks; see {options.out}/analytics.jsonl and {options.out}/analytics.png")


if __name__ == "__main__":
    main()
