"""Keeps a start readable: what SGLang and transformers warn about on every start, and nobody can act on, is dropped.

A log level given by the user (``--log-level info``) shows everything again.
"""

from __future__ import annotations

import logging
import warnings

# Logger -> beginnings of the messages that say nothing about the user's own set-up.
NOISE: dict[str, tuple[str, ...]] = {
    "sglang.srt.distributed.bootstrap": ("init_cpu_threads_env and shared memory",),
    "sglang.srt.managers.multimodal_processor": ("Ignore import error when loading",),
    "sglang.srt.models.registry": ("Ignore import error when loading",),
    "sglang.srt.server_args": ("Cuda graph is disabled because of using torch native attention",),
    "sglang.srt.utils.common": ("Fail to set RLIMIT", "Processor tokenizer for"),
    "torch.utils.cpp_extension": ("No CUDA runtime is found",),
    "transformers.models.auto.image_processing_auto": ("The `use_fast` parameter is deprecated",),
}


def silence() -> None:
    """Drop the known noise in this process. Call before SGLang's import."""
    for name, beginnings in NOISE.items():
        logging.getLogger(name).addFilter(_Dropped(beginnings))
    warnings.filterwarnings("ignore", category=UserWarning, module=r"sglang\..*")


class _Dropped(logging.Filter):
    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self.beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        verbose = logging.getLogger().getEffectiveLevel() <= logging.INFO
        return verbose or not record.getMessage().startswith(self.beginnings)
