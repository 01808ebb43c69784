"""The operators ATMM is timed against: each is built from inputs and gives ``run(copy)``, y += LoRA in place.

- ``csgmv``, ``triton``: SGLang's backends as shipped, called through their own classes.
- ``csgmv_tuned``: SGLang's csgmv kernels with the best of its tuner's search space, found on the workload itself. The
  tuner is a script of SGLang's repository, absent from its wheel; ``tune`` searches the same space (or part of it).
- ``slora_style``: one program per row and block of columns on CUDA cores, weights read by index (S-LoRA's and
  Punica's decode kernels); ours, written for this comparison, as are the next two.
- ``punica_style``: segments with one static tile, (16, 64, 64) as the paper's table 1 gives it.
- ``dlora_style``: rows padded to the longest adapter's, two batched matmuls, rows scattered back.
- ``flashinfer``: two grouped GEMMs of ``SegmentGEMMWrapper`` per projection part, added to y.
- ``vllm``: vLLM's LoRA kernels as its server calls them, where vLLM can be imported; no tuned tiles are in its wheel.
"""
# Kernel parameters are pointers and constants; mypy cannot read them.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.kernels.workloads import DEVICE, Inputs
from vlora_sgl.kernels.atmm import atmm, launch, make_routing
from vlora_sgl.kernels.tiling import Tile

Run = Callable[[int], torch.Tensor]
Config = dict[str, int]


def ours(inputs: Inputs) -> Run:
    """ATMM with the device's own table."""
    scalings = [inputs.scaling] * inputs.slots
    routing = make_routing(inputs.groups, inputs.load.rows, inputs.ranks, scalings, DEVICE)
    return lambda i: atmm(inputs.y[i], inputs.x[i], inputs.a[i], inputs.b[i], routing, inputs.offsets)


def punica_style(inputs: Inputs) -> Run:
    """Segments with one static tile."""
    scalings = [inputs.scaling] * inputs.slots
    routing = make_routing(inputs.groups, inputs.load.rows, inputs.ranks, scalings, DEVICE, dense=False, block=16)
    tiles = launch.Tiles("grouped_expand", Tile(16, 64, 64, 1, 4, 2), Tile(16, 64, 0, 1, 4, 1))
    return lambda i: launch.run(tiles, (inputs.y[i], inputs.x[i], inputs.a[i], inputs.b[i], routing, inputs.offsets))


# SGLang


def _sglang_batch(inputs: Inputs) -> tuple[Any, list[int]]:
    """(what SGLang's backends read of a ForwardBatch, the slot of every request): decode rows or one prompt each."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    if inputs.load.phase == "decode":
        slots = [slot for slot, length in enumerate(inputs.lengths) for _ in range(length)]
        return SimpleNamespace(forward_mode=ForwardMode.DECODE, batch_size=len(slots)), slots
    lengths = inputs.lengths
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(lengths),
        extend_seq_lens_cpu=lengths,
        extend_seq_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        extend_num_tokens=sum(lengths),
        return_logprob=False,
    )
    return batch, list(range(len(lengths)))


def _plain(kernel: Any) -> Any:
    """The Triton kernel itself: SGLang wraps some in a cache that knows neither their rank nor their tile."""
    return kernel.fn if hasattr(kernel, "kernel_cache") else kernel


def _forget_kernels() -> None:
    """Empty those caches, which a server needs not, having one rank."""
    chunked, plain = ("chunked_sgmv_shrink", "chunked_sgmv_expand"), ("sgemm_lora_a", "sgemm_lora_b")
    for name in (*chunked, *plain, "qkv_lora_b", "gate_up_lora_b"):
        for item in vars(importlib.import_module(f"sglang.kernels.ops.gemm.{name}")).values():
            if hasattr(item, "kernel_cache"):
                item.kernel_cache.clear()


def _prepared(inputs: Inputs, name: str, chunk: int = 16) -> Any:
    from sglang.srt.lora.backend.chunked_backend import ChunkedSgmvLoRABackend
    from sglang.srt.lora.backend.triton_backend import TritonLoRABackend

    _forget_kernels()
    kind = ChunkedSgmvLoRABackend if name == "csgmv" else TritonLoRABackend
    settings = SimpleNamespace(max_lora_chunk_size=chunk)  # all that the backend reads; 16 is SGLang's default
    backend = kind(max_loras_per_batch=inputs.slots, device=torch.device(DEVICE), server_args=settings)
    backend._prepare_lm_head_batch_info = lambda *_: (None, None)
    batch, slots = _sglang_batch(inputs)
    scalings = [inputs.scaling] * inputs.slots
    backend.prepare_lora_batch(batch, slots, inputs.ranks, scalings, use_cuda_graph=False)
    return backend


def _sglang(inputs: Inputs, name: str) -> Run:
    backend = _prepared(inputs, name)
    offsets = torch.tensor(inputs.offsets, dtype=torch.int32, device=DEVICE)
    widest = max(end - start for start, end in itertools.pairwise(inputs.offsets))

    def run(i: int) -> torch.Tensor:
        x, a, b, y = inputs.x[i], inputs.a[i], inputs.b[i], inputs.y[i]
        if inputs.parts == 3:
            return backend.run_qkv_lora(x, a, b, output_offset=offsets, max_qkv_out_dim=widest, base_output=y)
        if inputs.parts == 2:
            return backend.run_gate_up_lora(x, a, b, output_offset=offsets, base_output=y)
        low = backend.run_lora_a_sgemm(x, a)
        return backend.run_lora_b_sgemm(low, b, output_offset=offsets, base_output=y)

    return run


def csgmv(inputs: Inputs) -> Run:
    """SGLang's default backend as shipped."""
    return _sglang(inputs, "csgmv")


