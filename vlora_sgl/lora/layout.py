"""Which linear layers a base model has, under one name each, however a checkpoint or an engine spells it.

A tensor of layer 3's query projection is called ``model.layers.3.self_attn.q_proj`` in one release of transformers,
``model.language_model.layers.3…`` in the next, ``language_model.model.layers.3…`` in SGLang. The *canonical* name
drops every wrapper: ``layers.3.self_attn.q_proj``. Adapters, base checkpoints and engines all meet there. What lies in
the vision tower of a Qwen model keeps its first name: ``visual.blocks.3.attn.qkv``; a CLIP or InternViT is a
``vision_tower`` of ``layers``, and the two linears behind it are ``projector.linear_1`` and ``projector.linear_2``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlora_sgl.errors import AdapterError, ConfigError
from vlora_sgl.lora.experts import FUSED, expert_parts, is_expert

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

# Module names that only wrap the language model; they carry no meaning of their own.
_WRAPPERS = frozenset(
    {"base_model", "model", "language_model", "text_model", "llm", "transformer", "decoder", "module", "thinker"}
)

# A path through one of these belongs to an image, video or audio tower, or to what joins it to the language model.
_TOWER = re.compile(
    r"(^|\.)(visual|vision\w*|vit|image_\w+|audio\w*|multi_modal_projector|mm_projector|projector|merger|"
    r"deepstack\w*|resampler|connector|aligner|embed_vision|mlp1)(\.|$)"
)
# The towers whose adapters can be served. Of a Qwen model its blocks, its projector, and projectors of inner layers.
_QWEN_TOWER = re.compile(r"(?:^|\.)(visual\.(?:blocks|merger|deepstack_merger_list)\..+)$")
_TOWER_LAYER = re.compile(r"(?:^|\.)vision_(?:tower|model)\.(?:vision_\w+\.)*(?:encoder\.)?layers?\.(\d+)\.(.+)$")
# What is called a layer's attention in transformers' CLIP and InternViT, in InternVL's own code and in SGLang.
_ATTENTION = re.compile(r"^(?:self_attn|attention|attn)\.(?:attn\.)?(.+)$")
_ATTENTION_LEAVES = {"qkv": "qkv_proj", "proj": "out_proj", "projection_layer": "out_proj"}
# The two linears behind it. LLaVA's first layout counts the activation between them, InternVL's the norm before too.
_PROJECTORS = {
    f"{owner}.{leaf}": f"projector.linear_{number}"
    for owner, leaves in {
        "projector": ("linear_1", "linear_2"),
        "multi_modal_projector": ("linear_1", "linear_2"),
        "mm_projector": ("0", "2"),
        "mlp1": ("1", "3"),
    }.items()
    for number, leaf in enumerate(leaves, start=1)
}
_LAYER = re.compile(r"^layers\.(\d+)\.(.+)$")

_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")

# Every version of an adapter has the same names, and each is asked about several times.
_remembered = lru_cache(maxsize=1 << 15)

#: The two linear layers outside the decoder stack that an adapter may target.
EMBEDDING_MODULES = ("embed_tokens", "lm_head")


@_remembered
def is_tower(path: str) -> bool:
    """Whether ``path`` lies in a vision or audio tower or its projector, by the names in use for those."""
    return _TOWER.search(path) is not None


@_remembered
def canonical_name(path: str) -> str | None:
    """The name of a module without its wrappers, or ``None`` if ``path`` names none that an adapter may target.

    >>> canonical_name("base_model.model.model.language_model.layers.3.mlp.up_proj")
    'layers.3.mlp.up_proj'
    >>> canonical_name("lm_head"), canonical_name("vision_tower.transformer.layers.0.feed_forward.w1")
    ('lm_head', None)
    >>> canonical_name("model.visual.blocks.0.attn.qkv"), canonical_name("visual.merger.mlp.0")
    ('visual.blocks.0.attn.qkv', 'visual.merger.mlp.0')
    >>> canonical_name("vision_tower.vision_model.encoder.layers.2.self_attn.q_proj"), canonical_name("mlp1.3")
    ('vision_tower.layers.2.self_attn.q_proj', 'projector.linear_2')
    """
    if is_tower(path):
        return _tower_name(path)
    parts = path.split(".")
    while parts and parts[0] in _WRAPPERS:
        parts.pop(0)
    name = ".".join(parts)
    return name if _LAYER.match(name) or name in EMBEDDING_MODULES else None


def _tower_name(path: str) -> str | None:
    if found := _QWEN_TOWER.search(path):
        # SGLang's name for what transformers calls qkv: there it is one matrix, and its adapter has one A.
        return found[1].replace(".attn.qkv_proj", ".attn.qkv")
    if found := _TOWER_LAYER.search(path):
        if attention := _ATTENTION.match(found[2]):
            return f"vision_tower.layers.{found[1]}.self_attn.{_ATTENTION_LEAVES.get(attention[1], attention[1])}"
        return f"vision_tower.layers.{found[1]}.{found[2]}"
    return _PROJECTORS.get(".".join(path.split(".")[-2:]))


@_remembered
def layer_of(name: str) -> int | None:
    """The decoder layer of a canonical name; ``None`` for the embedding and the output layer."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


