"""Which decoding steps take the other kernels, and that these get what SGLang's got."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.stand_in import passing_for
from vlora_sgl import _sgl
from vlora_sgl.model_executor.fast_paths import decode_layers
from vlora_sgl.model_executor.fast_paths.decode_layers import (
    PLAIN,
    Attention,
    Norm,
    Rotation,
    can_norm,
    can_rotate,
    serves,
)

HEADS, KV_HEADS, WIDTH = 14, 2, 64


def tensors(dtype: torch.dtype = torch.bfloat16, width: int = WIDTH, heads: int = HEADS) -> list[torch.Tensor]:
    """q, the caches and the output of two sequences."""
    q, cache = torch.zeros(2, heads, width, dtype=dtype), torch.zeros(9, KV_HEADS, width, dtype=dtype)
    return [q, cache, cache.clone(), torch.zeros_like(q)]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What ``decode_attention`` was called with, in place of launches."""
    calls: list[Any] = []
    monkeypatch.setattr(decode_layers, "decode_attention", lambda *args: calls.append(args))
    return calls


def test_a_plain_launch_takes_the_other_kernel(launched: list[Any]) -> None:
    attention = Attention(lambda *args, **options: pytest.fail("SGLang's was called"))
    given = [*tensors(), "starts", "places", "partials", "weights"]
    attention(*given, "splits", 8, 0.25, 2.0, 0.5, logit_cap=0.0, sinks=None, use_pdl=True, page_size=1)
    assert launched == [(*given, 0.5, 0.5)], "the scale of the keys belongs to the scores"


@pytest.mark.parametrize(
    "option",
    [{"logit_cap": 30.0}, {"sinks": torch.ones(1)}, {"xai_temperature_len": 4}, {"page_size": 16}, {"score_mod": abs}],
    ids=lambda option: next(iter(option)),
)
def test_others_stay_as_they_are(option: dict[str, Any], launched: list[Any]) -> None:
    came: list[Any] = []
    given = [*tensors(), "starts", "places", "partials", "weights", "splits", 8, 0.25, 1.0, 1.0]
    Attention(lambda *args, **options: came.append((args, options)))(*given, **option)
    assert came == [(tuple(given), option)] and not launched


def test_what_the_kernel_does_not_take() -> None:
    q, k, v, out = tensors()
    assert serves(q, k, v, out)
    assert not serves(q, k.to(torch.float8_e4m3fn), v, out), "a cache of another type"
    assert not serves(q, k, v, out.float()), "an output of another type"
    assert not serves(q, k[None], v[None], out), "a paged view"
    assert not serves(*tensors(torch.float32)) and not serves(*tensors(width=96))
    assert not serves(*tensors(heads=KV_HEADS * 17)), "more queries than a matrix instruction has rows"


def test_sglang_calls_what_is_replaced_and_has_no_option_unknown_to_us() -> None:
    backend = inspect.getsource(_sgl.TritonAttnBackend.forward_decode)
    assert "self.decode_attention_fwd(" in backend and "save_kv_cache" in backend
    theirs = inspect.signature(_sgl.decode_attention.decode_attention_fwd).parameters
    ours = list(inspect.signature(Attention.__call__).parameters)[1:-1]
    assert list(theirs)[: len(ours)] == ours
    assert {name: theirs[name].default for name in list(theirs)[len(ours) :]} == {**PLAIN, "use_pdl": False}


def rotary(**changes: Any) -> Any:
    """SGLang's module of positions with three axes, by name."""
    made: Any = passing_for("MRotaryEmbedding", SimpleNamespace)(
        mrope_section=[8, 12, 12],
        is_neox_style=True,
        mrope_interleaved=False,
        mrope_interleaved_glm=False,
        rotary_dim=WIDTH,
        cos_sin_cache=torch.zeros(4, WIDTH),
    )
    made.__dict__.update(changes)
    return made


class Layer:
    """``Qwen2Attention`` whose projections add one, and whose attention sees what is in the cache."""

    q_size, kv_size, head_dim = HEADS * WIDTH, KV_HEADS * WIDTH, WIDTH

    def __init__(self, positions: Any) -> None:
        self.rotary_emb, self.asked = positions, []  # type: ignore[var-annotated]

    def qkv_proj(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x + 1, None

    def o_proj(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x + 1, None

    def attn(self, q: torch.Tensor, k: Any, v: Any, batch: Any, save_kv_cache: bool) -> torch.Tensor:
        self.asked.append(save_kv_cache)
        return q * 2

    attn.layer_id, attn.k_scale = 3, None  # type: ignore[attr-defined]

    def forward(self, positions: Any, hidden: Any, batch: Any) -> str:
        return "SGLang's"


def batch(decodes: bool) -> Any:
    return SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: decodes), out_cache_loc="places")


