"""A slot filled from one packed buffer holds, bit for bit, what SGLang's own load of the adapter leaves there."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vlora_sgl import _sgl
from vlora_sgl.lora import packed
from vlora_sgl.lora.packed import PackedPool
from vlora_sgl.lora.pool import SizedPool

HIDDEN, KV, INNER, VOCABULARY = 32, 16, 48, 64
# Kind of module -> (A's stacked projections, inputs, sizes of the outputs, whether tensor-parallel ranks split inputs)
KINDS: dict[str, tuple[int, int, tuple[int, ...], bool]] = {
    "qkv_proj": (3, HIDDEN, (HIDDEN, KV, KV), False),
    "o_proj": (1, HIDDEN, (HIDDEN,), True),
    "gate_up_proj": (2, HIDDEN, (INNER, INNER), False),
    "down_proj": (1, INNER, (HIDDEN,), True),
}
# (slot, rank, kinds of modules, layers): mixed ranks, missing modules, and less where more has been.
LOADS = (
    (3, 64, tuple(KINDS), (0, 1)),
    (1, 16, tuple(KINDS), (0, 1)),
    (2, 8, ("qkv_proj", "o_proj"), (0, 1)),
    (3, 5, ("qkv_proj", "gate_up_proj", "down_proj"), (1,)),
    (1, 7, ("down_proj",), (0, 1)),
    (3, 33, tuple(KINDS), (0, 1)),
)


def make_pool(
    sized: bool,
    layers: int = 2,
    tp: int = 1,
    extra: Sequence[str] = (),
    device: str = "cpu",
    residency: Any = None,
    eight_bits: bool = False,
) -> Any:
    """A pool whose slots are full of NaN, so that whatever a load leaves unwritten shows."""
    config = SimpleNamespace(
        hidden_size=HIDDEN, num_attention_heads=4, num_key_value_heads=2, intermediate_size=INNER,
        num_hidden_layers=layers, vocab_size=VOCABULARY,
    )  # fmt: skip
    model: Any = torch.nn.Linear(1, 1, device=device)
    model.config = config
    options: dict[str, Any] = {
        "base_hf_config": config, "max_loras_per_batch": 4, "dtype": torch.bfloat16, "tp_size": tp, "tp_rank": tp - 1,
        "attn_tp_size": tp, "max_lora_rank": 64, "target_modules": {*KINDS, *extra}, "base_model": model,
        "eviction_policy": "lru", "lora_added_tokens_size": 0, "residency": residency,
        "eight_bits": eight_bits,
    }  # fmt: skip
    pool = SizedPool((64, 16, 16), **options) if sized else PackedPool(**options)
    for matrix in matrices(pool):
        matrix.fill_(torch.nan)
    return pool


def matrices(pool: Any) -> list[torch.Tensor]:
    layers = [matrix for buffers in (pool.A_buffer, pool.B_buffer) for kind in buffers.values() for matrix in kind]
    return [*layers, *pool.embedding_A_buffer.values(), *pool.embedding_B_buffer.values()]


def bits(pool: Any) -> list[torch.Tensor]:
    """All of the pool's memory; integers, because a NaN does not equal itself."""
    return [torch.tensor([], dtype=m.dtype).set_(m.untyped_storage()).view(torch.uint8) for m in matrices(pool)]


def make_modules(layers: int = 2, tp: int = 1) -> list[dict[str, Any]]:
    """What the manager wraps, as far as a load asks it: the last tensor-parallel rank's part of A and B."""

    def slice_a(a: torch.Tensor, split: bool) -> torch.Tensor:
        return a.chunk(tp, 1)[-1] if split else a

    def slice_b(b: torch.Tensor, sizes: tuple[int, ...], split: bool) -> torch.Tensor:
        return b if split else torch.cat([part.chunk(tp)[-1] for part in b.split(sizes)])

    return [
        {
            f"model.layers.{layer}.x.{kind}": SimpleNamespace(
                slice_lora_a_weights=lambda a, split=split: slice_a(a, split),
                slice_lora_b_weights=lambda b, sizes=sizes, split=split: slice_b(b, sizes, split),
            )
            for kind, (_, _, sizes, split) in KINDS.items()
        }
        for layer in range(layers)
    ]


