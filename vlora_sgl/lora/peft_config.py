"""``adapter_config.json`` of a PEFT LoRA adapter: what it says about ranks and scales, and what we refuse by name."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from peft import LoraConfig
from peft.utils.other import get_pattern_key

from vlora_sgl.core import JsonDict
from vlora_sgl.errors import AdapterError, HeadError
from vlora_sgl.files import holders_below, is_there, read_json
from vlora_sgl.heads.store import peft_invocation
from vlora_sgl.lora.layout import canonical_name

CONFIG_NAME = "adapter_config.json"

# Options that change the function an adapter computes, in a way the operator does not carry out.
_REFUSED = {
    "use_qalora": "QA-LoRA pools the input groups",
    "use_bdlora": "BD-LoRA factors are block diagonal",
    "layer_replication": "layer_replication changes the base model's depth",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "kasa_config": "KaSA changes the base weights",
    "arrow_config": "Arrow routes between adapters",
}
# Initialisations that subtract from the base weights, so that the saved factors fit a base nobody serves.
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "lora_ga")
LARGEST = float(torch.finfo(torch.float32).max)
"""Of an alpha or a scale: the kernels hold them in float32."""
# Options that only matter while training, whatever their value.
_TRAINING_ONLY = frozenset({"loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"})

T = TypeVar("T")


@dataclass(frozen=True)
class PeftLoraConfig:
    """What serving needs from an adapter's configuration.

    Attributes:
        r: default rank.
        alpha: default alpha.
        rslora: the scale is ``alpha / sqrt(r)`` instead of ``alpha / r`` (rank-stabilised LoRA, arXiv 2312.03732).
        rank_pattern: regular expression on module paths -> rank.
        alpha_pattern: regular expression on module paths -> alpha.
        dora: every module has magnitudes.
        lora_bias: every B has a bias.
        bias: which of the base model's biases were trained: ``none``, ``all`` or ``lora_only``.
        modules_to_save: names of modules saved whole, beside the LoRA factors.
        raw: the file as read.
    """

    r: int
    alpha: float
    rslora: bool
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    modules_to_save: tuple[str, ...]
    raw: JsonDict
    dora: bool = False
    lora_bias: bool = False
    bias: str = "none"

    @classmethod
    def read(cls, directory: Path) -> PeftLoraConfig:
        """Reads and checks ``directory/adapter_config.json``.

        Raises:
            AdapterError: the file is missing, is not JSON, is not of a LoRA adapter, or asks for what we refuse.
        """
        path = directory / CONFIG_NAME
        if not is_there(path):
            below = ", ".join(map(str, holders_below(directory, CONFIG_NAME)))
            remedy = f"; one is in {below}" if below else ""
            raise AdapterError(f"{directory}: no {CONFIG_NAME}, so this is not a PEFT adapter{remedy}")
        raw = read_json(path)
        if not isinstance(raw, dict):
            raise AdapterError(f"{path}: expected a JSON object, got {type(raw).__name__}")
        return cls.from_dict(raw, str(path))

    @classmethod
    def from_dict(cls, raw: JsonDict, source: str = CONFIG_NAME) -> PeftLoraConfig:
        """Checks a configuration that was already read; ``source`` names it in messages.

        Raises:
            AdapterError: as for :meth:`read`.
        """
        if str(raw.get("peft_type", "")).upper() != "LORA":
            raise AdapterError(f"{source}: peft_type is {raw.get('peft_type')!r}, only 'LORA' can be served")
        for option, why in _REFUSED.items():
            if raw.get(option) not in (None, False, [], {}):
                raise AdapterError(f"{source}: {option}={raw[option]!r} cannot be served ({why})")
        _check_invocation(raw, source)
        _check_variants(raw, source)
        init = raw.get("init_lora_weights")
        if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
            raise AdapterError(
                f"{source}: init_lora_weights={init!r} changes the base weights; convert the adapter to plain LoRA, "
                "with what was saved before training: vlora convert TRAINED INITIAL OUTPUT"
            )
        if isinstance(init, str) and init.lower().startswith("loftq"):
            raise AdapterError(
                f"{source}: init_lora_weights={init!r} fits quantized weights of its own, which are not this base "
                "model's; merge it into those (PEFT: merge_and_unload) and serve the result, or train on the base "
                "model that is served"
            )
        known = {f.name for f in fields(LoraConfig)} | _TRAINING_ONLY
        for option, value in raw.items():
            if option not in known and value not in (None, False, [], {}, ""):
                raise AdapterError(f"{source}: option {option}={value!r} is unknown to this release")
        try:
            return cls(
                r=_positive(raw.get("r", LoraConfig.r), "r"),
                alpha=_finite(raw.get("lora_alpha", LoraConfig.lora_alpha), "lora_alpha"),
                rslora=_flag(raw.get("use_rslora"), "use_rslora"),
                rank_pattern={k: _positive(v, f"rank_pattern[{k!r}]") for k, v in _table(raw, "rank_pattern")},
                alpha_pattern={k: _finite(v, f"alpha_pattern[{k!r}]") for k, v in _table(raw, "alpha_pattern")},
                modules_to_save=tuple(raw.get("modules_to_save") or ()),
                raw=raw,
                dora=_flag(raw.get("use_dora"), "use_dora"),
                lora_bias=_flag(raw.get("lora_bias"), "lora_bias"),
                bias=str(raw.get("bias") or "none"),
            )
        except (TypeError, ValueError) as error:
            raise AdapterError(f"{source}: {error}") from None

    def explained(self) -> list[str]:
        """What a person should know of the adapter's form."""
        tokens = self.raw.get("alora_invocation_tokens")
        return [f"an activated LoRA: it starts at the last occurrence of the tokens {tokens}"] if tokens else []

    def rank(self, path: str) -> int:
        """The rank the configuration gives the module at ``path``, by PEFT's own matching rule."""
        return int(_lookup(self.rank_pattern, path, self.r))

    def scale(self, path: str, rank: int) -> float:
        """The factor on ``B A`` for the module at ``path`` of rank ``rank``."""
        alpha = float(_lookup(self.alpha_pattern, path, self.alpha))
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def _check_invocation(raw: JsonDict, source: str) -> None:
    """Whether an activated adapter's tokens are tokens; where they start it, ``heads.store`` reads."""
    try:
        peft_invocation(raw, source)
    except HeadError as error:
        raise AdapterError(str(error)) from None