def test_decoding_rotates_and_stores_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(rotary())
    pool = SimpleNamespace(get_kv_buffer=lambda layer_id: (f"k{layer_id}", f"v{layer_id}"))
    given: list[Any] = []

    def kernel(qkv: torch.Tensor, *args: Any) -> torch.Tensor:
        given.append(args)
        return qkv[:, : layer.q_size] + 5

    monkeypatch.setattr(decode_layers, "rotate_and_store", kernel)
    forward = Rotation(layer, pool)
    positions, x = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(2, layer.q_size + 2 * layer.kv_size)
    answer = forward(positions, x, batch(decodes=True))
    assert given == [(layer.rotary_emb.cos_sin_cache, positions, "places", "k3", "v3", [8, 12, 12])]
    assert torch.equal(answer, torch.full((2, layer.q_size), 13.0)) and layer.asked == [False]
    for other in ((positions, x, batch(decodes=False)), (positions[0], x, batch(decodes=True))):
        assert forward(*other) == "SGLang's"
    assert len(given) == 1


def test_where_adapters_are_in_the_projection_it_rotates(monkeypatch: pytest.MonkeyPatch) -> None:
    class Projection(decode_layers.AtmmQKVLinear):  # type: ignore[misc]
        def __init__(self) -> None:
            self.given: list[Any] = []

        def rotated(self, x: torch.Tensor, rotation: Any) -> torch.Tensor:
            self.given.append(rotation.operands)
            return x[:, : layer.q_size] + 6

    layer = Layer(rotary())
    layer.__dict__["qkv_proj"] = projection = Projection()
    monkeypatch.setattr(decode_layers, "rotate_and_store", lambda *_: pytest.fail("a launch of its own"))
    pool = SimpleNamespace(get_kv_buffer=lambda layer_id: (f"k{layer_id}", f"v{layer_id}"))
    positions, x = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(2, layer.q_size + 2 * layer.kv_size)
    answer = Rotation(layer, pool)(positions, x, batch(decodes=True))
    assert projection.given == [(layer.rotary_emb.cos_sin_cache, positions, "places", "k3", "v3", [8, 12, 12])]
    assert torch.equal(answer, torch.full((2, layer.q_size), 13.0)) and layer.asked == [False]


def names_seen(node: ast.AST) -> set[str]:
    """Which of k and v a method of a backend looks into, but where there are any, or to store them."""
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("k is not None", "save_kv_cache"):
        return {name for child in node.orelse for name in names_seen(child)}
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return {node.value.id} & {"k", "v"}
    return {name for child in ast.iter_child_nodes(node) for name in names_seen(child)}


@pytest.mark.parametrize(
    "module, backend",
    [
        ("flashattention_backend", "FlashAttentionBackend"),
        ("flashinfer_backend", "FlashInferAttnBackend"),
        ("triton_backend", "TritonAttnBackend"),
    ],
)
def test_backends_need_no_k_and_v_that_are_in_the_cache(module: str, backend: str) -> None:
    """As of layers that share a cache."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "srt" / "layers" / "attention" / f"{module}.py").read_text()
    (made,) = (one for one in ast.parse(source).body if isinstance(one, ast.ClassDef) and one.name == backend)
    seen = {one.name: names_seen(one) for one in made.body if isinstance(one, ast.FunctionDef)}
    assert not seen["forward_decode"] and seen["forward_extend"], "the other is what a look at them is like"


def test_what_a_rotation_replaces_is_sglangs_forward() -> None:
    """The four lines that are done otherwise when decoding, and nothing besides."""
    from sglang.srt.models.qwen2 import Qwen2Attention

    lines = [line.strip() for line in inspect.getsource(Qwen2Attention.forward).splitlines()]
    assert lines[lines.index(") -> torch.Tensor:") + 1 :] == [
        "qkv, _ = self.qkv_proj(hidden_states)",
        "q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)",
        "q, k = self.rotary_emb(positions, q, k)",
        "attn_output = self.attn(q, k, v, forward_batch)",
        "output, _ = self.o_proj(attn_output)",
        "return output",
    ]
    assert (
        list(inspect.signature(Qwen2Attention.forward).parameters)[1:]
        == list(inspect.signature(Rotation.__call__).parameters)[1:]
    )


class Pool(_sgl.MHATokenToKVPool):  # type: ignore[misc]
    pass


def test_which_layers_rotate_so() -> None:
    def pool(cls: Any = _sgl.MHATokenToKVPool, layout: str = "nhd", dtype: torch.dtype = torch.bfloat16) -> Any:
        made = cls.__new__(cls)
        made.kv_cache_layout, made.dtype, made.store_dtype = layout, dtype, dtype
        return made

    assert can_rotate(Layer(rotary()), pool(), torch.bfloat16)
    for changes in (
        {"mrope_section": None},
        {"is_neox_style": False},
        {"mrope_interleaved": True},
        {"rotary_dim": 32},
    ):
        assert not can_rotate(Layer(rotary(**changes)), pool(), torch.bfloat16)
    assert not can_rotate(Layer(SimpleNamespace()), pool(), torch.bfloat16), "positions of one axis"
    assert not can_rotate(Layer(rotary()), pool(Pool), torch.bfloat16), "a cache that may be laid out otherwise"
    assert not can_rotate(Layer(rotary()), pool(layout="hnd"), torch.bfloat16)
    assert not can_rotate(Layer(rotary()), pool(dtype=torch.float8_e4m3fn), torch.bfloat16)


def norm_layer(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """SGLang's module, on the meta device."""
    layer = _sgl.RMSNorm(8, eps=1e-3, weight_dtype=dtype)
    layer.__dict__.update(changes)
    layer.forward = lambda *args: ("SGLang's", *args)
    return layer