@_remembered
def kind_of(name: str) -> str:
    """The kind of module that a canonical name is one of: its last name; of the tower its name less numbers.

    >>> kind_of("layers.3.mlp.up_proj"), kind_of("visual.blocks.0.attn.qkv"), kind_of("visual.merger.mlp.0")
    ('up_proj', 'visual attn.qkv', 'visual merger.mlp.0')
    >>> kind_of("layers.3.mlp.experts.5.up_proj")
    'experts up_proj'
    """
    if not is_tower(name):
        return ("experts " if is_expert(name) else "") + name.rpartition(".")[2]
    layer = r"^(?:visual\.(?:blocks\.\d+\.)?|vision_tower\.layers\.\d+\.)|(?<=deepstack_merger_list)\.\d+"
    return "visual " + re.sub(layer, "", name)


def in_blocks(name: str) -> bool:
    """Whether a module of the tower, by its canonical name, lies in its blocks, and not behind them."""
    return name.startswith(("visual.blocks.", "vision_tower.layers."))


@dataclass(frozen=True)
class BaseLayout:
    """The linear layers of one base model.

    Attributes:
        shapes: canonical name -> ``(out_features, in_features)``. Stacked projections appear as their parts (q, k, v;
            gate, up), experts' linears by themselves. ``embed_tokens`` has ``(hidden, vocabulary)``, as its LoRA
            factors do.
        fused: canonical name of a stacked projection -> the canonical names of its parts, in row order. All experts'
            linears of a kind (``layers.0.mlp.experts.down_proj``) are one.
        num_layers: depth of the decoder.
        paths: canonical name -> the module's path in the transformers model; empty when built from an engine.
        other_linears: paths of linear layers whose adapters cannot be served (other towers, projectors).
    """

    shapes: Mapping[str, tuple[int, int]]
    fused: Mapping[str, tuple[str, ...]]
    num_layers: int
    paths: Mapping[str, str] = field(default_factory=dict)
    other_linears: tuple[str, ...] = ()

    @classmethod
    def from_modules(
        cls,
        linears: Iterable[tuple[str, tuple[int, int], tuple[int, ...]]],
        embeddings: Mapping[str, tuple[int, int]],
        experts: Mapping[str, tuple[int, int, int]] | None = None,
    ) -> BaseLayout:
        """Builds the layout from ``(path, (out, in), part sizes)`` of every linear layer.

        Args:
            linears: ``part sizes`` are the output sizes of the parts of a stacked projection, empty for a plain one.
            embeddings: path -> ``(hidden, vocabulary)`` of embedding layers.
            experts: path -> ``(experts, intermediate, hidden)`` of what holds gate, up and down of experts.
        """
        shapes: dict[str, tuple[int, int]] = {}
        fused: dict[str, tuple[str, ...]] = {}
        paths: dict[str, str] = {}
        others: list[str] = []
        for path, (out, inner), sizes in linears:
            name = canonical_name(path)
            if name is None:
                others.append(path)
                continue
            paths[name] = path
            if not sizes or name.endswith(".attn.qkv"):
                shapes[name] = (out, inner)
                continue
            parent = name.rpartition(".")[0]
            parts = tuple(f"{parent}.{leaf}" for leaf in (_QKV if len(sizes) == 3 else _GATE_UP))
            fused[name] = parts
            shapes.update({part: (size, inner) for part, size in zip(parts, sizes, strict=True)})
        for path, shape in embeddings.items():
            name = canonical_name(path)
            if name in EMBEDDING_MODULES:
                shapes[name] = shape
                paths[name] = path
        # A split model also accepts adapters trained on its stacked spelling (Megatron-style trainers write those).
        for stacked, leaves in (("qkv_proj", _QKV), ("gate_up_proj", _GATE_UP)):
            for name in [n for n in shapes if n.endswith("." + leaves[0])]:
                parent = name.rpartition(".")[0]
                parts = tuple(f"{parent}.{leaf}" for leaf in leaves)
                if all(p in shapes for p in parts):
                    fused.setdefault(f"{parent}.{stacked}", parts)
        for path, (count, intermediate, hidden) in (experts or {}).items():
            name = canonical_name(path)
            if name is None:
                others.append(path)
                continue
            own = expert_parts(name, count)
            fused.update(own)
            paths.update({f"{name}.{kind}": f"{path}.{kind}" for kind in FUSED})
            gate_up, down = own.values()
            shapes.update(dict.fromkeys(gate_up, (intermediate, hidden)))
            shapes.update(dict.fromkeys(down, (hidden, intermediate)))
        layers = [layer for n in shapes if (layer := layer_of(n)) is not None]
        return cls(shapes, fused, max(layers, default=-1) + 1, paths, tuple(others))

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> BaseLayout:
        """The layout of the transformers model that ``config`` describes, built without memory (meta device)."""
        return cls.from_model(empty_model(config))

    @classmethod
    def from_model(cls, model: nn.Module) -> BaseLayout:
        """The layout of a transformers model; only the shapes of its weights are read."""
        from torch import nn

        config: Any = model.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        linears: list[tuple[str, tuple[int, int], tuple[int, ...]]] = []
        embeddings: dict[str, tuple[int, int]] = {}
        experts: dict[str, tuple[int, int, int]] = {}
        for path, module in model.named_modules():
            if isinstance(module, nn.Embedding):
                embeddings[path] = (module.embedding_dim, module.num_embeddings)
            elif isinstance(module, nn.Linear):
                shape = (module.out_features, module.in_features)
                linears.append((path, shape, _part_sizes(path, shape[0], text)))
            elif all(getattr(getattr(module, kind, None), "ndim", 0) == 3 for kind in FUSED):
                sizes = [*module.down_proj.shape[1:]]  # which axis is which, gate and up tell: they are twice as many
                twice = set(module.gate_up_proj.shape[1:])
                hidden = next(size for size in sizes if size in twice)
                sizes.remove(hidden)
                experts[path] = (len(module.down_proj), sizes[0], hidden)
        return cls.from_modules(linears, embeddings, experts)

    @classmethod
    def from_directory(cls, model_dir: str | Path) -> BaseLayout:
        """The layout of the model whose ``config.json`` lies in ``model_dir``; no weights are read.

        Raises:
            ConfigError: there is no readable configuration.
        """
        from transformers import AutoConfig

        if not (Path(model_dir) / "config.json").is_file():
            raise ConfigError(f"{model_dir}: no config.json, so this is not a model directory")
        return cls.from_config(AutoConfig.from_pretrained(str(model_dir)))

    def parts_of(self, name: str) -> tuple[str, ...]:
        """The parts of a stacked projection; a plain one is its own only part."""
        return self.fused.get(name, (name,))

    def expected(self, name: str) -> tuple[int, int] | None:
        """``(out, in)`` of a module, the sum over its parts for a stacked one; ``None`` if the model lacks it."""
        parts = self.parts_of(name)
        if any(p not in self.shapes for p in parts):
            return None
        return sum(self.shapes[p][0] for p in parts), self.shapes[parts[0]][1]

    def check_layer(self, name: str, key: str) -> None:
        """Refuses a layer index past the depth.

        Raises:
            AdapterError: ``key``, whose canonical name is ``name``, lies past the last layer.
        """
        layer = layer_of(name)
        if layer is not None and layer >= self.num_layers:
            raise AdapterError(f"{key}: layer {layer} is past the depth of this model ({self.num_layers} layers)")


def empty_model(config: PretrainedConfig) -> nn.Module:
    """The transformers model of ``config`` with weights on the meta device, the class chosen as its config asks."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    multimodal = type(config) in AutoModelForImageTextToText._model_mapping
    auto: Any = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config)


def _part_sizes(path: str, out: int, text_config: PretrainedConfig) -> tuple[int, ...]:
    """Output sizes of the parts of a projection that the transformers model itself keeps stacked (Phi-3 and kin)."""
    leaf = path.rpartition(".")[2]
    if leaf == "gate_up_proj":
        return (out // 2, out // 2)
    if leaf != "qkv_proj":
        return ()
    heads = text_config.num_attention_heads
    kv_heads = getattr(text_config, "num_key_value_heads", None) or heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    return (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
