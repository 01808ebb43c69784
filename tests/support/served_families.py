"""Tiny random checkpoints of the families that SGLang serves, beside what transformers takes for the same model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as t
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from tests.support.lora_adapters import tiny_model
from tests.support.tiny_random import VOCABULARY_TEXT
from tools.tiny.build import CHAT_TEMPLATE, SPECIAL_TOKENS, build_tokenizer

Inputs = dict[str, Any]
IMAGE, START, END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
INTERN_MEAN, INTERN_STD = (torch.tensor(each).view(3, 1, 1) for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


@dataclass(frozen=True)
class Family:
    """A model that is served.

    Attributes:
        base: its name in ``lora_adapters``.
        shown: how a prompt marks an image; empty for a model of text.
        size: of the images that the tests show it.
        vision: changes to the tower's configuration.
        processor: its processor, given the tokenizer.
        inputs: what transformers is given for a text with images, if that is not what its processor makes of them.
        backend: what resizes its images on a server.
        more_tokens: special tokens that it has besides.
        served: writes the checkpoint that is served, if that is in another layout than transformers'.
        blind: what a CPU's server says of its images, if it refuses them.
        adapts: what its adapters' configuration says besides ``all-linear``.
    """

    base: str
    shown: str = ""
    size: tuple[int, int] = (32, 32)
    vision: dict[str, Any] | None = None
    processor: Callable[[Any], Any] = lambda tokenizer: tokenizer
    inputs: Callable[[Any, str, list[Image.Image]], Inputs] | None = None
    backend: str = "pil"
    more_tokens: dict[str, str] | None = None
    served: Callable[[nn.Module, Any, Path], None] | None = None
    blind: str = ""
    adapts: dict[str, Any] = field(default_factory=dict)


def save(name: str, root: Path, **text: Any) -> tuple[Path, Path]:
    """Write a family's checkpoints below ``root``; returns the one that is served, and transformers'.

    ``text`` changes the language model's configuration.
    """
    family, reference = FAMILIES[name], root / "reference"
    tokenizer = build_tokenizer(VOCABULARY_TEXT)
    tokenizer.chat_template = CHAT_TEMPLATE
    if family.more_tokens:
        tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL_TOKENS, *family.more_tokens.values()]})
        tokenizer._set_model_specific_special_tokens(family.more_tokens)
    model, processor = _random(family, tokenizer, text), family.processor(tokenizer)
    model.save_pretrained(reference)
    processor.save_pretrained(reference)
    if family.served is None:
        return reference, reference
    family.served(model, processor, root / "served")
    processor.save_pretrained(root / "served")
    return root / "served", reference


def _random(family: Family, tokenizer: Any, changes: dict[str, Any]) -> Any:
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in _MARKS.items()}
    special = {"bos_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"), "eos_token_id": ids.pop("eos")}
    vocabulary = (len(tokenizer) + 63) // 64 * 64
    text = {"vocab_size": vocabulary, "intermediate_size": 64, "pad_token_id": 0, **special, **changes}
    model: Any = tiny_model(family.base, text=text, tokens=ids | _ids(family, tokenizer), vision=family.vision)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:  # larger than usual, so that greedy answers are no near-ties
                vocabulary_std = 0.05 if tied else 1.0  # else every token's own logit would be the largest
                own = parameter[0, 0] if "experts" in name else parameter[0]
                std = vocabulary_std if "embed_tokens" in name else 0.6 / own.numel() ** 0.5
                parameter.normal_(0.0, std)
    model.generation_config.eos_token_id = None
    return model


_MARKS = {
    "eos": "<|im_end|>",
    "image_token_id": IMAGE,
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}


def _ids(family: Family, tokenizer: Any) -> dict[str, int]:
    more = family.more_tokens or {}
    return {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in more.items()}


# Processors


def _llava_processor(tokenizer: Any) -> Any:
    images = t.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    return t.LlavaProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default", image_token=IMAGE,
        num_additional_image_tokens=1, chat_template=CHAT_TEMPLATE.replace(START, "").replace(END, ""),
    )  # fmt: skip


def _qwen_processor(made: Any, size: int) -> Callable[[Any], Any]:
    shape = {"patch_size": size, "merge_size": 2, "min_pixels": (4 * size) ** 2, "max_pixels": (8 * size) ** 2}

    def processor(tokenizer: Any) -> Any:
        images = t.Qwen2VLImageProcessor(**shape)
        videos = Qwen3VLVideoProcessor() if size == 4 else Qwen2VLVideoProcessor(**shape)
        return made(image_processor=images, tokenizer=tokenizer, video_processor=videos, chat_template=CHAT_TEMPLATE)

    return processor


def _pixtral_processor(tokenizer: Any) -> Any:
    images = t.PixtralImageProcessor(size={"longest_edge": 32}, patch_size={"height": 8, "width": 8})
    marks = {"image_token": IMAGE, "image_break_token": START, "image_end_token": END}
    template = CHAT_TEMPLATE.replace(START, "").replace(END, "")
    return t.PixtralProcessor(images, tokenizer, patch_size=8, spatial_merge_size=2, chat_template=template, **marks)


def _intern_processor(tokenizer: Any) -> Any:
    """SGLang's InternVL reads the tokenizer alone; its own template's marker is another than its processor's."""
    tokenizer.chat_template = CHAT_TEMPLATE.replace(f"{START}{IMAGE}{END}", "<image>")
    return tokenizer


