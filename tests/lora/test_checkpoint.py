"""Every PEFT layout reads into the update PEFT itself applies, or is refused with a message that names the fault."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file

from tests.support.lora_adapters import FAMILIES, TEXT, tiny_adapter, tiny_config, tiny_model
from vlora_sgl.errors import AdapterError
from vlora_sgl.lora.checkpoint import AdapterWeights, read_adapter, weight_files
from vlora_sgl.lora.layout import BaseLayout, canonical_name, is_tower
from vlora_sgl.lora.weight_files import read_tensors

WEIGHTS = "adapter_model.safetensors"
LANGUAGE = r".*\blayers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj"
NOT_TOWERS = r".*(visual|vision_tower|vision_model|multi_modal_projector).*"


def layout_of(family: str) -> BaseLayout:
    return BaseLayout.from_config(tiny_config(family))


def peft_deltas(peft: PeftModel, layout: BaseLayout) -> dict[str, torch.Tensor]:
    """``s B A`` of every adapted module by PEFT's ``get_delta_weight`` in float64, split into parts as ours are."""
    deltas: dict[str, torch.Tensor] = {}
    for path, module in peft.double().named_modules():
        if isinstance(module, LoraLayer) and "default" in module.lora_A:
            name = canonical_name(path.replace(".base_layer", ""))
            assert name is not None
            row, delta = 0, module.get_delta_weight("default")
            if delta.ndim == 3:  # of all experts
                name, delta = f"{name}.{module.parameter_name}", delta.flatten(0, 1)
            for part in layout.parts_of(name):
                deltas[part] = delta[row : row + layout.shapes[part][0]]
                row += layout.shapes[part][0]
    return deltas


