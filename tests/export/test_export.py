"""An exported model answers as the original with PEFT does: the hot adapter, every cold one, and the base."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.support.lora_adapters import tiny_adapter, tiny_model
from tests.support.towers import ADAPTERS
from vlora_sgl.combined import parts
from vlora_sgl.errors import ConfigError
from vlora_sgl.export import run
from vlora_sgl.export.delta import compress, delta_modules
from vlora_sgl.export.merge import merge_shard
from vlora_sgl.export.run import ExportPlan, export
from vlora_sgl.export.trace import rank_choices, read_trace
from vlora_sgl.export.verify import ExportMismatchError, verify_export
from vlora_sgl.heads import save_heads
from vlora_sgl.lora.checkpoint import read_adapter
from vlora_sgl.lora.exported import adapter_options, read_exported
from vlora_sgl.lora.layout import BaseLayout

HOT = {
    "target_modules": r"(?!.*vision).*\blayers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|down|qkv|gate_up)_proj",
    "r": 4,
}
COLD: dict[str, dict[str, Any]] = {
    "narrow": {"target_modules": r"(?!.*vision).*\blayers\.[01]\.self_attn\.(q|v|qkv)_proj", "r": 3, "lora_alpha": 5},
    "mixed": {**HOT, "r": 6, "rank_pattern": {"o_proj": 2}, "use_rslora": True},
}
IDS = torch.tensor([[5, 9, 2, 77, 30, 11, 64, 3]])


def make_inputs(root: Path, family: str, dtype: torch.dtype) -> dict[str, Path]:
    tiny_model(family, dtype=dtype).save_pretrained(root / "model", max_shard_size="20KB")
    (root / "model" / "tokenizer.json").write_text("{}")
    for seed, (name, config) in enumerate({"hot": HOT, **COLD}.items(), start=1):
        tiny_adapter(tiny_model(family, dtype=dtype), root / name, seed=seed, strength=0.1, **config)
    return {name: root / name for name in ("hot", *COLD)}


def logits(model_dir: Path, family: str, adapter: Path | None, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    auto = AutoModelForImageTextToText if ("vl" in family or family == "llava") else AutoModelForCausalLM
    model: Any = auto.from_pretrained(model_dir, dtype=dtype)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).to(dtype)
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("exact_ranks", [False, True], ids=["padded", "exact"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava", "phi3"])
def test_hot_cold_and_base_give_the_original_logits(family: str, exact_ranks: bool, tmp_path: Path) -> None:
    adapters = make_inputs(tmp_path, family, torch.float32)
    out = tmp_path / "out"
    report = export(ExportPlan(tmp_path / "model", "hot", adapters, out, exact_ranks=exact_ranks), progress=False)
    assert 0 < report.verified <= 1
    expected = {name: logits(tmp_path / "model", family, path) for name, path in adapters.items()}
    expected["base"] = logits(tmp_path / "model", family, None)
    scale = expected["base"].abs().max()
    for one in expected:
        for other in expected:
            assert one == other or (expected[one] - expected[other]).abs().max() > 1e-2 * scale, (one, other)
    for name, want in expected.items():
        got = logits(out, family, None if name == "hot" else out / "adapters" / name)
        # Rounding each merged weight to float32 once, through three layers.
        assert (got - want).abs().max() < 1e-5 * scale, name


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_adapters_of_the_vision_tower_are_merged_and_taken_out(family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path / "model", max_shard_size="20KB")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    kinds = {"hot": "whole", "tower": "tower", "projector": "projector", "language": "language"}
    for seed, (name, kind) in enumerate(kinds.items(), start=1):
        tiny_adapter(tiny_model(family), tmp_path / name, seed=seed, strength=0.1, **ADAPTERS[kind])
    adapters, out = {name: tmp_path / name for name in kinds}, tmp_path / "out"
    export(ExportPlan(tmp_path / "model", "hot", adapters, out), progress=False)
    expected = {name: shown(tmp_path / "model", path) for name, path in adapters.items()}
    expected["base"] = shown(tmp_path / "model", None)
    for one, other in combinations(expected, 2):
        assert (expected[one] - expected[other]).abs().max() > 1e-2 * expected["base"].abs().max(), (one, other)
    for name, want in expected.items():
        got = shown(out, None if name == "hot" else out / "adapters" / name)
        assert (got - want).abs().max() < 1e-5 * want.abs().max(), name
    identity = load_file(out / "adapters" / "hot" / "adapter_model.safetensors")
    assert not any("visual" in key for key in identity), "what changes nothing shares its images with all"


def shown(model_dir: Path, adapter: Path | None) -> torch.Tensor:
    """Logits of a prompt with a picture, in float64."""
    model: Any = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float64)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).to(torch.float64)
    ids = torch.tensor([[5, 9, 102, *[100] * 4, 103, 30, 11]])  # four image tokens, of 4 patches each
    pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seen = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=ids, mm_token_type_ids=(ids == 100).int(), **seen).logits
    return logits


def test_a_half_precision_base_is_rounded_once(tmp_path: Path) -> None:
    adapters = make_inputs(tmp_path, "qwen2", torch.bfloat16)
    export(ExportPlan(tmp_path / "model", "hot", adapters, tmp_path / "out"), progress=False)
    hot = read_adapter(tmp_path / "hot", BaseLayout.from_directory(tmp_path / "model")).modules
    changed = 0
    for shard in (tmp_path / "model").glob("*.safetensors"):
        before, after = load_file(shard), load_file(tmp_path / "out" / shard.name)
        assert before.keys() == after.keys()
        for key, weight in before.items():
            name = key.removeprefix("model.").removesuffix(".weight")
            want = (weight.float() + hot[name].delta(torch.float32)).bfloat16() if name in hot else weight
            ulp = torch.finfo(torch.bfloat16).eps * want.float().abs().max()
            assert (after[key].float() - want.float()).abs().max() <= (ulp if name in hot else 0), key
            changed += int(name in hot and not torch.equal(after[key], weight))
    assert changed == len(hot)


def test_delta_adapters_load_where_q_k_and_v_must_come_together(tmp_path: Path) -> None:
    """Stock SGLang stacks q, k, v and gate, up, and takes one rank for all modules."""
    hot, cold = ({"target_modules": r".*layers\.\d+\.self_attn\.q_proj", "r": r} for r in (2, 3))
    tiny_model("qwen2").save_pretrained(tmp_path / "model")
    for seed, (name, config) in enumerate((("hot", hot), ("cold", cold))):
        tiny_adapter(tiny_model("qwen2"), tmp_path / name, seed=seed, **config)
    plan = ExportPlan(tmp_path / "model", "hot", {n: tmp_path / n for n in ("hot", "cold")}, tmp_path / "out")
    assert export(plan, progress=False).ranks == {"cold": 5, "base": 2, "hot": 1}
    tensors = load_file(tmp_path / "out" / "adapters" / "cold" / "adapter_model.safetensors")
    assert {key.split(".")[-3] for key in tensors} == {"q_proj", "k_proj", "v_proj"}
    assert {t.shape[0] for k, t in tensors.items() if "lora_A" in k} == {5}


def test_delta_adapters_keep_to_what_vllm_reads(tmp_path: Path) -> None:
    """What vllm/lora/{peft_helper,utils}.py ask: one rank and one scale ``lora_alpha / r`` (no rank_pattern is
    known), no modules_to_save, no bias, and keys ``base_model.model.PATH.lora_{A,B}.weight``."""
    adapters = make_inputs(tmp_path, "qwen2_5_vl", torch.float32)
    export(ExportPlan(tmp_path / "model", "hot", adapters, tmp_path / "out"), progress=False)
    for name in ("hot", *COLD, "base"):
        directory = tmp_path / "out" / "adapters" / name
        config = json.loads((directory / "adapter_config.json").read_text())
        assert not config["modules_to_save"] and not config["use_dora"] and config["bias"] == "none"
        assert config["lora_alpha"] == config["r"] and not config["rank_pattern"] and not config["use_rslora"]
        tensors = load_file(directory / "adapter_model.safetensors")
        names = {re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", key) for key in tensors}
        assert None not in names
        assert {t.shape["lora_A" not in k] for k, t in tensors.items()} == {config["r"]}
        targets = {match[1].rpartition(".")[2] for match in names if match}
        assert targets == {target.rpartition(".")[2] for target in config["target_modules"]}


def test_a_stopped_bake_goes_on_and_another_one_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = make_inputs(tmp_path, "qwen2", torch.float32)
    plan = ExportPlan(tmp_path / "model", "hot", adapters, tmp_path / "out")
    written: list[str] = []

    def stop_after_two(source: Path, target: Path, *rest: Any) -> Any:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(source.name)
        return merge_shard(source, target, *rest)

    monkeypatch.setattr(run, "merge_shard", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        export(plan, progress=False)
    done = {name: (plan.out / name).stat().st_mtime_ns for name in written}
    monkeypatch.setattr(run, "merge_shard", merge_shard)
    with pytest.raises(ConfigError, match="is an unfinished export"):
        read_exported(plan.out)
    with pytest.raises(ConfigError, match="another unfinished export"):
        export(ExportPlan(plan.model, "mixed", adapters, plan.out), progress=False)
    export(plan, progress=False)
    assert {name: (plan.out / name).stat().st_mtime_ns for name in written} == done, "finished shards are kept"
    assert read_exported(plan.out) is not None and read_exported(plan.model) is None
    with pytest.raises(ConfigError, match="not empty"):
        export(plan, progress=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verification_notices_wrong_weights_and_deltas(dtype: torch.dtype, tmp_path: Path) -> None:
    """A weight that is not the sum, an adapter that was not merged, a delta that lacks its half."""
    adapters = make_inputs(tmp_path, "qwen2", dtype)
    plan = ExportPlan(tmp_path / "model", "hot", adapters, tmp_path / "out", samples=1000)
    assert export(plan, progress=False).verified < 1
    layout = BaseLayout.from_directory(plan.model)
    hot, cold = (read_adapter(adapters[name], layout).modules for name in ("hot", "mixed"))
    delta = read_adapter(plan.out / "adapters" / "mixed", layout).modules
    wrong: list[tuple[Path, Any, Any]] = [
        (plan.model, hot, {}),  # the base, not merged at all
        (plan.out, cold, cold),  # a plain adapter in place of its delta
        (plan.out, {}, delta),  # one adapter's delta for another's
    ]
    for out, own, changed in wrong:
        with pytest.raises(ExportMismatchError, match="times what rounding"):
            verify_export(plan.model, out, layout, own, changed, 1000)
    for shard in plan.out.glob("*.safetensors"):
        tensors = load_file(shard)
        save_file({k: t * (1 + 8 * torch.finfo(dtype).eps) for k, t in tensors.items()}, shard)
    with pytest.raises(ExportMismatchError, match="the merged adapter: off by"):
        verify_export(plan.model, plan.out, layout, hot, {}, 1000)


def test_compressed_deltas_are_held_to_what_was_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = make_inputs(tmp_path, "qwen2", torch.bfloat16)
    report = export(ExportPlan(tmp_path / "model", "hot", adapters, tmp_path / "out", compress=5), progress=False)
    error, worst = report.errors["mixed"]
    assert 0 < error <= worst < 1 and report.verified < 1
    assert report.errors["base"][0] < 1e-2, "rank 4 fits into 5"

    def careless(modules: Any, rank: int) -> Any:
        """Says it dropped as much as the best approximation does, and dropped more."""
        better, smaller = compress(modules, rank), compress(modules, rank - 3)
        return replace(better, modules=smaller.modules)

    monkeypatch.setattr(run, "compress", careless)
    with pytest.raises(ExportMismatchError, match=r"(narrow|mixed): off by"):
        export(ExportPlan(tmp_path / "model", "hot", adapters, tmp_path / "other", compress=5), progress=False)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_half_precision_logits_differ_by_rounding_only(family: str, tmp_path: Path) -> None:
    """bfloat16 base: every answer of the exported model is as near to float64 as PEFT's own bfloat16 merge."""
    adapters = make_inputs(tmp_path, family, torch.bfloat16)
    out = tmp_path / "out"
    export(ExportPlan(tmp_path / "model", "hot", adapters, out), progress=False)
    truth = {name: logits(tmp_path / "model", family, path) for name, path in adapters.items()}
    truth["base"] = logits(tmp_path / "model", family, None)
    for name, want in truth.items():
        exported = None if name == "hot" else out / "adapters" / name
        original = None if name == "base" else adapters[name]
        # In float64 what is left is the one rounding of the merged weights; bfloat16 adds the arithmetic's own.
        scale, eps = want.abs().max(), torch.finfo(torch.bfloat16).eps
        assert (logits(out, family, exported) - want).abs().max() < 2 * eps * scale, name
        own = (logits(tmp_path / "model", family, original, torch.bfloat16) - want).abs().max()
        ours = (logits(out, family, exported, torch.bfloat16) - want).abs().max()
        assert ours < 4 * own, (name, float(ours / scale), float(own / scale))
        other = truth["base" if name != "base" else "hot"]
        assert (other - want).abs().max() > 10 * ours, "the adapters must matter more than rounding does"