GEMMA = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}


def _gemma_processor(tokenizer: Any) -> Any:
    images = t.Gemma3ImageProcessor(size={"height": 32, "width": 32}, do_pan_and_scan=False)
    template = CHAT_TEMPLATE.replace(f"{START}{IMAGE}{END}", GEMMA["boi_token"])
    return t.Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)


# Layouts of checkpoints that are not transformers'


def _save_original_llava(model: Any, processor: Any, directory: Path) -> None:
    """The language model's names without a prefix, its settings at the top, the tower beside it."""
    tower = directory / "clip-tower"
    model.model.vision_tower.save_pretrained(tower)
    projector = {"linear_1": "model.mm_projector.0", "linear_2": "model.mm_projector.2"}
    weights = {}
    for name, weight in model.state_dict().items():
        if "vision_tower" not in name:
            name = name.replace("model.language_model.", "model.").replace("model.multi_modal_projector.", "")
            part, _, rest = name.partition(".")
            weights[f"{projector[part]}.{rest}" if part in projector else name] = weight.contiguous()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        **model.config.text_config.to_dict(),
        "architectures": ["LlavaLlamaForCausalLM"],
        "model_type": "llava",
        "image_token_index": model.config.image_token_index,
        "image_aspect_ratio": "pad",
        "mm_hidden_size": model.config.vision_config.hidden_size,
        "mm_projector_type": "mlp2x_gelu",
        "mm_vision_select_feature": "patch",
        "mm_vision_select_layer": -2,
        "mm_vision_tower": str(tower),
    }
    (directory / "config.json").write_text(json.dumps(config))


INTERN = {"start_token": "<img>", "end_token": "</img>", "context_token": "<IMG_CONTEXT>"}
_INTERN_NAMES = (
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.multi_modal_projector.layer_norm.", "mlp1.0."),
    ("model.multi_modal_projector.linear_1.", "mlp1.1."),
    ("model.multi_modal_projector.linear_2.", "mlp1.3."),
    ("model.vision_tower.", "vision_model."),
    ("embeddings.cls_token", "embeddings.class_embedding"),
    ("embeddings.position_embeddings", "embeddings.position_embedding"),
    ("embeddings.patch_embeddings.projection.", "embeddings.patch_embedding."),
    ("encoder.layer.", "encoder.layers."),
    ("lambda_1", "ls1"),
    ("lambda_2", "ls2"),
    ("layernorm_before", "norm1"),
    ("layernorm_after", "norm2"),
    ("attention.projection_layer", "attn.proj"),
)


