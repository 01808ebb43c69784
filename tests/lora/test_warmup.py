"""What is compiled at start is what large prefills launch, without their memory, and nothing on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vlora_sgl.kernels import atmm
from vlora_sgl.kernels.atmm import Vectors, atmm_linear, atmm_silu_and_mul, launch, make_routing
from vlora_sgl.kernels.atmm.row_routing import DENSE_MAX_SLOTS
from vlora_sgl.lora import warmup
from vlora_sgl.lora.warmup import compile_prefills, wrapped_linears
from vlora_sgl.scaled import E4M3

SLOTS, RANK, K = 4, 16, 64
CAPTURED, MOST = 2048, 5000
KERNELS = (
    launch.grouped.grouped_shrink_kernel,
    launch.grouped.grouped_expand_kernel,
    launch.activation.grouped_silu_kernel,
)
PARTS = {"qkv_proj": (0, 64, 80, 96), "gate_up_proj": (0, 96, 192), "o_proj": (0, 64)}


def module(name: str, fusible: bool = True, vectors: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    offsets = PARTS[name]
    return SimpleNamespace(
        a=torch.zeros(SLOTS, (len(offsets) - 1) * RANK, K, dtype=dtype),
        b=torch.zeros(SLOTS, offsets[-1], RANK, dtype=dtype),
        offsets=offsets,
        fusible=fusible,
        own_bias=torch.zeros(offsets[-1]) if name == "qkv_proj" else None,
        deferred=object() if name == "gate_up_proj" else None,
        vectors=torch.zeros(SLOTS, 2, offsets[-1]) if vectors else None,
    )


def manager(
    device: str = "cuda",
    two_slots_a_row: bool = True,
    fusible: bool = True,
    vectors: bool = False,
    slots: torch.dtype = torch.float32,
) -> Any:
    layers = [{name: module(name, fusible, vectors, slots) for name in PARTS} for _ in range(3)]
    return SimpleNamespace(
        dtype=torch.float32,
        # The tensors are the CPU's: what is compiled there is only named.
        device=SimpleNamespace(type=device),
        lora_backend=SimpleNamespace(places=range(SLOTS), marks_rows=vectors, most_dense=DENSE_MAX_SLOTS),
        lora_modules=[{**layer, "lm_head": object()} for layer in layers],
        max_loras_per_batch=SLOTS,
        two_slots_a_row=two_slots_a_row,
    )


def key(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """What Triton compiles a kernel for."""

    def kind(value: Any, parameter: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, torch.Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        return parameter.do_not_specialize or (value == 1, value % 16 == 0)

    kinds = (kind(value, parameter) for value, parameter in zip(args, function.params, strict=False))
    return function.__name__, *kinds, *sorted(options.items())


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Keys of the kernels that were compiled."""
    keys: list[Any] = []

    def compile_one(function: Any, *args: Any, grid: Any, **options: Any) -> Any:
        assert sum(value.numel() for value in args if isinstance(value, torch.Tensor)) < 1 << 20
        keys.append(key(function, args, options))
        return SimpleNamespace(run=None)

    for kernel in KERNELS:
        monkeypatch.setattr(kernel, "warmup", lambda *args, kernel=kernel, **rest: compile_one(kernel, *args, **rest))
    # Tables of tiles are of a device; the routing goes to the CPU's memory.
    monkeypatch.setattr(warmup, "_routing", on_cpu(warmup._routing))
    yield keys


