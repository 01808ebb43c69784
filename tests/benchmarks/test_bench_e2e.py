"""The end-to-end harness without a server: bodies of a trace, sums over outcomes, figures from rows."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors import safe_open
from transformers import AutoConfig, AutoProcessor

from benchmarks.serving import systems
from benchmarks.serving.bench_e2e import figures, parse, plan_figures, requests_of
from benchmarks.serving.replay import Outcome, summarize
from benchmarks.serving.shape7b import (
    SHAPES,
    adapter_numbers,
    base_numbers,
    make_adapters,
    make_language_model,
    make_model,
)
from benchmarks.serving.systems import SYSTEMS, Deployment
from benchmarks.serving.traces import IMAGE_SIDE, IMAGE_TOKENS, RETRIEVAL, VIDEO, Arrival, Speaker, Workload, trace
from vlora_sgl.kernels.tiling_search import MODELS, projections
from vlora_sgl.models import tiny


@pytest.fixture(scope="module")
def speaker() -> Speaker:
    return Speaker(tiny.path())


def test_a_body_has_the_tokens_and_images_asked_for(speaker: Speaker) -> None:
    from transformers import AutoTokenizer

    body = speaker.body(Arrival(0.0, "a3", prompt=256, output=20), images=2)
    tokens = AutoTokenizer.from_pretrained(tiny.path()).encode(body["text"], add_special_tokens=False)
    # A placeholder stands for one image's tokens.
    assert len(tokens) + 2 * (IMAGE_TOKENS - 1) == 256
    assert len(set(body["image_data"])) == 2
    assert (body["lora_path"], body["sampling_params"]["max_new_tokens"]) == ("a3", 20)


def test_every_system_gets_the_same_trace(speaker: Speaker) -> None:
    load = Workload(rate=5.0, output=9, images=0)
    one, other = (requests_of(load, 20.0, Speaker(tiny.path(), 3), system, False) for system in ("cost", "csgmv"))
    assert one == other and len(one) > 20
    bare = requests_of(load, 20.0, Speaker(tiny.path(), 3), "off", False)
    assert {body["lora_path"] for _, body in bare} == {None}
    assert [(due, body["text"]) for due, body in bare] == [(due, body["text"]) for due, body in one]
    heads, stock = (requests_of(load, 20.0, Speaker(tiny.path(), 3), s, True) for s in ("cost", "csgmv"))
    assert {body["sampling_params"]["max_new_tokens"] for _, body in heads} == {1}
    assert stock == other


def test_workloads_are_what_they_say() -> None:
    rows = list(trace(Workload(**{**{f: getattr(RETRIEVAL, f) for f in RETRIEVAL.__slots__}, "rate": 50.0}), 100.0))
    assert sum(r.prompt for r in rows) / len(rows) == pytest.approx(256, rel=0.05)
    assert sum(r.output for r in rows) / len(rows) == pytest.approx(220, rel=0.05)
    rows = list(trace(Workload(**{**{f: getattr(VIDEO, f) for f in VIDEO.__slots__}, "rate": 50.0}), 100.0))
    assert {r.prompt for r in rows} == {6 * IMAGE_TOKENS + 32}
    assert all(3 <= r.output <= 16 for r in rows)


def test_latency_per_token_is_all_seconds_over_all_tokens() -> None:
    good = [
        Outcome(1.0, first=1.5, last=3.0, tokens=3, prompt=10, cached=5, gaps=[1.0, 0.5]),
        Outcome(2.0, first=2.1, last=2.1, tokens=1, prompt=10),
    ]
    row = summarize([*good, Outcome(3.0, error="503: no")])
    assert row["token_latency"] == pytest.approx((2.0 + 0.1) / 4)
    assert (row["requests"], row["failed"], row["first_error"]) == (2, 1, "503: no")
    assert row["cached_share"] == 0.25
    assert row["tokens_per_second"] == pytest.approx(4 / 3)
    assert summarize([Outcome(0.0, error="x")])["requests"] == 0


def row(system: str, latency: float, **more: Any) -> dict[str, Any]:
    cell = {"workload": "retrieval", "heads": False, "skew": 0.6, "rate": 8.0, "adapters": 8, "requests": 9}
    return {**cell, "system": system, "token_latency": latency, "mean_latency": 9 * latency, **more}


def test_figures_are_the_worst_cells() -> None:
    rows = [row("cost", 6.0), row("csgmv", 10.0), row("dlora", 8.0), row("unmerged", 6.6)]
    rows += [row("cost", 9.0, skew=0.1), row("csgmv", 10.0, skew=0.1)]
    bytes_of_30 = 30 * adapter_numbers(64) / base_numbers()
    assert 0.6 < bytes_of_30 < 0.8  # 30 adapters of 0.32 GB, over 14 GB
    times = [
        ("unmerged", 8, 8.0, 200.0),
        ("off", 0, 6.8, 180.0),
        ("cost", 1, 6.85, 180.0),
        ("unmerged", 2, 7.0, 180.0),
    ]
    rows += [
        {"workload": "uniform", "rank": 64, "rows": 32, "system": s, "adapters": n, "decode_step": d, "prefill": p}
        for s, n, d, p in times
    ]
    replayed = {
        "e2e.retrieval.skew60_vs_sglang": 0.6,
        "e2e.worst_vs_sglang": 0.9,
        "e2e.vs_dlora_policy": 0.75,
        "e2e.vs_punica_policy": 6 / 6.6,
        "e2e.vs_slora_policy": 6 / 6.6,
    }
    of_8_slots = {
        "e2e.uniform8.r64.decode_vs_off": 0.85,
        "e2e.uniform8.prefill_vs_off": 0.9,
        "e2e.one_adapter_vs_off": 6.8 / 6.85,
    }
    assert {name: value for name, value, _ in figures(rows)} == pytest.approx(replayed | of_8_slots)
    rows.append({**rows[-1], "adapters": 64, "decode_step": 7.7 + 6.8 * bytes_of_30})
    assert {name: value for name, value, _ in figures(rows)} == pytest.approx(replayed | {"e2e.flat_2_64": 1.1})


def test_command_lines_name_the_system(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path / "m", {"a0": tmp_path / "a0"}, 1, 64, 32, False, True, tmp_path)
    ours, stock, off = (deployment.command(name, 1234) for name in ("ours", "csgmv", "off"))
    assert "vlora_sgl.launch_server" in ours and f"a0={tmp_path}/a0" in ours
    assert "benchmarks.serving.stock" in stock and "--lora-backend" in stock
    assert "--enable-lora" not in off
    shared = {"--max-running-requests", "--load-format", "--chunked-prefill-size"}
    assert all(shared <= set(command) for command in (ours, stock, off))
    assert {system.server for system in SYSTEMS.values()} == {"ours", "csgmv", "triton", "off", "vllm"}


def test_a_model_that_sees_nothing_is_told_nothing_of_images(tmp_path: Path) -> None:
    blind = Deployment(tmp_path / "m", {}, 1, 64, 32, True, False, tmp_path)
    assert not any("multimodal" in flag or "mm-" in flag for flag in blind.flags("ours"))
    arrival = Arrival(0.0, "a0", prompt=2 * (IMAGE_TOKENS + 2) + 10, output=3)
    body = Speaker(tiny.path(), 0, spelled=50).body(arrival, 2)
    assert "image_data" not in body and "<|" not in body["text"]
    assert len(body["text"].split()) == 10 + 2 * 50


def test_the_language_model_of_llava_has_its_shape(tmp_path: Path) -> None:
    model = make_language_model(tmp_path / "model", tiny=False)
    config = AutoConfig.from_pretrained(model)
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (4096, 32, 11008)
    assert not list(model.glob("*.safetensors"))
    small = make_language_model(tmp_path / "small", tiny=True)
    adapters = make_adapters(tmp_path, small, ["a0", "a1"], 4)
    with safe_open(adapters["a1"] / "adapter_model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert "base_model.model.model.layers.2.mlp.down_proj.lora_B.weight" in names


@pytest.mark.parametrize(("shape", "infix"), [("llava-7b", "llava"), ("tiny-qwen3vl", "qwen3vl")])
@pytest.mark.parametrize("attention", ["triton", "default"])
def test_families_have_figures_of_their_own(shape: str, infix: str, attention: str) -> None:
    own = {"shape": shape, "attention": attention}
    rows = [row("cost", 6.0, **own), row("csgmv", 10.0, **own)]
    assert {name for name, *_ in figures(rows)} == {
        f"e2e.{infix}.retrieval.skew60_vs_sglang",
        f"e2e.{infix}.worst_vs_sglang",
    }


@pytest.mark.parametrize("shape, infix", [("7b", ""), ("tiny", ""), ("3b", "3b.")])
def test_what_users_run_has_figures_of_its_own(shape: str, infix: str) -> None:
    """With backends that the servers choose, and vLLM's server beside them."""
    own = {"shape": shape, "attention": "default", "ttft_p50": 0.05, "ttft_p99": 0.1, "tpot": 0.006}
    rows = [row("cost", 6.0, **own), row("csgmv", 10.0, **own), row("vllm", 12.0, words=256, **own)]
    video = {"workload": "video", "mean_latency": 50.0, "p99_latency": 90.0}
    rows += [row("cost", 1.0, **own, **{**video, "heads": True})]
    rows += [row("csgmv", 1.0, **own, **{**video, "mean_latency": 200.0, "p99_latency": 100.0})]
    rows += [row("cost", 1.0, **own, **{**video, "heads": True, "skew": 0.9})]
    rows += [row("csgmv", 1.0, **own, **{**video, "mean_latency": 100.0, "p99_latency": 10.0, "skew": 0.9})]
    assert {name: value for name, value, _ in figures(rows)} == pytest.approx(
        {
            f"default.e2e.{infix}retrieval_vs_sglang": 0.6,
            f"default.e2e.{infix}retrieval_vs_vllm": 0.5,
            f"default.e2e.{infix}video_heads_vs_sglang": 0.25,
            f"default.e2e.{infix}video_p99_vs_sglang": 0.9,
            f"default.e2e.{infix}worst_vs_sglang": 0.6,
        }
        | {
            f"default.e2e.{infix}retrieval_{what}.{system}": value
            for system in ("vlora", "sglang", "vllm")
            for what, value in (("ttft_ms", 50.0), ("ttft_p99_ms", 100.0), ("tpot_ms", 6.0))
        }
    )


