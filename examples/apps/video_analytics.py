"""Video analytics (V-LoRA, section 6.1): streams of video that bring a chunk of 30 frames every second.

As a chunk comes, its action is asked for (six of its frames) and the objects of its middle frame: by vision heads
where adapters are named that have heads for it (``--actions``, ``--objects``), else by generating. Each answer has a
second (``--deadline``), and the late ones are counted. Writes ``analytics.jsonl`` and ``analytics.png``, the middle
frames with boxes. Without ``--video`` the embedded model watches real handwritten digits that slide, grow, spin or
rest, all unseen, and any other model watches cameras that pan over photographs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import requests
from photographs import photograph
from PIL import Image
from serving import Served, argument_parser, serving
from sheets import contact_sheet, framed

import vlora_sgl as vlora
from vlora_sgl.images import open_image
from vlora_sgl.lang.media import sample_frames

CHUNK = 30
PANS = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}
PHOTOGRAPHS = ("astronaut.png", "china.jpg", "motorcycle_left.png", "coffee.png")


@dataclass(frozen=True)
class Expert:
    """An adapter with a vision head, and the question that it was trained with."""

    adapter: str
    head: str
    question: str


@dataclass(frozen=True)
class Task:
    """What is asked of every chunk, and whom; without an expert the model generates.

    Attributes:
        frames: frames of a chunk that the action is read from.
        question: for the action, where no head answers.
        target: what to detect, where no head does.
    """

    frames: int
    question: str
    target: str
    actions: Expert | None
    objects: Expert | None


@dataclass(frozen=True)
class Chunk:
    """Some frames of a stream, which come ``at`` so many seconds, and the action in them where it is known."""

    stream: str
    number: int
    at: float
    frames: list[Image.Image]
    action: str | None = None

    @property
    def middle(self) -> Image.Image:
        """The frame whose objects are asked for."""
        return self.frames[len(self.frames) // 2]


@dataclass(frozen=True)
class Seen:
    """What came of a chunk, so many seconds after it had come."""

    chunk: Chunk
    action: str
    objects: vlora.Boxes
    seconds: float


@vlora.function
def analyse(s: vlora.ProgramState, chunk: Chunk, task: Task) -> None:
    """The action of a chunk and the objects of its middle frame, side by side."""
    action, objects = s.fork(2)
    clip, middle = vlora.video(chunk.frames, task.frames), vlora.image(chunk.middle)
    if task.actions is not None:
        with vlora.adapter(task.actions.adapter):
            action += vlora.user(clip + task.actions.question)
            action += vlora.assistant(vlora.classify("action", head=task.actions.head))
    else:
        action += vlora.user(clip + task.question) + vlora.assistant(vlora.gen("action", 8, stop="\n"))
    if task.objects is not None:
        with vlora.adapter(task.objects.adapter):
            objects += vlora.user(middle + task.objects.question)
            objects += vlora.assistant(vlora.detect("objects", head=task.objects.head))
    else:
        objects += vlora.user(middle + vlora.prompts.detect(task.target))
        objects += vlora.assistant(vlora.detect("objects", task.target, 64))
    s["action"], s["objects"] = str(action["action"]).strip(), objects["objects"]


def watch(chunks: Sequence[Chunk], task: Task, backend: vlora.Runtime) -> Iterator[Seen]:
    """Analyse every chunk when it comes; results in the order of the chunks."""
    begin = time.monotonic()

    def one(chunk: Chunk) -> Seen:
        time.sleep(max(0.0, begin + chunk.at - time.monotonic()))
        state = analyse.run(chunk, task, backend=backend)
        action, objects = state.get("action", str), state.get("objects", vlora.Boxes)
        return Seen(chunk, action, objects, time.monotonic() - begin - chunk.at)

    with ThreadPoolExecutor(len(chunks)) as pool:
        yield from pool.map(one, chunks)


def expert_of(served: Served, adapter: str | None, kind: str) -> Expert | None:
    """The head of this kind that an adapter has.

    Raises:
        SystemExit: it has none, or several.
    """
    if adapter is None:
        return None
    listed = requests.get(f"{served.backend.url}/lora_adapters", timeout=60).json()["adapters"]
    rows = {row["name"]: row for row in listed}
    heads = rows.get(adapter, {}).get("heads") or {}
    names = [name for name, its in heads.items() if its == kind]
    if len(names) != 1:
        raise SystemExit(f"the adapter {adapter!r} has {len(names)} heads that {kind}; one is needed")
    return Expert(adapter, names[0], rows[adapter]["prompt"] or "")


def counted(backend: vlora.Runtime) -> dict[str, int]:
    """Deadlines of such requests that the server has seen kept and missed so far."""
    state = backend.get_server_info()["internal_states"][0]["vlora"]
    return dict(state["deadlines"]["realtime"])


def task_of(options: argparse.Namespace, served: Served) -> Task:
    """What the options ask; the embedded model has experts of its own, whose clips had three frames."""
    own = served.embedded and served.trained
    actions = expert_of(served, options.actions or ("actions" if own else None), "classify")
    objects = expert_of(served, options.objects or ("counting" if own else None), "detect")
    return Task(options.frames or (3 if own else 6), options.question, options.target, actions, objects)


def pan(path: Path, direction: str, frames: int) -> list[Image.Image]:
    """Frames of a camera that moves over a photograph; one of 448 x 448 pixels is 256 tokens."""
    picture = open_image(path).resize((896, 896))
    dx, dy = PANS[direction]
    corners = []
    for step in range(frames):
        shift = 224 * step / max(1, frames - 1) - 112
        corners.append((round(224 + dx * shift), round(224 + dy * shift)))
    return [picture.crop((left, top, left + 448, top + 448)) for left, top in corners]


def clips_of(
    stream: int, options: argparse.Namespace, served: Served
) -> tuple[str, list[list[Image.Image]], list[str]]:
    """A stream's name, the frames of its chunks, and their actions where they are known."""
    count = options.chunks
    if options.video:
        path = options.video[stream % len(options.video)]
        frames = sample_frames(path, CHUNK * count)
        return f"{path.name} {stream}", [frames[n : n + CHUNK] for n in range(0, len(frames), CHUNK)], []
    if served.embedded and served.trained:
        import embedded

        clips = embedded.handwritten(count, seed=stream)
        return f"digits {stream}", [clip.frames for clip in clips], [clip.action for clip in clips]
    way = tuple(PANS)[stream % len(PANS)]
    name = PHOTOGRAPHS[stream % len(PHOTOGRAPHS)]
    frames = pan(photograph(name).path, way, CHUNK * count)
    chunks = [frames[n * CHUNK : (n + 1) * CHUNK] for n in range(count)]
    return f"{name} {stream}", chunks, [f"camera moves {way}"] * count