def on_cpu(make: Any) -> Any:
    return lambda *args: make(*args[:-1], torch.device("cpu"))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Keys of the kernels that were launched."""
    keys: list[Any] = []

    def launch_one(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        assert not warmup
        keys.append(key(function, args, options))

    for kernel in KERNELS:
        monkeypatch.setattr(kernel, "run", lambda *args, kernel=kernel, **rest: launch_one(kernel, *args, **rest))
    monkeypatch.setattr(atmm, "on_kernels", lambda _: True)
    return keys


def prefill(one: Any, rows: int, pairs: int, touched: int, vectored: Any = ()) -> None:
    """A batch of which ``touched`` rows apply slots, through the operator."""
    numbers = np.arange(rows, dtype=np.int32)
    applied = tuple((slot, 1.0) for slot in range(pairs))
    groups = [(numbers[:touched], applied), (numbers[touched:], ())]
    routing = make_routing(groups, rows, [RANK] * SLOTS, [1.0] * SLOTS, "cpu", vectored=vectored)
    x, weight = torch.zeros(rows, K), torch.zeros(one.offsets[-1], K)
    operands = x, one.a, one.b, routing, one.offsets
    given = None if one.vectors is None else Vectors(one.vectors, one.own_bias)
    if one.deferred is not None:
        atmm.atmm_silu_and_mul(torch.zeros(rows, one.offsets[-1]), *operands, vectors=given)
    elif one.fusible:
        atmm_linear(x, weight, one.own_bias, *operands[1:], vectors=one.vectors)
    else:
        atmm.atmm(torch.zeros(rows, one.offsets[-1]), *operands, vectors=given)


@pytest.mark.parametrize("vectors", [False, True], ids=["plain LoRA", "vectors too"])
@pytest.mark.parametrize("fusible", [True, False], ids=["base and adapters together", "adapters alone"])
@pytest.mark.parametrize("slots", [torch.float32, E4M3], ids=["wide", "e4m3"])
def test_large_prefills_launch_nothing_that_is_not_compiled(
    compiled: list[Any], launched: list[Any], slots: torch.dtype, fusible: bool, vectors: bool
) -> None:
    one = manager(fusible=fusible, vectors=vectors, slots=slots)
    assert compile_prefills(one, CAPTURED, MOST) == len(compiled) == len(set(compiled)) > 0
    assert not launched
    for linear in one.lora_modules[0].values():
        if hasattr(linear, "fusible"):
            for rows in (CAPTURED + 1, 2500, 4096, 4097, MOST):
                for pairs in (1, 2):
                    prefill(linear, rows, pairs, rows)
                    prefill(linear, rows, pairs, rows // 3)
                    if vectors:
                        prefill(linear, rows, pairs, rows // 3, {0})
    assert set(launched) == set(compiled)


def test_two_slots_a_row_only_where_they_can_be(compiled: list[Any]) -> None:
    both = compile_prefills(manager(), CAPTURED, MOST)
    assert 0 < compile_prefills(manager(two_slots_a_row=False), CAPTURED, MOST) < both


def test_small_blocks_only_where_a_prefill_may_have_them(compiled: list[Any]) -> None:
    def blocks(captured: int) -> set[int]:
        compiled.clear()
        compile_prefills(manager(), captured, MOST)
        return {
            dict(option for option in one if isinstance(option, tuple) and option[0] == "BM")["BM"] for one in compiled
        }

    assert blocks(CAPTURED) == {64}
    assert blocks(0) == {16, 64}  # no graphs at all: a prefill of 65 tokens may be of many adapters


def test_nothing_to_do(compiled: list[Any]) -> None:
    assert compile_prefills(manager("cpu"), CAPTURED, MOST) == 0
    assert compile_prefills(manager(), CAPTURED, CAPTURED) == 0
    assert not compiled


def test_a_shape_is_compiled_once_and_what_has_no_slots_never() -> None:
    assert [linear.offsets for linear in wrapped_linears(manager())] == list(PARTS.values())


def test_a_tile_that_a_device_refuses_does_not_end_the_start(
    monkeypatch: pytest.MonkeyPatch, compiled: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: Any) -> None:
        raise warmup.OutOfResources(2, 1, "shared memory")

    monkeypatch.setattr(warmup, "load", refuse)
    assert compile_prefills(manager(), CAPTURED, MOST) == len(compiled)
    assert "does not fit this device" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_large_prefill_compiles_nothing() -> None:
    from triton import knobs

    device = torch.device("cuda", torch.cuda.current_device())
    one = manager()
    one.device = device
    for layer in one.lora_modules:
        for linear in layer.values():
            for name in ("a", "b", "own_bias"):
                if getattr(linear, name, None) is not None:
                    setattr(linear, name, getattr(linear, name).to(device, torch.bfloat16))
    assert compile_prefills(one, CAPTURED, MOST) > 0
    late: list[Any] = []
    knobs.runtime.jit_post_compile_hook = lambda **about: late.append(about["repr"])
    try:
        for linear in one.lora_modules[0].values():
            if hasattr(linear, "fusible"):
                for rows in (CAPTURED + 1, 4096, 4097, MOST):
                    groups = [(np.arange(rows, dtype=np.int32), ((0, 1.0),))]
                    routing = make_routing(groups, rows, [RANK] * SLOTS, [1.0] * SLOTS, device)
                    x = torch.zeros(rows, K, dtype=torch.bfloat16, device=device)
                    if linear.deferred is not None:  # an activation adds its adapters' part
                        y = torch.zeros(rows, linear.offsets[-1], dtype=torch.bfloat16, device=device)
                        atmm_silu_and_mul(y, x, linear.a, linear.b, routing, linear.offsets)
                        continue
                    weight = torch.zeros(linear.offsets[-1], K, dtype=torch.bfloat16, device=device)
                    atmm_linear(x, weight, linear.own_bias, linear.a, linear.b, routing, linear.offsets)
    finally:
        knobs.runtime.jit_post_compile_hook = None
    torch.cuda.synchronize()
    assert not late
