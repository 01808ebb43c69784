"""Rows to routing tables, and the backend's static tables against fresh ones."""

import types
from typing import Any

import numpy as np
import pytest
import torch

from vlora_sgl.core import row_pairs
from vlora_sgl.errors import ConfigError, UnknownAdapterError
from vlora_sgl.kernels.atmm import atmm_reference, make_routing
from vlora_sgl.kernels.atmm.row_routing import groups_of
from vlora_sgl.lora.invocation import split_batch
from vlora_sgl.lora.row_routing import RowRouting

SLOTS = {None: 3, "x": 0, "y": 1, "m": 2}
RANKS, SCALINGS = {"x": 4, "y": 2, "m": 3}, {"x": 0.5, "y": 2.0, "m": 1.0}


@pytest.fixture
def backend() -> Any:
    from vlora_sgl.lora.backend import AtmmBackend

    return AtmmBackend(max_loras_per_batch=4, device="cpu", server_args=None)


def batch(lengths: Any, extend: bool = True, adapters: Any = (), starts: Any = None) -> Any:
    mode = types.SimpleNamespace(is_extend=lambda: extend)
    return types.SimpleNamespace(
        forward_mode=mode,
        lora_ids=list(adapters),
        extend_seq_lens_cpu=lengths,
        extend_seq_lens=torch.tensor(lengths),
        extend_prefix_lens_cpu=starts or [0] * len(lengths),
        batch_size=len(lengths),
    )


def row_routing(routed: Any = None) -> Any:
    adapters = {
        name: types.SimpleNamespace(
            config=types.SimpleNamespace(r=rank, target_modules=["q_proj"]), scaling=SCALINGS[name]
        )
        for name, rank in RANKS.items()
    }
    names = sorted(SLOTS, key=SLOTS.get)
    pool = types.SimpleNamespace(uid_to_buffer_id=SLOTS, buffer_id_to_uid=names, max_loras_per_batch=len(SLOTS))
    return RowRouting(pool, adapters, routed or {})


@pytest.mark.parametrize(
    ("merged", "expected"),
    [
        (None, [(((0, 1.0),), 3), ((), 1), (((2, 1.0),), 2)]),
        ("m", [(((0, 1.0), (2, -1.0)), 3), (((2, -1.0),), 1), ((), 2)]),
    ],
    ids=["unmerged", "mixture"],
)
def test_rows_follow_the_mode(merged: str | None, expected: Any) -> None:
    assert row_routing().runs_of(batch([3, 1, 2], adapters=["x", None, "m"]), merged) == expected


def test_rows_before_an_adapters_invocation_start_run_as_base_rows() -> None:
    view = split_batch(batch([5, 2], adapters=["x", "y"], starts=[10, 0]), [13, 0])
    found = row_routing().runs_of(view, None)
    assert found == [((), 3), (((0, 1.0),), 2), (((1, 1.0),), 2)]


def test_a_routed_adapters_rows_hold_its_members_until_the_router_speaks() -> None:
    routed = {"r": types.SimpleNamespace(members=("x", "y"))}
    found = row_routing(routed).runs_of(batch([2, 1], adapters=["r", "m"]), "m")
    assert found == [(((0, 0.0), (1, 0.0), (2, -1.0)), 2), ((), 1)]


def test_rows_of_several_adapters_apply_each_by_its_scale() -> None:
    adapters = ['{"x": 0.5, "y": -2.0}', '{"m": 0.25, "x": 3.0}', '{"m": 1.0, "y": 1.5}', None]
    unmerged = row_routing().runs_of(batch([1, 2, 1, 1], adapters=adapters), None)
    assert [pairs for pairs, _ in unmerged] == [
        ((0, 0.5), (1, -2.0)), ((2, 0.25), (0, 3.0)), ((2, 1.0), (1, 1.5)), (),
    ]  # fmt: skip
    mixture = row_routing().runs_of(batch([1, 2, 1, 1], adapters=adapters), "m")
    assert [pairs for pairs, _ in mixture] == [
        ((0, 0.5), (1, -2.0), (2, -1.0)), ((2, -0.75), (0, 3.0)), ((1, 1.5),), ((2, -1.0),),
    ]  # fmt: skip