def test_the_manifest_says_who_answers_for_whom(tmp_path: Path) -> None:
    adapters = make_inputs(tmp_path, "qwen2", torch.float32)
    export(ExportPlan(tmp_path / "model", "hot", adapters, tmp_path / "out"), progress=False)
    exported = read_exported(tmp_path / "out")
    assert exported is not None and set(exported.adapters) == {"hot", "narrow", "mixed", "base"}
    assert [exported.serving(name) for name in ("hot", "mixed", None, "unknown")] == [None, "mixed", "base", "unknown"]
    assert exported.serving("hot", head=True) == "hot"
    sums = {
        '{"hot": 0.5}': {"base": 0.5},
        '{"mixed": 0.5, "hot": 0.5}': {"mixed": 0.5},
        '{"mixed": 2.0, "other": -0.5, "hot": 0.25}': {"mixed": 2.0, "other": -0.5, "base": -0.75},
        '{"mixed": 2.0}': {"mixed": 2.0, "base": -1.0},
    }
    for asked, wanted in sums.items():
        assert dict(parts(str(exported.serving(asked)))) == wanted
    options = adapter_options(tmp_path / "out", given=False)
    assert options["enable_lora"] and f"base={tmp_path / 'out' / 'adapters' / 'base'}" in options["lora_paths"]
    assert adapter_options(tmp_path / "out", given=True) == adapter_options("some/name-on-a-hub", given=False) == {}
    # The merged adapter's name, for engines that know nothing of manifests: an adapter that changes nothing.
    assert torch.equal(
        logits(tmp_path / "out", "qwen2", tmp_path / "out" / "adapters" / "hot"),
        logits(tmp_path / "out", "qwen2", None),
    )


