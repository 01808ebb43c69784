"""vlora_sgl's own settings: one frozen dataclass, from which the command line is built.

SGLang's settings stay SGLang's. Ours travel to the engine's processes in one environment variable, because child
processes are started by SGLang and inherit nothing else of ours.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from vlora_sgl.core import MAX_IMAGE_PIXELS, InferenceMode, JsonDict
from vlora_sgl.errors import ConfigError
from vlora_sgl.names import Parser
from vlora_sgl.sources import FORM, Source, read_sources

ENVIRONMENT_VARIABLE = "VLORA_SGL_ARGS"
UPLOADS_VARIABLE = "VLORA_SGL_UPLOADS"
SHARED_MEMORY, LEAST_SHARED_BYTES = Path("/dev/shm"), 2**30
"""Containers have 64 MiB of it unless told otherwise: too little for adapters."""
POLICY_NAMES = ("cost", "vlora", "unmerged", "merged")
SLOT_UNIT = 16
"""Ranks of device slots are multiples of it: what ``tl.dot`` pads a rank to, and what keeps the kernels' addresses
aligned."""

LEAST_SECONDS = 1.0
"""Of a limit: below it, it would end what goes well."""
MOST_IMAGE_PIXELS = 178_956_970
"""Above it Pillow refuses some formats by itself."""


def _flag(default: object, help: str, **options: object) -> Any:
    return field(default=default, metadata={"help": help, **options})


@dataclass(frozen=True)
class VLoraArgs:
    """Settings of vlora_sgl, beside SGLang's ``ServerArgs``. Each field is a flag of the launcher."""

    mode: str = _flag(
        "auto",
        "how adapters are applied: 'auto' chooses per batch, the others force one mode (for debugging)",
        choices=("auto", *(str(mode) for mode in InferenceMode)),
    )
    policy: str = _flag(
        "cost",
        "how batches are formed and their mode chosen: by a measured cost table ('cost'), by the paper's Algorithm 1 "
        "('vlora'), by one of the baselines ('unmerged', 'merged'), or by a class of yours (its import path)",
        metavar="{" + ",".join(POLICY_NAMES) + ",module:Class}",
    )
    cost_table: str | None = _flag(
        None,
        "file with the costs of an iteration, as python -m vlora_sgl.measure_costs writes it; by default the one "
        "measured for this device and model, else an analytic one",
        metavar="FILE",
    )
    theta: float = _flag(
        0.5, "credit, in seconds, above which a request starves (Algorithm 1)", type=float, metavar="SECONDS"
    )
    wait_bound: float = _flag(
        2.0, "longest a request may be kept from running for the sake of others", type=float, metavar="SECONDS"
    )
    iteration_log: str | None = _flag(
        None,
        "write what each iteration ran and how long it took to this file, one JSON object a line",
        metavar="FILE",
    )
    max_routed: int = _flag(
        16,
        "routed adapters (members chosen token by token) that can be loaded at once; 0 leaves their kernel out "
        "of the graphs",
        type=int,
        metavar="N",
    )
    merge_copy: str = _flag(
        "device",
        "where the copy of the base weights lives: 'device' (exact switch in milliseconds, costs their size "
        "in device memory) or 'host' (pinned memory, switches at the speed of the bus)",
        choices=("device", "host"),
    )
    merge_tolerance: float = _flag(
        0.05,
        "largest relative error of a layer's output that folding an adapter into FP8 weights may make; one that makes "
        "more stays unmerged. 0: nothing is folded into FP8",
        type=float,
        metavar="SHARE",
    )
    adapter_weights: str = _flag(
        "auto",
        "what device slots hold of adapters' linear layers: 'auto' (the engine's type) or 'fp8' (e4m3: half the "
        "memory, half the bytes of a step, a few per cent of an update lost)",
        choices=("auto", "fp8"),
    )
    slot_ranks: tuple[int, ...] = _flag(
        (),
        "ranks of the device slots for adapters, one number a slot, so that a small adapter does not cost what the "
        "largest does; multiples of 16; sets --max-loras-per-batch and --max-lora-rank. By default all have that",
        nargs="+",
        type=int,
        metavar="RANK",
    )
    fetch_ahead: int = _flag(
        4,
        "most adapters on their way to device slots at once, beside the steps, for requests that wait; with 0 every "
        "batch waits for its own",
        type=int,
        metavar="N",
    )
    dora: bool = _flag(
        False,
        "give the device slots, and the graphs, room for what DoRA and trained biases add to an adapter: two numbers "
        "for each output of a linear. By default where an adapter of --lora-paths needs it",
        action="store_true",
    )
    adapter_root: tuple[str, ...] = _flag(
        (),
        "directory below which adapters may be loaded at run time; give it several times for several; "
        "without it any directory is allowed",
        action="append",
        metavar="DIR",
    )

    adapter_source: tuple[str, ...] = _flag(
        (),
        "where adapters come from when a request names them: a folder, which is watched, or a URL, below which they "
        f"lie by their names; or one adapter as NAME=URL: {FORM}. Give it several times for several",
        action="append",
        metavar="SOURCE",
    )
    source_cache: str = _flag(
        "~/.cache/vlora_sgl/adapters",
        "directory for adapters that were fetched; servers may share it",
        metavar="DIR",
    )
    source_cache_bytes: int = _flag(
        20 * 2**30,
        "most bytes of all adapters in it; what was used the longest time ago leaves first",
        type=int,
        metavar="BYTES",
    )

    image_host: tuple[str, ...] = _flag(
        (),
        "host that the vision routes may fetch images from; give it several times for several; "
        "without it they take data: URLs only",
        action="append",
        metavar="HOST",
    )

    fast_paths: str = _flag(
        "auto",
        "attention and norms between the linears: 'auto' takes our kernels where they were measured to be faster than "
        "SGLang's Triton attention, 'off' leaves all to SGLang, so that what adapters cost can be told apart",
        choices=("auto", "off"),
    )

    max_answers: int = _flag(128, "most answers to one prompt that a request may ask for (n)", type=int, metavar="N")
    max_top_logprobs: int = _flag(128, "most alternatives per token that a request may ask for", type=int, metavar="N")
    max_images: int = _flag(64, "most images of one prompt; so many videos and sounds besides", type=int, metavar="N")
    max_text_chars: int = _flag(
        0,
        "most characters of one prompt's text; 0: 64 for each token of the model's context",
        type=int,
        metavar="N",
    )
    max_image_pixels: int = _flag(
        MAX_IMAGE_PIXELS,
        "most pixels of an image in a request (width x height, read from its header); more is refused before it is "
        "decoded",
        type=int,
        metavar="PIXELS",
    )

    max_body_bytes: int = _flag(
        128 * 2**20,
        "most bytes of a request's body, images in base64 included; more is a 413",
        type=int,
        metavar="BYTES",
    )

    max_adapter_bytes: int = _flag(
        2**30,
        "most bytes of an adapter that is sent in the body of /load_lora_adapter or /reload_lora_adapter; 0: none is "
        "taken",
        type=int,
        metavar="BYTES",
    )

    drain_seconds: float = _flag(
        30.0,
        "a server that is told to stop (SIGTERM, Ctrl-C) is gone so many seconds later: requests may finish until "
        "5 seconds before (half the time, if that is more), then they are aborted",
        type=float,
        metavar="SECONDS",
    )

    wait_seconds: float = _flag(
        60.0,
        "how long a request that loads, unloads or changes anything waits for the engine, and for requests that still "
        "use an adapter; then it gets a 504 that says what it waited for, and what it began goes on. Ten times as "
        "long for weights",
        type=float,
        metavar="SECONDS",
    )

    encoder_cache_mb: int = _flag(
        100, "device memory for outputs of the image encoder, kept for images that come back", type=int, metavar="MIB"
    )

    vision_graphs: int = _flag(
        16,
        "CUDA graphs of the image encoder that are kept, each of a size of images and how many of it come together, 0 "
        "for none (docs/design/prefix_cache.md)",
        type=int,
        metavar="GRAPHS",
    )

    def __post_init__(self) -> None:
        if not (self.theta > 0 and self.wait_bound > 0):
            raise ConfigError(
                f"--vlora-theta and --vlora-wait-bound must be > 0; got {self.theta!r} and {self.wait_bound!r}"
            )
        if not 0 <= self.merge_tolerance <= 1:
            raise ConfigError(f"--vlora-merge-tolerance must be from 0 to 1; got {self.merge_tolerance!r}")
        if self.fetch_ahead < 0:
            raise ConfigError(f"--vlora-fetch-ahead must be 0 or more; got {self.fetch_ahead!r}")
        if not 1 <= self.max_image_pixels <= MOST_IMAGE_PIXELS:
            raise ConfigError(
                f"--vlora-max-image-pixels must be from 1 to {MOST_IMAGE_PIXELS}; got {self.max_image_pixels!r}"
            )
        if self.max_body_bytes < 1024:
            raise ConfigError(f"--vlora-max-body-bytes must be at least 1024; got {self.max_body_bytes!r}")
        if self.max_adapter_bytes < 0:
            raise ConfigError(f"--vlora-max-adapter-bytes must be 0 or more; got {self.max_adapter_bytes!r}")
        for name in ("drain_seconds", "wait_seconds"):
            if not LEAST_SECONDS <= getattr(self, name) < float("inf"):
                flag = "--vlora-" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be {LEAST_SECONDS:g} or more; got {getattr(self, name)!r}")
        if self.source_cache_bytes < 1:
            raise ConfigError(f"--vlora-source-cache-bytes must be above 0; got {self.source_cache_bytes!r}")
        for name in ("slot_ranks", "adapter_root", "adapter_source", "image_host"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if any(rank <= 0 or rank % SLOT_UNIT for rank in self.slot_ranks):
            raise ConfigError(f"--vlora-slot-ranks must be multiples of {SLOT_UNIT}; got {self.slot_ranks}")
        if self.policy not in POLICY_NAMES and ":" not in self.policy:
            raise ConfigError(
                f"--vlora-policy must be one of {', '.join(POLICY_NAMES)}, or module:Class; got {self.policy!r}"
            )
        for item in dataclasses.fields(self):
            choices = item.metadata.get("choices")
            if choices and getattr(self, item.name) not in choices:
                raise ConfigError(
                    f"{option_string(item)} must be one of {', '.join(choices)}; got {getattr(self, item.name)!r}"
                )

    @property
    def sources(self) -> tuple[Source, ...]:
        """What ``adapter_source`` says.

        Raises:
            ConfigError: it is not what the flag takes.
        """
        return read_sources(self.adapter_source)

    @property
    def readable(self) -> tuple[str, ...]:
        """Directories below which adapters may be loaded at run time; none: any."""
        if not self.adapter_root:
            return ()
        folders = (source.place for source in self.sources if source.is_folder)
        return (*self.adapter_root, *folders, str(Path(self.source_cache).expanduser()), str(uploads_directory()))

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add a group with one flag per field; defaults come from the class."""
        group = parser.add_argument_group("vlora_sgl", "what vlora_sgl adds to SGLang")
        for item in dataclasses.fields(cls):
            # argparse appends to the default in place, so it gets a list of its own.
            default = list(item.default) if isinstance(item.default, tuple) else item.default
            group.add_argument(option_string(item), dest=f"vlora_{item.name}", default=default, **item.metadata)

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> VLoraArgs:
        """Build from a parsed command line."""
        return cls(**{item.name: getattr(namespace, f"vlora_{item.name}") for item in dataclasses.fields(cls)})

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> VLoraArgs:
        """Read what ``to_environment`` wrote; the defaults where nothing was written.

        Raises:
            ConfigError: the variable holds something else.
        """
        return _parsed((os.environ if environment is None else environment).get(ENVIRONMENT_VARIABLE, "{}"))

    def to_environment(self) -> None:
        """Hand these settings to the processes that this one starts."""
        os.environ[ENVIRONMENT_VARIABLE] = json.dumps(dataclasses.asdict(self))
        os.environ.pop(UPLOADS_VARIABLE, None)
        os.environ[UPLOADS_VARIABLE] = str(uploads_directory())


def uploads_directory() -> Path:
    """Where this server, all of its processes, keeps adapters that come in requests; it need not exist."""
    if UPLOADS_VARIABLE in os.environ:
        return Path(os.environ[UPLOADS_VARIABLE])
    shared = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).total >= LEAST_SHARED_BYTES
    root = SHARED_MEMORY if shared and os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    return root / f"vlora-uploads-{os.getuid()}-{os.getpid()}"


@lru_cache(maxsize=8)
def _parsed(text: str) -> VLoraArgs:
    """The settings in a variable's text, parsed once a process: requests and adapter loads ask for them, too."""
    try:
        return VLoraArgs(**json.loads(text))
    except (TypeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{ENVIRONMENT_VARIABLE} is not what this version writes: {error}") from error


def changed_while_serving(args: VLoraArgs, changes: Mapping[str, float]) -> VLoraArgs:
    """The settings after a change on a running server, where values are numbers.

    Args:
        args: the settings until then.
        changes: ``vlora_theta`` and ``vlora_wait_bound`` in seconds; ``vlora_policy:NAME`` and ``vlora_mode:NAME``
            with any value, which choose NAME. A policy's import path is taken only if the server was started with it:
            a request must not decide what is imported.

    Raises:
        ConfigError: another key, or a value that the setting does not take.
    """
    new: JsonDict = {}
    for key, value in changes.items():
        name, _, choice = key.removeprefix("vlora_").partition(":")
        if (name in ("policy", "mode")) != bool(choice) or name not in ("policy", "mode", "theta", "wait_bound"):
            raise ConfigError(
                f"{key} cannot be changed while serving; what can: vlora_theta, vlora_wait_bound, "
                "vlora_policy:NAME, vlora_mode:NAME"
            )
        if name == "policy" and ":" in choice and choice != VLoraArgs.from_environment().policy:
            raise ConfigError(f"{key}: a running server takes {', '.join(POLICY_NAMES)} and what it was started with")
        new[name] = choice or float(value)
    return dataclasses.replace(args, **new)


def option_string(item: dataclasses.Field[object]) -> str:
    """The command-line flag of a field."""
    return "--vlora-" + item.name.replace("_", "-")


def split_argv(argv: Sequence[str]) -> tuple[VLoraArgs, list[str]]:
    """Take our flags out of a command line.

    Returns:
        Our settings, and the rest, which is SGLang's, in the order given.

    Raises:
        ConfigError: a setting of ours that is wrong.
    """
    parser = Parser(add_help=False, allow_abbrev=False)
    VLoraArgs.add_cli_args(parser)
    namespace, rest = parser.parse_known_args(argv)
    return VLoraArgs.from_cli_args(namespace), rest


# SGLang's settings that a plain CPU cannot do: the field, the values that it can, and why not the others.
KERNELS = "its kernels are for GPUs"
GPU_MEMORY = "it moves what is in a GPU's memory, and there is none"
QUANTISED_ON_A_CPU = ("fp8", "w8a8_fp8", "w8a8_int8", "compressed-tensors", "awq", "gptq")
GPU_LINKS = "it is about links between GPUs"
NOT_ON_A_CPU: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("device", ("cpu",), "there is no other device"),
    ("attention_backend", ("torch_native",), KERNELS),
    ("prefill_attention_backend", ("torch_native",), KERNELS),
    ("decode_attention_backend", ("torch_native",), KERNELS),
    ("mm_attention_backend", ("sdpa",), KERNELS),
    ("sampling_backend", ("pytorch",), KERNELS),
    ("quantization", QUANTISED_ON_A_CPU, KERNELS),
    ("torchao_config", ("",), KERNELS),
    ("moe_a2a_backend", ("none",), GPU_LINKS),
    ("cuda_graph_backend_decode", ("disabled",), "there are no CUDA graphs"),
    ("cuda_graph_backend_prefill", ("disabled",), "there are no CUDA graphs"),
    ("enable_hierarchical_cache", (), f"{GPU_MEMORY}; the prefix cache is in host memory as it is"),
    ("hicache_storage_backend", (), GPU_MEMORY),
    ("enable_lmcache", (), GPU_MEMORY),
    ("enable_flexkv", (), GPU_MEMORY),
    ("enable_unified_memory", (), KERNELS),
    ("enable_hisparse", (), KERNELS),
    ("enable_memory_saver", (), GPU_MEMORY),
    ("enable_weights_cpu_backup", (), GPU_MEMORY),
    ("cpu_offload_gb", (0, "0"), GPU_MEMORY),
    ("enable_lora_overlap_loading", (), "there is no second stream to load adapters on"),
    ("enable_two_batch_overlap", (), "there is no second stream"),
    ("enable_single_batch_overlap", (), "there is no second stream"),
    ("enable_pdmux", (), "there is no second stream"),
    ("enable_deterministic_inference", (), KERNELS),
    ("enable_fused_qk_norm_rope", (), KERNELS),
    ("enable_nccl_nvls", (), GPU_LINKS),
    ("enable_symm_mem", (), GPU_LINKS),
    ("enable_torch_symm_mem", (), GPU_LINKS),
    ("enable_mscclpp", (), GPU_LINKS),
    ("enable_flashinfer_allreduce_fusion", (), GPU_LINKS),
)


def refuse_on_a_cpu(settings: Mapping[str, object]) -> None:
    """Refuse, by name, settings of SGLang's that a plain CPU cannot do.

    Args:
        settings: by field of ``ServerArgs``; those that are left out are SGLang's or our defaults.

    Raises:
        ConfigError: names the first, its value and the reason.
    """
    for name, fine, reason in NOT_ON_A_CPU:
        value = settings.get(name)
        if value is not None and value is not False and value not in fine:
            shown = "" if value is True else f"={value}"
            raise ConfigError(f"--{name.replace('_', '-')}{shown} does not work on a plain CPU: {reason}")


def fields_in(argv: Sequence[str]) -> dict[str, object]:
    """What a command line sets, by field of ``ServerArgs``: the value that follows a flag, ``True`` if none does."""
    found: dict[str, object] = {}
    for position, argument in enumerate(argv):
        if argument.startswith("--"):
            name, separator, value = argument[2:].partition("=")
            following = argv[position + 1 : position + 2]
            alone = not following or following[0].startswith("--")
            found[name.replace("-", "_")] = value if separator else True if alone else following[0]
    return found
