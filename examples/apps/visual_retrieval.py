"""Visual retrieval (V-LoRA, section 6.1): ask, caption and search a folder of images.

For every image one program forks three ways over the same image: a caption, the boxes of what the query describes, and
whether the query matches. Writes ``retrieval.jsonl`` and ``retrieval.png``, the best match first.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from photographs import all_photographs
from serving import argument_parser, serving
from sheets import contact_sheet

import vlora_sgl as vlora


@vlora.function
def inspect(s: vlora.ProgramState, path: str, query: str, head: str | None, expert: str | None) -> None:
    """Caption, boxes and match of one image; ``expert`` answers the match, by its head if it has one."""
    s += vlora.user(vlora.image(path))
    captioned, grounded, matched = s.fork(3)
    captioned += vlora.user(vlora.prompts.CAPTION) + vlora.assistant(vlora.caption("caption", 16))
    grounded += vlora.user(vlora.prompts.ground(query)) + vlora.assistant(vlora.ground("boxes", query, 64))
    with vlora.adapter(expert):
        matched += vlora.user(f"Is there a {query}?")
        answer = vlora.classify("match", head=head) if head else vlora.classify("match", ["yes", "no"])
        matched += vlora.assistant(answer)
    s["caption"], s["boxes"], s["match"] = captioned["caption"], grounded["boxes"], matched["match"]


def main() -> None:
    """Run over a folder, or over the photographs that ship with scikit-learn and scikit-image."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--images", type=Path, help="a folder of images instead of the built-in photographs")
    parser.add_argument("--query", default="cat", help="what to look for, in words")
    parser.add_argument("--expert", help="the adapter that decides on matches; by default the base model")
    parser.add_argument("--head", help="the expert's yes/no head")
    parser.add_argument("--limit", type=int, default=100, help="at most so many images")
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    files = sorted(options.images.iterdir()) if options.images else [one.path for one in all_photographs()]
    files = files[: options.limit]
    batch = [
        {"path": str(file), "query": options.query, "head": options.head, "expert": options.expert} for file in files
    ]
    with serving(options) as served:
        states = inspect.run_batch(batch, backend=served.backend, num_threads=8, progress_bar=True)
    found, failed = [], 0
    for file, state in zip(files, states, strict=True):
        if state.error():
            print(f"{file.name}: {state.error()}")
            failed += 1
            continue
        match = state.get("match", vlora.Label)
        found.append((match.probabilities.get("yes", 0.0), file, state))
    found.sort(key=lambda one: -one[0])
    options.out.mkdir(parents=True, exist_ok=True)
    pictures = []
    with (options.out / "retrieval.jsonl").open("w") as rows:
        for probability, file, state in found:
            boxes = state.get("boxes", vlora.Boxes)
            row = {"image": file.name, "query": options.query, "match": probability, "caption": state["caption"]}
            row["boxes"] = [[box.x0, box.y0, box.x1, box.y1] for box in boxes]
            rows.write(json.dumps(row) + "\n")
            print(f"{probability:5.2f}  {file.name:<24}{state['caption']!r}")
            text = f"{file.name}\nmatch {probability:.2f}\n{state['caption']}"
            pictures.append((boxes.draw(str(file)), text))
    if not pictures:
        raise SystemExit("no image could be analysed")
    contact_sheet(pictures).save(options.out / "retrieval.png")
    print(f"{len(found)} images, {failed} failed; see {options.out}/retrieval.jsonl and {options.out}/retrieval.png")


if __name__ == "__main__":
    main()