def _check_variants(raw: JsonDict, source: str) -> None:
    """Refuse what PEFT has no form for, too, or what would reach the tokens before an activated adapter's start."""
    bias, activated = raw.get("bias") or "none", raw.get("alora_invocation_tokens")
    if bias not in ("none", "all", "lora_only"):
        raise AdapterError(f"{source}: bias must be 'none', 'all' or 'lora_only', got {_shown(bias)}")
    if raw.get("use_dora") and (activated or raw.get("lora_bias")):
        other = "alora_invocation_tokens" if activated else "lora_bias"
        raise AdapterError(f"{source}: use_dora does not go with {other}")
    if activated and bias != "none":
        raise AdapterError(f"{source}: bias={bias!r} does not go with alora_invocation_tokens")


def _lookup(pattern: dict[str, T], path: str, default: T) -> T:
    """PEFT's pattern lookup on the path as saved, then on the canonical name (keys may be re-prefixed)."""
    for candidate in (path, canonical_name(path) or path):
        key = get_pattern_key(list(pattern), candidate)
        if key in pattern:
            return pattern[key]
    return default


def _table(raw: JsonDict, option: str) -> list[tuple[str, Any]]:
    value = raw.get(option) or {}
    if not isinstance(value, dict):
        raise TypeError(f"{option} must be an object, got {_shown(value)}")
    for pattern in value:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{option} has {pattern!r}, which is no regular expression: {error}") from None
    return list(value.items())


def _positive(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{what} must be a positive integer, got {_shown(value)}")
    return value


def _finite(value: Any, what: str) -> float:
    # An integer may be too large for a float; a comparison takes it. NaN fails every comparison.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise ValueError(f"{what} must be a finite number of at most {LARGEST:.3g}, got {_shown(value)}")
    return float(value)


def _flag(value: Any, what: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{what} must be true or false, got {_shown(value)}")
    return bool(value)


def _shown(value: Any) -> str:
    """A value for a message of one line; Python refuses to write integers of more than some thousand digits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
