"""Video streams in time: a chunk a second of each, its action and its objects by heads, a second for each answer.

    python -m benchmarks.serving.bench_video --summary FILE        # 7B shape, 8 streams, five minutes; seven of a GPU
    python -m benchmarks.serving.bench_video --tiny --seconds 10 --summary FILE       # a check on a laptop

A chunk is six frames of 256 tokens for the action and one more for the objects (of the 30 that come each second);
every frame is new. Requests are of class ``realtime`` with a deadline of a second, counted by the server from their
arrival. The load is the share of the rate at which the same requests, 32 under way, saturate the server.

- ``video.missed_deadlines``: how many answers were late; the p50 and p99 of the answers, from the call, are printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.serving.bench_heads import HEAD, warm_up
from benchmarks.serving.client import Client, images, request
from benchmarks.serving.shape7b import build_engine, engine_options, make_adapters, make_model
from benchmarks.serving.simulate import quantile
from benchmarks.summary import record
from vlora_sgl.core import RequestParams, ServiceClass
from vlora_sgl.heads import ClassifyHead, DetectHead, save_heads

FRAMES = 6
FIND = "find"


def give_heads(adapter: Path, model: Path) -> None:
    """A head for 101 actions and one for two kinds of objects."""
    config = json.loads((model / "config.json").read_text())
    hidden = config.get("text_config", config)["hidden_size"]
    actions = ClassifyHead(HEAD, hidden, [f"class {number}" for number in range(101)])
    save_heads(adapter, [actions, DetectHead(FIND, hidden, ["person", "ball"], threshold=0.99)])


def measure(engine: Any, adapters: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """The rate that saturates the engine, then the streams."""
    client, fresh = Client(engine), images(16 if args.tiny else 256)
    asks = RequestParams(service=ServiceClass.REALTIME, deadline=args.deadline)

    def make(number: int) -> dict[str, Any]:
        """Actions and objects in turn, of one stream's adapter after the other's."""
        frames, head = ((FRAMES, HEAD), (1, FIND))[number % 2]
        adapter = adapters[number // 2 % len(adapters)]
        one = request(list(itertools.islice(fresh, frames)), adapter, 1, head)
        return {**one, "sampling_params": asks.added_to(one["sampling_params"])}

    warm_up(client, make, 4 if args.tiny else 32)
    rate = client.saturate(make, 4 if args.tiny else 32, 3 if args.tiny else 10)
    before = counted(engine)
    seconds = client.stream(make, 2 * args.streams, args.seconds)
    after = counted(engine)
    return {
        "streams": args.streams,
        "answers": len(seconds),
        "load": round(2 * args.streams / rate, 3),
        "p50": round(quantile(seconds, 0.5), 4),
        "p99": round(quantile(seconds, 0.99), 4),
        "worst": round(max(seconds), 4),
        "late_at_the_client": sum(one > args.deadline for one in seconds),
        **{kind: after[kind] - before[kind] for kind in ("met", "missed")},
    }


def counted(engine: Any) -> dict[str, int]:
    """Deadlines kept and missed so far."""
    return dict(engine.get_server_info()["internal_states"][0]["vlora"]["deadlines"]["realtime"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few hundred thousand parameters and 16-token images")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--deadline", type=float, default=1.0)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--summary", type=Path, required=True, help="file to append the figure to")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch) / "model", args.tiny)
        adapters = make_adapters(Path(scratch) / "adapters", model, [f"adapter{n}" for n in range(8)], args.rank)
        for path in adapters.values():
            give_heads(path, model)
        engine = build_engine(**engine_options(model, adapters, args.rank, args.tiny))
        try:
            row = measure(engine, list(adapters), args)
        finally:
            engine.shutdown()
    print(json.dumps(row), flush=True)
    record("video.missed_deadlines", row["missed"], "answers", False, summary=args.summary)


if __name__ == "__main__":
    main()
