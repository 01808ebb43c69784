"""LLaVA's two layouts: one configuration, one set of names, and what is refused of the original one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlavaConfig

from tests.support.served_families import load, save
from vlora_sgl.errors import ConfigError
from vlora_sgl.multimodal import llava
from vlora_sgl.multimodal.architectures import get_mm_processor, get_model_architecture


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The original layout's directory, and transformers'."""
    return save("llava_original", tmp_path_factory.mktemp("llava"))


def config_of(directory: Path, **changes: Any) -> Any:
    config = LlavaConfig.from_pretrained(directory)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def test_the_original_layouts_settings_are_transformers_by_other_names(original: tuple[Path, Path]) -> None:
    found, wanted = llava.transformers_config(config_of(original[0])), config_of(original[1])
    assert found.text_config.to_diff_dict().items() >= {"hidden_size": 32, "num_key_value_heads": 1}.items()
    for name in ("hidden_size", "intermediate_size", "vocab_size", "rope_parameters", "rms_norm_eps"):
        assert getattr(found.text_config, name) == getattr(wanted.text_config, name)
    for name in ("hidden_size", "num_hidden_layers", "image_size", "patch_size", "hidden_act"):
        assert getattr(found.vision_config, name) == getattr(wanted.vision_config, name)
    for name in ("vision_feature_layer", "vision_feature_select_strategy", "image_token_index"):
        assert getattr(found, name) == getattr(wanted, name)


def test_both_layouts_weights_have_one_set_of_names(original: tuple[Path, Path]) -> None:
    theirs, ours = (load_file(directory / "model.safetensors") for directory in original)
    found = {llava.renamed(name): weight for name, weight in theirs.items()}
    wanted = {llava.renamed(name): weight for name, weight in ours.items() if "vision_tower" not in name}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    inside = {llava.renamed(name) for name in load("llava", original[1]).state_dict()}
    assert inside == wanted.keys() | {name for name in inside if name.startswith("vision_tower.")}


@pytest.mark.parametrize("changes", [{"image_aspect_ratio": "anyres"}, {"image_aspect_ratio": "anyres_max_9"}])
def test_tiles_are_sglangs_which_needs_cuda(original: tuple[Path, Path], changes: Any, monkeypatch: Any) -> None:
    config = config_of(original[0], **changes)
    monkeypatch.setattr(llava, "is_plain_cpu", lambda: True)
    with pytest.raises(ConfigError, match=r"image_aspect_ratio 'anyres.* on CUDA only"):
        llava.is_served(config)
    monkeypatch.setattr(llava, "is_plain_cpu", lambda: False)
    assert not llava.is_served(config)
    given: list[Any] = []
    get_mm_processor(lambda *args, **kwargs: given.append(args), config, "settings", "processor", "transport")
    assert given == [(config, "settings", "processor", "transport")]


def test_another_projector_is_refused_by_name(original: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match=r"mm_projector_type: expected 'mlp2x_gelu'.* got 'linear'"):
        llava.transformers_config(config_of(original[0], mm_projector_type="linear"))


def test_a_tower_that_is_not_clip_is_sglangs() -> None:
    config = SimpleNamespace(architectures=["LlavaForConditionalGeneration"])
    for kind, served in (("clip_vision_model", True), ("pixtral", False)):
        config.vision_config = SimpleNamespace(model_type=kind)
        assert llava.is_served(config) == served


def test_models_that_are_ours_are_found_by_architecture() -> None:
    for name, found in (
        ("LlavaForConditionalGeneration", llava.Llava),
        ("LlavaLlamaForCausalLM", llava.LlavaOriginal),
        ("LlamaForCausalLM", "SGLang's"),
    ):
        assert get_model_architecture(lambda _, name=name: ("SGLang's", name), None) == (found, name)


def test_images_beside_each_other_are_several() -> None:
    processor = llava.LlavaProcessor.__new__(llava.LlavaProcessor)
    processor._tokens = 4
    ids = torch.tensor([1, *[9] * 8, 2, *[9] * 4, 3])
    assert processor.get_mm_items_offset(ids, 9) == [(1, 4), (5, 8), (10, 13)]
