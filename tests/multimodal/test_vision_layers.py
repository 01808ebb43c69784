"""The encoder's faster layers compute what the model's do."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.interpreter import CUDA, DEVICE, kernels, passed_interpreted, starter
from tests.support.stand_in import passing_for
from vlora_sgl import _sgl
from vlora_sgl.multimodal.vision_layers import ATTENDS, Attention, PatchEmbedding, attentions, patch_embeddings

GPU = torch.device("cuda")


def embedding(device: str, dtype: torch.dtype, bias: bool = False) -> Any:
    return SimpleNamespace(proj=torch.nn.Conv3d(3, 24, (2, 4, 4), (2, 4, 4), bias=bias).to(device, dtype))


@pytest.mark.parametrize("bias", [False, True])
def test_patches_are_embedded_as_the_convolution_does(bias: bool) -> None:
    layer, patches = embedding("cpu", torch.float32, bias), torch.randn(7, 3 * 2 * 4 * 4)
    expected = layer.proj(patches.view(-1, 3, 2, 4, 4)).view(7, 24)
    torch.testing.assert_close(PatchEmbedding(layer)(patches), expected)
    layer.proj.weight.data.mul_(2)  # weights may be replaced while the server runs
    torch.testing.assert_close(PatchEmbedding(layer)(patches), layer.proj(patches.view(-1, 3, 2, 4, 4)).view(7, 24))


@pytest.mark.parametrize("backend, dtype", [("sdpa", torch.bfloat16), *((name, torch.float32) for name in ATTENDS)])
@pytest.mark.parametrize("known", ATTENDS)
def test_attention_that_is_replaced_and_that_is_not(backend: str, dtype: torch.dtype, known: str) -> None:
    """Backends that want their rows together, and what flash attention cannot do, are left to SGLang."""
    attn = SimpleNamespace(qkv_backend_name=backend)
    encoder = passing_for("Qwen2_5_VisionTransformer", SimpleNamespace)(
        patch_embed=embedding("cpu", dtype), blocks=[SimpleNamespace(attn=attn)], dtype=dtype, device=GPU
    )
    runner = SimpleNamespace(model=SimpleNamespace(visual=encoder))
    assert attentions(runner) == "the encoder's attention is not triton_attn or fa3 in 16 bits"
    attn.qkv_backend_name, encoder.dtype = known, torch.bfloat16
    (place,) = attentions(runner)
    assert place[:2] == (attn, "forward") and isinstance(place.value, Attention)
    (place,) = patch_embeddings(runner)
    assert place[:2] == (encoder.patch_embed, "forward") and isinstance(place.value, PatchEmbedding)
    encoder.device = torch.device("cpu")
    assert attentions(runner) == patch_embeddings(runner) == "its image encoder is not on a GPU"


class Plain:
    """Stands for SGLang's backend where there is no GPU: takes what that takes, and computes it in q's dtype."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        bsz: int,
        seq_len: int,
        softmax_scale: float | None,
        forward_metadata: Any,
    ) -> torch.Tensor:
        assert (bsz, seq_len) == (1, len(q)) and cu_seqlens is forward_metadata.cu_seqlens
        assert len({t.untyped_storage().data_ptr() for t in (q, k, v)}) == 1, "nothing was copied"
        return attend(q, k, v, cu_seqlens)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """[S, heads, width], sequence by sequence."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    parts = [
        F.scaled_dot_product_attention(*(t[:, :, a:b] for t in (q, k, v)))[0].transpose(0, 1)
        for a, b in itertools.pairwise(bounds.tolist())
    ]
    return torch.cat(parts)


def backend_of(name: str) -> Any:
    """The layer's own backend of that name; none where torch attends."""
    if name == "triton_attn":
        return None
    if not CUDA:
        return Plain()
    return _sgl.VisionFlash3Attention(use_data_parallel=True)


@kernels
@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if CUDA else [])], ids=str)
@pytest.mark.parametrize("heads, width", [(16, 80), (4, 16)])
@pytest.mark.parametrize("lengths", [[256], [64, 64, 16, 4], [4]])
@pytest.mark.parametrize("backend", ATTENDS if CUDA else ["fa3"])
@torch.no_grad()
def test_kernel_attention_against_float64(
    backend: str, lengths: list[int], heads: int, width: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    rows, hidden = sum(lengths), heads * width
    project = torch.nn.Linear(hidden, 3 * hidden, device=DEVICE, dtype=dtype)
    back = torch.nn.Linear(hidden, hidden, device=DEVICE, dtype=dtype)
    layer = SimpleNamespace(
        num_attention_heads_per_partition=heads,
        head_size=width,
        softmax_scale=None,
        qkv_backend_name=backend,
        qkv_backend=backend_of(backend),
        qkv_proj=lambda x: (project(x), None),
        proj=lambda x: (back(x), None),
    )
    x = torch.randn(1, rows, hidden, device=DEVICE, dtype=dtype)
    angles = torch.rand(rows, width // 2, device=DEVICE) * 6
    cos, sin = (torch.cat((half, half), -1).to(dtype) for half in (angles.cos(), angles.sin()))
    bounds = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)

    def model(kind: torch.dtype) -> torch.Tensor:
        qkv = F.linear(x.to(kind), project.weight.to(kind), project.bias.to(kind)).view(rows, 3, heads, width)
        q, k, v = qkv.unbind(1)
        c, s = cos.to(kind)[:, None], sin.to(kind)[:, None]
        q, k = (t * c + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * s for t in (q, k))
        out = attend(q, k, v, bounds).reshape(rows, hidden)
        return F.linear(out, back.weight.to(kind), back.bias.to(kind))

    exact = model(torch.float64)
    floor = (model(dtype).double() - exact).abs().max()
    metadata = SimpleNamespace(cu_seqlens=bounds, max_seqlen=max(lengths))
    out = Attention(layer)(x, cu_seqlens=bounds, position_embeddings=(cos, sin), forward_metadata=metadata)
    assert out.shape == (1, rows, hidden)
    assert (out[0].double() - exact).abs().max() <= 2 * floor


@starter
def test_interpreted() -> None:
    assert passed_interpreted(__file__) == 6