def test_adapters_with_an_invocation_start_are_refused(tmp_path: Path) -> None:
    adapters = make_inputs(tmp_path, "qwen2", torch.float32)
    save_heads(adapters["narrow"], [], invocation="after_image")
    with pytest.raises(ConfigError, match="narrow starts at 'after_image'"):
        export(ExportPlan(tmp_path / "model", "hot", adapters, tmp_path / "out"), progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("which", ["hot", "narrow"])
@pytest.mark.parametrize(
    ("options", "form"),
    [
        ({"use_dora": True}, "DoRA's magnitudes"),
        ({"lora_bias": True}, "biases of B"),
        ({"bias": "all"}, "trained bias"),
    ],
)
def test_what_is_no_low_rank_update_is_refused(options: Any, form: str, which: str, tmp_path: Path) -> None:
    adapters = make_inputs(tmp_path, "qwen2", torch.float32)
    tiny_adapter(tiny_model("qwen2"), adapters[which], target_modules=["q_proj"], **options)
    with pytest.raises(ConfigError, match=f"{which} has {form}.*serve it on the original base"):
        export(ExportPlan(tmp_path / "model", "hot", adapters, tmp_path / "out"), progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "bitsandbytes"])
def test_quantised_bases_are_refused_by_name(method: str, tmp_path: Path) -> None:
    adapters = make_inputs(tmp_path, "qwen2", torch.float32)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": method}}))
    with pytest.raises(ConfigError, match=f"quantised with '{method}'"):
        export(ExportPlan(tmp_path / "model", "hot", adapters, tmp_path / "out"), progress=False)
    assert not (tmp_path / "out").exists()


