"""Reads a PEFT LoRA directory into canonical modules, or refuses it by name.

The tensors are the truth: which modules are adapted, and at which rank, is read from the file, so that any form of
``target_modules`` (list, regular expression, ``all-linear``, with ``exclude_modules`` or ``layers_to_transform``)
means what it meant in training. The configuration only supplies the scales, and must not contradict the tensors.
Nothing is dropped: a tensor that cannot be honoured is an :class:`~vlora_sgl.errors.AdapterError` that names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from vlora_sgl.errors import AdapterError
from vlora_sgl.files import check_regular, is_there, read_json
from vlora_sgl.heads.saved import without_wrappers
from vlora_sgl.lora.access import allowed_directory
from vlora_sgl.lora.bulk import Contents, digest, digests, joined, place
from vlora_sgl.lora.experts import factors_of_experts, is_fused, is_router, parameter_of
from vlora_sgl.lora.layout import EMBEDDING_MODULES, BaseLayout, canonical_name, is_tower, kind_of, layer_of
from vlora_sgl.lora.load_report import LoadReport, count
from vlora_sgl.lora.peft_config import PeftLoraConfig
from vlora_sgl.lora.token_rows import KEY as TOKEN_ROWS
from vlora_sgl.lora.token_rows import TokenRows, token_rows
from vlora_sgl.lora.weight_files import Room, SavedTensors, read_tensors

WEIGHTS_NAME = "adapter_model.safetensors"
INDEX_NAME = WEIGHTS_NAME + ".index.json"

_LORA_KEY = re.compile(
    r"^(?P<path>.+?)\.lora_(?:embedding_)?(?P<side>[AB])(?:\.(?!weight$|bias$)[^.]+)?(?:\.weight)?$"
)
_MAGNITUDE_KEY = re.compile(r"^(?P<path>.+?)\.lora_magnitude_vector(?:\.[^.]+)??(?:\.weight)?$")
_LORA_BIAS_KEY = re.compile(r"^(?P<path>.+?)\.lora_B(?:\.[^.]+)?\.bias$")
# The whole layer PEFT saves beside an adapter that is a head on the last hidden state (vlora_sgl/heads/saved.py).
_HEAD = "score"
_PICKLES = {".bin", ".pt", ".pth", ".pkl", ".ckpt"}
_SAMPLES = 3
_MERGE = "merge it into the base model (PEFT: merge_and_unload) and serve the result as a model of its own"

Sides = dict[str, tuple[str, torch.Tensor]]
"""Of one module, its ``A``, ``B``, ``magnitude`` and ``bias`` (of B), each with the key it is saved under."""


@dataclass(frozen=True)
class LoraPair:
    """The low-rank update of one linear layer: ``y += scale * (x A^T) B^T``.

    Attributes:
        a: ``[r, in]``, on the CPU, in the file's dtype.
        b: ``[out, r]``, likewise.
        scale: the LoRA scaling, not multiplied into either factor.
        magnitude: ``[out]``, the norms that DoRA (arXiv 2402.09353) gives the rows of ``W + scale * B A``.
        bias: ``[out]``, of B: ``scale`` times it joins the output.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    magnitude: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        """Rows of ``a``."""
        return self.a.shape[0]

    def delta(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """``scale * B A``, ``[out, in]``, computed in ``dtype``."""
        return self.scale * (self.b.to(dtype) @ self.a.to(dtype))


@dataclass(frozen=True)
class AdapterWeights:
    """An adapter as read: canonical module name -> factors, whole tensors saved beside them, and the report.

    Stacked projections are already split into their parts, which then share ``a``.

    Attributes:
        token_rows: new rows of ``embed_tokens`` and ``lm_head``.
        biases: canonical name -> bias ``[out]`` that takes the base model's place, of modules adapted or not.
        digests: canonical name -> digest of all that the adapter has for a module, its scale included, heads and new
            rows of tokens apart.
    """

    modules: Mapping[str, LoraPair]
    saved: Mapping[str, torch.Tensor]
    config: PeftLoraConfig
    report: LoadReport
    token_rows: Mapping[str, TokenRows] = field(default_factory=dict)
    biases: Mapping[str, torch.Tensor] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def form(self) -> str | None:
        """What makes it more than plain LoRA, for messages; ``None`` if nothing does."""
        if self.biases:
            return "trained biases of the base model"
        if any(pair.magnitude is not None for pair in self.modules.values()):
            return "DoRA's magnitudes"
        return "biases of B" if any(pair.bias is not None for pair in self.modules.values()) else None


def read_adapter(directory: str | Path, layout: BaseLayout | None = None, room: Room | None = None) -> AdapterWeights:
    """Reads the adapter in ``directory`` and checks it against a base model.

    Args:
        directory: holds ``adapter_config.json`` and safetensors, one file or shards.
        layout: the base model; without it shapes and depth are not checked and stacked projections stay stacked.
        room: where tensors are read to, if it matters.

    Raises:
        AdapterError: the adapter cannot be served as it is; the message names the option or tensor.
    """
    directory = Path(directory)
    config = PeftLoraConfig.read(directory)
    _refuse_added_tokens(directory, layout)
    return assemble(read_tensors(weight_files(directory), room), config, str(directory), layout)


def check_files(directory: str) -> None:
    """Whether a directory holds an adapter's files, before anything is started for it; tensors are not read.

    Raises:
        AdapterError: it does not; the message names the file.
    """
    adapter = allowed_directory(directory, ())
    PeftLoraConfig.read(adapter)
    weight_files(adapter)


def assemble(
    read: SavedTensors, config: PeftLoraConfig, source: str, layout: BaseLayout | None = None
) -> AdapterWeights:
    """Sorts an adapter's tensors into modules; the part of :func:`read_adapter` that touches no file.

    Raises:
        AdapterError: as for :func:`read_adapter`.
    """
    sides: dict[str, Sides] = {}
    own_biases: dict[str, tuple[str, torch.Tensor]] = {}
    saved: dict[str, torch.Tensor] = {}
    notes: list[str] = []
    unknown: list[str] = []
    spoiled = {without_wrappers(key) for key in read.spoiled}
    contents = {place(tensor): read.contents[key] for key, tensor in read.tensors.items()}
    tensors = _unwrapped(read.tensors)
    new_rows = {key: tensor for key, tensor in tensors.items() if TOKEN_ROWS.match(key)}
    rows = token_rows(new_rows, config.raw, layout)
    notes += [f"trainable_token_indices: {len(new.ids)} rows of {layer} are its own" for layer, new in rows.items()]
    for key, tensor in tensors.items():
        if key in spoiled:
            raise AdapterError(f"{key}: holds NaN or infinite values")
        if key in new_rows:
            continue
        path, side = module_and_side(key)
        if side is not None:
            if side in sides.setdefault(path, {}):
                raise AdapterError(f"{key}: a second {side} for the same module")
            sides[path][side] = (key, tensor)
        elif config.bias != "none" and key.endswith(".bias") and path.rpartition(".")[2] not in config.modules_to_save:
            if path in own_biases:
                raise AdapterError(f"{key}: a second bias for the same module")
            own_biases[path] = (key, tensor)
        else:
            _sort_other(key, tensor, config, layout, saved, notes, unknown)
    unknown += [path for path in sides if canonical_name(path) is None]
    _refuse_towers([path for path in unknown if is_tower(path)])
    if unknown:
        raise AdapterError(
            f"{source}: {len(unknown)} of {len(tensors)} tensors fit no module that can be adapted, for example "
            f"{_sample(unknown)}"
        )

    modules: dict[str, LoraPair] = {}
    origin: dict[str, str] = {}
    for path, pair in sides.items():
        name = canonical_name(path)
        assert name is not None
        for part, lora in _module(path, name, pair, config, layout):
            if part in modules:
                raise AdapterError(f"{path}: adapts {part}, which {origin[part]} adapts already")
            modules[part], origin[part] = lora, path
    biases = _biases(own_biases, layout)
    if not modules:
        raise AdapterError(f"{source}: no LoRA tensor matched any module; keys look like {_sample(list(tensors))}")
    if config.raw.get("ensure_weight_tying") and (tied := [name for name in modules if name in EMBEDDING_MODULES]):
        raise AdapterError(
            f"{source}: ensure_weight_tying ties {tied[0]} to what is not in the file; train LoRA on embed_tokens and "
            f"lm_head, each by its name, or {_MERGE}"
        )
    form = [tensor for pair in modules.values() for tensor in (pair.magnitude, pair.bias) if tensor is not None]
    if not form and not biases and not any(bool(pair.b.any()) for pair in modules.values()):
        notes.append("every B is zero: the adapter changes nothing")
    notes += [*_explained(modules, biases), *config.explained()]

    of_modules = module_digests(modules, biases, contents)
    more = {**saved, **{f"{name} {new.ids}": new.rows for name, new in rows.items()}}
    report = LoadReport(
        path=source,
        digest=joined(
            {**of_modules, **{f"{name} whole": digest({"": tensor}, contents) for name, tensor in more.items()}}
        )[:40],
        tensors=sum(map(len, sides.values())),
        modules=count(map(kind_of, modules)),
        layers=len({layer_of(name) for name in modules} - {None}),
        ranks=count(pair.rank for pair in modules.values()),
        scales=count(pair.scale for pair in modules.values()),
        prefixes=tuple(sorted({path.removesuffix(canonical_name(path) or "").rstrip(".") for path in sides})),
        heads={name: tuple(tensor.shape) for name, tensor in saved.items()},
        nbytes=sum(t.numel() * t.element_size() for pair in sides.values() for _, t in pair.values()),
        notes=tuple(notes),
    )
    return AdapterWeights(modules, saved, config, report, rows, biases, of_modules)


def module_and_side(key: str) -> tuple[str, str | None]:
    """The module that a tensor belongs to, and what it is of its adapter; ``None`` for what is no adapter's."""
    match = _LORA_KEY.match(key)
    if match is not None:
        return match["path"], match["side"]
    for side, pattern in (("magnitude", _MAGNITUDE_KEY), ("bias", _LORA_BIAS_KEY)):
        match = pattern.match(key)
        if match is not None:
            return match["path"], side
    return key.rpartition(".")[0].removesuffix(".base_layer"), None


def _explained(modules: Mapping[str, LoraPair], biases: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """What a person should know of an adapter that is more than plain LoRA."""
    scaled = sum(pair.magnitude is not None for pair in modules.values())
    if scaled:
        yield f"DoRA: the rows of {scaled} modules' weights get the norms trained (m / |W + s B A|, computed at load)"
    shifted = sum(pair.bias is not None for pair in modules.values())
    if shifted:
        yield f"lora_bias: B of {shifted} modules has a bias"
    if biases:
        yield f"bias: those of {len(biases)} modules of the base model are replaced for this adapter's rows"


def _biases(given: Mapping[str, tuple[str, torch.Tensor]], layout: BaseLayout | None) -> dict[str, torch.Tensor]:
    """Biases of the base model that were trained, by canonical name, split into the parts of stacked projections."""
    found: dict[str, torch.Tensor] = {}
    for path, (key, tensor) in given.items():
        name = canonical_name(path)
        if (
            name is None
            or is_tower(name)
            or name in EMBEDDING_MODULES
            or (layout is not None and layout.expected(name) is None)
        ):
            raise AdapterError(
                f"{key}: of the base model's biases those of the language model's linear layers can be served; train "
                "with bias='lora_only'"
            )
        parts = {name: tensor}
        if layout is not None:
            layout.check_layer(name, key)
            parts = dict(zip(layout.parts_of(name), _rows(tensor, key, name, layout), strict=True))
        if found.keys() & parts.keys():
            raise AdapterError(f"{key}: a second bias of {name}")
        found |= parts
    return found


def _rows(tensor: torch.Tensor, key: str, name: str, layout: BaseLayout) -> list[torch.Tensor]:
    """One number an output of the module ``name``, by its parts."""
    sizes = [layout.shapes[part][0] for part in layout.parts_of(name)]
    if tensor.shape != (sum(sizes),):
        raise AdapterError(f"{key}: expected [{sum(sizes)}], one number an output of {name}, got {list(tensor.shape)}")
    return list(tensor.split(sizes))


def _unwrapped(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors by their names without trainers' wrappers."""
    found: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        name = without_wrappers(key)
        if name in found:
            raise AdapterError(f"{key}: a second tensor {name}")
        found[name] = tensor
    return found


def _check_sides(path: str, name: str, pair: Sides, config: PeftLoraConfig) -> None:
    """Whether a module has just the tensors that the configuration promises."""
    for side, what, promised in (
        ("A", "lora_A", True),
        ("B", "lora_B", True),
        ("magnitude", "lora_magnitude_vector", config.dora),
        ("bias", "bias of lora_B", config.lora_bias),
    ):
        if promised and side not in pair:
            ((key, _), *_) = pair.values()
            raise AdapterError(f"{key}: its {what} is missing")
        if side in pair and not promised:
            option = "use_dora" if side == "magnitude" else "lora_bias"
            raise AdapterError(f"{pair[side][0]}: the configuration does not set {option}")
    if (name in EMBEDDING_MODULES or is_tower(name)) and len(pair) > 2:
        raise AdapterError(f"{path}: DoRA and lora_bias of {name} cannot be served")


def _fused_experts(
    path: str, name: str, pair: Sides, config: PeftLoraConfig, layout: BaseLayout | None
) -> Iterator[tuple[str, LoraPair]]:
    """The factors of every expert, of a wrapper of all experts' weights."""
    (a_key, a), (_, b) = pair["A"], pair["B"]
    if layout is None:
        yield name, LoraPair(a, b, config.scale(path, config.rank(path)))
        return
    layout.check_layer(name, a_key)
    where, turned = parameter_of(path, name, ((a.shape[0], a.shape[1]), (b.shape[0], b.shape[1])), layout)
    kind, rank = where.rpartition(".")[2], config.rank(where)
    found = list(factors_of_experts(a, b, kind, name, turned, layout, rank)) if a.shape[0] % rank == 0 else []
    if not found:
        raise AdapterError(f"{a_key}: expected rank {rank} for every expert of {where}, got A {list(a.shape)}")
    for part, own_a, own_b in found:
        yield part, LoraPair(own_a, own_b, config.scale(where, rank))


def _module(
    path: str,
    name: str,
    pair: Sides,
    config: PeftLoraConfig,
    layout: BaseLayout | None,
) -> Iterator[tuple[str, LoraPair]]:
    """Checks the two factors of one module and yields them, split into the parts of a stacked projection."""
    _check_sides(path, name, pair, config)
    (a_key, a), (b_key, b) = pair["A"], pair["B"]
    if a.dim() != 2 or b.dim() != 2:
        raise AdapterError(f"{a_key}: expected matrices, got A {list(a.shape)} and B {list(b.shape)}")
    rank = a.shape[0]
    if b.shape[1] != rank:
        raise AdapterError(f"{b_key}: A has rank {rank}, B {b.shape[1]}")
    if is_fused(name):
        yield from _fused_experts(path, name, pair, config, layout)
        return
    if config.rank(path) != rank:
        raise AdapterError(f"{a_key}: the tensors have rank {rank}, the configuration says {config.rank(path)}")
    scale = config.scale(path, rank)
    more = {side: pair[side] for side in ("magnitude", "bias") if side in pair}
    if layout is None:
        yield name, LoraPair(a, b, scale, **{side: tensor for side, (_, tensor) in more.items()})
        return
    layout.check_layer(name, a_key)
    if is_router(name, layout):
        raise AdapterError(f"{a_key}: LoRA on the router of experts is not supported; leave {name} as it is")
    expected = layout.expected(name)
    if expected is None:
        raise AdapterError(f"{a_key}: this model has no module {name}")
    if (b.shape[0], a.shape[1]) != expected:
        raise AdapterError(
            f"{a_key}: B {list(b.shape)} and A {list(a.shape)} make an update of [{b.shape[0]}, {a.shape[1]}]; "
            f"{name} of this model is {list(expected)}"
        )
    split = {side: _rows(tensor, key, name, layout) for side, (key, tensor) in more.items()}
    row = 0
    for i, part in enumerate(layout.parts_of(name)):
        rows = layout.shapes[part][0]
        yield part, LoraPair(a, b[row : row + rows], scale, **{side: parts[i] for side, parts in split.items()})
        row += rows


def _sort_other(
    key: str,
    tensor: torch.Tensor,
    config: PeftLoraConfig,
    layout: BaseLayout | None,
    saved: dict[str, torch.Tensor],
    notes: list[str],
    unknown: list[str],
) -> None:
    """Files a tensor that is no LoRA factor under saved heads, notes or unknown keys, or refuses it."""
    path, _, kind = key.rpartition(".")
    leaf = path.removesuffix(".base_layer").rpartition(".")[2]
    if leaf in EMBEDDING_MODULES:
        if (
            layout is not None
            and "embed_tokens" in layout.shapes
            and tensor.shape[0] != layout.shapes["embed_tokens"][1]
        ):
            raise AdapterError(
                f"{key}: {tensor.shape[0]} rows, the model's vocabulary has {layout.shapes['embed_tokens'][1]}; "
                f"adapters that add vocabulary cannot be served; {_MERGE}"
            )
        if path.endswith(".base_layer") and leaf not in config.modules_to_save:
            # PEFT stores the frozen base embedding beside an adapter that targets it.
            notes.append(f"{key} is PEFT's copy of the base model's frozen weights and is not used")
            return
        raise AdapterError(
            f"{key}: a saved {leaf} would replace the base model's for one adapter and cannot be served; train LoRA "
            f"on it instead (target_modules), or {_MERGE}"
        )
    if leaf == _HEAD and leaf in config.modules_to_save:
        if config.raw.get("task_type") == "TOKEN_CLS":
            raise AdapterError(f"{key}: labels every token, and a served head reads the last one")
        saved[f"{leaf}.{kind}"] = tensor
        return
    if leaf in config.modules_to_save or "modules_to_save" in path:
        raise AdapterError(f"{key}: of modules_to_save only {_HEAD} can be served")
    unknown.append(key)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors that hold the adapter: the index's shards, the one file PEFT writes, or its numbered shards.

    Raises:
        AdapterError: there are none, a listed shard is missing, or a shard points out of the directory.
    """
    index = directory / INDEX_NAME
    if is_there(index):
        try:
            names = sorted(set(read_json(index)["weight_map"].values()))
        except (KeyError, AttributeError, TypeError) as error:
            raise AdapterError(f"{index}: not an index of shards: {error!r}") from None
        if any(not isinstance(n, str) or Path(n).name != n for n in names):
            raise AdapterError(f"{index}: shards must lie beside their index, got {_sample(list(map(str, names)))}")
    elif is_there(directory / WEIGHTS_NAME):
        names = [WEIGHTS_NAME]
    else:
        names = sorted(path.name for path in directory.glob("adapter_model-*.safetensors"))
    if not names:
        pickles = sorted(p.name for p in directory.glob("*") if p.suffix in _PICKLES)
        if pickles:
            raise AdapterError(
                f"{directory}: {pickles[0]} is a pickle, which may carry code; only safetensors are read"
            )
        raise AdapterError(f"{directory}: no {WEIGHTS_NAME}")
    missing = [name for name in names if not is_there(directory / name)]
    if missing:
        raise AdapterError(f"{directory}: shard {missing[0]} is listed but missing")
    paths = [directory / name for name in names]
    for path in paths:
        check_regular(path)
    return paths


def _refuse_towers(paths: list[str]) -> None:
    if paths:
        raise AdapterError(
            f"{len(paths)} modules lie in a vision tower or projector where LoRA is not applied, for example "
            f"{_sample(paths)}; of Qwen2-VL, Qwen2.5-VL and Qwen3-VL visual.blocks and the mergers are, of LLaVA with "
            "CLIP and InternVL the tower's layers and the projector's linears"
        )


def _refuse_added_tokens(directory: Path, layout: BaseLayout | None) -> None:
    """Refuses ``added_tokens.json`` with ids past the base vocabulary; copies of the base's own list are harmless."""
    path = directory / "added_tokens.json"
    if layout is None or "embed_tokens" not in layout.shapes or not is_there(path):
        return
    tokens = read_json(path)
    try:
        added = [token for token, index in tokens.items() if index >= layout.shapes["embed_tokens"][1]]
    except (AttributeError, TypeError) as error:
        raise AdapterError(f"{path}: not a table of tokens: {error}") from None
    if added:
        raise AdapterError(
            f"{path}: adds {len(added)} token(s) to the vocabulary, for example {_sample(added)}; {_MERGE}"
        )


def module_digests(
    modules: Mapping[str, LoraPair],
    biases: Mapping[str, torch.Tensor] | None = None,
    contents: Contents | None = None,
) -> dict[str, str]:
    """Of every module the digest of its factors, their scale, and what else an adapter has for its outputs.

    Args:
        contents: of the tensors, where they are known.
    """
    found: dict[str, dict[str, torch.Tensor | None]] = {
        name: {f"A {pair.scale!r}": pair.a, "B": pair.b, "magnitude": pair.magnitude, "bias": pair.bias}
        for name, pair in modules.items()
    }
    for name, bias in (biases or {}).items():
        found.setdefault(name, {})["bias of the base"] = bias
    return digests(found, contents)


def _sample(keys: list[str]) -> str:
    return ", ".join(sorted(keys)[:_SAMPLES]) + (", ..." if len(keys) > _SAMPLES else "")
