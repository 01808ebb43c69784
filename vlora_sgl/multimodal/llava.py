"""LLaVA with a CLIP tower: both layouts of its checkpoints, on whatever SGLang runs on.

SGLang 0.5.17 serves the original layout (``mm_vision_tower``) on CUDA alone, and by a way with images of its own that
no cache of embeddings sees. Of transformers' layout it does not find the tower. Here both are one model of SGLang's
parts: its language model, its CLIP encoder, and the way with images that its other models have. What LLaVA's later
releases do (``anyres`` tiles, SigLIP towers) is left to SGLang's model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig
from transformers.activations import ACT2FN
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from vlora_sgl import _sgl
from vlora_sgl._sgl_types import ModelRunner, MultimodalDataItem, MultimodalInputs
from vlora_sgl.errors import ConfigError
from vlora_sgl.platforms.cpu import is_plain_cpu
from vlora_sgl.seams import Place, Places

Weights = Iterable[tuple[str, torch.Tensor]]

ORIGINAL = "LlavaLlamaForCausalLM"
CLIP = ("clip", "clip_vision_model")

RENAMED = (
    ("model.mm_projector.0.", "multi_modal_projector.linear_1."),
    ("model.mm_projector.2.", "multi_modal_projector.linear_2."),
    ("model.vision_tower.vision_tower.", "vision_tower."),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("model.language_model.", "language_model.model."),
    ("model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)
"""Beginnings of a weight's name in the original layout, and in what transformers has written since, and here."""

