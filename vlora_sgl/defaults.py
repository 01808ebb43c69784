"""SGLang settings that we choose when the user did not, and those that we refuse."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

import yaml

from vlora_sgl import names
from vlora_sgl._sgl_types import ServerArgs
from vlora_sgl.core import JsonDict
from vlora_sgl.errors import ConfigError
from vlora_sgl.lora.checkpoint import check_files
from vlora_sgl.lora.exported import adapter_options
from vlora_sgl.managers.policies import policy_class
from vlora_sgl.platforms.cpu import is_plain_cpu
from vlora_sgl.server_args import NOT_ON_A_CPU, VLoraArgs, fields_in, refuse_on_a_cpu
from vlora_sgl.startup import imports, measured

# Everywhere: models that see are what this package is for; a start prints what a user needs.
COMMON_DEFAULTS: JsonDict = {
    "enable_multimodal": True,
    "radix_cache_backend": "vlora",
    "lora_backend": "atmm",
    "log_level": "warning",
}
# On a plain CPU SGLang's own defaults ask for kernels that are not there, or for CUDA.
CPU_DEFAULTS: JsonDict = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "llguidance",  # xgrammar's masks pin memory and have no CPU operator: a regex ends the server
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "disable_fast_image_processor": True,  # the fast one moves images to CUDA
    "sleep_on_idle": True,  # else an idle server takes a whole core
    "disable_overlap_schedule": True,  # there is no second stream to overlap with
    # The cache takes host memory here, which others use too.
    "mem_fraction_static": 0.3,
    "max_total_tokens": 65536,
}


def engine_defaults(model: str = "", adapters_given: bool = False, slot_ranks: Sequence[int] = ()) -> JsonDict:
    """Defaults for this machine and this model, by ``ServerArgs`` field; an exported model comes with its adapters."""
    adapters = adapter_options(model, adapters_given)
    if slot_ranks:  # one slot more is the base model's
        adapters = {**adapters, "max_loras_per_batch": len(slot_ranks) + 1, "max_lora_rank": max(slot_ranks)}
    return {**adapters, **COMMON_DEFAULTS, **(CPU_DEFAULTS if is_plain_cpu() else measured.settings(model))}


def command_line_defaults(argv: Sequence[str], slot_ranks: Sequence[int] = ()) -> list[str]:
    """The defaults as flags, less those that ``argv`` sets itself."""
    given = given_fields(argv)
    flags: list[str] = []
    for name, value in engine_defaults(imports.model_path_of(argv), "lora_paths" in given, slot_ranks).items():
        if name not in given:
            flag = "--" + name.replace("_", "-")
            flags += [flag] if value is True else [flag, *map(str, value if isinstance(value, list) else [value])]
    return flags


def given_fields(argv: Sequence[str]) -> set[str]:
    """The fields of ``ServerArgs`` that a command line sets, itself or by its file of settings (``--config``)."""
    given = fields_in(argv)
    with contextlib.suppress(OSError, yaml.YAMLError):  # SGLang says what is wrong with the file
        settings = yaml.safe_load(Path(str(given["config"])).read_text()) if "config" in given else None
        return {*given, *(str(name).replace("-", "_") for name in settings or ())}
    return set(given)


def settle(server_args: ServerArgs, given: Collection[str] = ()) -> ServerArgs:
    """Defaults that other settings decide, and a note of who chose what; returns ``server_args``.

    Prefills of several tensor-parallel ranks run eagerly unless asked for: their graphs have not been tried. Adapters
    are loaded beside the steps in any case (``--vlora-fetch-ahead``), and SGLang's way to do so, in which every rank
    asks its own device what has arrived, gives way to that.

    Args:
        given: the fields that the user set.
    """
    if server_args.tp_size > 1 and server_args.cuda_graph_backend_prefill is None:
        server_args.cuda_graph_config.prefill.backend = "disabled"
    if server_args.enable_lora_overlap_loading:
        server_args.override("vlora_sgl", enable_lora_overlap_loading=False)
    server_args._vlora_chosen = measured.chosen(server_args, given)
    return server_args


# What we refuse, by the ServerArgs field, the value that is fine, and why.
UNSUPPORTED: tuple[tuple[str, object, str], ...] = (
    ("pp_size", 1, "pipeline parallelism: its ranks do not see one plan"),
    ("disaggregation_mode", "null", "prefill/decode disaggregation: its loops bypass the mode switch"),
    ("tokenizer_worker_num", 1, "several tokenizer workers: SGLang starts them without plugins"),
    ("use_ray", False, "the Ray launcher: it bypasses our processes"),
    ("enable_dp_attention", False, "data-parallel attention: its ranks must run the same collectives in every mode"),
    ("speculative_algorithm", None, "speculative decoding: its steps of several tokens a row were never shown exact"),
)


def refuse_unsupported(server_args: ServerArgs) -> None:
    """Refuse, by name, the SGLang settings that would bypass us or cannot work here, and a policy that cannot be
    imported.

    Raises:
        ConfigError: names the first such setting, its value and the reason.
        AdapterNameError: an adapter's name that it cannot have.
        AdapterError: a directory of --lora-paths that holds no adapter.
    """
    policy_class(VLoraArgs.from_environment().policy)
    # Again: a file of settings, a flag cut short or an exported model may have brought others.
    adapters = names.adapters_of(server_args.lora_paths)
    names.check_names(adapters, server_args.served_model_name, str(server_args.model_path))
    for _, directory in adapters:
        check_files(str(directory))
    for name, fine, reason in UNSUPPORTED:
        value = getattr(server_args, name, fine)
        if value != fine and value is not None:
            raise ConfigError(f"--{name.replace('_', '-')}={value} is not supported: {reason}")
    if is_plain_cpu():
        refuse_on_a_cpu({name: getattr(server_args, name, None) for name, _, _ in NOT_ON_A_CPU})
    if getattr(server_args, "grammar_backend", None) == "xgrammar" and is_plain_cpu():
        raise ConfigError(
            "--grammar-backend=xgrammar does not work on a plain CPU: its masks pin memory, and the first "
            "request with a grammar would end the server; leave it out (llguidance is used)"
        )
    if os.environ.get("SGLANG_RUST_SERVER", "0").lower() in ("1", "true"):
        raise ConfigError("SGLANG_RUST_SERVER is not supported: it serves requests without our tokenizer manager")