@pytest.mark.parametrize("attention", ["default", "fa3", "triton"])
def test_backends_are_given_or_left_to_the_servers(
    attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systems, "on_gpu", lambda: True)
    made = Deployment(tmp_path / "m", {}, 1, 64, 32, False, True, tmp_path, attention=attention)
    for server in ("ours", "csgmv", "off"):
        command = made.command(server, 1234)
        given = {
            flag: value
            for flag, value in itertools.pairwise(command)
            if flag.endswith("-backend") and flag.startswith("--") and flag != "--lora-backend"
        }
        vision = {"triton": "triton_attn"}.get(attention, attention)
        wanted = {"attention": attention, "mm-attention": vision, "sampling": "pytorch"}
        chosen = {} if attention == "default" else {f"--{name}-backend": value for name, value in wanted.items()}
        assert given == chosen


@pytest.mark.parametrize("shape", SHAPES)
def test_models_have_the_sizes_of_their_shape(shape: str, tmp_path: Path) -> None:
    """As the configurations say, and as the tiles of the kernels have them."""
    sizes = SHAPES[shape]
    for path in (
        make_language_model(tmp_path / "language", False, shape),
        whole := make_model(tmp_path / "whole", False, shape),
    ):
        config = json.loads((path / "config.json").read_text())
        text = config.get("text_config", config)
        assert {name: text[name] for name in sizes.text} == sizes.text
        heads, small, hidden = text["num_attention_heads"], text["num_key_value_heads"], text["hidden_size"]
        assert MODELS[sizes.tiles] == projections(hidden, text["intermediate_size"], heads, small)
        assert text.get("head_dim", hidden // heads) * heads == hidden
        assert not list(path.rglob("*.safetensors")), "weights are random: there are no files of them"
    config = json.loads((whole / "config.json").read_text())
    tower = config.get("vision_config") or json.loads(Path(config["mm_vision_tower"], "config.json").read_text())
    assert {name: tower[name] for name in sizes.vision} == sizes.vision
    assert config.get("mm_hidden_size", tower["hidden_size"]) == tower["hidden_size"]
    assert tower.get("out_hidden_size", sizes.text["hidden_size"]) == sizes.text["hidden_size"]


@pytest.mark.parametrize(("shape", "tokens"), [("7b", 64), ("llava-7b", 576), ("qwen3vl-8b", 49)])
def test_an_image_has_as_many_tokens_as_its_model_gives_it(shape: str, tokens: int, tmp_path: Path) -> None:
    path = make_model(tmp_path, False, shape)
    processor = AutoProcessor.from_pretrained(path)
    image = Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE))
    given = processor(text=[SHAPES[shape].mark], images=[image], return_tensors="pt")
    mark = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert int((given["input_ids"] == mark).sum()) == tokens