def test_an_adapter_without_a_slot_is_an_error() -> None:
    with pytest.raises(UnknownAdapterError, match="gone"):
        row_routing().runs_of(batch([1], adapters=["gone"]), None)


def test_groups_gather_rows_of_the_same_pairs() -> None:
    runs = row_routing().runs_of(batch([1, 2, 1, 1], adapters=["x", "y", "x", None]), None)
    groups, rows = groups_of(runs)
    assert rows == 5
    assert {pairs: list(numbers) for numbers, pairs in groups} == {((0, 1.0),): [0, 3], ((1, 1.0),): [1, 2], (): [4]}


@pytest.mark.parametrize("merged", [None, "m"], ids=["unmerged", "mixture"])
def test_what_is_handed_over_is_what_every_row_applies(backend: Any, merged: str | None) -> None:
    """A prefill with an invocation start and all modes' rows, through the backend, against the float64 loop."""
    torch.manual_seed(0)
    a, b = torch.randn(4, 2 * 4, 10), torch.randn(4, 12, 4)
    x, w, offsets = torch.randn(10, 10), torch.randn(12, 10), (0, 5, 12)
    rows = row_routing()
    forward_batch = batch([4, 1, 2, 3], adapters=["x", None, "y", "m"])
    view = split_batch(forward_batch, [2, 0, 0, 0])
    backend.route(*rows.tables_of(rows.runs_of(view, merged)))
    own = [None, None, "x", "x", None, "y", "y", "m", "m", "m"]
    ranks, scalings = [4, 2, 3, 0], [0.5, 2.0, 1.0, 0.0]
    groups = [
        (np.array([t], dtype=np.int32), tuple((SLOTS[name], weight) for name, weight in row_pairs(adapter, merged)))
        for t, adapter in enumerate(own)
    ]
    exact = atmm_reference(x.double() @ w.double().T, x, a, b, groups, ranks, scalings, offsets)
    out, base = backend.linear(x, w, None, a, b, offsets), x @ w.T
    assert torch.allclose(out.double(), exact, atol=1e-4)
    changed = [bool((out[t] - base[t]).abs().max() > 0.1) for t in range(10)]
    assert changed == [bool(pairs) for _, pairs in groups]


def test_backend_applies_each_requests_adapter(backend: Any) -> None:
    torch.manual_seed(0)
    ranks, scalings = [4, 0, 2, 3], [0.5, 0.0, 2.0, 1.0]
    a, b = torch.randn(4, 2 * 4, 10), torch.randn(4, 12, 4)
    x, w, offsets = torch.randn(6, 10), torch.randn(12, 10), (0, 5, 12)
    backend.route([(((0, 1.0),), 2), ((), 3), (((3, 1.0),), 1)], ranks, scalings)
    out = backend.linear(x, w, None, a, b, offsets)
    rows = np.arange(6, dtype=np.int32)
    groups = [(rows[:2], ((0, 1.0),)), (rows[5:], ((3, 1.0),))]
    exact = atmm_reference(x.double() @ w.double().T, x, a, b, groups, ranks, scalings, offsets)
    assert torch.allclose(out.double(), exact, atol=1e-4) and not torch.allclose(out, x @ w.T, atol=0.1)
    assert torch.equal(out[2:5], (x @ w.T)[2:5])