def test_heads_are_carried_over(tmp_path: Path) -> None:
    adapters = make_inputs(tmp_path, "qwen2", torch.float32)
    for name in ("hot", "mixed"):
        (tmp_path / name / "vlora_adapter.json").write_text(json.dumps({"format": 1, "prompt": name}))
        save_file({"digit.weight": torch.ones(2, 32)}, tmp_path / name / "vlora_heads.safetensors")
    export(ExportPlan(tmp_path / "model", "hot", adapters, tmp_path / "out"), progress=False)
    for name in ("hot", "mixed"):
        for file in ("vlora_adapter.json", "vlora_heads.safetensors"):
            assert (tmp_path / "out" / "adapters" / name / file).read_bytes() == (tmp_path / name / file).read_bytes()


def test_compression_is_the_best_of_its_rank_and_tells_its_error(tmp_path: Path) -> None:
    tiny_model("qwen2").save_pretrained(tmp_path / "model")
    for seed, name in enumerate(("hot", "cold")):
        tiny_adapter(tiny_model("qwen2"), tmp_path / name, seed=seed, **HOT)
    layout = BaseLayout.from_directory(tmp_path / "model")
    hot, cold = (read_adapter(tmp_path / name, layout).modules for name in ("hot", "cold"))
    delta = delta_modules(cold, hot)
    assert compress(delta, 8).error < 1e-6
    smaller = compress(delta, 3)
    lost = whole = 0.0
    for name, pair in delta.items():
        singular = torch.linalg.svdvals(pair.delta())
        difference = torch.linalg.matrix_norm(pair.delta() - smaller.modules[name].delta()) ** 2
        torch.testing.assert_close(difference, singular[3:].square().sum(), rtol=1e-4, atol=1e-8)
        lost, whole = lost + float(difference), whole + float(singular.square().sum())
    assert smaller.error == pytest.approx((lost / whole) ** 0.5, rel=1e-4) and smaller.error > 0.1