def make_adapter(rank: int, kinds: Sequence[str], adapted: Sequence[int], layers: int = 2, seed: int = 0) -> Any:
    """As ``build_adapter`` makes it, but in float32, which the pool's dtype is rounded from."""
    torch.manual_seed(seed)
    found = [SimpleNamespace(weights={}, pinned_weights={}) for _ in range(layers)]
    for layer in adapted:
        for kind in kinds:
            parts, inputs, outputs, _ = KINDS[kind]
            name = f"layers.{layer}.x.{kind}"
            found[layer].weights[f"{name}.lora_A.weight"] = torch.randn(parts * rank, inputs)
            found[layer].weights[f"{name}.lora_B.weight"] = torch.randn(sum(outputs), rank)
    return SimpleNamespace(uid=f"a{seed}", config=SimpleNamespace(r=rank), layers=found, embedding_layers={})


def load_as_sglang(pool: Any, slot: int, adapter: Any, modules: Any) -> None:
    place = pool.places[slot]
    _sgl.LoRAMemoryPool.load_lora_weight_to_buffer(pool, adapter.uid, place, adapter, modules, None, None)


@pytest.mark.parametrize("staging", [packed.STAGING_BYTES, 1], ids=["one_piece", "many_pieces"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("sized", [False, True], ids=["equal_slots", "sized_slots"])
@pytest.mark.parametrize("eight_bits", [False, True], ids=["wide", "e4m3"])
def test_slots_hold_what_sglang_writes(
    eight_bits: bool, sized: bool, tp: int, staging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "STAGING_BYTES", staging)
    ours, theirs = (make_pool(sized, tp=tp, eight_bits=eight_bits) for _ in range(2))
    modules = make_modules(tp=tp)
    adapters = [[make_adapter(*load[1:], seed=seed) for _ in range(2)] for seed, load in enumerate(LOADS)]
    for _ in range(2):  # the second time around with everything that is kept between loads
        for (slot, *what), (mine, original) in zip(LOADS, adapters, strict=True):
            ours.load_lora_weight_to_buffer("x", slot, mine, modules, None, None)
            load_as_sglang(theirs, slot, original, modules)
            assert all(map(torch.equal, bits(ours), bits(theirs))), f"slot {slot}: {what}"


def test_nothing_of_a_packed_buffer_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fill looks at all of it for numbers that are not finite: between matrices there are zeros."""
    taken: list[torch.Tensor] = []

    def full_of_nan(*shape: Any, **options: Any) -> torch.Tensor:
        made = torch.full(shape, torch.nan, **options)
        taken.extend([made] if made.device.type == "cpu" else [])
        return made

    pool, modules = make_pool(sized=False), make_modules()
    monkeypatch.setattr(packed, "torch", SimpleNamespace(**{**vars(torch), "empty": full_of_nan}))
    for seed, (_, rank, kinds, layers) in enumerate(LOADS):
        held = pool.pack(make_adapter(rank, kinds, layers, seed=seed), modules)
        assert held.buffer is taken.pop() and not taken
        assert bool(torch.isfinite(held.buffer).all())
        assert not any(held.buffer[end:begin].any() for end, begin in held.layout.gaps())
        gaps = sum(begin - end for end, begin in held.layout.gaps())
        assert gaps + sum(shape.numel() for shape in held.layout.shapes) == len(held.buffer)


@pytest.mark.parametrize("eight_bits", [False, True], ids=["wide", "e4m3"])
def test_embeddings_are_loaded_beside(eight_bits: bool) -> None:
    ours, theirs = (make_pool(sized=False, extra=["embed_tokens"], eight_bits=eight_bits) for _ in range(2))
    assert {buffer.dtype for buffer in ours._vocabulary} == {torch.bfloat16}
    modules = make_modules()
    for embeds in (True, False):
        adapters = [make_adapter(8, ["o_proj"], (0,)) for _ in range(2)]
        if embeds:
            a, b = torch.randn(8, VOCABULARY), torch.randn(HIDDEN, 8)
            for adapter in adapters:
                adapter.pinned_embedding_layers, adapter.added_tokens_embeddings = {}, {}
                adapter.pinned_added_tokens_embeddings = {}
                adapter.config.lora_added_tokens_size = 0
                adapter.embedding_layers = {"embed_tokens.lora_A.weight": a, "embed_tokens.lora_B.weight": b}
        ours.load_lora_weight_to_buffer("x", 1, adapters[0], modules, None, None)
        for buffer in (theirs.embedding_A_buffer, theirs.embedding_B_buffer):
            buffer["embed_tokens"][1].zero_()  # SGLang leaves what lay past the rank
        load_as_sglang(theirs, 1, adapters[1], modules)
        assert not ours.embedding_A_buffer["embed_tokens"][1].isnan().any()
        assert all(map(torch.equal, bits(ours), bits(theirs)))


class Copies(TorchDispatchMode):
    """Counts the operations that write: every one is a copy to the device, a kernel, or work of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in func.__name__ for word in ("copy", "zero", "cat", "pin_memory", "clone")):
            self.count[func.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layers", [2, 28])
def test_a_load_is_a_handful_of_copies_whatever_the_depth(layers: int) -> None:
    pool, modules = make_pool(sized=True, layers=layers), make_modules(layers)
    whole, part = (make_adapter(16, kinds, range(layers), layers) for kinds in (KINDS, ["qkv_proj"]))
    for adapter, zeroed in ((whole, 0), (part, 1)):
        pool.pack(adapter, modules)
        with Copies() as copies:
            pool.load_lora_weight_to_buffer("x", 1, adapter, modules, None, None)
        expected = {"copy_.default": 3, "_foreach_copy_.default": 2, "_foreach_zero_.default": zeroed}
        assert copies.count == Counter(expected)  # the third is one element, which says that all are finite


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", "AB")
@pytest.mark.parametrize("sized", [False, True], ids=["equal_slots", "sized_slots"])
@pytest.mark.parametrize("where", [0, -1])
@pytest.mark.parametrize("eight_bits", [False, True], ids=["wide", "e4m3"])
def test_what_was_spoiled_behind_the_loader_leaves_b_finite_and_a_not(
    eight_bits: bool, sized: bool, side: str, value: float, where: int
) -> None:
    """Dense kernels give other rows 0 x B; the adapter's own rows have to notice."""
    pool, modules = make_pool(sized, eight_bits=eight_bits), make_modules()
    value = torch.nan if eight_bits else value  # which is all that e4m3 has
    adapter, twin = make_adapter(16, tuple(KINDS), (0, 1)), make_adapter(16, tuple(KINDS), (0, 1))
    pool.pack(adapter, modules)
    name = list(adapter.layers[where].weights)[0 if side == "A" else 1]
    adapter.layers[where].weights[name].view(-1)[where] = value
    pool.load_lora_weight_to_buffer("x", 1, adapter, modules, None, None)

    def finite(buffers: Any) -> list[bool]:
        matrices = [matrix[pool.places[1]] for kind in buffers.values() for matrix in kind]
        parts = (m[:, :16] if buffers is pool.B_buffer else m[:16] for m in matrices)
        return [bool(part.float().isfinite().all()) for part in parts]

    assert all(finite(pool.B_buffer)) and not all(finite(pool.A_buffer))
    pool.load_lora_weight_to_buffer("y", 1, twin, modules, None, None)
    assert all(finite(pool.B_buffer)) and all(finite(pool.A_buffer)), "the next in the slot is in order"


def test_an_adapter_is_held_once_and_its_layout_as_long_as_somebody_has_it() -> None:
    pool, modules = make_pool(sized=False), make_modules()
    adapters = [make_adapter(8, ["qkv_proj", "down_proj"], (0, 1), seed=seed) for seed in range(2)]
    buffers = [pool.pack(adapter, modules).buffer for adapter in adapters]
    for adapter, buffer in zip(adapters, buffers, strict=True):
        weights = [weight for layer in adapter.layers for weight in layer.weights.values()]
        assert len(weights) == 8
        assert all(w.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr() for w in weights)
        assert buffer.numel() < sum(w.numel() for w in weights) + 8 * 64
        assert pool.pack(adapter, modules).buffer is buffer
    assert adapters[0].packed.layout is adapters[1].packed.layout
    del adapters, adapter
    gc.collect()
    assert not pool._layouts