def chunks_of(options: argparse.Namespace, served: Served) -> list[Chunk]:
    """The chunks of all streams as they come: one a second of each, the streams evenly apart."""
    found = []
    for stream in range(options.streams):
        name, clips, actions = clips_of(stream, options, served)
        for number, frames in enumerate(clips):
            at = (number + stream / options.streams) * options.every
            found.append(Chunk(name, number, at, frames, actions[number] if actions else None))
    return sorted(found, key=lambda chunk: chunk.at)


def told(seen: Seen, deadline: float, judged: bool) -> str:
    """A line of what was seen, and when."""
    chunk = seen.chunk
    said = f"{chunk.stream:<26}chunk {chunk.number}: {seen.action!r}"
    if chunk.action is not None:
        said += f" (is: {chunk.action})" + (" ✓" if seen.action == chunk.action else " ✗") * judged
    late = " LATE" if seen.seconds > deadline else ""
    return f"{said}; {len(seen.objects)} objects; {seen.seconds:.2f} s{late}"


def caption(seen: Seen) -> str:
    """Two lines under a picture."""
    return f"{seen.chunk.stream} chunk {seen.chunk.number}, {seen.seconds:.2f} s\n{seen.action}"


def main() -> None:
    """Serve, watch, print, draw."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--video", action="append", default=[], type=Path, help="a video file or a folder of frames")
    parser.add_argument("--streams", type=int, default=1, help="how many streams there are")
    parser.add_argument("--chunks", type=int, default=4, help="chunks of each stream")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between two chunks of a stream")
    parser.add_argument("--deadline", type=float, default=1.0, metavar="SECONDS", help="for each answer")
    parser.add_argument("--actions", metavar="ADAPTER", help="whose head names actions")
    parser.add_argument("--objects", metavar="ADAPTER", help="whose head finds objects")
    parser.add_argument("--frames", type=int, help="frames of a chunk that the action is read from (6)")
    parser.add_argument("--question", default=vlora.prompts.ACTION, help="what to ask about a chunk without a head")
    parser.add_argument("--target", default="person", help="what to detect without a head")
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with serving(options) as served:
        task, chunks = task_of(options, served), chunks_of(options, served)
        backend = vlora.Runtime(served.backend.url, service="realtime", deadline=options.deadline)
        before = counted(backend)
        results = []
        for seen in watch(chunks, task, backend):
            print(told(seen, options.deadline, served.embedded), flush=True)
            results.append(seen)
        after = counted(backend)
    with (options.out / "analytics.jsonl").open("w") as rows:
        for seen in results:
            boxes = [{"label": box.label, "box": [box.x0, box.y0, box.x1, box.y1]} for box in seen.objects]
            row = {"stream": seen.chunk.stream, "chunk": seen.chunk.number, "seconds": round(seen.seconds, 4)}
            row |= {"late": seen.seconds > options.deadline, "action": seen.action, "truth": seen.chunk.action}
            rows.write(json.dumps({**row, "objects": boxes}) + "\n")
    tiles = [
        (framed(seen.objects.draw(seen.chunk.middle), seen.seconds <= options.deadline), caption(seen))
        for seen in results
    ]
    contact_sheet(tiles, columns=min(8, max(2, options.chunks))).save(options.out / "analytics.png")
    late = sum(seen.seconds > options.deadline for seen in results)
    missed, met = (after[kind] - before[kind] for kind in ("missed", "met"))
    slowest = max(seen.seconds for seen in results)
    print(f"{late} of {len(results)} chunks late; the slowest took {slowest:.2f} s of {options.deadline:g}")
    print(f"the server counts {missed} of {met + missed} deadlines missed")
    print(f"see {options.out}/analytics.jsonl and {options.out}/analytics.png")


if __name__ == "__main__":
    main()