def test_quick_is_one_cell() -> None:
    args = parse(["--quick"])
    assert (args.skews, len(args.rates), args.together) == ([0.6], 1, 2)


def test_figures_of_every_policy_compare_the_default_one_with_the_best_of_each_cell() -> None:
    ratios = {"cost": 1.0, "unmerged": 1.25, "dlora": 1.0, "vlora": 1.02, "merged": 3.0}
    rows = [
        {
            "system": system, "skew": skew, "rate": rate, "token_latency": ratio, "ttft": 2 * ratio, "tpot": ratio,
            "ttft_p99": 5.0 if system == "cost" else 4.0, "tpot_p99": 1.0, "cost_error": {"decode": 0.03},
        }
        for system, ratio in ratios.items()
        for skew in (0.6, 0.99)
        for rate in (8.0, 24.0)
    ]  # fmt: skip
    found = {name: value for name, value, _ in plan_figures(rows)}
    assert found["plan.mean_over_best"] == 1.0 and found["plan.p99_over_best"] == 1.25
    assert found["plan.skew99_over_unmerged"] == 0.8 and found["plan.table_error"] == 0.03
    mild = [row for row in rows if row["skew"] == 0.6]
    assert "plan.skew99_over_unmerged" not in {name for name, *_ in plan_figures(mild)}
