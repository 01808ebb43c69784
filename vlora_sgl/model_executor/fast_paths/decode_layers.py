"""Attention and norms of a decoding step, in fewer and faster kernels.

SGLang's Triton attention takes four launches a layer: rotary positions, keys and values to the cache, attention over
chunks of the keys, their sum. Here they are two, ``rotate_and_store`` and ``decode_attention``, and one where adapters
are in the projection before them, which then rotates and stores (``atmm_rotated``). For 32 sequences of
288 tokens on the shape of a Qwen2.5-VL-7B that is 15.4 us instead of 23.7, for one of 8,192 28 instead of 103 (H200,
bfloat16, 28 query and 4 key heads of 128, 2026-11-29). Norms let the linear behind them fetch its weights meanwhile.
The arithmetic is the same; angles and sums are float32. The norms, the rotation and the store go with every attention
backend; the attention stands in for Triton's alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vlora_sgl import _sgl
from vlora_sgl._sgl_types import ForwardBatch, MHATokenToKVPool, ModelRunner, Qwen2Attention, RMSNorm
from vlora_sgl.kernels import atmm
from vlora_sgl.kernels.atmm import DENSE_MAX_ROWS
from vlora_sgl.kernels.decode_attention import MAX_GROUP, WIDTHS, decode_attention
from vlora_sgl.kernels.devices import ARRIVALS
from vlora_sgl.kernels.norm import add_rms_norm_
from vlora_sgl.kernels.rotary import rotate_and_store
from vlora_sgl.lora.layers import AtmmQKVLinear
from vlora_sgl.model_executor.fast_paths import unmeasured
from vlora_sgl.seams import Place, Places

PLAIN = {
    "logit_cap": 0.0,
    "sinks": None,
    "xai_temperature_len": -1,
    "has_mla": False,
    "page_size": 1,
    "score_mod": None,
    "aux_tensors": None,
}
"""Options of SGLang's launch under which it computes what ``decode_attention`` does."""


class Attention:
    """Stands in the place of the attention backend's ``decode_attention_fwd``.

    Args:
        inner: SGLang's, which serves what ``decode_attention`` does not.
    """

    def __init__(self, inner: Callable[..., None]) -> None:
        self.inner = inner

    def __call__(
        self,
        q: torch.Tensor,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        o: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        attn_logits: torch.Tensor,
        attn_lse: torch.Tensor,
        num_kv_splits: torch.Tensor,
        max_kv_splits: int,
        sm_scale: float,
        k_scale: float,
        v_scale: float,
        **options: object,
    ) -> None:
        """As SGLang's, in its order of arguments."""
        plain = all(options.get(name, value) == value for name, value in PLAIN.items())
        if plain and serves(q, k_buffer, v_buffer, o):
            scale = sm_scale * k_scale
            decode_attention(q, k_buffer, v_buffer, o, kv_indptr, kv_indices, attn_logits, attn_lse, scale, v_scale)
        else:
            self.inner(
                q, k_buffer, v_buffer, o, kv_indptr, kv_indices, attn_logits, attn_lse, num_kv_splits, max_kv_splits,
                sm_scale, k_scale, v_scale, **options,
            )  # fmt: skip


