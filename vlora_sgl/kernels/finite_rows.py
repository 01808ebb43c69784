# A kernel parameter is a pointer, a scalar or a constant; Triton reads the annotations, mypy cannot.
# mypy: disallow-untyped-defs=False
"""Which rows of a step's logits are not finite, and logits in their place that any sampler takes.

A hidden state that is not finite makes every logit of its row so: each is a sum over all of it, behind a norm that
keeps what is finite small. So a few columns say it, and a row in order costs their bytes alone. A sampler must not see
such a row: ``torch.multinomial`` ends the process over one NaN, on a GPU by an assertion.

Call it on the model's own logits, before a grammar or a bias puts -inf there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS = 128
"""Logits of a row that are looked at."""
BLOCK = 4096


@triton.jit
def _clear_rows_kernel(logits, flags, stride, vocabulary, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows)."""
    row = tl.program_id(0)
    own = logits + row.to(tl.int64) * stride
    column = tl.arange(0, COLUMNS)
    seen = tl.load(own + column, mask=column < vocabulary, other=0.0).to(tl.float32)
    bad = tl.max((seen - seen != 0.0).to(tl.int32), 0)  # of NaN and infinities the difference is NaN
    tl.store(flags + row, bad.to(tl.int8))
    tl.debug_barrier()  # no thread may clear what another has yet to see
    if bad != 0:
        for start in range(0, vocabulary, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(own + at, tl.zeros([BLOCK], logits.dtype.element_ty), mask=at < vocabulary)


def clear_rows_(logits: torch.Tensor, flags: torch.Tensor | None = None) -> torch.Tensor:
    """Set rows whose logits are not finite to zero, in place, and say which: one launch, nothing waits.

    Args:
        logits: [M, V], rows contiguous.
        flags: [>= M] int8 to write to, at an address that a graph keeps; a fresh one by default.

    Returns:
        [M] int8, 1 where a row was not finite.
    """
    rows, vocabulary = logits.shape
    flags = torch.empty(rows, dtype=torch.int8, device=logits.device) if flags is None else flags[:rows]
    if logits.device.type == "cpu" and not triton.knobs.runtime.interpret:
        bad = ~torch.isfinite(logits[:, :COLUMNS]).all(-1)
        logits[bad] = 0.0
        flags.copy_(bad)
    elif rows:
        _clear_rows_kernel[(rows,)](
            logits, flags, logits.stride(0), vocabulary, COLUMNS=COLUMNS, BLOCK=BLOCK, num_warps=4
        )
    return flags