def _save_original_intern(model: Any, processor: Any, directory: Path) -> None:
    """InternVLChatModel's names; queries, keys and values of the tower in one weight."""
    weights: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        for theirs, original in _INTERN_NAMES:
            name = name.replace(theirs, original)
        if name.startswith("vision_model"):
            if ".attention.q_proj." in name or ".attention.k_proj." in name:
                continue
            if ".attention.v_proj." in name:
                v = name
                parts = [_of(model, n) for n in (v.replace("v_proj", "q_proj"), v.replace("v_proj", "k_proj"), v)]
                name, weight = v.replace("attention.v_proj", "attn.qkv"), torch.cat(parts)
        weights[name] = weight.contiguous()
    directory.mkdir()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    vision, text = model.config.vision_config, model.config.text_config
    config = {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "downsample_ratio": model.config.downsample_ratio,
        "force_image_size": vision.image_size[0],
        "llm_config": {**text.to_dict(), "architectures": ["Qwen2ForCausalLM"]},
        "ps_version": "v2",
        "select_layer": -1,
        "template": "internvl2_5",
        "dtype": "float32",
        "vision_config": {
            "architectures": ["InternVisionModel"],
            "hidden_size": vision.hidden_size,
            "image_size": vision.image_size[0],
            "intermediate_size": vision.intermediate_size,
            "layer_norm_eps": vision.layer_norm_eps,
            "model_type": "intern_vit_6b",
            "norm_type": vision.norm_type,
            "num_attention_heads": vision.num_attention_heads,
            "num_hidden_layers": vision.num_hidden_layers,
            "patch_size": vision.patch_size[0],
            "qk_normalization": vision.use_qk_norm,
            "qkv_bias": vision.attention_bias,
        },
    }
    (directory / "config.json").write_text(json.dumps(config))


def _of(model: Any, name: str) -> torch.Tensor:
    name = name.replace("vision_model.encoder.layers.", "model.vision_tower.encoder.layer.")
    weight: torch.Tensor = model.state_dict()[name]
    return weight


def _save_published_gemma(model: Any, processor: Any, directory: Path) -> None:
    """The tower's names as in Google's files; transformers has since shortened what it writes."""
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    weights = {name.replace("vision_tower.", "vision_tower.vision_model."): w for name, w in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def _save_published_experts(model: Any, processor: Any, directory: Path) -> None:
    """Inputs before outputs, as in Qwen's files; transformers has since turned its parameters round."""
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    weights = {
        name: weight.mT.contiguous() if name.rpartition(".")[0].endswith(".experts") else weight
        for name, weight in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})


# What transformers is given


def _squared(processor: Any, text: str, images: list[Image.Image]) -> Inputs:
    """As the original LLaVA does: each image in the middle of a square of the mean colour."""
    from sglang.srt.multimodal.mm_utils import expand2square

    mean = tuple(int(255 * part) for part in processor.image_processor.image_mean)
    return dict(processor(text=[text], images=[expand2square(one, mean) for one in images], return_tensors="pt"))


def _tiled(tokenizer: Any, text: str, images: list[Image.Image]) -> Inputs:
    """As SGLang's InternVL does: tiles of 448 x 448 in bfloat16."""
    from sglang.srt.multimodal.processors.internvl import InternVLProcessor
    from torchvision.transforms.functional import pil_to_tensor

    tiles = []
    for image in images:
        pixels = (pil_to_tensor(image).float() / 255 - INTERN_MEAN) / INTERN_STD
        tiles.append(InternVLProcessor.dynamic_preprocess(pixels, 448, 12, use_thumbnail=True).float())
        text = text.replace("<image>", f"<img>{INTERN['context_token'] * 4 * len(tiles[-1])}</img>", 1)
    return dict(tokenizer(text, return_tensors="pt")) | ({"pixel_values": torch.cat(tiles)} if tiles else {})


