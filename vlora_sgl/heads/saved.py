"""The classification head that PEFT saves with an adapter (``modules_to_save=["score"]``), served as a head of ours.

``AutoModelForSequenceClassification`` reads the last token's post-norm hidden state through ``score``, a linear layer;
that is what a ``classify`` head does. PEFT keeps no label names, so they are ``LABEL_0`` and on, as in transformers,
unless the adapter's ``vlora_adapter.json`` describes a head ``score`` with labels of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from vlora_sgl.core import JsonDict
from vlora_sgl.errors import AdapterError, HeadError
from vlora_sgl.files import check_regular, read_json

SAVED_HEAD = "score"
# Modules that torch.compile, FSDP and activation checkpointing put around another; trainers leave them in the keys.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def without_wrappers(key: str) -> str:
    """A tensor's name as it is when nothing wraps its module.

    >>> without_wrappers("_orig_mod.model.layers.3._checkpoint_wrapped_module.mlp.up_proj.lora_A.weight")
    'model.layers.3.mlp.up_proj.lora_A.weight'
    """
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def peft_settings(directory: Path) -> JsonDict:
    """``adapter_config.json``, or nothing: whoever loads the LoRA weights reports what is wrong with that file."""
    try:
        return dict(read_json(directory / "adapter_config.json"))
    except (AdapterError, TypeError, ValueError):
        return {}


def saved_head(directory: str | Path) -> dict[str, torch.Tensor]:
    """``weight`` [labels, hidden] and, where it has one, ``bias`` [labels]; empty if the adapter saves no such head.

    Raises:
        HeadError: the configuration asks for it, and the weights are not there.
    """
    directory = Path(directory)
    if SAVED_HEAD not in (peft_settings(directory).get("modules_to_save") or ()):
        return {}
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("adapter_model*.safetensors")):
        check_regular(path, HeadError)
        try:
            with safe_open(str(path), framework="pt", device="cpu") as file:
                for key in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                    module, _, part = without_wrappers(key).rpartition(".")
                    if module.rpartition(".")[2] == SAVED_HEAD and part in ("weight", "bias"):
                        found[part] = file.get_tensor(key).float()
        except (OSError, SafetensorError) as error:
            raise HeadError(f"{path} cannot be read: {error}") from error
    if "weight" not in found or found["weight"].dim() != 2:
        raise HeadError(f"{directory}: modules_to_save names {SAVED_HEAD!r}, and no matrix of it is in the weights")
    return found


def with_saved_head(heads: Mapping[str, JsonDict], directory: str | Path) -> dict[str, JsonDict]:
    """The heads described, and the saved one if there is one.

    Raises:
        HeadError: a description of it that does not fit its weights.
    """
    saved = saved_head(directory)
    if not saved:
        return dict(heads)
    count = len(saved["weight"])
    settings = heads.get(SAVED_HEAD) or {
        "name": SAVED_HEAD,
        "kind": "classify",
        "labels": [f"LABEL_{label}" for label in range(count)],
    }
    if settings["kind"] != "classify" or len(settings["labels"]) != count:
        raise HeadError(
            f"{directory}: head {SAVED_HEAD!r} is saved with {count} outputs; it is described as {settings['kind']} "
            f"of {len(settings.get('labels', ()))} labels"
        )
    return {**heads, SAVED_HEAD: settings}