def test_the_trace_decides_what_pays(tmp_path: Path) -> None:
    trace = tmp_path / "requests.jsonl"
    rows = [{"adapter": "a", "prompt_tokens": 90}, {"model": "m:b", "output_tokens": 8}, {"lora_path": None}]
    trace.write_text("\n".join(map(json.dumps, rows)))
    tokens = read_trace(trace)
    assert tokens == {"a": 90, "b": 8, None: 1}
    ranks = {"a": 16, "b": 16}
    assert [c.hot for c in rank_choices(tokens, ranks)] == ["a", None, "b"]
    assert rank_choices({None: 99, "a": 1}, ranks)[0].hot is None, "merging costs the base's requests"
    with pytest.raises(ConfigError, match="not given: c"):
        rank_choices({"c": 1}, ranks)
    trace.write_text("nonsense")
    with pytest.raises(ConfigError, match=r"requests.jsonl:1"):
        read_trace(trace)


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_inputs(tmp_path, "qwen2", torch.float32)
    command = [sys.executable, "-m", "vlora_sgl.export", "--model", "model", "--cold", "renamed=mixed", "hot", "--out"]
    (tmp_path / "trace.jsonl").write_text('{"adapter": "hot"}\n{"adapter": "renamed"}\n{"adapter": "hot"}')
    options = [*command, "out", "--trace", "trace.jsonl", "--compress", "4"]
    done = subprocess.run(options, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "hot merged" in done.stdout and "adapters/renamed: rank 4, relative error" in done.stdout
    monkeypatch.chdir(tmp_path)
    assert run.main([*command[3:], "again", "--trace", "trace.jsonl", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["hot"] == "hot" and "expected extra cost" in told.err
    shutil.rmtree(tmp_path / "hot")
    monkeypatch.setattr(sys, "argv", ["export", *command[3:], "more", "--hot", "hot"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("vlora_sgl.export", run_name="__main__")
    refused = capsys.readouterr().err
    assert ended.value.code == 1 and "refused: " in refused and "adapter_config.json" in refused