def assert_equals_peft(weights: AdapterWeights, peft: PeftModel, layout: BaseLayout) -> None:
    expected = peft_deltas(peft, layout)
    assert expected and set(weights.modules) == set(expected)
    for name, delta in expected.items():
        assert delta.abs().max() > 0, f"{name}: this case would not notice a missing update"
        torch.testing.assert_close(weights.modules[name].delta(), delta, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reads_as_peft_applies_it(family: str, tmp_path: Path) -> None:
    layout = layout_of(family)
    targets: dict[str, Any] = {"target_modules": "all-linear"}
    if "moe" in family:  # all-linear would be the router, too
        fused = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        targets = {"target_modules": ["q_proj", "o_proj"], "target_parameters": fused}
    peft = tiny_adapter(tiny_model(family), tmp_path, exclude_modules=NOT_TOWERS, lora_alpha=12, **targets)
    weights = read_adapter(tmp_path, layout)
    assert_equals_peft(weights, peft, layout)
    assert weights.report.tensors == len(load_file(tmp_path / WEIGHTS))


FORMS: dict[str, dict[str, Any]] = {
    "q_only": {"target_modules": ["q_proj"]},
    "q_v": {"target_modules": ["q_proj", "v_proj"]},
    "k_v": {"target_modules": ["k_proj", "v_proj"]},
    "q_k": {"target_modules": ["q_proj", "k_proj"]},
    "down_only": {"target_modules": ["down_proj"]},
    "up_only": {"target_modules": ["up_proj"]},
    "regex": {"target_modules": LANGUAGE},
    "layers_0_1": {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": [0, 1]},
    "excluded": {"target_modules": "all-linear", "exclude_modules": r".*\.layers\.1\..*"},
    "full_paths": {"target_modules": ["model.layers.2.mlp.up_proj"]},
    "rslora": {"target_modules": ["q_proj", "v_proj"], "use_rslora": True, "lora_alpha": 32},
    "rank_pattern": {"target_modules": LANGUAGE, "rank_pattern": {"layers.1.self_attn.q_proj": 2, "down_proj": 7}},
    "alpha_pattern": {"target_modules": LANGUAGE, "alpha_pattern": {r".*layers.0.*": 3, "v_proj": 40}},
    "patterns_rslora": {
        "target_modules": LANGUAGE,
        "rank_pattern": {"q_proj": 1},
        "alpha_pattern": {"q_proj": 5},
        "use_rslora": True,
    },
    "lm_head_embed": {"target_modules": ["lm_head", "q_proj"]},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_targets_ranks_and_scales(form: str, tmp_path: Path) -> None:
    layout = layout_of("qwen2")
    peft = tiny_adapter(tiny_model("qwen2"), tmp_path, **FORMS[form])
    assert_equals_peft(read_adapter(tmp_path, layout), peft, layout)


MORE_THAN_LORA: dict[str, tuple[str, dict[str, Any], str]] = {
    "dora": ("llama", {"use_dora": True}, "DoRA"),
    "dora_of_stacked": ("phi3", {"use_dora": True, "target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}, "DoRA"),
    "dora_vl": ("qwen2_5_vl", {"use_dora": True}, "DoRA"),
    "dora_with_patterns": (
        "qwen2",
        {"use_dora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}, "use_rslora": True},
        "DoRA",
    ),
    "lora_bias": ("llama", {"lora_bias": True}, "lora_bias"),
    "lora_bias_vl": ("qwen2_5_vl", {"lora_bias": True, "alpha_pattern": {"q_proj": 3}}, "lora_bias"),
    "bias_of_its_modules": ("qwen2_5_vl", {"bias": "lora_only"}, "bias:"),
    "every_bias": ("qwen2", {"bias": "all", "target_modules": ["q_proj", "up_proj"]}, "bias:"),
    "dora_and_biases": ("qwen2", {"bias": "lora_only", "use_dora": True}, "bias:"),
}


@pytest.mark.parametrize("form", MORE_THAN_LORA)
def test_what_is_more_than_lora_reads_as_peft_applies_it(form: str, tmp_path: Path) -> None:
    """Every linear's output in float64, by the formula that the engine serves."""
    family, options, note = MORE_THAN_LORA[form]
    base = tiny_model(family)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    layout = layout_of(family)
    peft = tiny_adapter(base, tmp_path, **{"target_modules": LANGUAGE, **options}).double()
    weights = read_adapter(tmp_path, layout)
    assert weights.form is not None and any(text.startswith(note) for text in weights.report.notes)
    seen = 0
    for path, module in peft.base_model.model.named_modules():
        name = canonical_name(path)
        if name is None or layout.expected(name) is None or not hasattr(module, "in_features"):
            continue
        x = torch.randn(3, module.in_features, dtype=torch.float64)
        linear = getattr(module, "base_layer", module)
        torch.testing.assert_close(by_formula(x, weights, layout, name, linear), module(x))
        seen += 1
    assert seen == len(layout.paths) - 1, "every linear, and not the embedding"
    again = dict(load_file(tmp_path / WEIGHTS))
    key = next(k for k in again if "magnitude" in k or k.endswith("bias"))
    again[key] = again[key] * 2
    save_file(again, tmp_path / WEIGHTS)
    assert read_adapter(tmp_path, layout).report.digest != weights.report.digest


def by_formula(x: torch.Tensor, weights: AdapterWeights, layout: BaseLayout, name: str, linear: Any) -> torch.Tensor:
    """``g (x W^T + s x A^T B^T) + b``, ``g = m / |W + s B A|``."""
    parts = layout.parts_of(name)
    sizes = [layout.shapes[part][0] for part in parts]
    biases = [None] * len(parts) if linear.bias is None else linear.bias.split(sizes)
    outputs = []
    for part, total, bias in zip(parts, linear.weight.split(sizes), biases, strict=True):
        pair, bias = weights.modules.get(part), weights.biases.get(part, bias)
        total = total if pair is None else total + pair.delta()
        y = x @ total.T
        if pair is not None and pair.magnitude is not None:
            y = y * pair.magnitude.double() / total.norm(dim=1)
        if pair is not None and pair.bias is not None:
            y = y + pair.scale * pair.bias.double()
        outputs.append(y if bias is None else y + bias.double())
    return torch.cat(outputs, dim=-1)


def test_embedding_factors_read_as_a_linear_layers(tmp_path: Path) -> None:
    peft = tiny_adapter(tiny_model("llama"), tmp_path, target_modules=["embed_tokens"])
    weights = read_adapter(tmp_path, layout_of("llama"))
    expected = peft.double().base_model.model.model.embed_tokens.get_delta_weight("default").T
    torch.testing.assert_close(weights.modules["embed_tokens"].delta(), expected)
    assert any("frozen" in note for note in weights.report.notes)


def test_rslora_scale_is_alpha_over_the_root_of_the_rank(tmp_path: Path) -> None:
    tiny_adapter(tiny_model("llama"), tmp_path, target_modules=["q_proj"], r=16, lora_alpha=32, use_rslora=True)
    assert set(read_adapter(tmp_path).report.scales) == {8.0}


PREFIXES = [
    "base_model.model.model.",
    "base_model.model.model.language_model.",
    "base_model.model.language_model.model.",
    "base_model.model.model.language_model.model.",
    "base_model.model.",
    "base_model.model.thinker.model.",
    "model.",
    "",
]


@pytest.mark.parametrize("prefix", PREFIXES, ids=repr)
def test_every_key_prefix_in_use_means_the_same_adapter(prefix: str, tmp_path: Path) -> None:
    layout = layout_of("qwen2_5_vl")
    config = {"rank_pattern": {r"layers.1.self_attn.q_proj": 2}, "target_modules": LANGUAGE}
    peft = tiny_adapter(tiny_model("qwen2_5_vl"), tmp_path, **config)
    original = read_adapter(tmp_path, layout).report
    tensors = load_file(tmp_path / WEIGHTS)
    save_file({prefix + key[key.index("layers.") :]: t for key, t in tensors.items()}, tmp_path / WEIGHTS)
    renamed = read_adapter(tmp_path, layout)
    assert_equals_peft(renamed, peft, layout)
    assert renamed.report.prefixes == (prefix.rstrip("."),)
    assert renamed.report.digest == original.digest


WRAPPED = {
    "compiled": lambda key: f"_orig_mod.{key}",
    "compiled_inside": lambda key: key.replace("model.language_model", "model._orig_mod.language_model"),
    "fsdp_layers": lambda key: key.replace(".self_attn", "._fsdp_wrapped_module.self_attn"),
    "checkpointed": lambda key: key.replace(".mlp", "._checkpoint_wrapped_module.mlp"),
    "fsdp_linears": lambda key: key.replace(".lora_", "._fsdp_wrapped_module.lora_"),
    "all": lambda key: f"_orig_mod.{key.replace('.', '._fsdp_wrapped_module.')}",
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_wrappers_that_trainers_leave_in_keys_mean_nothing(wrapper: str, tmp_path: Path) -> None:
    layout = layout_of("qwen2_5_vl")
    config = {"rank_pattern": {r"layers.1.self_attn.q_proj": 2}, "target_modules": LANGUAGE}
    peft = tiny_adapter(tiny_model("qwen2_5_vl"), tmp_path, **config)
    original = read_adapter(tmp_path, layout).report
    tensors = load_file(tmp_path / WEIGHTS)
    renamed = {WRAPPED[wrapper](key): t for key, t in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, tmp_path / WEIGHTS)
    found = read_adapter(tmp_path, layout)
    assert_equals_peft(found, peft, layout)
    assert found.report == original
    again = next(key for key in tensors if WRAPPED[wrapper](key) != key)
    save_file({**renamed, again: tensors[again].clone()}, tmp_path / WEIGHTS)
    with pytest.raises(AdapterError, match="a second tensor"):
        read_adapter(tmp_path, layout)


def test_a_talker_is_not_a_thinker(tmp_path: Path) -> None:
    tiny_adapter(tiny_model("qwen2"), tmp_path, target_modules=["q_proj"])
    tensors = load_file(tmp_path / WEIGHTS)
    save_file({k.replace("model.model.", "model.talker.model."): t for k, t in tensors.items()}, tmp_path / WEIGHTS)
    with pytest.raises(AdapterError, match=r"fit no module.*talker"):
        read_adapter(tmp_path)


def test_a_stacked_adapter_splits_over_a_model_that_keeps_projections_apart(tmp_path: Path) -> None:
    layout = layout_of("llama")
    peft = tiny_adapter(tiny_model("phi3"), tmp_path, target_modules=["qkv_proj", "gate_up_proj"])
    assert_equals_peft(read_adapter(tmp_path, layout), peft, layout)


def test_shards_read_as_one_file(tmp_path: Path) -> None:
    tiny_adapter(tiny_model("llama"), tmp_path, target_modules=LANGUAGE)
    whole = read_adapter(tmp_path).report
    tensors = load_file(tmp_path / WEIGHTS)
    (tmp_path / WEIGHTS).unlink()
    shards = {f"adapter_model-0000{i}-of-00002.safetensors": sorted(tensors)[i::2] for i in (0, 1)}
    for name, keys in shards.items():
        save_file({k: tensors[k] for k in keys}, tmp_path / name)
    assert read_adapter(tmp_path).report.digest == whole.digest, "numbered shards without an index"
    index = {"weight_map": {k: name for name, keys in shards.items() for k in keys}}
    (tmp_path / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    assert read_adapter(tmp_path).report == whole
    (tmp_path / next(iter(shards))).unlink()
    with pytest.raises(AdapterError, match=r"00000-of-00002.*missing"):
        read_adapter(tmp_path)


def test_the_digest_follows_content_and_scale(tmp_path: Path) -> None:
    digests = set()
    for i, (seed, alpha) in enumerate([(1, 8), (2, 8), (1, 9)]):
        tiny_adapter(tiny_model("llama"), tmp_path / str(i), seed=seed, target_modules=["q_proj"], lora_alpha=alpha)
        digests.add(read_adapter(tmp_path / str(i)).report.digest)
    assert len(digests) == 3


@pytest.mark.parametrize("labels", [3, 5])
def test_a_saved_classification_head_comes_back_whole(labels: int, tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    model = Qwen2ForSequenceClassification(Qwen2Config(**TEXT, num_labels=labels))
    peft = tiny_adapter(model, tmp_path, target_modules=["q_proj"], task_type="SEQ_CLS")
    weights = read_adapter(tmp_path, layout_of("qwen2"))
    torch.testing.assert_close(
        weights.saved["score.weight"], peft.base_model.model.score.modules_to_save["default"].weight
    )
    assert weights.report.heads == {"score.weight": (labels, TEXT["hidden_size"])}


def rewrite(directory: Path, **options: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **options}))


def retensor(directory: Path, **changes: Any) -> None:
    """Applies ``change(tensors)`` to the adapter's tensor table."""
    tensors = load_file(directory / WEIGHTS)
    changes["change"](tensors)
    save_file({k: t.contiguous() for k, t in tensors.items()}, directory / WEIGHTS)


def first(tensors: dict[str, torch.Tensor], side: str) -> str:
    return next(k for k in sorted(tensors) if f"lora_{side}" in k)


MAGNITUDE, ONES = "lora_magnitude_vector", torch.ones(32)

TOWER_NAMES = {
    "llava": {
        "model.vision_tower.encoder.layers.0.self_attn.q_proj": (
            "base_model.model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj",
            "model.vision_tower.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj",
        ),
        "model.vision_tower.encoder.layers.1.self_attn.out_proj": ("vision_tower.layers.1.self_attn.proj",),
        "model.vision_tower.encoder.layers.1.mlp.fc2": ("vision_tower.vision_model.encoder.layers.1.mlp.fc2",),
        "model.multi_modal_projector.linear_1": ("model.mm_projector.0", "base_model.model.mm_projector.0"),
        "model.multi_modal_projector.linear_2": ("model.mm_projector.2",),
    },
    "internvl": {
        "model.vision_tower.encoder.layer.1.attention.q_proj": ("vision_tower.encoder.layer.1.attention.q_proj",),
        "model.vision_tower.encoder.layer.1.attention.projection_layer": (
            "vision_model.encoder.layers.1.attn.proj",
            "vision_model.encoder.layers.1.attn.attn.proj",
        ),
        "model.vision_tower.encoder.layer.0.mlp.fc1": ("base_model.model.vision_model.encoder.layers.0.mlp.fc1",),
        "model.multi_modal_projector.linear_1": ("mlp1.1", "base_model.model.mlp1.1"),
        "model.multi_modal_projector.linear_2": ("mlp1.3",),
    },
}


@pytest.mark.parametrize("family", TOWER_NAMES)
def test_every_spelling_of_a_towers_module_is_one(family: str) -> None:
    layout = layout_of(family)
    towers = {path for path in layout.paths.values() if is_tower(path)}
    assert not any(map(is_tower, layout.other_linears)), "every linear of the tower and the projector can be adapted"
    for path, others in TOWER_NAMES[family].items():
        name = canonical_name(path)
        assert name is not None and layout.paths[name] in towers and layout.expected(name) is not None
        assert {canonical_name(other) for other in others} == {name}
        assert canonical_name(name) == name and is_tower(name)
    for other in (
        "mlp1.0",
        "mm_projector.1",
        "multi_modal_projector.layer_norm",
        "vision_model.embeddings.patch_embedding",
    ):
        assert is_tower(other) and canonical_name(other) is None


def test_queries_keys_and_values_of_a_tower_come_apart_or_as_one(tmp_path: Path) -> None:
    """InternVL's own code has one matrix of them, with one A; transformers' has three."""
    layout = layout_of("internvl")
    tiny_adapter(tiny_model("internvl"), tmp_path, target_modules=r".*vision_tower\..*(q_proj|k_proj|v_proj)")
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    apart = read_adapter(tmp_path, layout).modules
    stem, fused = "base_model.model.model.vision_tower.encoder.layer.{}.attention.{}_proj.lora_{}.weight", {}
    for layer in range(2):
        a = tensors[stem.format(layer, "q", "A")]
        b = [tensors[stem.format(layer, part, "B")] for part in "qkv"]
        where = f"base_model.model.vision_model.encoder.layers.{layer}.attn.qkv.lora_{{}}.weight"
        fused |= {where.format("A"): a, where.format("B"): torch.cat(b)}
    save_file(fused, tmp_path / "adapter_model.safetensors")
    joined = read_adapter(tmp_path, layout).modules
    assert joined.keys() == apart.keys() and len(joined) == 6
    for name, pair in joined.items():
        assert torch.equal(pair.b, apart[name].b)
        assert torch.equal(pair.a, apart[name.replace("k_proj", "q_proj").replace("v_proj", "q_proj")].a)


REFUSALS: dict[str, tuple[Any, str]] = {
    "dora_without_magnitudes": (lambda d: rewrite(d, use_dora=True), "lora_magnitude_vector is missing"),
    "dora_and_lora_bias": (lambda d: rewrite(d, use_dora=True, lora_bias=True), "use_dora does not go with lora_bias"),
    "dora_and_alora": (
        lambda d: rewrite(d, use_dora=True, alora_invocation_tokens=[1]),
        "use_dora does not go with alora_invocation_tokens",
    ),
    "alora_and_bias": (
        lambda d: rewrite(d, bias="all", alora_invocation_tokens=[1]),
        "bias='all' does not go with alora_invocation_tokens",
    ),
    "lora_bias_without_biases": (lambda d: rewrite(d, lora_bias=True), "bias of lora_B is missing"),
    "bias_of_another_method": (lambda d: rewrite(d, bias="boft_only"), "bias must be .*'boft_only'"),
    "bias_of_the_tower": (
        lambda d: (rewrite(d, bias="all"), _add(d, "base_model.model.model.visual.blocks.0.attn.qkv.bias")),
        r"visual.blocks.0.attn.qkv.bias.*train with bias='lora_only'",
    ),
    "bias_of_a_norm": (
        lambda d: (rewrite(d, bias="all"), _add(d, "base_model.model.model.layers.0.input_layernorm.bias")),
        r"input_layernorm.bias.*bias='lora_only'",
    ),
    "bias_of_another_width": (
        lambda d: (rewrite(d, bias="all"), _add(d, "base_model.model.model.layers.0.self_attn.q_proj.bias")),
        r"q_proj.bias: expected \[32\], one number an output.*got \[4, 32\]",
    ),
    "bias_twice": (
        lambda d: (
            rewrite(d, bias="all"),
            _add(d, "model.layers.0.self_attn.q_proj.bias", shape=(32,)),
            _add(d, "model.layers.0.self_attn.q_proj.base_layer.bias", shape=(32,)),
        ),
        "a second bias for the same module",
    ),
    "bias_twice_by_another_name": (
        lambda d: (
            rewrite(d, bias="all"),
            _add(d, "model.layers.0.self_attn.q_proj.bias", shape=(32,)),
            _add(d, "layers.0.self_attn.q_proj.bias", shape=(32,)),
        ),
        "a second bias of layers.0.self_attn.q_proj",
    ),
    "pissa": (lambda d: rewrite(d, init_lora_weights="pissa_niter_4"), "pissa_niter_4.*convert"),
    "olora": (lambda d: rewrite(d, init_lora_weights="olora"), "olora"),
    "alora_text": (lambda d: rewrite(d, alora_invocation_tokens="ab"), "alora_invocation_tokens.*token ids.*'ab'"),
    "alora_negative": (lambda d: rewrite(d, alora_invocation_tokens=[1, -2]), r"alora_invocation_tokens.*\[1, -2\]"),
    "alora_huge": (lambda d: rewrite(d, alora_invocation_tokens=[2**70]), "alora_invocation_tokens.*token ids"),
    "future_option": (lambda d: rewrite(d, use_next_years_trick=True), "use_next_years_trick"),
    "other_method": (lambda d: rewrite(d, peft_type="IA3"), "IA3"),
    "rank_zero": (lambda d: rewrite(d, r=0), "r must be a positive integer"),
    "rank_contradicts": (lambda d: rewrite(d, r=9), "rank 4, the configuration says 9"),
    "config_not_json": (lambda d: (d / "adapter_config.json").write_text("{r: 4"), "not readable as JSON"),
    "config_a_list": (lambda d: (d / "adapter_config.json").write_text("[]"), "expected a JSON object"),
    "config_missing": (lambda d: (d / "adapter_config.json").unlink(), "no adapter_config.json"),
    "weights_missing": (lambda d: (d / WEIGHTS).unlink(), f"no {WEIGHTS}"),
    "truncated": (lambda d: (d / WEIGHTS).write_bytes((d / WEIGHTS).read_bytes()[:-64]), "not a complete safetensors"),
    "empty": (lambda d: (d / WEIGHTS).write_bytes(b""), "is empty"),
    "pickle": (lambda d: (d / WEIGHTS).rename(d / "adapter_model.bin"), "pickle"),
    "nan": (lambda d: retensor(d, change=lambda t: t[first(t, "B")][0].fill_(float("nan"))), "lora_B.*NaN"),
    "infinite": (lambda d: retensor(d, change=lambda t: t[first(t, "A")][0].fill_(float("inf"))), "lora_A.*infinite"),
    "integers": (lambda d: retensor(d, change=lambda t: t.update({first(t, "A"): t[first(t, "A")].int()})), "int32"),
    "a_without_b": (lambda d: retensor(d, change=lambda t: t.pop(first(t, "B"))), "lora_A.*lora_B is missing"),
    "b_without_a": (lambda d: retensor(d, change=lambda t: t.pop(first(t, "A"))), "lora_B.*lora_A is missing"),
    "ranks_differ": (
        lambda d: retensor(d, change=lambda t: t.update({first(t, "B"): t[first(t, "B")][:, :3]})),
        "A has rank 4, B 3",
    ),
    "hidden_size": (
        lambda d: retensor(d, change=lambda t: t.update({first(t, "A"): t[first(t, "A")][:, :-8]})),
        r"A \[4, 40\].*of this model is \[32, 48\]",
    ),
    "past_depth": (lambda d: _rename(d, "layers.2.", "layers.3."), "layer 3 is past the depth"),
    "tower": (
        lambda d: _rename(d, "model.language_model.layers.0.self_attn.q_proj", "model.visual.blocks.0.attn.qkv"),
        r"of \[32, 32\]; visual.blocks.0.attn.qkv of this model is \[96, 32\]",
    ),
    "tower_depth": (
        lambda d: _rename(d, "model.language_model.layers.0.self_attn.q_proj", "model.visual.blocks.9.attn.qkv"),
        "this model has no module visual.blocks.9.attn.qkv",
    ),
    "patches": (
        lambda d: _rename(d, "model.language_model.layers.0.self_attn.q_proj", "model.visual.patch_embed.proj"),
        "vision tower or projector.*visual.patch_embed.proj",
    ),
    "clip_tower": (
        lambda d: _rename(d, "model.language_model.layers.1.", "vision_tower.vision_model.encoder.layers.1."),
        "no module vision_tower.layers.1.mlp.down_proj",
    ),
    "projector": (
        lambda d: _rename(d, "model.language_model.layers.0.self_attn.q_proj", "multi_modal_projector.linear_1"),
        "multi_modal_projector.linear_1.*no module projector.linear_1",
    ),
    "unknown_module": (lambda d: _rename(d, "q_proj", "query_key_value"), "no module layers.0.self_attn.query_key"),
    "unknown_prefix": (lambda d: _rename(d, "language_model.", "backbone."), "fit no module.*backbone.layers.0"),
    "unknown_tensor": (lambda d: _add(d, "base_model.model.gate.scale"), "fit no module.*base_model.model.gate.scale"),
    "magnitude": (
        lambda d: retensor(d, change=lambda t: t.update({first(t, "A").replace("lora_A.weight", MAGNITUDE): ONES})),
        "lora_magnitude_vector: the configuration does not set use_dora",
    ),
    "magnitude_alone": (
        lambda d: (rewrite(d, use_dora=True), _add(d, f"model.layers.0.mlp.z_proj.{MAGNITUDE}")),
        "lora_.*is missing",
    ),
    "bias_tensor": (
        lambda d: retensor(d, change=lambda t: t.update({first(t, "B").replace("weight", "bias"): ONES})),
        "lora_B.bias: the configuration does not set lora_bias",
    ),
    "saved_lm_head": (
        lambda d: _add(d, "base_model.model.lm_head.weight", 128),
        "saved lm_head would replace.*train LoRA.*on it instead",
    ),
    "added_vocabulary": (
        lambda d: _add(d, "base_model.model.lm_head.weight", 130),
        "130 rows.*add vocabulary.*merge_and_unload",
    ),
    "new_rows": (lambda d: rewrite(d, trainable_token_indices=[3, 5]), "its rows are not in the weights"),
    "new_rows_of_others": (
        lambda d: _add(d, "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", 2),
        "names no such layer",
    ),
    "added_tokens": (
        lambda d: (d / "added_tokens.json").write_text('{"<new>": 128, "<old>": 3}'),
        r"adds 1 token.*<new>",
    ),
    "saved_norm": (
        lambda d: (rewrite(d, modules_to_save=["norm"]), _add(d, "base_model.model.model.norm.weight")),
        r"norm.*of modules_to_save only",
    ),
    "saved_classifier": (
        lambda d: (rewrite(d, modules_to_save=["classifier"]), _add(d, "base_model.model.classifier.weight")),
        r"classifier.*of modules_to_save only score",
    ),
    "token_labels": (
        lambda d: (
            rewrite(d, modules_to_save=["score"], task_type="TOKEN_CLS"),
            _add(d, "base_model.model.score.weight"),
        ),
        "labels every token",
    ),
    "unannounced_head": (lambda d: _add(d, "base_model.model.score.weight"), "fit no module.*score.weight"),
    "experts": (lambda d: _rename(d, "mlp.", "mlp.experts.0."), r"no module layers\.\d\.mlp\.experts\.0\."),
    "twice": (lambda d: _duplicate(d), "which .* adapts already"),
}


def _rename(directory: Path, old: str, new: str) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for key in [k for k in tensors if old in k]:
            tensors[key.replace(old, new)] = tensors.pop(key)

    retensor(directory, change=change)


def _add(directory: Path, key: str, rows: int = 4, shape: tuple[int, ...] | None = None) -> None:
    retensor(directory, change=lambda t: t.update({key: torch.ones(shape or (rows, 32))}))


def _duplicate(directory: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[key.replace("base_model.model.", "")] = tensors[key].clone()

    retensor(directory, change=change)


@pytest.fixture(scope="module")
def good_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("good")
    tiny_adapter(tiny_model("qwen2_5_vl"), directory, target_modules=LANGUAGE)
    return directory


@pytest.mark.parametrize("fault", REFUSALS)
def test_what_cannot_be_served_is_refused_by_name(fault: str, good_adapter: Path, tmp_path: Path) -> None:
    directory = tmp_path / "adapter"
    shutil.copytree(good_adapter, directory)
    layout = layout_of("qwen2_5_vl")
    read_adapter(directory, layout)  # it is the fault, not the adapter, that is refused
    inject, message = REFUSALS[fault]
    inject(directory)
    with pytest.raises(AdapterError, match=message):
        read_adapter(directory, layout)


# What no number may be, as JSON writes it: each in every field that is a number.
NUMBERS = {
    "nan": "NaN",
    "infinity": "Infinity",
    "minus-infinity": "-Infinity",
    "past-float64": "1e999",
    "past-float32": "1e308",
    "digits": "1" + "0" * 400,
    "too-many-digits": "1" + "0" * 5000,
    "word": '"16"',
    "nan-as-a-word": '"nan"',
    "boolean": "true",
    "nothing": "null",
    "list": "[16]",
    "object": "{}",
}
RANKS = {"negative": "-4", "zero": "0", "fraction": "4.5", "whole-float": "4.0"}
FIELDS = {
    "r": '"r": %s',
    "lora_alpha": '"lora_alpha": %s',
    "rank_pattern": '"rank_pattern": {"q_proj": %s}',
    "alpha_pattern": '"alpha_pattern": {"q_proj": %s}',
}


def hostile_numbers() -> list[tuple[str, str]]:
    values = {"r": {**NUMBERS, **RANKS}, "rank_pattern": {**NUMBERS, **RANKS}}
    return [(field, value) for field in FIELDS for value in values.get(field, NUMBERS)]


@pytest.mark.parametrize(("field", "value"), hostile_numbers())
def test_a_number_that_is_none_is_refused_by_its_field(
    field: str, value: str, good_adapter: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "adapter"
    shutil.copytree(good_adapter, directory)
    path = directory / "adapter_config.json"
    config = json.loads(path.read_text())
    config.pop(field)
    text = {**NUMBERS, **RANKS}[value]
    path.write_text(json.dumps(config)[:-1] + ", " + FIELDS[field] % text + "}")
    # A rank that is one, but not the tensors', is found to differ from theirs; some are not even JSON to Python.
    named = rf"{field}.* must be .*got |the configuration says {text}|not readable as JSON"
    with pytest.raises(AdapterError, match=named) as caught:
        read_adapter(directory, layout_of("qwen2_5_vl"))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize("scale", [-2.0, 0, 1e-30, 3e38])
def test_a_scale_of_any_size_is_served_while_it_is_a_number(scale: float, good_adapter: Path, tmp_path: Path) -> None:
    directory = tmp_path / "adapter"
    shutil.copytree(good_adapter, directory)
    rewrite(directory, lora_alpha=scale)
    assert set(read_adapter(directory, layout_of("qwen2_5_vl")).report.scales) == {scale / 4}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"use_rslora": "false"}, "use_rslora must be true or false, got 'false'"),
        ({"use_rslora": 1}, "use_rslora must be true or false, got 1"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern must be an object"),
        ({"alpha_pattern": {"(": 4}}, "alpha_pattern has '\\(', which is no regular expression"),
    ],
)
def test_a_setting_of_another_type_is_refused(
    options: dict[str, Any], named: str, good_adapter: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "adapter"
    shutil.copytree(good_adapter, directory)
    rewrite(directory, **options)
    with pytest.raises(AdapterError, match=named):
        read_adapter(directory)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_value_that_is_not_finite_is_refused_wherever_it_is(
    value: float, good_adapter: Path, tmp_path: Path
) -> None:
    config, tensors = (good_adapter / "adapter_config.json").read_text(), load_file(good_adapter / WEIGHTS)
    (tmp_path / "adapter_config.json").write_text(config)
    for key, tensor in tensors.items():
        spoiled = tensor.clone()
        spoiled[-1, -1] = value
        save_file({**tensors, key: spoiled}, tmp_path / WEIGHTS)
        with pytest.raises(AdapterError, match=f"^{re.escape(key)}: holds NaN or infinite values$"):
            read_adapter(tmp_path, layout_of("qwen2_5_vl"))


def test_of_many_faults_the_first_in_the_file_is_named(good_adapter: Path, tmp_path: Path) -> None:
    shutil.copytree(good_adapter, tmp_path, dirs_exist_ok=True)
    retensor(tmp_path, change=lambda tensors: [tensor.fill_(torch.nan) for tensor in tensors.values()])
    first = next(iter(read_tensors(weight_files(tmp_path)).tensors))
    for _ in range(5):
        with pytest.raises(AdapterError, match=f"^{re.escape(first)}: "):
            read_adapter(tmp_path, layout_of("qwen2_5_vl"))


def test_an_adapter_of_nothing_is_refused(good_adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text((good_adapter / "adapter_config.json").read_text())
    save_file({}, tmp_path / WEIGHTS)
    with pytest.raises(AdapterError, match="no LoRA tensor matched"):
        read_adapter(tmp_path, layout_of("qwen2_5_vl"))


def test_reading_keeps_nothing_mapped(tmp_path: Path) -> None:
    """Replacing the files of a loaded adapter must not change what is served."""
    tiny_adapter(tiny_model("llama"), tmp_path, target_modules=["q_proj"])
    weights = read_adapter(tmp_path)
    before = {name: pair.delta() for name, pair in weights.modules.items()}
    data = bytearray((tmp_path / WEIGHTS).read_bytes())
    data[-256:] = bytes(256)
    with open(tmp_path / WEIGHTS, "r+b") as file:
        file.write(data)
    assert all(torch.equal(weights.modules[name].delta(), delta) for name, delta in before.items())


def test_adapters_that_share_what_is_not_in_the_file_are_refused(tmp_path: Path) -> None:
    tiny_adapter(tiny_model("qwen2_5_vl"), tmp_path, target_modules=["lm_head", "q_proj"])
    assert "lm_head" in read_adapter(tmp_path).modules
    rewrite(tmp_path, ensure_weight_tying=True)
    with pytest.raises(AdapterError, match=r"ensure_weight_tying ties lm_head.*each by its name"):
        read_adapter(tmp_path)