def sglang_triton(inputs: Inputs) -> Run:
    """SGLang's triton backend as shipped."""
    return _sglang(inputs, "triton")


def shrink_space(quick: bool) -> Iterator[Config]:
    """The tuner's space for shrinks; quick: only 4 warps and the deeper pipelines."""
    for n, k, warps, stages in itertools.product((16, 32, 64), (64, 128, 256), (4, 8), (2, 3, 4)):
        if not quick or (warps == 4 and stages > 2):
            yield {"BLOCK_N": n, "BLOCK_K": k, "num_warps": warps, "num_stages": stages}


def expand_space(quick: bool) -> Iterator[Config]:
    """The tuner's space for expands; quick: no register caps and two stages."""
    caps = (0,) if quick else (0, 96, 112, 128, 160)
    for n, k, warps, stages, cap in itertools.product((32, 64), (16, 32), (4, 8), (1, 2, 3), caps):
        if not quick or stages == 2:
            config = {"BLOCK_N": n, "BLOCK_K": k, "num_warps": warps, "num_stages": stages}
            yield {**config, "maxnreg": cap} if cap else config


class CsgmvKernels:
    """SGLang's csgmv kernels with given tiles and its longest chunks, past the cache its launchers keep per shape."""

    def __init__(self, inputs: Inputs) -> None:
        from sglang.kernels.ops.gemm import chunked_sgmv_expand, chunked_sgmv_shrink

        self.inputs, self.batch = inputs, _prepared(inputs, "csgmv", 128).batch_info
        self.offsets = torch.tensor(inputs.offsets, dtype=torch.int32, device=DEVICE)
        self.widest = max(end - start for start, end in itertools.pairwise(inputs.offsets))
        self.low = torch.empty(inputs.load.rows, inputs.parts * inputs.rank, device=DEVICE, dtype=inputs.x[0].dtype)
        self.low.normal_()
        self._shrink = _plain(chunked_sgmv_shrink._chunked_lora_shrink_kernel)
        self._expand = _plain(chunked_sgmv_expand._chunked_lora_expand_kernel)

    def shrink(self, i: int, config: Config) -> torch.Tensor:
        """low = x A^T."""
        inputs, info = self.inputs, self.batch
        width = inputs.parts * inputs.rank
        self._shrink[(triton.cdiv(width, config["BLOCK_N"]), info.num_segments)](
            x=inputs.x[i], weights=inputs.a[i], output=self.low, seg_indptr=info.seg_indptr,
            weight_indices=info.weight_indices, lora_ranks=info.lora_ranks, permutation=info.permutation,
            num_segs=info.num_segments, N=width, K=inputs.k, NUM_SLICES=inputs.parts, BLOCK_M=info.max_len, **config,
        )  # fmt: skip
        return self.low

    def expand(self, i: int, config: Config) -> torch.Tensor:
        """y += low B^T."""
        inputs, info, y = self.inputs, self.batch, self.inputs.y[i]
        self._expand[(triton.cdiv(self.widest, config["BLOCK_N"]), inputs.parts, info.num_segments)](
            x=self.low, weights=inputs.b[i], output=y, output_stride_0=y.stride(0), output_stride_1=1,
            seg_indptr=info.seg_indptr, weight_indices=info.weight_indices, lora_ranks=info.lora_ranks,
            permutation=info.permutation, num_segs=info.num_segments, scalings=info.scalings,
            slice_offsets=self.offsets, NUM_SLICES=inputs.parts, OUTPUT_DIM=inputs.n, MAX_RANK=inputs.rank,
            BLOCK_M=info.max_len, **config,
        )  # fmt: skip
        return y