QWEN = f"{START}{IMAGE}{END}"
EXPERTS = {
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "lora_alpha": 4,  # a larger update would never be merged
}
FAMILIES = {
    "llama": Family("llama"),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "qwen3_moe": Family("qwen3_moe", adapts=EXPERTS),
    "mistral": Family("mistral"),
    "phi3": Family("phi3"),
    "llava": Family("llava", IMAGE, processor=_llava_processor, backend="torchvision"),
    "llava_original": Family(
        "llava",
        IMAGE,
        (48, 32),
        processor=_llava_processor,
        inputs=_squared,
        backend="torchvision",
        served=_save_original_llava,
    ),
    # SGLang takes rows of any other width than that of 14 x 14 patches for embeddings that are done.
    "qwen2_vl": Family("qwen2_vl", QWEN, (112, 56), {"patch_size": 14}, _qwen_processor(t.Qwen2VLProcessor, 14)),
    "qwen2_5_vl": Family(
        "qwen2_5_vl",
        QWEN,
        (112, 56),
        {"patch_size": 14, "window_size": 56},
        _qwen_processor(t.Qwen2_5_VLProcessor, 14),
    ),
    "qwen3_vl": Family("qwen3_vl", QWEN, processor=_qwen_processor(t.Qwen3VLProcessor, 4)),
    "qwen3_vl_moe": Family(
        "qwen3_vl_moe",
        QWEN,
        processor=_qwen_processor(t.Qwen3VLProcessor, 4),
        served=_save_published_experts,
        adapts=EXPERTS,
    ),
    "internvl3": Family(
        "internvl",
        "<image>",
        (64, 64),
        processor=_intern_processor,
        inputs=_tiled,
        more_tokens=INTERN,
        served=_save_original_intern,
    ),
    "mistral3": Family("mistral3", IMAGE, processor=_pixtral_processor),
    "gemma3": Family(
        "gemma3",
        GEMMA["boi_token"],
        processor=_gemma_processor,
        more_tokens=GEMMA,
        served=_save_published_gemma,
        blind="images of Gemma 3 need --attention-backend triton",
    ),
}


class Reference:
    """transformers + PEFT on a family's files.

    Args:
        directory: of transformers' checkpoint.
        adapters: directories by name; none may be loaded yet.
    """

    def __init__(self, name: str, directory: Path, adapters: dict[str, Path]) -> None:
        from peft import PeftModel

        self.name, self.directory, self.family = name, directory, FAMILIES[name]
        sees = bool(self.family.shown)
        has_processor = sees and self.family.inputs is not _tiled
        # AutoTokenizer splits a Qwen2's text by rules of its own, not by those of the file.
        kind: Any = t.AutoProcessor if has_processor else t.PreTrainedTokenizerFast
        self.processor: Any = kind.from_pretrained(directory)
        if has_processor:  # torchvision resizes a little differently
            images = t.AutoImageProcessor.from_pretrained(directory, backend=self.family.backend)
            self.processor.image_processor = images
        base = load(name, directory)
        (first, path), *others = adapters.items()
        self.model = PeftModel.from_pretrained(base, path, adapter_name=first)
        for other, path in others:
            self.model.load_adapter(path, adapter_name=other)
        self.model.eval()

    @torch.inference_mode()
    def tokens(self, text: str, adapter: str | None, images: list[Image.Image], count: int) -> list[int]:
        """Greedy tokens."""
        inputs = self._inputs(text, images)
        options = {"do_sample": False, "max_new_tokens": count}
        if adapter is None:
            with self.model.disable_adapter():
                output = self.model.generate(**inputs, **options)
        else:
            self.model.set_adapter(adapter)
            output = self.model.generate(**inputs, **options)
        ids: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
        return ids

    @torch.inference_mode()
    def state(self, text: str, adapter: str, images: list[Image.Image]) -> torch.Tensor:
        """[hidden] of the last token, as the LM head reads it."""
        self.model.set_adapter(adapter)
        inner: Any = self.model.base_model.model.model
        return inner(**self._inputs(text, images)).last_hidden_state[0, -1]

    def _inputs(self, text: str, images: list[Image.Image]) -> Inputs:
        make = self.family.inputs
        if make is not None and images:
            return make(self.processor, text, images)
        return dict(self.processor(text=[text], return_tensors="pt", **({"images": images} if images else {})))


def load(name: str, directory: Path) -> Any:
    """transformers' model of a family, in float32."""
    auto = t.AutoModelForImageTextToText if FAMILIES[name].shown else t.AutoModelForCausalLM
    return auto.from_pretrained(directory, dtype=torch.float32)
