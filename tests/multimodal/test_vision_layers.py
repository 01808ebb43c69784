"""The encoder's faster layers compute what the model's do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.stand_in import passing_for
from vlora_sgl.multimodal.vision_layers import REPLACED, Attention, PatchEmbedding, attentions, patch_embeddings

CUDA = torch.device("cuda")


def embedding(device: str, dtype: torch.dtype, bias: bool = False) -> Any:
    return SimpleNamespace(proj=torch.nn.Conv3d(3, 24, (2, 4, 4), (2, 4, 4), bias=bias).to(device, dtype))


@pytest.mark.parametrize("bias", [False, True])
def test_patches_are_embedded_as_the_convolution_does(bias: bool) -> None:
    layer, patches = embedding("cpu", torch.float32, bias), torch.randn(7, 3 * 2 * 4 * 4)
    expected = layer.proj(patches.view(-1, 3, 2, 4, 4)).view(7, 24)
    torch.testing.assert_close(PatchEmbedding(layer)(patches), expected)
    layer.proj.weight.data.mul_(2)  # weights may be replaced while the server runs
    torch.testing.assert_close(PatchEmbedding(layer)(patches), layer.proj(patches.view(-1, 3, 2, 4, 4)).view(7, 24))


@pytest.mark.parametrize("backend, dtype", [("fa3", torch.bfloat16), (REPLACED, torch.float32)])
def test_attention_that_is_not_replaced(backend: str, dtype: torch.dtype) -> None:
    """Flash attention of SGLang's own stays, and what torch's cannot do is left to SGLang."""
    attn = SimpleNamespace(qkv_backend_name=backend)
    encoder = passing_for("Qwen2_5_VisionTransformer", SimpleNamespace)(
        patch_embed=embedding("cpu", dtype), blocks=[SimpleNamespace(attn=attn)], dtype=dtype, device=CUDA
    )
    runner = SimpleNamespace(model=SimpleNamespace(visual=encoder))
    assert attentions(runner) == "the encoder's attention is not triton_attn in 16 bits"
    attn.qkv_backend_name, encoder.dtype = REPLACED, torch.bfloat16
    (place,) = attentions(runner)
    assert place[:2] == (attn, "forward") and isinstance(place.value, Attention)
    (place,) = patch_embeddings(runner)
    assert place[:2] == (encoder.patch_embed, "forward") and isinstance(place.value, PatchEmbedding)
    encoder.device = torch.device("cpu")
    assert attentions(runner) == patch_embeddings(runner) == "its image encoder is not on a GPU"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's variable-length attention runs on a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads, width", [(16, 80), (4, 16)])
@pytest.mark.parametrize("lengths", [[256], [64, 64, 16, 4], [4]])
@torch.no_grad()
def test_attention_against_float64(lengths: list[int], heads: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, hidden = sum(lengths), heads * width
    project = torch.nn.Linear(hidden, 3 * hidden, device="cuda", dtype=dtype)
    back = torch.nn.Linear(hidden, hidden, device="cuda", dtype=dtype)
    layer = SimpleNamespace(
        num_attention_heads_per_partition=heads,
        head_size=width,
        softmax_scale=None,
        qkv_proj=lambda x: (project(x), None),
        proj=lambda x: (back(x), None),
    )
    x = torch.randn(1, rows, hidden, device="cuda", dtype=dtype)
    angles = torch.rand(rows, width // 2, device="cuda") * 6
    cos, sin = (torch.cat((half, half), -1).to(dtype) for half in (angles.cos(), angles.sin()))
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)

    def model(kind: torch.dtype) -> torch.Tensor:
        qkv = F.linear(x.to(kind), project.weight.to(kind), project.bias.to(kind)).view(rows, 3, heads, width)
        q, k, v = (part.transpose(0, 1) for part in qkv.unbind(1))
        q, k = (
            t * cos.to(kind) + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin.to(kind) for t in (q, k)
        )
        parts = [
            F.scaled_dot_product_attention(*(t[None, :, a:b] for t in (q, k, v)))[0].transpose(0, 1)
            for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        ]
        return F.linear(torch.cat(parts).reshape(rows, hidden), back.weight.to(kind), back.bias.to(kind))

    exact = model(torch.float64)
    floor = (model(dtype).double() - exact).abs().max()
    metadata = SimpleNamespace(cu_seqlens=bounds, max_seqlen=max(lengths))
    out = Attention(layer)(x, cu_seqlens=bounds, position_embeddings=(cos, sin), forward_metadata=metadata)
    assert out.shape == (1, rows, hidden)
    assert (out[0].double() - exact).abs().max() <= 2 * floor
