"""Two layers of Qwen2.5-VL's image encoder, in fewer and faster kernels than the model's code asks for.

Patches do not overlap, so their embedding is a matrix product, which cuDNN's 3D convolution computes at a twentieth
of the speed. Attention goes to torch's variable-length flash attention where SGLang takes its Triton kernel (which it
does wherever it has no flash attention of its own), and to FlashAttention 3 where SGLang takes that; either reads q,
k and v where the projection left them, which SGLang copies out. q and k are rotated there, in place: SGLang's rotation
is compiled by Inductor when the first image comes, and again when one of another size does, for seconds. The
arithmetic stays the model's: sums and angles in float32, rounded once. Of an image of 4,096 patches the embedding
takes 20 us instead of 545, a full attention 333 instead of 560, a windowed one 28 instead of 51, and the rotation 10
instead of 73 with the copies before it (H200, bfloat16, 2026-11-29; FlashAttention 3 was not measured).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from vlora_sgl._sgl_types import ModelRunner, VisionAttention
from vlora_sgl.kernels.rotary import rotate_
from vlora_sgl.multimodal.vision_graphs import known_encoder
from vlora_sgl.seams import Place, Places

Rows = torch.Tensor
"""[S, heads, width], rows apart: q, k or v."""

Attend = Callable[[VisionAttention, Rows, Rows, Rows, Any], torch.Tensor]
"""Attention of a layer on q, k and v, in the sequences of SGLang's metadata: [S, heads, width]."""


def by_torch(layer: VisionAttention, q: Rows, k: Rows, v: Rows, metadata: Any) -> torch.Tensor:
    """As ``Attend``, by torch's variable-length flash attention."""
    bounds, longest = metadata.cu_seqlens, metadata.max_seqlen
    out: Any = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=layer.softmax_scale)
    return cast(torch.Tensor, out)


def by_sglang(layer: VisionAttention, q: Rows, k: Rows, v: Rows, metadata: Any) -> torch.Tensor:
    """As ``Attend``, by the layer's own backend: one that takes rows that lie apart."""
    return layer.qkv_backend(
        q, k, v, metadata.cu_seqlens, 1, len(q), softmax_scale=layer.softmax_scale, forward_metadata=metadata
    )


ATTENDS: dict[str, Attend] = {"triton_attn": by_torch, "fa3": by_sglang}
"""SGLang's attention backends of encoders that ``Attention`` stands in for, and what then attends."""


class PatchEmbedding:
    """Stands in the place of a patch embedding's ``forward``.

    Args:
        layer: the model's, with a convolution ``proj`` whose stride is its kernel.
    """

    def __init__(self, layer: Any) -> None:
        self.proj = layer.proj

    def __call__(self, patches: torch.Tensor) -> torch.Tensor:
        """Embeddings [S, hidden] of patches [S, pixels]."""
        weight = self.proj.weight.flatten(1)
        return F.linear(patches.view(-1, weight.shape[1]).to(weight.dtype), weight, self.proj.bias)


class Attention:
    """Stands in the place of ``VisionAttention.forward``.

    Args:
        layer: SGLang's, with stacked projections and as many key heads as query heads.
    """

    def __init__(self, layer: VisionAttention) -> None:
        self.layer, self.attend = layer, ATTENDS[layer.qkv_backend_name]

    def __call__(
        self,
        x: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        forward_metadata: Any,
        output_ws: object = None,
    ) -> torch.Tensor:
        """As the layer: [1, S, hidden] of x [1, S, hidden], sequences as ``forward_metadata`` has them."""
        layer = self.layer
        heads, width = layer.num_attention_heads_per_partition, layer.head_size
        qkv, _ = layer.qkv_proj(x)
        rows = qkv.view(-1, 3 * heads * width)
        rotate_(rows, *position_embeddings, heads=2 * heads, width=width)
        q, k, v = rows.view(-1, 3, heads, width).unbind(1)
        out = self.attend(layer, q, k, v, forward_metadata)
        answer: torch.Tensor = layer.proj(out.view(*x.shape[:2], heads * width))[0]
        return answer


def patch_embeddings(runner: ModelRunner) -> Places:
    """What stands in the place of the patch embedding of a model runner's image encoder."""
    encoder = known_encoder(runner.model)
    if isinstance(encoder, str):
        return encoder
    return [Place(encoder.patch_embed, "forward", PatchEmbedding(encoder.patch_embed))]


def attentions(runner: ModelRunner) -> Places:
    """What stands in the place of the attentions of a model runner's image encoder."""
    encoder = known_encoder(runner.model)
    if isinstance(encoder, str):
        return encoder
    layers = [block.attn for block in encoder.blocks if block.attn.qkv_backend_name in ATTENDS]
    if not layers or encoder.dtype not in (torch.float16, torch.bfloat16):
        return f"the encoder's attention is not {' or '.join(ATTENDS)} in 16 bits"
    return [Place(layer, "forward", Attention(layer)) for layer in layers]
