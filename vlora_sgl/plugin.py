"""Puts our classes in place of SGLang's, in every process, and proves that they are there.

SGLang only logs a plugin's failure and then serves without it, so nothing here relies on its loader: each process of
ours calls ``install`` before SGLang builds anything, and ``verify`` before the first request. The entry point
``register`` does nothing in processes that vlora_sgl did not start: stock ``sglang serve`` stays stock.
"""

from __future__ import annotations

import os
import pkgutil
from functools import partial
from typing import Any

from vlora_sgl import _sgl
from vlora_sgl.errors import ContractError
from vlora_sgl.platforms.cpu import is_plain_cpu
from vlora_sgl.server_args import ENVIRONMENT_VARIABLE

# SGLang's class -> the subclass of ours that takes its place.
REPLACEMENTS: dict[str, str] = {
    "Scheduler": "vlora_sgl.managers.scheduler:VLoraScheduler",
    "TpModelWorker": "vlora_sgl.heads.worker:HeadWorker",
    "LoRAManager": "vlora_sgl.lora.manager:VLoraManager",
    "TokenizerManager": "vlora_sgl.managers.tokenizer_manager:VLoraTokenizerManager",
    "ModelRunner": "vlora_sgl.model_executor.model_runner:VLoraModelRunner",
    "PrefillCudaGraphRunner": "vlora_sgl.model_executor.graph_runner:VLoraPrefillCudaGraphRunner",
}

# SGLang's method -> the function of ours that wraps it, called as f(original, *args, **kwargs).
WRAPPED: dict[str, str] = {
    "SchedulerWeightUpdaterManager.release_memory_occupation": (
        "vlora_sgl.model_executor.model_runner:unmerge_before_release"
    ),
    "OpenAIServingBase._resolve_lora_path": "vlora_sgl.managers.tokenizer_manager:resolve_model_name",
    "BaseMultimodalProcessor.process_mm_data": "vlora_sgl.multimodal.image_requests:process_mm_data",
    "BaseMultimodalProcessor._wrap_tensor_for_cuda_ipc": "vlora_sgl.multimodal.image_requests:wrap_for_cuda_ipc",
    "load_image": "vlora_sgl.multimodal.opening:load_image",
    "ProcessorMixin._check_special_mm_tokens": "vlora_sgl.multimodal.image_requests:check_special_tokens",
    "get_rope_index": "vlora_sgl.multimodal.image_requests:get_rope_index",
    "import_processors": "vlora_sgl.startup.imports:import_needed_processors",
    "chunked_prefill_embedding": "vlora_sgl.multimodal.embedding_count:chunked_prefill_embedding",
    "adjust_embedding_length": "vlora_sgl.multimodal.embedding_count:adjust_embedding_length",
    "set_envs_and_config": "vlora_sgl.startup.processes:use_start_method",
}

# Name of a prefix cache, for --radix-cache-backend -> its factory.
RADIX_CACHES: dict[str, str] = {
    "vlora": "vlora_sgl.mem_cache.radix_cache:create_radix_cache",
}
# Name of a LoRA backend of ours -> its class.
LORA_BACKENDS: dict[str, str] = {"atmm": "vlora_sgl.lora.backend:AtmmBackend"}

# Architectures that see and whose prefills replay graphs rightly; SGLang captures none but those on its list.
GRAPHED_PREFILLS = ("Qwen2_5_VLForConditionalGeneration",)

CPU_PLATFORM = "TorchCpuPlatform"

_installed = False


def register() -> None:
    """Entry point of the group in which SGLang looks for plugins (pyproject.toml)."""
    if ENVIRONMENT_VARIABLE in os.environ:
        install()


def install() -> None:
    """Put every class and wrapper of the tables above in place. Once per process; later calls do nothing.

    Raises:
        ContractError: SGLang is not the release we extend.
    """
    global _installed
    if _installed:
        return
    _installed = True
    _sgl.check_version()
    # Resolved first: SGLang finds the platform by entry point while it imports itself, and ours imports SGLang.
    platform = type(_sgl.platforms.current_platform).__name__
    if is_plain_cpu() and platform != CPU_PLATFORM:
        raise ContractError(
            f"SGLang's platform is {platform}, expected {CPU_PLATFORM}: is vlora_sgl installed, SGLANG_PLATFORM unset?"
        )
    for name, ours in LORA_BACKENDS.items():
        _sgl.register_lora_backend(name)(partial(pkgutil.resolve_name, ours))
        _sgl.LORA_BACKEND_CHOICES.append(name)
    _sgl.GRAPHED_PREFILLS.extend(GRAPHED_PREFILLS)
    registry, kinds = _sgl.HookRegistry, _sgl.HookType
    for name, ours in REPLACEMENTS.items():
        registry.register(_dotted(name), pkgutil.resolve_name(ours), kinds.REPLACE)
    for name, ours in WRAPPED.items():
        registry.register(_dotted(name), pkgutil.resolve_name(ours), kinds.AROUND)
    registry.apply_hooks()
    for name, factory in RADIX_CACHES.items():
        _sgl.register_radix_cache_backend(name, pkgutil.resolve_name(factory))


def verify() -> None:
    """Check that what SGLang will use is ours.

    Raises:
        ContractError: names the first seam that is not in place.
    """
    for name, ours in REPLACEMENTS.items():
        target = _dotted(name)
        if pkgutil.resolve_name(target) is not pkgutil.resolve_name(ours):
            raise ContractError(f"{target} is not replaced by {ours}; this process would serve without it")
    for name, ours in WRAPPED.items():
        if pkgutil.resolve_name(ours) not in _wrappers(pkgutil.resolve_name(_dotted(name))):
            raise ContractError(f"{_dotted(name)} is not wrapped by {ours}; this process would serve without it")


def _wrappers(function: Any) -> list[Any]:
    """The functions around a wrapped one: SGLang keeps each in the closure of its wrapper, and nowhere else."""
    found = []
    while hasattr(function, "__wrapped__"):
        found += [cell.cell_contents for cell in function.__closure__ or ()]
        function = function.__wrapped__
    return found


def _dotted(name: str) -> str:
    head, _, method = name.partition(".")
    path = _sgl.NAMES[head].replace(":", ".")
    return f"{path}.{method}" if method else path
