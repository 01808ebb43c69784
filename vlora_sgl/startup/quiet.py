"""Keeps a start readable: what SGLang and transformers warn about on every start, and nobody can act on, is dropped.

A log level given by the user (``--log-level info``) shows everything again.
"""

from __future__ import annotations

import logging
import warnings

from vlora_sgl import _sgl, seams
from vlora_sgl.seams import Place

# Logger -> beginnings of the messages that say nothing about the user's own set-up.
NOISE: dict[str, tuple[str, ...]] = {
    **_sgl.NOISE,
    "torch.utils.cpp_extension": ("No CUDA runtime is found",),
    "transformers.models.auto.image_processing_auto": ("The `use_fast` parameter is deprecated",),
}


def silence() -> None:
    """Drop the known noise in this process. Call before SGLang's import."""
    places = [Place(logging.getLogger(name).filters, None, _Dropped(start)) for name, start in NOISE.items()]
    seams.place("logging.Filterer.filters", places)
    warnings.filterwarnings("ignore", message="ORJSONResponse is deprecated")  # of FastAPI, which SGLang answers by
    warnings.filterwarnings("ignore", category=UserWarning, module=r"sglang\..*")
    warnings.filterwarnings("ignore", module=r"PIL\..*")  # what it thinks of clients' images


class _Dropped(logging.Filter):
    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self.beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        verbose = logging.getLogger().getEffectiveLevel() <= logging.INFO
        return verbose or not record.getMessage().startswith(self.beginnings)