def serves(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether ``decode_attention`` takes these tensors."""
    if k_cache.dim() != 3 or k_cache.shape != v_cache.shape:
        return False
    kv_heads, width = k_cache.shape[1:]
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and q.dtype == k_cache.dtype == v_cache.dtype == out.dtype
        and width in WIDTHS
        and q.shape[1] <= MAX_GROUP * kv_heads
        and q.shape[0] * kv_heads <= ARRIVALS
    )


class Rotation:
    """Stands in the place of ``Qwen2Attention.forward``.

    Args:
        layer: SGLang's, with multimodal rotary positions.
        pool: the cache of keys and values.
    """

    def __init__(self, layer: Qwen2Attention, pool: MHATokenToKVPool) -> None:
        self.layer, self.pool = layer, pool
        self._own = layer.forward

    def __call__(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """As the layer: [T, hidden] of hidden_states [T, hidden]. Only decoding is done here."""
        layer = self.layer
        if not forward_batch.forward_mode.is_decode() or positions.dim() != 2:
            answer: torch.Tensor = self._own(positions, hidden_states, forward_batch)
            return answer
        rotary, caches = layer.rotary_emb, self.pool.get_kv_buffer(layer.attn.layer_id)
        rotation = atmm.Rotation(
            rotary.cos_sin_cache, positions, forward_batch.out_cache_loc, *caches, rotary.mrope_section
        )
        if isinstance(layer.qkv_proj, AtmmQKVLinear):
            q = layer.qkv_proj.rotated(hidden_states, rotation)
        else:
            q = rotate_and_store(layer.qkv_proj(hidden_states)[0], *rotation.operands)
        # k and v are in the cache: as of layers that share one, the backend is given none.
        answer, _ = layer.o_proj(layer.attn(q, None, None, forward_batch, save_kv_cache=False))
        return answer


class Norm:
    """Stands in the place of ``RMSNorm.forward``.

    Args:
        layer: SGLang's, with one weight for all.
    """

    def __init__(self, layer: RMSNorm) -> None:
        self.layer = layer
        self._own = layer.forward

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, post_residual_addition: object = None
    ) -> object:
        """As the layer. Only few rows with a residual are done here, in place as there: (normed, residual)."""
        few = x.dim() == 2 and 0 < len(x) <= DENSE_MAX_ROWS and x.stride(1) == 1
        if residual is None or post_residual_addition is not None or not few:
            return self._own(x, residual, post_residual_addition)
        add_rms_norm_(x, residual, self.layer.weight, self.layer.variance_epsilon)
        return x, residual


def can_norm(layer: RMSNorm, dtype: torch.dtype) -> bool:
    """Whether ``Norm`` may stand for a layer of a model in ``dtype``."""
    return (
        layer.has_weight
        and layer.weight.dtype == dtype
        and layer.variance_size_override is None
        and not (layer.cast_x_before_out_mul or layer.fp32_residual)
    )


def can_rotate(layer: Qwen2Attention, pool: MHATokenToKVPool, dtype: torch.dtype) -> bool:
    """Whether ``Rotation`` may stand for a layer of a model in ``dtype``: plain keys and values in the same dtype, and
    positions whose three axes have columns of their own."""
    rotary = layer.rotary_emb
    return (
        _sgl.is_a(rotary, "MRotaryEmbedding")
        and bool(rotary.mrope_section)
        and rotary.is_neox_style
        and not (rotary.mrope_interleaved or rotary.mrope_interleaved_glm)
        and rotary.rotary_dim == layer.head_dim
        and layer.head_dim in WIDTHS
        and type(pool) is _sgl.MHATokenToKVPool
        and pool.kv_cache_layout == "nhd"
        and pool.dtype == pool.store_dtype == dtype
        and layer.attn.k_scale is None
    )


def refusal(runner: ModelRunner) -> str | None:
    """Why a model runner's decoding steps are left to SGLang's kernels; ``None`` if they are not."""
    if (why := unmeasured()) is not None:
        return why
    if runner.server_args.enable_deterministic_inference:
        return "--enable-deterministic-inference"
    return "decode context parallelism" if getattr(decoding(runner), "dcp_size", 1) > 1 else None


def decoding(runner: ModelRunner) -> Any:
    """The attention backend of a model runner's decoding steps; SGLang may have another one for prefills."""
    return getattr(runner.attn_backend, "decode_backend", runner.attn_backend)


def attention(runner: ModelRunner) -> Places:
    """What stands in the place of the attention kernels of a decoding step."""
    backend, why = decoding(runner), refusal(runner)
    if why is None and not _sgl.is_a(backend, "TritonAttnBackend"):
        why = f"its attention backend is {type(backend).__name__}"
    return why or [Place(backend, "decode_attention_fwd", Attention(backend.decode_attention_fwd))]


def norms(runner: ModelRunner) -> Places:
    """What stands in the place of a model runner's norms."""
    layers: list[Any] = [layer for layer in runner.model.modules() if type(layer) is _sgl.RMSNorm]
    return refusal(runner) or [
        Place(layer, "forward", Norm(layer)) for layer in layers if can_norm(layer, runner.dtype)
    ]


def rotations(runner: ModelRunner) -> Places:
    """What stands in the place of a model runner's attention layers."""
    if (why := refusal(runner)) is not None:
        return why
    pool = runner.token_to_kv_pool
    layers: list[Any] = [layer for layer in runner.model.modules() if _sgl.is_a(layer, "Qwen2Attention")]
    layers = [layer for layer in layers if can_rotate(layer, pool, runner.dtype)]
    for layer in layers:
        # As SGLang does at a first forward: a graph would keep the address of what that replaces.
        layer.rotary_emb._match_cos_sin_cache_dtype(torch.empty(0, device=pool.device, dtype=runner.dtype))
    return [Place(layer, "forward", Rotation(layer, pool)) for layer in layers]
