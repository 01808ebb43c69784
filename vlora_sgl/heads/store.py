"""What an adapter's directory says beside its LoRA weights: ``vlora_adapter.json`` and ``vlora_heads.safetensors``.

::

    {"format": 1,
     "invocation": null | "after_image" | [token ids],
     "prompt": "Which digit is this?",
     "heads": [{"name": "digit", "kind": "classify", "labels": ["0", "1"]},
               {"name": "dots", "kind": "count", "maximum": 9},
               {"name": "find", "kind": "detect", "labels": ["cat"], "threshold": 0.5, "overlap": 0.5}],
     "metrics": {...}}

Every key but ``format`` is optional. The invocation may stand in ``adapter_config.json`` as PEFT writes it, in
``alora_invocation_tokens``. A head's weights: the tensors ``NAME.weight`` [outputs, hidden], ``NAME.bias``;
those of a head ``score`` may be among the adapter's instead (``heads.saved``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from vlora_sgl.core import JsonDict
from vlora_sgl.errors import HeadError, quoted
from vlora_sgl.files import check_regular, is_there, read_json
from vlora_sgl.heads.base import VisionHead
from vlora_sgl.heads.classify import ClassifyHead
from vlora_sgl.heads.count import CountHead
from vlora_sgl.heads.detect import DetectHead
from vlora_sgl.heads.saved import SAVED_HEAD, peft_settings, saved_head, with_saved_head

DESCRIPTION_FILE = "vlora_adapter.json"
WEIGHTS_FILE = "vlora_heads.safetensors"
FORMAT = 1
AFTER_IMAGE = "after_image"

Invocation = str | tuple[int, ...] | None
"""Where an adapter starts: ``None`` at the first token, ``"after_image"``, or at a token sequence."""

KINDS: dict[str, type[VisionHead]] = {cls.kind: cls for cls in (ClassifyHead, CountHead, DetectHead)}
_SETTINGS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "classify": (frozenset({"labels"}), frozenset()),
    "count": (frozenset({"maximum"}), frozenset()),
    "detect": (frozenset({"labels"}), frozenset({"threshold", "overlap"})),
}
_TYPES: dict[str, type] = {"labels": list, "maximum": int, "threshold": float, "overlap": float}
_ACTIVATED = "alora_invocation_tokens"
_KEYS = frozenset({"format", "invocation", "prompt", "heads", "metrics"})


@dataclass(frozen=True)
class AdapterDescription:
    """``vlora_adapter.json``, checked.

    Attributes:
        invocation: where the adapter starts.
        prompt: the question the adapter was trained with, ``None`` if any.
        heads: settings of each head, by name.
        metrics: what its maker measured.
    """

    invocation: Invocation = None
    prompt: str | None = None
    heads: Mapping[str, JsonDict] = field(default_factory=dict)
    metrics: JsonDict = field(default_factory=dict)

    def head_named(self, name: str | None, kind: str | None, adapter: str) -> str:
        """The head a request means: by name, or the only one of its kind.

        Raises:
            HeadError: none or several fit; the message lists what exists.
        """
        kinds = {head: settings["kind"] for head, settings in self.heads.items()}
        fitting = [head for head in kinds if name in (None, head) and kind in (None, kinds[head])]
        if len(fitting) == 1:
            return fitting[0]
        have = ", ".join(f"{head} ({kinds[head]})" for head in kinds) or "none"
        wanted = f"{kind or 'vision'} head" + (f" named {name!r}" if name is not None else "")
        problem = "several heads fit; name one" if fitting else f"no {wanted}"
        raise HeadError(f"adapter {adapter!r}: {problem}; heads it has: {have}")


def read_description(directory: str | Path) -> AdapterDescription:
    """Read and check ``vlora_adapter.json``; an adapter without one has no heads and starts at the first token.

    Raises:
        HeadError: names the file, the key, and what was expected.
    """
    path = Path(directory) / DESCRIPTION_FILE
    activated = peft_invocation(peft_settings(Path(directory)), str(directory))
    if not is_there(path):
        return AdapterDescription(activated, heads=with_saved_head({}, directory))
    data = read_json(path, HeadError)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise HeadError(f'{path}: expected an object with "format": {FORMAT}, got {found!r}')
    unknown = data.keys() - _KEYS
    if unknown:
        raise HeadError(f"{path}: unknown keys {sorted(unknown)}; known are {sorted(_KEYS)}")
    prompt, metrics = data.get("prompt"), data.get("metrics", {})
    if not isinstance(prompt, str | None) or not isinstance(metrics, dict):
        raise HeadError(f"{path}: prompt must be a string and metrics an object")
    invocation = activated if data.get("invocation") is None else _invocation(data["invocation"], path)
    if activated not in (None, invocation):
        raise HeadError(f"{path}: the invocation is {invocation!r}, {_ACTIVATED} of adapter_config.json {activated!r}")
    heads = with_saved_head(_head_settings(data.get("heads", []), path), directory)
    return AdapterDescription(invocation, prompt, heads, metrics)


def peft_invocation(settings: JsonDict, source: str) -> tuple[int, ...] | None:
    """Where PEFT's configuration says that an activated LoRA (aLoRA) starts; ``None`` for any other adapter.

    Raises:
        HeadError: it is no list of token ids.
    """
    value = settings.get(_ACTIVATED)
    if value in (None, []):
        return None
    if not _is_tokens(value):
        raise HeadError(f"{source}: {_ACTIVATED} must be a list of token ids, got {quoted(value)}")
    return tuple(value)


def _invocation(value: object, where: Path) -> Invocation:
    if value == AFTER_IMAGE:
        return AFTER_IMAGE
    if isinstance(value, list) and _is_tokens(value):
        return tuple(value)
    raise HeadError(f"{where}: the invocation must be {AFTER_IMAGE!r} or a list of token ids, got {value!r}")


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(t) is int and 0 <= t < 2**31 for t in value)


def _head_settings(value: object, where: Path) -> dict[str, JsonDict]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise HeadError(f"{where}: heads must be a list of objects")
    heads: dict[str, JsonDict] = {}
    for item in value:
        name, kind = item.get("name"), item.get("kind")
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise HeadError(f"{where}: a head's name is letters, digits, _ and -; got {name!r}")
        if name in heads:
            raise HeadError(f"{where}: two heads are named {name!r}")
        if kind not in KINDS:
            raise HeadError(f"{where}: head {name!r} has kind {kind!r}; kinds are {', '.join(KINDS)}")
        needed, optional = _SETTINGS[kind]
        given = item.keys() - {"name", "kind"}
        if needed - given or given - needed - optional:
            raise HeadError(
                f"{where}: head {name!r} needs {sorted(needed)}, may have {sorted(optional)}, has {sorted(given)}"
            )
        for key in given:
            value_ok = isinstance(item[key], _TYPES[key] if _TYPES[key] is not float else (int, float))
            if not value_ok or isinstance(item[key], bool):
                raise HeadError(f"{where}: head {name!r}: {key} must be {_TYPES[key].__name__}, got {item[key]!r}")
        if not all(isinstance(label, str) for label in item.get("labels", [])):
            raise HeadError(f"{where}: head {name!r}: labels must be strings, got {item['labels']!r}")
        heads[name] = dict(item)
    return heads


def build_head(settings: JsonDict, hidden_size: int) -> VisionHead:
    """A head with fresh weights, from its entry in ``vlora_adapter.json``.

    Raises:
        HeadError: an impossible setting.
    """
    options = {key: value for key, value in settings.items() if key not in ("name", "kind")}
    return KINDS[settings["kind"]](settings["name"], hidden_size, **options)


def load_heads(
    directory: str | Path,
    hidden_size: int,
    device: torch.device | str = "cpu",
    description: AdapterDescription | None = None,
) -> dict[str, VisionHead]:
    """The heads of an adapter, by name, in evaluation mode.

    Args:
        directory: the adapter's directory.
        hidden_size: of the model that serves it.
        device: where the weights go.
        description: what ``read_description`` gave, if it was read already.
    Raises:
        HeadError: a file or tensor that is missing, left over, of another shape or not finite, by name.
    """
    description = description or read_description(directory)
    path = Path(directory) / WEIGHTS_FILE
    if not description.heads:
        if is_there(path):
            raise HeadError(f"{path} has weights of heads that {DESCRIPTION_FILE} does not describe")
        return {}
    tensors = {f"{SAVED_HEAD}.{part}": tensor for part, tensor in saved_head(directory).items()}
    if tensors:
        tensors.setdefault(f"{SAVED_HEAD}.bias", torch.zeros(len(tensors[f"{SAVED_HEAD}.weight"])))
    if is_there(path) or not tensors:
        check_regular(path, HeadError)
        try:
            tensors |= load_file(path, device="cpu")
        except (OSError, SafetensorError) as error:
            raise HeadError(f"{path} cannot be read: {error}") from error
    heads = {name: build_head(settings, hidden_size) for name, settings in description.heads.items()}
    expected = {f"{name}.{part}": (head, part) for name, head in heads.items() for part in ("weight", "bias")}
    if tensors.keys() != expected.keys():
        missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
        raise HeadError(f"{path}: missing tensors {missing}, unknown tensors {unknown}")
    for key, (head, part) in expected.items():
        parameter, tensor = getattr(head.linear, part), tensors[key]
        if tensor.shape != parameter.shape:
            raise HeadError(f"{path}: {key} is {list(tensor.shape)}, expected {list(parameter.shape)}")
        if not torch.isfinite(tensor).all():
            raise HeadError(f"{path}: {key} has values that are not finite")
        parameter.data.copy_(tensor)
    return {name: head.to(device).eval().requires_grad_(False) for name, head in heads.items()}


def save_heads(
    directory: str | Path,
    heads: Iterable[VisionHead],
    invocation: Invocation = None,
    prompt: str | None = None,
    metrics: Mapping[str, object] | None = None,
) -> None:
    """Write both files into an adapter's directory; what ``load_heads`` and ``read_description`` then read."""
    heads = list(heads)
    description: JsonDict = {"format": FORMAT}
    if invocation is not None:
        description["invocation"] = invocation if isinstance(invocation, str) else list(invocation)
    if prompt is not None:
        description["prompt"] = prompt
    if heads:
        description["heads"] = [head.settings() for head in heads]
        tensors = {
            f"{head.name}.{part}": getattr(head.linear, part).detach().float().cpu().contiguous()
            for head in heads
            for part in ("weight", "bias")
        }
        save_file(tensors, Path(directory) / WEIGHTS_FILE)
    if metrics:
        description["metrics"] = dict(metrics)
    (Path(directory) / DESCRIPTION_FILE).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
