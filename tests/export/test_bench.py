"""The benchmark's traffic."""

from __future__ import annotations

from benchmarks.serving.bench_export import COLD, HOT, arrivals, parse, ratios


def test_both_sides_get_the_same_requests_under_their_own_names() -> None:
    args = parse(["--summary", "none", "--requests", "50"])
    stock, exported = (arrivals(0.8, side, args, seed=3) for side in (False, True))
    assert [at for at, _ in stock] == [at for at, _ in exported] == sorted(at for at, _ in stock)
    assert [r["input_ids"] for _, r in stock] == [r["input_ids"] for _, r in exported]
    asked = [(s["lora_path"], b["lora_path"]) for (_, s), (_, b) in zip(stock, exported, strict=True)]
    assert asked.count((HOT, None)) == 40 and {pair for pair in asked if pair[0] != HOT} == {(c, c) for c in COLD}
    assert all(len(r["input_ids"]) == 400 for _, r in stock)


def test_ratios_pair_runs_of_the_same_repeat() -> None:
    rows = [
        {"engine": engine, "share": 1.0, "latency": value}
        for engine, value in (("stock", 2.0), ("exported", 1.0), ("exported", 3.0), ("stock", 4.0), ("ours", 9.0))
    ]
    assert ratios(rows, "exported", 1.0) == [0.5, 0.75]