def csgmv_with(inputs: Inputs, shrink: Config, expand: Config) -> Run:
    """SGLang's csgmv kernels with tuned tiles."""
    kernels = CsgmvKernels(inputs)

    def run(i: int) -> torch.Tensor:
        kernels.shrink(i, shrink)
        return kernels.expand(i, expand)

    return run


# Baselines of our own


@triton.jit
def _row_shrink(x, a, h, slots, ranks, a_slot, K: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    rank = tl.load(ranks + slot)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    if tl.program_id(1) * BN >= C * rank:
        return
    acc = tl.zeros((BN,), tl.float32)
    for step in range(0, K, 256):
        k = step + tl.arange(0, 256)
        xk = tl.load(x + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        ptrs = a + slot.to(tl.int64) * a_slot + cols.to(tl.int64)[:, None] * K + k[None, :]
        ak = tl.load(ptrs, mask=(cols < C * rank)[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)
        acc += tl.sum(ak * xk[None, :], 1)
    tl.store(h + row * (C * R) + cols, acc, mask=cols < C * rank)


@triton.jit
def _row_expand(
    y, b, h, slots, ranks, scalings, parts, b_slot,
    N: tl.constexpr, C: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    rank = tl.load(ranks + slot)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    live = cols < N
    part = tl.load(parts + cols, mask=live, other=0)
    k = tl.arange(0, RP)
    ptrs = b + slot.to(tl.int64) * b_slot + cols.to(tl.int64)[:, None] * R + k[None, :]
    bk = tl.load(ptrs, mask=live[:, None] & (k < rank)[None, :], other=0.0).to(tl.float32)
    low = tl.load(h + row * (C * R) + part[:, None] * rank + k[None, :], mask=(k < rank)[None, :], other=0.0)
    add = tl.sum(bk * low, 1) * tl.load(scalings + slot)
    old = tl.load(y + row * N + cols, mask=live, other=0.0).to(tl.float32)
    tl.store(y + row * N + cols, (old + add).to(y.dtype.element_ty), mask=live)


def slora_style(inputs: Inputs) -> Run:
    """A program per row and block of columns, on CUDA cores."""
    rows, c, r = inputs.load.rows, inputs.parts, inputs.rank
    options = {"dtype": torch.int32, "device": DEVICE}
    slots = torch.repeat_interleave(
        torch.arange(len(inputs.lengths), **options), torch.tensor(inputs.lengths, device=DEVICE)
    )
    ranks = torch.tensor(inputs.ranks, **options)
    scalings = torch.full((inputs.slots,), inputs.scaling, device=DEVICE)
    parts = torch.zeros(inputs.n, **options)
    for bound in inputs.offsets[1:-1]:
        parts[bound:] += 1
    h = torch.empty(rows, c * r, device=DEVICE)

    def run(i: int) -> torch.Tensor:
        x, y, a, b = inputs.x[i], inputs.y[i], inputs.a[i], inputs.b[i]
        _row_shrink[(rows, triton.cdiv(c * r, 16))](x, a, h, slots, ranks, a.stride(0), K=inputs.k, C=c, R=r, BN=16)
        _row_expand[(rows, triton.cdiv(inputs.n, 64))](
            y,
            b,
            h,
            slots,
            ranks,
            scalings,
            parts,
            b.stride(0),
            N=inputs.n,
            C=c,
            R=r,
            RP=triton.next_power_of_2(r),
            BN=64,
        )
        return y

    return run


def dlora_style(inputs: Inputs) -> Run:
    """Batched matmuls over rows padded to the longest adapter's, ranks padded to the pool's."""
    lengths, r = inputs.lengths, inputs.rank
    longest, count = max(lengths), len(lengths)
    index = torch.zeros(count, longest, dtype=torch.int64)
    where = []
    start = 0
    for s, length in enumerate(lengths):
        index[s, :length] = torch.arange(start, start + length)
        where += [s * longest + j for j in range(length)]
        start += length
    index, order = index.reshape(-1).to(DEVICE), torch.tensor(where, device=DEVICE)
    masks = torch.zeros(count, inputs.parts * r, device=DEVICE, dtype=inputs.x[0].dtype)
    # The pool keeps a slot's parts at its own rank; padded matmuls want them at the pool's: laid out anew if mixed.
    a_index = torch.zeros(count, inputs.parts * r, dtype=torch.int64)
    for s in range(count):
        for c in range(inputs.parts):
            own = inputs.ranks[s]
            masks[s, c * r : c * r + own] = inputs.scaling
            a_index[s, c * r : c * r + own] = torch.arange(c * own, (c + 1) * own)
    mixed = len(set(inputs.ranks)) > 1
    gather = a_index.to(DEVICE)[:, :, None].expand(-1, -1, inputs.k)
    padded = [torch.gather(a[:count], 1, gather) if mixed else a[:count] for a in inputs.a]

    def run(i: int) -> torch.Tensor:
        x = inputs.x[i][index].view(count, longest, inputs.k)
        low = torch.bmm(x, padded[i].transpose(1, 2)) * masks[:, None, :]
        for c in range(inputs.parts):
            columns = slice(inputs.offsets[c], inputs.offsets[c + 1])
            delta = torch.bmm(low[:, :, c * r : (c + 1) * r], inputs.b[i][:count, columns].transpose(1, 2))
            inputs.y[i][:, columns] += delta.reshape(count * longest, -1)[order]
        return inputs.y[i]

    return run


_workspace: list[torch.Tensor] = []


def flashinfer_segments(inputs: Inputs) -> Run:
    """FlashInfer's segment GEMM, twice per projection part. Mixed ranks are left out: it pads them with garbage."""
    import flashinfer

    if len(set(inputs.ranks)) > 1:
        raise NotImplementedError("one rank for all segments")
    if not _workspace:
        _workspace.append(torch.empty(128 << 20, dtype=torch.int8, device=DEVICE))
    wrapper = flashinfer.SegmentGEMMWrapper(_workspace[0])
    lengths = torch.tensor(inputs.lengths, dtype=torch.int64, device=DEVICE)
    count, r = len(inputs.lengths), inputs.rank
    b = [[t[:count, s:e].contiguous() for s, e in itertools.pairwise(inputs.offsets)] for t in inputs.b]

    def gemm(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return wrapper.run(x, weights, count, weight_column_major=True, seg_lens=lengths)

    def run(i: int) -> torch.Tensor:
        low = gemm(inputs.x[i], inputs.a[i][:count])
        for c, (start, end) in enumerate(itertools.pairwise(inputs.offsets)):
            delta = gemm(low[:, c * r : (c + 1) * r].contiguous(), b[i][c])
            inputs.y[i][:, start:end].add_(delta, alpha=inputs.scaling)
        return inputs.y[i]

    return run


def vllm_weights(inputs: Inputs, i: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A and B of a copy as vLLM keeps them: a tensor a projection, [slots, 1, rank, K] and [slots, 1, columns, rank].

    Lower ranks are padded with zeros to the pool's, and B has the scaling in it, as vLLM loads an adapter.
    """
    full, k = inputs.rank, inputs.k
    a = torch.zeros(inputs.parts, inputs.slots, 1, full, k, dtype=inputs.a[i].dtype, device=DEVICE)
    b = torch.zeros(inputs.slots, 1, inputs.n, full, dtype=inputs.b[i].dtype, device=DEVICE)
    for slot, rank in enumerate(inputs.ranks):
        a[:, slot, 0, :rank] = inputs.a[i][slot, : inputs.parts * rank].view(inputs.parts, rank, k)
        b[slot, 0, :, :rank] = inputs.b[i][slot, :, :rank] * inputs.scaling
    return list(a), [b[:, :, start:end].contiguous() for start, end in itertools.pairwise(inputs.offsets)]


def vllm(inputs: Inputs) -> Run:
    """A shrink into float32 that the operator zeroes itself, and an expand that adds to y."""
    from vllm.lora.ops.triton_ops import LoRAKernelMeta, lora_expand, lora_shrink

    rows = inputs.load.rows
    slots = torch.repeat_interleave(torch.arange(len(inputs.lengths)), torch.tensor(inputs.lengths))
    meta = LoRAKernelMeta.make(inputs.slots, rows, torch.device(DEVICE))
    meta.prepare_tensors(slots.to(DEVICE, torch.int32))
    routing = meta.meta_args(rows, False)  # a grid over all slots, as shipped
    low = torch.empty(inputs.parts, rows, inputs.rank, dtype=torch.float32, device=DEVICE)
    weights = [vllm_weights(inputs, i) for i in range(inputs.copies)]

    def run(i: int) -> torch.Tensor:
        a, b = weights[i]
        lora_shrink(inputs.x[i], a, low, *routing, 1.0)
        lora_expand(low, b, inputs.y[i], *routing, offset_start=0, add_inputs=True)
        return inputs.y[i]

    return run


OPTIONAL = ("flashinfer", "vllm")
"""Peers that are timed where they are asked for: an installation more, or minutes of a compiler."""

PEERS: dict[str, Callable[[Inputs], Run]] = {
    "atmm": ours,
    "csgmv": csgmv,
    "triton": sglang_triton,
    "slora_style": slora_style,
    "punica_style": punica_style,
    "dlora_style": dlora_style,
    "flashinfer": flashinfer_segments,
    "vllm": vllm,
}