@pytest.mark.parametrize("adapters", [True, False])
@pytest.mark.parametrize("unfit", ["", "inactive", "quantised", "vectors"])
def test_a_projection_rotates_in_its_own_launch_where_adapters_are_in_it(
    backend: Any, adapters: bool, unfit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the rotation is a launch of its own, behind what the layer gives without it."""
    from vlora_sgl.lora import backend as module
    from vlora_sgl.lora import layers

    ran: list[Any] = []
    monkeypatch.setattr(module, "atmm_rotated", lambda *given: ran.append(("one", *given)))
    for place in (module, layers):
        monkeypatch.setattr(place, "rotate_and_store", lambda *given: ran.append(("own", *given)))

    class Projection(layers.AtmmQKVLinear):  # type: ignore[misc]
        lora_active = unfit != "inactive"

        def __init__(self) -> None:
            base = {"weight": torch.eye(3), "bias": torch.ones(3), "skip_bias_add": False}
            own = {"a": "a", "b": "b", "offsets": (0, 1, 2, 3), "lora_backend": backend}
            own |= {"fusible": unfit != "quantised", "vectors": torch.zeros(4, 2, 3) if unfit == "vectors" else None}
            self.__dict__.update(own, base_layer=types.SimpleNamespace(**base))

        def forward(self, input_: torch.Tensor) -> Any:
            return "qkv", None

    backend.route([(((0, 1.0),), 2)] if adapters else [((), 2)], [4, 2, 3, 0], [0.5, 2.0, 1.0, 0.0])
    rotation, x = types.SimpleNamespace(operands=("cos", "positions")), torch.zeros(2, 3)
    layer = Projection()
    layer.rotated(x, rotation)
    ((how, first, *rest),) = ran
    if unfit:
        assert (how, first, rest) == ("own", "qkv", ["cos", "positions"])
    elif not adapters:
        assert how == "own" and torch.equal(first, torch.ones(2, 3)) and rest == ["cos", "positions"]
    else:
        assert how == "one" and first is x and rest[-1] is rotation
        assert rest[1] is layer.base_layer.bias and rest[4] is backend.batch_info.routing


def test_a_routed_slot_without_an_adapter_is_refused(backend: Any) -> None:
    with pytest.raises(ValueError, match="slot 1 is routed to but holds no adapter"):
        backend.route([(((1, 1.0),), 1)], [4, 0, 0, 0], [1.0] * 4)


@pytest.mark.parametrize("rows", [5, 64, 70])
def test_graph_tables_hold_what_fresh_tables_hold_and_forget_the_batch_before(rows: int) -> None:
    from vlora_sgl.kernels.atmm import make_routing
    from vlora_sgl.lora.backend import GraphTables

    ranks, scalings = [4, 8, 2, 0], [0.5, 1.0, 2.0, 0.0]
    tables = GraphTables(96, range(4), torch.device("cpu"))
    tables.refresh([(((0, 1.0), (1, -1.0)), 96)], ranks, scalings)
    runs = [(((0, 1.0), (2, -1.0)), 2), ((), 1), (((1, 1.0),), rows - 3)]
    view = tables.refresh(runs, ranks, scalings)
    groups, _ = groups_of(runs)
    fresh = make_routing(groups, rows, ranks, scalings, "cpu", block=tables.block)
    if rows <= 64:
        count = int(fresh.active[0])
        assert torch.equal(view.active[: 2 + count], fresh.active[: 2 + count])
        assert torch.equal(view.gates, fresh.gates)
        assert not tables.routing(64).gates[rows:].any()
    else:
        count = len(fresh.tile_rows)
        assert int(view.n_tiles) >= count
        assert torch.equal(view.tile_rows[:count], fresh.tile_rows)
        assert torch.equal(view.tile_slots[:count, : fresh.tile_slots.shape[1]], fresh.tile_slots)
        padded = view.tile_rows[count : int(view.n_tiles)]
        assert sorted(padded[padded >= 0].tolist()) == list(range(rows, 96))


FIVE = ((0, 0.7), (1, 0.3), (2, -1.0), (3, 2.0), (4, -0.5))


@pytest.mark.parametrize("rows", [3, 64])
def test_a_decode_graph_of_few_rows_takes_rows_of_five_slots(rows: int) -> None:
    from vlora_sgl.kernels.atmm import make_routing
    from vlora_sgl.lora.backend import GraphTables

    ranks, scalings = [4] * 6, [0.5 + slot for slot in range(6)]
    tables = GraphTables(96, range(6), torch.device("cpu"), both=True)
    for size in (64, 96):
        tables.refresh([((), size)], ranks, scalings, many=False)  # captured
    runs = [(FIVE, rows - 1), ((), 1)]
    assert tables.holds(rows, 5, 5, 3)
    view = tables.refresh(runs, ranks, scalings)
    fresh = make_routing(groups_of(runs)[0], rows, ranks, scalings, "cpu")
    assert torch.equal(view.gates, fresh.gates) and bool(fresh.gates[0, :5].all())
    assert int(view.active[0]) == 5 and not int(tables.routing(96).n_tiles), "nobody reads the others"


@pytest.mark.parametrize(
    ("rows", "active", "pairs", "tuples", "captured", "holds"),
    [
        (65, 5, 2, 3, (64, 96), True),  # a mixture's rows
        (65, 5, 3, 3, (64, 96), False),
        (65, 5, 2, 14, (64, 96), False),  # more sets of slots than the tiles were counted for
        (40, 5, 5, 30, (64, 96), True),
        (40, 5, 5, 3, (32, 96), False),  # padded to a graph of grouped kernels
        (40, 5, 2, 3, (), True),
        (40, 5, 3, 3, (), False),
    ],
)
def test_what_a_decode_graph_has_room_for(
    rows: int, active: int, pairs: int, tuples: int, captured: tuple[int, ...], holds: bool
) -> None:
    from vlora_sgl.lora.backend import GraphTables

    ranks, scalings = [4] * 6, [1.0] * 6
    tables = GraphTables(96, range(6), torch.device("cpu"), both=True)
    for size in captured:
        tables.refresh([((), size)], ranks, scalings, many=False)
    assert tables.holds(rows, active, pairs, tuples) == holds
    wide = [((*FIVE[:pairs],), 1), ((), rows - 1)]
    if not holds and tuples <= 6:
        with pytest.raises(ConfigError, match="exceed the graph's tables"):
            tables.refresh(wide, ranks, scalings)
    else:
        tables.refresh(wide, ranks, scalings)


def test_a_pool_of_many_slots_has_tables_for_few_in_use_and_for_many() -> None:
    from vlora_sgl.kernels.atmm import make_routing
    from vlora_sgl.kernels.atmm.row_routing import DENSE_MAX_SLOTS
    from vlora_sgl.lora.backend import GraphTables

    slots = 40
    ranks, scalings = [8] * slots, [0.5 + slot for slot in range(slots)]
    tables = GraphTables(32, range(slots), torch.device("cpu"), both=True)
    prefill = GraphTables(32, range(slots), torch.device("cpu"))
    for used in (1, DENSE_MAX_SLOTS, DENSE_MAX_SLOTS + 1, 32, 2):
        runs = [(((slots - 1 - slot, 1.0),), 1) for slot in range(used)]
        view = tables.refresh(runs, ranks, scalings)
        fresh = make_routing(groups_of(runs)[0], used, ranks, scalings, "cpu", block=tables.block)
        assert (view.gates is None) == (fresh.gates is None) == (used > DENSE_MAX_SLOTS)
        assert view.active_most == DENSE_MAX_SLOTS
        if view.gates is not None and view.active is not None:
            assert torch.equal(view.gates, fresh.gates)
            assert torch.equal(view.active[: 2 + used], fresh.active[: 2 + used])
            assert torch.equal(view.active[2 + slots :][:used], fresh.active[2 + slots :][:used])
        else:
            assert torch.equal(view.tile_slots[:used, :1], fresh.tile_slots)
        assert prefill.refresh(runs, ranks, scalings).gates is None, "a prefill's graph comes once"
    assert tables.routing(8).gates is not None and tables.routing(8, True).gates is None
    assert tables.refresh([((), 8)], ranks, scalings, True).gates is None, "as a graph of many is captured"


def test_a_graph_sees_which_slots_every_row_applies() -> None:
    """For layers that gather rows anew; rows past the batch apply none."""
    from vlora_sgl.lora.backend import GraphTables

    ranks, scalings = [16, 8, 4, 0], [1.0, 0.5, 2.0, 0.0]
    tables = GraphTables(8, range(4), torch.device("cpu"), both=True, tuples=True)
    merged = ((2, -1.0),)
    for runs in (
        [(((0, 1.0), *merged), 2), ((), 1), (merged, 3)],
        [(((1, 1.0),), 1)],
        [((), 8)],
        [(((0, 1.0),), 4), (((1, 1.0),), 3), (((2, 1.0),), 1)],
    ):
        rows = sum(count for _, count in runs)
        view = tables.refresh(runs, ranks, scalings).tuples
        fresh = make_routing(*groups_of(runs), ranks, scalings, "cpu", tuples=True).tuples
        assert view is not None and fresh is not None
        for table in ("words", "gates"):
            held, wanted = getattr(view, table), getattr(fresh, table)
            padded = torch.zeros_like(held)
            padded[: wanted.shape[0], : wanted.shape[1]] = wanted
            assert torch.equal(held, padded)
        assert torch.equal(view.rows[:rows], fresh.rows) and not view.rows[rows:].any()
        assert view.words[0].eq(0).all()
    assert not tables.holds(4, 3, 3, 3) and tables.holds(4, 3, 2, 5), "of more slots a row than it has room for"


def test_a_refresh_reuses_its_buffers_and_costs_the_host_little() -> None:
    import timeit

    from vlora_sgl.lora.backend import GraphTables

    ranks, scalings = [64] * 8 + [0], [1.0] * 8 + [0.0]
    tables = GraphTables(32, range(9), torch.device("cpu"))
    runs = [(((slot, 1.0), (0, -1.0)), 4) for slot in range(8)]
    addresses = {tables.refresh(runs, ranks, scalings).gates.data_ptr() for _ in range(2 * GraphTables.RING)}
    assert len(addresses) == 1
    assert {source.data_ptr() for source in tables._ring} == {view.ctypes.data for view in tables._views}
    assert min(timeit.repeat(lambda: tables.refresh(runs, ranks, scalings), number=20, repeat=10)) / 20 < 500e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("rows", "block"), [(24, None), (80, None), (300, 64)])
def test_a_replay_follows_refreshed_tables_without_allocating_or_waiting(rows: int, block: int | None) -> None:
    from vlora_sgl.kernels.atmm import atmm_linear, make_routing
    from vlora_sgl.lora.backend import GraphTables

    ranks, scalings, offsets = [16, 8, 12, 0], [0.5, 1.0, 2.0, 0.0], (0, 32, 96)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    a, b = torch.randn(4, 32, 64, **options), torch.randn(4, 96, 16, **options)
    x, w = torch.randn(rows, 64, **options), torch.randn(96, 64, **options)
    tables = GraphTables(rows, range(4), torch.device("cuda"), block)
    tables.refresh([((), rows)], ranks, scalings)
    view = tables.routing(rows)
    atmm_linear(x, w, None, a, b, view, offsets)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = atmm_linear(x, w, None, a, b, view, offsets)
    batches = [
        [(((0, 1.0),), 5), ((), 2), (((1, 1.0), (2, -1.0)), rows - 7)],
        [(((2, 1.0),), rows)],
        [((), 3), (((1, 1.0), (0, -1.0)), 1), (((0, 1.0),), rows - 4)],
    ]
    for runs in batches * 3:
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            tables.refresh(runs, ranks, scalings)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        graph.replay()
        groups, _ = groups_of(runs)
        fresh = make_routing(groups, rows, ranks, scalings, "cuda")
        assert torch.equal(out, atmm_linear(x, w, None, a, b, fresh, offsets))
