"""Every PEFT layout reads into the update PEFT itself applies, or is refused with a message that names the fault."""

from __future__ import annotations

import json
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
from vlora_sgl.lora.checkpoint import AdapterWeights, read_adapter
from vlora_sgl.lora.layout import BaseLayout, canonical_name

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
            name = canonical_name(path)
            assert name is not None
            row, delta = 0, module.get_delta_weight("default")
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
    peft = tiny_adapter(
        tiny_model(family), tmp_path, target_modules="all-linear", exclude_modules=NOT_TOWERS, lora_alpha=12
    )
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


REFUSALS: dict[str, tuple[Any, str]] = {
    "dora": (lambda d: rewrite(d, use_dora=True), "DoRA"),
    "lora_bias": (lambda d: rewrite(d, lora_bias=True), "lora_bias"),
    "bias": (lambda d: rewrite(d, bias="all"), "bias='all'"),
    "pissa": (lambda d: rewrite(d, init_lora_weights="pissa_niter_4"), "pissa_niter_4.*convert"),
    "olora": (lambda d: rewrite(d, init_lora_weights="olora"), "olora"),
    "alora": (lambda d: rewrite(d, alora_invocation_tokens=[1, 2]), "alora_invocation_tokens=.*aLoRA"),
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
        "vision tower or projector.*visual.blocks.0.attn.qkv",
    ),
    "clip_tower": (
        lambda d: _rename(d, "model.language_model.layers.1.", "vision_tower.vision_model.encoder.layers.1."),
        "vision tower or projector.*vision_tower",
    ),
    "projector": (
        lambda d: _rename(d, "model.language_model.layers.0.self_attn.q_proj", "multi_modal_projector.linear_1"),
        "vision tower or projector.*multi_modal_projector",
    ),
    "unknown_module": (lambda d: _rename(d, "q_proj", "query_key_value"), "no module layers.0.self_attn.query_key"),
    "unknown_prefix": (lambda d: _rename(d, "language_model.", "backbone."), "fit no module.*backbone.layers.0"),
    "unknown_tensor": (lambda d: _add(d, "base_model.model.gate.scale"), "fit no module.*base_model.model.gate.scale"),
    "magnitude": (lambda d: _add(d, "base_model.model.layers.0.q_proj.lora_magnitude_vector"), "DoRA"),
    "bias_tensor": (lambda d: _add(d, "model.layers.0.self_attn.q_proj.lora_B.bias"), "lora_bias"),
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
    "experts": (lambda d: _rename(d, "mlp.", "mlp.experts.0."), "routed experts"),
    "twice": (lambda d: _duplicate(d), "which .* adapts already"),
}


def _rename(directory: Path, old: str, new: str) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for key in [k for k in tensors if old in k]:
            tensors[key.replace(old, new)] = tensors.pop(key)

    retensor(directory, change=change)


def _add(directory: Path, key: str, rows: int = 4) -> None:
    retensor(directory, change=lambda t: t.update({key: torch.ones(rows, 32)}))


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