def test_few_rows_with_a_residual_are_normed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(decode_layers, "add_rms_norm_", lambda *args: given.append(args))
    layer, x, residual = norm_layer(), torch.zeros(64, 8), torch.zeros(64, 8)
    forward = Norm(layer)
    assert forward(x, residual) == (x, residual)
    assert len(given) == 1 and given[0][:2] == (x, residual) and given[0][2] is layer.weight and given[0][3] == 1e-3
    many = torch.zeros(65, 8)
    for args in ((x,), (many, many), (x, residual, x), (x[None], residual[None]), (x[:0], residual[:0])):
        assert forward(*args)[0] == "SGLang's"
    assert len(given) == 1


def test_which_norms_are_those() -> None:
    assert can_norm(norm_layer(), torch.bfloat16)
    assert not can_norm(norm_layer(torch.float32), torch.bfloat16)
    for changes in ({"variance_size_override": 4}, {"cast_x_before_out_mul": True}, {"fp32_residual": True}):
        assert not can_norm(norm_layer(**changes), torch.bfloat16)
    own = list(inspect.signature(_sgl.RMSNorm.forward_cuda).parameters)[1:]
    assert own == list(inspect.signature(Norm.__call__).parameters)[1:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_sglangs_kernels_agree() -> None:
    """Attention within one unit in the last place of the largest output, k as SGLang's rotation leaves it."""
    from sglang.kernels.ops.attention.rotary_triton import triton_mrope_fused

    torch.manual_seed(0)
    tokens, heads, kv_heads, width, splits = 3, 28, 4, 128, 8
    lengths = torch.tensor([700, 1, 130])
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * width, device="cuda", dtype=torch.bfloat16)
    k_cache, v_cache = torch.randn(2, 900, kv_heads, width, device="cuda", dtype=torch.bfloat16)
    cos_sin = torch.randn(50, width, device="cuda").clamp(-1, 1).to(torch.bfloat16)
    positions = torch.randint(50, (3, tokens), device="cuda")
    starts = torch.tensor([0, *lengths.cumsum(0)], device="cuda", dtype=torch.int32)
    places = torch.randperm(900, device="cuda")[: int(lengths.sum())]
    newest = places[starts[1:].long() - 1]
    theirs = qkv.clone()
    q, k, _ = theirs.split([heads * width, kv_heads * width, kv_heads * width], -1)
    triton_mrope_fused(q, k, cos_sin, positions, [16, 24, 24], width, width, False, False, True, None)
    mine = decode_layers.rotate_and_store(qkv, cos_sin, positions, newest, k_cache, v_cache, (16, 24, 24))
    torch.testing.assert_close(mine, q, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(k_cache[newest].flatten(1), k, rtol=2**-6, atol=2**-6)
    out, own = torch.full((2, tokens, heads, width), float("nan"), device="cuda", dtype=torch.bfloat16)
    args = (
        starts, places, torch.empty(tokens, heads, splits, width, device="cuda"),
        torch.empty(tokens, heads, splits, device="cuda"), torch.full((tokens,), 3, device="cuda", dtype=torch.int32),
        splits, width**-0.5, 1.0, 1.0,
    )  # fmt: skip
    query = mine.view(tokens, heads, width)
    _sgl.decode_attention.decode_attention_fwd(query, k_cache, v_cache, out, *args)
    Attention(lambda *a, **o: pytest.fail("SGLang's was called"))(query, k_cache, v_cache, own, *args)
    torch.testing.assert_close(own, out, rtol=2**-7, atol=2**-8 * float(out.abs().max()))
