"""Keeps the log readable: what SGLang and transformers warn about on every start, and nobody can act on, is dropped,
and what a client sent wrong is one line.

A log level given by the user (``--log-level info``) shows everything again.
"""

from __future__ import annotations

import logging
import warnings

from vlora_sgl import _sgl, seams
from vlora_sgl.managers.unreadable import in_line, is_of_the_request
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
    places += [Place(logging.getLogger(name).filters, None, _Shortened()) for name in _sgl.TOLD_AT_LENGTH]
    seams.place("logging.Filterer.filters", places)
    warnings.filterwarnings("ignore", message="ORJSONResponse is deprecated")  # of FastAPI, which SGLang answers by
    warnings.filterwarnings("ignore", message="Duplicate Operation ID")  # of the document that /openapi.json makes
    warnings.filterwarnings("ignore", category=UserWarning, module=r"sglang\..*")
    warnings.filterwarnings("ignore", module=r"PIL\..*")  # what it thinks of clients' images


class _Dropped(logging.Filter):
    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self.beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        verbose = logging.getLogger().getEffectiveLevel() <= logging.INFO
        return verbose or not record.getMessage().startswith(self.beginnings)


class _Shortened(logging.Filter):
    """A client's fault in one line, without the place in the source where it was found."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and is_of_the_request(error) and logging.getLogger().getEffectiveLevel() > logging.INFO:
            said = f"{record.getMessage()}: {in_line(error)}"
            record.msg, record.args, record.exc_info = " ".join(said.split())[:500], (), None
        return True
