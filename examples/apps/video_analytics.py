"""Video analytics (V-LoRA, section 6.1): several streams at once, in chunks of 30 frames.

Every chunk is asked for its action (consecutive frames) and for the objects of its middle frame. Without ``--video``
the streams are cameras that pan over real photographs, so the direction of the motion is known and printed beside the
answer. Writes ``analytics.jsonl`` and ``analytics.png``, the annotated middle frames.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from photographs import photograph
from PIL import Image
from serving import argument_parser, serving
from sheets import contact_sheet

import vlora_sgl as vlora
from vlora_sgl.lang.media import sample_frames

CHUNK = 30
PANS = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}


@vlora.function
def analyse(s: vlora.ProgramState, frames: list[Image.Image], target: str, question: str, expert: str | None) -> None:
    """The action of a chunk and the objects of its middle frame, side by side."""
    action, objects = s.fork(2)
    with vlora.adapter(expert):
        action += vlora.user(vlora.video(frames, 3) + question) + vlora.assistant(vlora.gen("action", 8))
    objects += vlora.user(vlora.image(frames[len(frames) // 2]) + vlora.prompts.detect(target))
    objects += vlora.assistant(vlora.detect("objects", target, 64))
    s["action"], s["objects"] = action["action"], objects["objects"]


def pan(path: Path, direction: str, frames: int) -> Iterator[Image.Image]:
    """Frames of a camera that moves over a photograph."""
    picture = Image.open(path).convert("RGB").resize((448, 448))
    dx, dy = PANS[direction]
    for step in range(frames):
        shift = 112 * step / max(1, frames - 1)
        left = 112 + dx * (shift - 56)
        top = 112 + dy * (shift - 56)
        yield picture.crop((round(left), round(top), round(left) + 224, round(top) + 224))


def main() -> None:
    """Analyse the videos given, or panned photographs."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--video", action="append", default=[], type=Path, help="a video file or a folder of frames")
    parser.add_argument("--target", default="person", help="what to detect")
    parser.add_argument("--question", default=vlora.prompts.ACTION, help="what to ask about a chunk")
    parser.add_argument("--expert", help="the adapter that names actions; by default the base model")
    parser.add_argument("--chunks", type=int, default=2, help="chunks of each stream")
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    count = CHUNK * options.chunks
    if options.video:
        streams = {path.name: (sample_frames(path, count), None) for path in options.video}
    else:
        names = ("astronaut.png", "china.jpg", "motorcycle_left.png")
        streams = {
            f"{name} {way}": (list(pan(photograph(name).path, way, count)), way)
            for name, way in zip(names, PANS, strict=False)
        }
    work = [
        (name, chunk, frames[chunk * CHUNK : (chunk + 1) * CHUNK], known)
        for name, (frames, known) in streams.items()
        for chunk in range(-(-len(frames) // CHUNK))
    ]
    batch = [(frames, options.target, options.question, options.expert) for _, _, frames, _ in work]
    with serving(options) as served:
        states = analyse.run_batch(batch, backend=served.backend, num_threads=8, progress_bar=True)
    options.out.mkdir(parents=True, exist_ok=True)
    pictures = []
    with (options.out / "analytics.jsonl").open("w") as rows:
        for (name, chunk, frames, known), state in zip(work, states, strict=True):
            if state.error():
                print(f"{name} chunk {chunk}: {state.error()}")
                continue
            objects = state.get("objects", vlora.Boxes)
            row = {"stream": name, "chunk": chunk, "action": state["action"], "camera": known}
            row["objects"] = [{"label": box.label, "box": [box.x0, box.y0, box.x1, box.y1]} for box in objects]
            rows.write(json.dumps(row) + "\n")
            print(f"{name:<24}chunk {chunk}: {state['action']!r}; {len(objects)} x {options.target}; camera {known}")
            pictures.append((objects.draw(frames[len(frames) // 2]), f"{name} chunk {chunk}\n{state['action']}"))
    if not pictures:
        raise SystemExit("no chunk could be analysed")
    contact_sheet(pictures, columns=options.chunks).save(options.out / "analytics.png")
    print(f"{len(pictures)} of {len(work)} chunks; see {options.out}/analytics.jsonl and {options.out}/analytics.png")


if __name__ == "__main__":
    main()
