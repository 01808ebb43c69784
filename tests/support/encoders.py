"""Tiny random image encoders of every structure, of SGLang's classes and ours, without a language model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import CLIPVisionConfig, PretrainedConfig

from tests.support.lora_adapters import tiny_model
from vlora_sgl import _sgl
from vlora_sgl.multimodal.llava import ClipTower, Llava

QWEN = {
    "qwen2_vl": "Qwen2VisionTransformer",
    "qwen2_5_vl": "Qwen2_5_VisionTransformer",
    "qwen3_vl": "Qwen3VLMoeVisionModel",
    "qwen3_vl_moe": "Qwen3VLMoeVisionModel",
}
ENCODERS = (*QWEN, "internvl", "llava")
HIDDEN = 32
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}


def make(family: str) -> Any:
    """As much of a model as encodes images, in float32; no two weights alike."""
    model = _qwen(family) if family in QWEN else (_llava if family == "llava" else _internvl)()
    numbers = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        spread = 0.5 if "norm" in name or "ln_q" in name else 0.3
        parameter.data = (parameter.ndim == 1) + spread * torch.randn(parameter.shape, generator=numbers)
        parameter.requires_grad_(False)
    return model.float().eval()


class _Seeing(nn.Module):
    def __init__(self, visual: nn.Module) -> None:
        super().__init__()
        self.visual = visual


def _qwen(family: str) -> Any:
    trained: Any = tiny_model(family)
    return _Seeing(getattr(_sgl, QWEN[family])(trained.config.vision_config))


def _bare(kind: type) -> Any:
    """An object of a model's class with nothing in it."""
    model = object.__new__(kind)
    nn.Module.__init__(model)
    return model


def _internvl() -> Any:
    config = PretrainedConfig(
        **SIZES,
        image_size=16,
        patch_size=4,
        qkv_bias=True,
        qk_normalization=False,
        norm_type="layer_norm",
        layer_norm_eps=1e-6,
        initializer_factor=0.1,
        drop_path_rate=0.0,
        dropout=0.0,
        hidden_act="gelu",
    )
    model = _bare(_sgl.InternVLChatModel)
    model.vision_model = _sgl.InternVisionModel(config)
    model.mlp1 = nn.Sequential(nn.LayerNorm(4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN), nn.GELU())
    model.select_layer, model.downsample_ratio, model.ps_version, model.num_image_token = -1, 0.5, "v2", 4
    return model


def _llava() -> Any:
    vision = CLIPVisionConfig(**SIZES, image_size=16, patch_size=8)
    model = _bare(Llava)
    model.vision_tower = ClipTower(vision)
    model.multi_modal_projector = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU())
    model.config, model._layers, model._first = SimpleNamespace(vision_config=vision), [2], 1
    return model
