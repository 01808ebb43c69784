"""The encoder's faster layers compute what the model's do."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sglang.srt.layers.attention import vision

from tests.lora.test_activation import runtime as layers_runtime  # noqa: F401 - a fixture
from tests.lora.test_tower import runtime  # noqa: F401 - a fixture
from tests.support.encoders import ENCODERS, QWEN, make
from tests.support.interpreter import CUDA, DEVICE, kernels, passed_interpreted, starter
from tests.support.stand_in import passing_for
from vlora_sgl import _sgl
from vlora_sgl.multimodal.vision_families import structure_of
from vlora_sgl.multimodal.vision_layers import (
    ATTENDS,
    Attention,
    Lengths,
    PatchEmbedding,
    attentions,
    patch_embeddings,
    why_not,
)

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


class attention(SimpleNamespace):
    """A layer of a kind that is replaced, with these changes."""

    __hash__ = object.__hash__

    def __init__(self, **changes: Any) -> None:
        alike = {"num_attention_heads_per_partition": 4, "num_attention_kv_heads_per_partition": 4}
        plain = {"qk_normalization": False, "qk_normalization_by_head_size": False, "sinks": None}
        more = {"use_qkv_parallel": True, "customized_position_embedding_applier": None, "qkv_backend_name": "fa3"}
        super().__init__(**{**alike, **plain, **more, **changes})


@pytest.mark.parametrize(
    "changes, why",
    [
        ({}, None),
        ({"qkv_backend_name": "fa4"}, "is not triton_attn or fa3"),
        ({"use_qkv_parallel": False}, "has q, k and v of a head beside each other"),
        ({"num_attention_kv_heads_per_partition": 2}, "has several heads of q for one of k"),
        ({"qk_normalization": True}, "normalises q and k"),
        ({"qk_normalization_by_head_size": True}, "normalises q and k"),
        ({"customized_position_embedding_applier": max}, "has positions of its own"),
        ({"sinks": torch.zeros(4)}, "has positions of its own, or sinks"),
    ],
)
def test_layers_that_compute_something_else_are_left_alone(changes: dict[str, Any], why: str | None) -> None:
    found = why_not(attention(**changes))
    assert found is None if why is None else str(found).startswith(why)


@pytest.mark.parametrize("backend, dtype", [("sdpa", torch.bfloat16), *((name, torch.float32) for name in ATTENDS)])
@pytest.mark.parametrize("known", ATTENDS)
def test_attention_that_is_replaced_and_that_is_not(backend: str, dtype: torch.dtype, known: str) -> None:
    """Backends that want their rows together, and what flash attention cannot do, are left to SGLang."""
    attn = attention(qkv_backend_name=backend)
    encoder = passing_for("Qwen2_5_VisionTransformer", SimpleNamespace)(
        patch_embed=embedding("cpu", dtype), blocks=[SimpleNamespace(attn=attn)], dtype=dtype, device=GPU
    )
    runner = SimpleNamespace(model=SimpleNamespace(visual=encoder))
    sixteen = dtype in (torch.float16, torch.bfloat16)
    assert attentions(runner) == f"the encoder's attention is not {'triton_attn or fa3' if sixteen else 'in 16 bits'}"
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
        **_: object,
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


TURNED = ["by-wholes", "by-halves", "not"]
"""How a family's blocks hand on their positions: Qwen2-VL and Qwen2.5-VL, Qwen3-VL, those that add them to patches."""


def backend_of(name: str) -> Any:
    """The layer's own backend of that name; none where torch attends."""
    if name == "triton_attn":
        return None
    if not CUDA:
        return Plain()
    return _sgl.VisionFlash3Attention(use_data_parallel=True)


@kernels
@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if CUDA else [])], ids=str)
@pytest.mark.parametrize("heads, width", [(16, 80), (16, 72), (4, 16)])
@pytest.mark.parametrize("lengths", [[256], [64, 64, 16, 4], [4]])
@pytest.mark.parametrize("turned", TURNED)
@pytest.mark.parametrize("backend", ATTENDS if CUDA else ["fa3"])
@torch.no_grad()
def test_kernel_attention_against_float64(
    backend: str, turned: str, lengths: list[int], heads: int, width: int, dtype: torch.dtype
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
    angles = torch.rand(rows, width // 2, device=DEVICE) * 6 * (turned != "not")
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
    named: dict[str, Any] = {"position_embeddings": (cos, sin)}
    if turned == "by-halves":
        named = {"rotary_pos_emb_cos": cos[:, : width // 2], "rotary_pos_emb_sin": sin[:, : width // 2]}
    elif turned == "not":
        named = {}
    out = Attention(layer, Lengths())(x, cu_seqlens=bounds, forward_metadata=metadata, **named)
    assert out.shape == (1, rows, hidden)
    assert (out[0].double() - exact).abs().max() <= 2 * floor


@kernels
@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.usefixtures("runtime")
@torch.no_grad()
def test_kernel_layers_in_their_places_compute_what_the_encoder_does(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own layers of every family, in float32 on a CPU; on a GPU in 16 bits, beside SGLang's Triton kernel."""
    model = make(family)
    structure: Any = structure_of(model.to(DEVICE, torch.float16 if CUDA else torch.float32))
    patched = family in QWEN
    grids = [(1, 8, 4), (1, 4, 4), (2, 4, 4)] if patched else structure.common() * 3
    x = torch.cat([torch.randn(structure.shape(grid, 1)) for grid in grids]).to(DEVICE, structure.dtype)
    rest = (torch.tensor(grids),) if patched else ()
    with monkeypatch.context() as patch:  # SGLang's rotation as it is written, not compiled
        patch.setattr(vision, "apply_rotary_pos_emb", vision.apply_rotary_pos_emb_native_eager)
        wanted = getattr(structure.owner, structure.method)(x.clone(), *rest)
    lengths = Lengths()
    for layer in structure.attentions:
        if not CUDA:
            layer.qkv_backend_name = "fa3"
            del layer.qkv_backend
            layer.qkv_backend = Plain()
        assert why_not(layer) is None
        layer.forward = Attention(layer, lengths)
    if structure.patch_embed is not None:
        structure.patch_embed.forward = PatchEmbedding(structure.patch_embed)
    found = getattr(structure.owner, structure.method)(x.clone(), *rest)
    assert found.shape == wanted.shape
    off = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max()
    assert off < (0.02 if CUDA else 1e-5)
    assert len(lengths._known) == (family == "llava"), "only CLIP's layers are told no lengths"


@starter
def test_interpreted() -> None:
    assert passed_interpreted(__file__) == 27 + len(ENCODERS)