STACKED = (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"))


class ClipTower(_sgl.CLIPVisionModel):
    """SGLang's CLIP encoder, which here gives the states between its layers and loads itself."""

    def __init__(self, config: CLIPVisionConfig, quant_config: object = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        for layer in self.vision_model.encoder.layers:
            layer.self_attn.qkv_backend.flatten_batch = (
                False  # torch's attention takes one image only, where it is set
            )

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.vision_model.embeddings.patch_embedding.weight.dtype
        return found

    def states(self, pixel_values: torch.Tensor, depth: int) -> list[torch.Tensor]:
        """Hidden states [images, 1 + patches, width] before each of the first ``depth`` layers, and behind the last.

        Args:
            pixel_values: [images, 3, height, width].
        """
        model = self.vision_model
        found = [model.pre_layrnorm(model.embeddings(pixel_values.to(self.device)))]
        for layer in model.encoder.layers[:depth]:
            found.append(layer(found[-1], None, None))
        return found

    def load_weights(self, weights: Weights) -> None:
        """Take the weights of transformers' ``CLIPVisionModel``, by its names with or without ``vision_model.``."""
        parameters = dict(self.vision_model.named_parameters())
        for full, weight in weights:
            name = full.removeprefix("vision_model.").replace(".out_proj.", ".proj.")
            if name.endswith("position_ids"):  # a buffer, in old checkpoints
                continue
            shard = next(((leaf, part) for leaf, part in STACKED if f".{leaf}." in name), None)
            parameter = parameters[name.replace(shard[0], "qkv_proj") if shard else name]
            load = getattr(parameter, "weight_loader", _sgl.default_weight_loader)
            load(parameter, weight, *(shard[1:] if shard else ()))


def activations(runner: ModelRunner) -> Places:
    """What stands in the place of the activations of a model runner's CLIP tower."""
    tower: Any = getattr(runner.model, "vision_tower", None)
    if not isinstance(tower, ClipTower):
        return "its image encoder is no CLIP tower of ours"
    made = ACT2FN[tower.vision_model.config.hidden_act]
    return [Place(layer.mlp, "act", made) for layer in tower.vision_model.encoder.layers]


class Llava(_sgl.LlavaForConditionalGeneration):
    """transformers' ``LlavaForConditionalGeneration``; with any other tower than CLIP it is SGLang's."""

    def __new__(cls, config: Any, *args: object, **kwargs: object) -> Any:
        if is_served(config):
            return super().__new__(cls)
        return _sgl.LlavaForConditionalGeneration(config, *args, **kwargs)

    def __init__(self, config: Any, quant_config: object = None, prefix: str = "") -> None:
        config = copy.deepcopy(config)  # SGLang writes settings of its own into it
        super().__init__(config, quant_config, prefix)
        layers, count = config.vision_feature_layer, config.vision_config.num_hidden_layers + 1
        self._layers = [n % count for n in (layers if isinstance(layers, list) else [layers])]
        self._first = 1 if config.vision_feature_select_strategy == "default" else 0  # the class's state is left out

    def _get_sgl_model_cls(self, config: Any, auto_model_type: type = object) -> type[nn.Module]:
        # SGLang imports all models of transformers to find a name, and registers no CLIP tower.
        if config.model_type in CLIP:
            return ClipTower
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
        found: type[nn.Module] = _sgl.ModelRegistry.resolve_model_cls(name)[0]
        return found

    def pad_input_ids(self, input_ids: Any, image_inputs: MultimodalInputs) -> Any:
        """The prompt with each image's tokens spelled by its content, by which the prefix cache knows it."""
        return _sgl.MultimodalPaddingPattern().pad_input_tokens(input_ids, image_inputs)

    def get_image_feature(self, items: list[MultimodalDataItem]) -> torch.Tensor:
        """Embeddings [tokens, hidden] of all images behind each other, encoded together."""
        pixels = torch.cat([torch.as_tensor(item.feature).to(self.vision_tower.device) for item in items])
        return self.extract_feature(pixels).flatten(0, 1)

    def extract_feature(self, pixels: torch.Tensor) -> torch.Tensor:
        """Embeddings [images, tokens, hidden] of images [images, 3, height, width]."""
        states = self.vision_tower.states(pixels, max(self._layers))
        chosen = torch.cat([states[n][:, self._first :] for n in self._layers], dim=-1)
        embeddings: torch.Tensor = self.multi_modal_projector(chosen)
        return embeddings

    def rows_of(self, item: MultimodalDataItem) -> list[tuple[int, int]]:
        """Of each image of an item: states of the tower, and those that the projector is given."""
        pixels: Any = item.feature
        return [self.rows_of_size(*pixels.shape[2:])] * len(pixels)

    def rows_of_size(self, height: int, width: int) -> tuple[int, int]:
        """As ``rows_of``, of an image of so many pixels."""
        size = self.config.vision_config.patch_size
        states = 1 + (height // size) * (width // size)
        return states, states - self._first

    def load_weights(self, weights: Weights) -> None:
        """Take a checkpoint's weights, by the names that either layout has for them."""
        parameters = dict(self.multi_modal_projector.named_parameters(prefix="multi_modal_projector"))
        for full, weight in weights:
            name = renamed(full)
            part, _, inside = name.partition(".")
            if part in ("language_model", "vision_tower"):
                getattr(self, part).load_weights([(inside, weight)])
            else:
                _sgl.default_weight_loader(parameters[name], weight)


class LlavaOriginal(Llava):
    """The original layout, ``LlavaLlamaForCausalLM``: its tower lies in a directory of its own."""

    def __new__(cls, config: Any, *args: object, **kwargs: object) -> Any:
        if is_served(config):
            return super(Llava, cls).__new__(cls)
        return _sgl.LlavaLlamaForCausalLM(config, *args, **kwargs)

    def __init__(self, config: Any, quant_config: object = None, prefix: str = "") -> None:
        self._tower = config.mm_vision_tower
        found = transformers_config(config)
        config.text_config, config.vision_config = found.text_config, found.vision_config  # adapters ask for shapes
        super().__init__(found, quant_config, prefix)

    def load_weights(self, weights: Weights) -> None:
        """Take the tower's weights from its directory, then the checkpoint's, which may have a tower of its own."""
        from transformers import CLIPVisionModel

        dtype = next(self.vision_tower.parameters()).dtype
        tower = CLIPVisionModel.from_pretrained(self._tower, dtype=dtype)
        self.vision_tower.load_weights(tower.state_dict().items())
        super().load_weights(weights)


def renamed(name: str) -> str:
    """A weight's name here."""
    for theirs, ours in RENAMED:
        if name.startswith(theirs):
            return ours + name[len(theirs) :]
    return name


def is_served(config: Any) -> bool:
    """Whether a LLaVA's configuration is one that is served here, rather than by SGLang's model.

    Raises:
        ConfigError: it is not, and SGLang's does not run on this machine.
    """
    original = ORIGINAL in (config.architectures or ())
    if not original:
        return config.vision_config.model_type in CLIP
    tiles = str(getattr(config, "image_aspect_ratio", None))
    if "anyres" not in tiles and tower_config(config).model_type in CLIP:
        return True
    if is_plain_cpu():
        raise ConfigError(
            f"{ORIGINAL} with mm_vision_tower {config.mm_vision_tower!r} and image_aspect_ratio {tiles!r}: SGLang "
            "encodes its images on CUDA only; on a CPU expected a CLIP tower without anyres"
        )
    return False


def tower_config(config: Any) -> Any:
    """The configuration that lies beside the original layout's tower."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(config.mm_vision_tower)


def transformers_config(config: Any) -> LlavaConfig:
    """What the original layout's configuration is called in transformers'.

    Args:
        config: as SGLang reads it: a ``LlavaConfig`` whose parts are defaults, and which has the language model's
            settings itself.

    Raises:
        ConfigError: its projector is not the two layers of LLaVA-1.5.
    """
    projector = getattr(config, "mm_projector_type", "linear")
    if projector != "mlp2x_gelu":
        raise ConfigError(f"mm_projector_type: expected 'mlp2x_gelu', as LLaVA-1.5 has, got {projector!r}")
    known = LlamaConfig().to_dict().keys() - {"architectures", "model_type", "transformers_version"}
    text = {name: value for name, value in config.to_dict().items() if name in known}
    tower = tower_config(config)
    every = getattr(config, "mm_vision_select_feature", "patch") == "cls_patch"
    return LlavaConfig(
        architectures=["LlavaForConditionalGeneration"],
        text_config=LlamaConfig(**text),
        vision_config=getattr(tower, "vision_config", tower),
        vision_feature_layer=config.mm_vision_select_layer,
        vision_feature_select_strategy="full" if every else "default",
        projector_hidden_act="gelu",
        image_token_index=config.image_token_index,
        dtype=config.dtype,
    )


class LlavaProcessor(_sgl.BaseMultimodalProcessor):
    """Images of a LLaVA with a CLIP tower, by transformers' ``LlavaProcessor``."""

    models = ()
    gpu_image_decode = False  # CLIP's image processor takes Pillow's images

    def __init__(self, hf_config: Any, server_args: object, processor: Any, *args: object, **kwargs: object) -> None:
        super().__init__(hf_config, server_args, processor, *args, **kwargs)
        size = [processor.image_processor.crop_size[side] for side in ("height", "width")]
        shown = processor.replace_image_token({"pixel_values": torch.zeros(1, 3, *size)}, 0)
        self._tokens = shown.count(processor.image_token)
        self._squared = getattr(hf_config, "image_aspect_ratio", None) == "pad"
        tokens = {"image_token": processor.image_token, "image_token_id": processor.image_token_id}
        self.mm_tokens = _sgl.MultimodalSpecialTokens(**tokens).build(processor)

    async def process_mm_data_async(
        self, image_data: list[Any], input_text: object, request_obj: object, *args: object, **kwargs: object
    ) -> object:
        """As SGLang's processors: the prompt's ids and one item for each image."""
        loaded = await self.load_mm_data(prompt=input_text, multimodal_tokens=self.mm_tokens, image_data=image_data)
        if self._squared:
            loaded.images = [self._square(image) for image in loaded.images]
        items, ids, _ = await self.process_and_combine_mm_data_async(loaded, self.mm_tokens)
        return _sgl.MultimodalProcessorOutput(
            mm_items=items, input_ids=ids.tolist(), im_token_id=self.mm_tokens.image_token_id
        )

    def get_mm_items_offset(self, input_ids: torch.Tensor, mm_token_id: int) -> list[tuple[int, int]]:
        """First and last token of each image: two may stand beside each other, and all have as many tokens."""
        found = super().get_mm_items_offset(input_ids, mm_token_id)
        size = self._tokens
        return [(at, at + size - 1) for first, last in found for at in range(first, last + 1, size)]

    def _square(self, image: Any) -> Any:
        mean = tuple(int(255 * part) for part in self._processor.image_processor.image_mean)
        return _sgl.expand2square(image, mean)


def processor_of(original: Callable[..., Any], hf_config: Any, *args: Any, model_config: object = None) -> Any:
    """``LlavaProcessor`` for what is served here; else SGLang's, by the function that gives it."""
    if is_served(hf_config):
        return LlavaProcessor(hf_config, *args)
    return original(hf_config, *args, model_config=model_config)
