"""What goes wrong while a request is tokenized is the request's fault, whatever SGLang's reader makes of it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from vlora_sgl.errors import RequestError, VLoraError

logger = logging.getLogger(__name__)

UNFORESEEN = (TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, RecursionError)
"""What a reader that trusts its input raises; memory, files and devices are not the request's fault."""


@contextmanager
def refusing_what_cannot_be_read() -> Iterator[None]:
    """Around a request's tokenization.

    Raises:
        RequestError: it ended with one of ``UNFORESEEN``; the log says where.
    """
    try:
        yield
    except VLoraError:
        raise
    except UNFORESEEN as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = " ".join(f"{type(error).__name__} {error}".split())[:300]
        logger.warning("a request cannot be read: %s (%s:%s)", what, where.filename, where.lineno)
        raise RequestError(f"the prompt and what came with it cannot be read: {what}") from None
