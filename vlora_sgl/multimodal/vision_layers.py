"""Two layers of image encoders, in fewer and faster kernels than the models' code asks for.

Patches do not overlap, so their embedding is a matrix product, which cuDNN's 3D convolution computes at a twentieth
of the speed. Attention goes to torch's variable-length flash attention where SGLang takes its Triton kernel (which it
does wherever it has no flash attention of its own), and to FlashAttention 3 where SGLang takes that; either reads q,
k and v where the projection left them, which SGLang copies out. q and k are rotated there, in place: SGLang's rotation
is compiled by Inductor when the first image comes, and again when one of another size does, for seconds. The
arithmetic stays the model's: sums and angles in float32, rounded once. Of an image of 4,096 patches the embedding
takes 20 us instead of 545, a full attention 333 instead of 560, a windowed one 28 instead of 51, and the rotation 10
instead of 73 with the copies before it (Qwen2.5-VL, H200, bfloat16, 2026-11-29; FlashAttention 3 was not measured).

CLIP's blocks are told no lengths, which SGLang's attention therefore makes anew in each of them, and waits for the
device to know the longest; here they are made once for every number of images.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from vlora_sgl._sgl_types import ModelRunner, VisionAttention
from vlora_sgl.kernels.rotary import rotate_
from vlora_sgl.multimodal.vision_families import known_structure
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


class Lengths:
    """SGLang's metadata of sequences of one length, for blocks that are given none.

    They stay: a graph of the encoder holds their addresses.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Any] = {}

    def of(self, x: torch.Tensor) -> Any:
        """Of x [images, S, hidden]."""
        count, length, _ = x.shape
        if (count, length) not in self._known:
            bounds = torch.arange(count + 1, dtype=torch.int32, device=x.device) * length
            self._known[count, length] = SimpleNamespace(cu_seqlens=bounds, max_seqlen=length)
        return self._known[count, length]


class Attention:
    """Stands in the place of ``VisionAttention.forward``.

    Args:
        layer: SGLang's, which ``why_not`` has nothing against.
        lengths: of sequences that the layer is not told.
    """

    def __init__(self, layer: VisionAttention, lengths: Lengths) -> None:
        self.layer, self.attend, self.lengths = layer, ATTENDS[layer.qkv_backend_name], lengths

    def __call__(
        self,
        x: torch.Tensor,
        cu_seqlens: object = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        rotary_pos_emb_cos: torch.Tensor | None = None,
        rotary_pos_emb_sin: torch.Tensor | None = None,
        attention_mask: None = None,
        forward_metadata: Any = None,
        **unused: object,
    ) -> torch.Tensor:
        """As the layer: [B, S, hidden] of x [B, S, hidden], sequences as ``forward_metadata`` has them.

        Args:
            position_embeddings: cosine and sine [S, width], or those by name [S, width / 2]; without, nothing turns.
            unused: workspaces and lengths of other backends.
        """
        layer = self.layer
        heads, width = layer.num_attention_heads_per_partition, layer.head_size
        qkv, _ = layer.qkv_proj(x)
        rows = qkv.view(-1, 3 * heads * width)
        cos, sin = position_embeddings or (rotary_pos_emb_cos, rotary_pos_emb_sin)
        if cos is not None and sin is not None:
            rotate_(rows, cos, sin, heads=2 * heads, width=width)
        q, k, v = rows.view(-1, 3, heads, width).unbind(1)
        out = self.attend(layer, q, k, v, self.lengths.of(x) if forward_metadata is None else forward_metadata)
        answer: torch.Tensor = layer.proj(out.view(*x.shape[:2], heads * width))[0]
        return answer


def why_not(layer: VisionAttention) -> str | None:
    """Why ``Attention`` does not compute what a layer does, or ``None`` if it does."""
    if layer.qkv_backend_name not in ATTENDS:
        return f"is not {' or '.join(ATTENDS)}"
    if not layer.use_qkv_parallel:
        return "has q, k and v of a head beside each other"
    if layer.num_attention_heads_per_partition != layer.num_attention_kv_heads_per_partition:
        return "has several heads of q for one of k"
    if layer.qk_normalization or layer.qk_normalization_by_head_size:
        return "normalises q and k, which are copied out for that"
    if layer.customized_position_embedding_applier is not None or layer.sinks is not None:
        return "has positions of its own, or sinks"
    return None


def patch_embeddings(runner: ModelRunner) -> Places:
    """What stands in the place of the patch embedding of a model runner's image encoder."""
    structure = known_structure(runner.model)
    if isinstance(structure, str):
        return structure
    if structure.patch_embed is None:
        return "its images are not cut into patches before they come: a convolution in two dimensions does that"
    return [Place(structure.patch_embed, "forward", PatchEmbedding(structure.patch_embed))]


def attentions(runner: ModelRunner) -> Places:
    """What stands in the place of the attentions of a model runner's image encoder."""
    structure = known_structure(runner.model)
    if isinstance(structure, str):
        return structure
    if structure.dtype not in (torch.float16, torch.bfloat16):
        return "the encoder's attention is not in 16 bits"
    reasons = {layer: why_not(layer) for layer in structure.attentions}
    lengths = Lengths()
    places = [Place(layer, "forward", Attention(layer, lengths)) for layer, why in reasons.items() if why is None]
    return places or f"the encoder's attention {next(iter(reasons.values()))}"
