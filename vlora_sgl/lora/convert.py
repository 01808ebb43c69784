"""Adapters whose initialisation took something out of the base weights, to plain LoRA.

PiSSA (arXiv:2404.02948), OLoRA (arXiv:2406.01775), CorDA (arXiv:2406.05223) and LoRA-GA (arXiv:2407.05000) begin with
factors ``A0, B0`` that are not zero, and take ``s B0 A0`` out of the weights, so that the model is the same. Trained,
``W - s B0 A0 + s B A`` is the base model with an adapter of twice the rank (PEFT's ``subtract_mutated_init``):

    s (B A - B0 A0) = s [B | -B0] [A ; A0]
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from vlora_sgl.core import JsonDict
from vlora_sgl.errors import AdapterError, quoted
from vlora_sgl.files import is_there, read_json
from vlora_sgl.heads.store import DESCRIPTION_FILE
from vlora_sgl.heads.store import WEIGHTS_FILE as HEADS_FILE
from vlora_sgl.lora.checkpoint import WEIGHTS_NAME, read_adapter, weight_files
from vlora_sgl.lora.peft_config import CONFIG_NAME, PeftLoraConfig
from vlora_sgl.lora.weight_files import read_tensors


def convert(trained: Path, initial: Path, output: Path) -> None:
    """Write the plain LoRA adapter that does on the base model what a trained one does on its changed weights.

    Args:
        trained: a PEFT directory.
        initial: the same adapter as it was saved before training.
        output: where it goes; it must not be there. Heads and description come along.

    Raises:
        AdapterError: one of them is none, or they are not the same adapter; nothing is written.
    """
    if output.exists():
        raise AdapterError(f"{quoted(str(output))} is there already; name a directory that is not")
    config, before = _config(trained), _config(initial)
    for option in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"):
        if (config.get(option) or None) != (before.get(option) or None):
            raise AdapterError(
                f"{initial}: {option} is {before.get(option)!r}, of the trained adapter it is {config.get(option)!r}; "
                "expected the same adapter as it was before training"
            )
    after, before = (read_tensors(weight_files(one)).tensors for one in (trained, initial))
    tensors = _joined(after, before, initial)
    output.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        save_file(tensors, made / WEIGHTS_NAME, metadata={"format": "pt"})
        (made / CONFIG_NAME).write_text(json.dumps(_doubled(config), indent=2, sort_keys=True) + "\n")
        for name in (DESCRIPTION_FILE, HEADS_FILE):
            if is_there(trained / name):
                shutil.copyfile(trained / name, made / name)
        read_adapter(made)
        made.chmod(0o755)
        made.rename(output)
    except BaseException:
        shutil.rmtree(made)
        raise


def _config(directory: Path) -> JsonDict:
    """The configuration, which but for its initialisation is one that is served.

    Raises:
        AdapterError: it is not.
    """
    raw = read_json(directory / CONFIG_NAME)
    if not isinstance(raw, dict):
        raise AdapterError(f"{directory / CONFIG_NAME}: expected a JSON object, got {type(raw).__name__}")
    init = raw.get("init_lora_weights")
    loftq = isinstance(init, str) and init.lower().startswith("loftq")
    read = PeftLoraConfig.from_dict(raw if loftq else {**raw, "init_lora_weights": True}, str(directory / CONFIG_NAME))
    for option in ("use_dora", "lora_bias"):
        if raw.get(option):
            raise AdapterError(f"{directory / CONFIG_NAME}: with {option} the change is no LoRA of the base model")
    return {**raw, "r": read.r, "lora_alpha": read.alpha}


def _joined(
    trained: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor], initial: Path
) -> dict[str, torch.Tensor]:
    """Factors side by side; what is no factor stays as it was trained."""
    found = {}
    for name, tensor in trained.items():
        side = next((side for side in "AB" if f".lora_{side}." in name or f".lora_embedding_{side}" in name), None)
        if side is None:
            found[name] = tensor
            continue
        old = before.get(name)
        if old is None or old.shape != tensor.shape:
            came = "none" if old is None else f"one of shape {list(old.shape)}"
            raise AdapterError(f"{initial}: expected {name} of shape {list(tensor.shape)}, got {came}")
        rank_first = side == "A"
        old = (old if rank_first else -old).to(tensor.dtype)
        found[name] = torch.cat([tensor, old], dim=0 if rank_first else 1).contiguous()
    if unused := [name for name in before if name not in trained]:
        raise AdapterError(f"{initial}: {unused[0]} is not in the trained adapter")
    return found


def _doubled(config: JsonDict) -> JsonDict:
    """The configuration for twice the rank at the same scales."""
    more = math.sqrt(2) if config.get("use_rslora") else 2
    return {
        **config,
        "init_lora_weights": True,
        "r": 2 * config["r"],
        "lora_alpha": more * config["lora_alpha"],
        "rank_pattern": {path: 2 * rank for path, rank in (config.get("rank_pattern") or {}).items()},
        "alpha_pattern": {path: more * alpha for path, alpha in (config.get("alpha_pattern") or {}).items()},
    }
