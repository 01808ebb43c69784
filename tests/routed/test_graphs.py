"""Routed rows in the tables that captured graphs read, against a loop over rows in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.interpreter import DEVICE, kernels, passed_interpreted, starter
from vlora_sgl.kernels.atmm import atmm, atmm_linear, make_routing
from vlora_sgl.kernels.atmm.reference import atmm_reference
from vlora_sgl.lora.backend import GRAPH_PAIRS, AtmmBackend
from vlora_sgl.routed.router_tables import RouterTables
from vlora_sgl.routed.rows import LoadedRouted, TokenRouting
from vlora_sgl.routed.spec import RoutedSpec
from vlora_sgl.routed.token_router import Router

HIDDEN, SLOTS, RANK, WIDE = 32, 9, 8, 24
RANKS, SCALINGS = [8, 4, 8, 6, 8, 2, 8, 8, 8], [1.0, 0.5, 2.0, 1.0, 1.5, 1.0, 0.25, 1.0, 3.0]
SLOT_OF = {name: slot for slot, name in enumerate("abcdefgh")}
MERGED = "h"


@starter
def test_kernels_interpreted() -> None:
    assert passed_interpreted(__file__, "test_kernel") == 2 * len(BATCHES)


def router(members: int, context: str) -> Router:
    made = Router(HIDDEN, members, context)
    with torch.no_grad():
        made.w2.mul_(20)
        made.b2.normal_()
    return made.requires_grad_(False).to(DEVICE)


def routed_adapters() -> dict[str, LoadedRouted]:
    torch.manual_seed(2)
    specs = {
        "rules": RoutedSpec(("a", "b"), modalities={"image": 1}, ranges=((0, 20, 0),)),
        "places": RoutedSpec(("c", "a"), positions=((0, 3, 0), (5, 70, 1))),
        "learned": RoutedSpec(("a", "b", "c", "d"), router=router(4, "prefix")),
        "pairs": RoutedSpec(("b", "c", "d"), router=router(3, "token"), top_k=2),
        "four": RoutedSpec(tuple("abcdef"), router=router(6, "token"), top_k=4),
    }
    return {name: LoadedRouted(spec, spec.members, i) for i, (name, spec) in enumerate(specs.items())}


class Served:
    """The parts of an engine that a step goes through, with its graphs' tables."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.loaded, device = routed_adapters(), torch.device(DEVICE)
        self.tables = RouterTables(len(self.loaded), HIDDEN, 50, 0, device)
        self.tables.bind(torch.arange(8 * 128, dtype=torch.int32, device=device).view(8, 128), 8 * 128)
        for one in self.loaded.values():
            assert self.tables.put(one.spec) == one.index
        self.backend = AtmmBackend(SLOTS, device)
        self.backend.routes_tokens = True
        scaling_of = {name: SCALINGS[slot] for name, slot in SLOT_OF.items()}
        self.routing = TokenRouting(
            self.tables, self.loaded, SLOT_OF.__getitem__, scaling_of.__getitem__, self.backend
        )
        self.a, self.b = (torch.randn(shape, device=device) for shape in ((SLOTS, RANK, HIDDEN), (SLOTS, WIDE, RANK)))

    def capture(self, *sizes: int) -> None:
        """Decode graphs of these sizes, the largest first."""
        self.backend.init_cuda_graph_batch_info(sizes[0], 1)
        self.routing.reserve(sizes[0], GRAPH_PAIRS)
        for size in sizes:
            self.backend.route([((), size)], RANKS, SCALINGS, use_cuda_graph=True, many=False)

    def batch(self, adapters: list[str | None], lengths: list[int] | None = None) -> Any:
        """A decode step of one token each, or a prefill of these lengths behind two tokens."""
        rows = len(adapters) if lengths is None else sum(lengths)
        prefix = [2] * len(adapters)
        return SimpleNamespace(
            lora_ids=adapters, batch_size=len(adapters), mm_inputs=None,
            forward_mode=SimpleNamespace(is_extend=lambda: lengths is not None),
            extend_seq_lens_cpu=lengths, extend_prefix_lens_cpu=prefix, seq_lens_cpu=[9] * len(adapters),
            seq_lens=torch.full((rows,), 9, device=DEVICE), req_pool_indices=torch.arange(rows, device=DEVICE) % 8,
            out_cache_loc=torch.arange(rows, device=DEVICE) + 40, input_ids=torch.arange(rows, device=DEVICE) % 50,
        )  # fmt: skip

    def prepare(self, batch: Any, merged: bool, **graph: Any) -> None:
        """What the manager does before a batch."""
        always = ((SLOT_OF[MERGED], -1.0),) if merged else ()
        runs = []
        for i, name in enumerate(batch.lora_ids):
            own: tuple[tuple[int, float], ...] = ()
            if name in self.loaded:
                own = tuple((SLOT_OF[member], 0.0) for member in self.loaded[name].members)
            elif name is not None:
                own = ((SLOT_OF[name], 1.0),)
            count = batch.extend_seq_lens_cpu[i] if batch.forward_mode.is_extend() else 1
            runs.append(((*own, *always), count))
        routed = self.routing.rows_of(batch)
        self.backend.route(runs, RANKS, SCALINGS, routed=routed, always=int(merged), **graph)
        self.routing.prepare(batch, always)

    def wanted(self, y: torch.Tensor, x: torch.Tensor, batch: Any, embeds: torch.Tensor, merged: bool) -> torch.Tensor:
        """By a loop over rows, from the weights as plain code has them."""
        totals = self.tables.totals.clone()
        rows = self.routing._rows_of(batch)
        weights = self.tables.weights_of(rows, embeds, batch.input_ids, batch.out_cache_loc).cpu()
        self.tables.totals.copy_(totals)
        owner = [name for i, name in enumerate(batch.lora_ids) for _ in range(self.count(batch, i))]
        groups = []
        for row, name in enumerate(owner):
            pairs: list[tuple[int, float]] = [(SLOT_OF[MERGED], -1.0)] if merged else []
            if name in self.loaded:
                members = self.loaded[name].members
                pairs += [(SLOT_OF[m], w) for m, w in zip(members, weights[row].tolist(), strict=False) if w]
            elif name is not None:
                pairs.append((SLOT_OF[name], 1.0))
            groups.append((np.asarray([row], dtype=np.int32), tuple(pairs)))
        return atmm_reference(y.cpu(), x.cpu(), self.a.cpu(), self.b.cpu(), groups, RANKS, SCALINGS, [0, WIDE])

    def count(self, batch: Any, i: int) -> int:
        return batch.extend_seq_lens_cpu[i] if batch.forward_mode.is_extend() else 1


BATCHES: list[list[str | None]] = [
    ["learned", None, "a", "rules", "learned", "places"],
    ["learned", "rules", "rules", "learned", "g"],
    ["places"],
    [None, "f", "a", None],
]


@kernels
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("names", BATCHES)
def test_kernel_graphs_apply_what_a_loop_over_rows_does(names: list[str | None], merged: bool) -> None:
    """Prefills padded to their graphs, of either kind of kernels; decode steps of more rows than the dense kernels
    take, padded to one of two graphs."""
    served = Served()
    graphs = (96, 80)
    served.capture(*graphs)
    for rows, size in ((7 * len(names), 48), (14 * len(names), 96)):
        lengths = [rows // len(names) + i % 2 for i in range(len(names))]
        batch = served.batch(names, lengths)
        served.prepare(batch, merged, prefill_tokens=size)
        embeds = torch.randn(sum(lengths), HIDDEN, device=DEVICE)
        check(served, batch, embeds, size, merged, ahead=True)
    for rows, graph in ((70, 80), (90, 96)):
        batch = served.batch([names[i % len(names)] for i in range(rows)])
        served.prepare(batch, merged, use_cuda_graph=True)
        check(served, batch, torch.randn(graph, HIDDEN, device=DEVICE), graph, merged, ahead=False)


def check(served: Served, batch: Any, embeds: torch.Tensor, size: int, merged: bool, ahead: bool) -> None:
    """Whether the tables that a graph of ``size`` rows reads give every row what a loop gives it."""
    tables = served.backend.prefill_tables[size] if ahead else served.backend.graph_tables
    assert tables is not None and served.backend.batch_info is not None
    rows, view = len(batch.input_ids), tables.routing(size)
    padded = SimpleNamespace(**vars(batch))
    spare = size - rows
    for name in ("input_ids", "req_pool_indices", "seq_lens", "out_cache_loc"):
        setattr(padded, name, torch.nn.functional.pad(getattr(batch, name), (0, spare), value=1))
    x = torch.randn(size, HIDDEN, device=DEVICE)
    y = torch.randn(size, WIDE, device=DEVICE)
    named = any(name in served.loaded for name in batch.lora_ids)
    wanted = served.wanted(y[:rows], x[:rows], batch, embeds[:rows], merged)
    if ahead:
        assert served.routing.is_ahead == named
        if served.routing.is_ahead:
            served.routing.route_ahead(embeds[:rows], padded)
    else:  # as it is captured: the batch's own view is of its rows, a graph's of its own
        served.backend.batch_info.routing = view
        served.routing.route(embeds, padded)
    assert view.n_tiles is None or view.tile_rows is not None
    # A graph of fewer rows than the tables are for looks at its own tiles only.
    assert view.tile_rows is None or int(view.n_tiles) <= len(view.tile_rows) or not named
    got = atmm(y.clone(), x, served.a, served.b, view, [0, WIDE])
    torch.testing.assert_close(got[:rows].double().cpu(), wanted, atol=1e-3, rtol=1e-3)
    assert torch.equal(got[rows:], y[rows:]), "padding is left alone"
    weight = torch.randn(WIDE, HIDDEN, device=DEVICE)
    whole = atmm_linear(x, weight, None, served.a, served.b, view, [0, WIDE])
    base = torch.nn.functional.linear(x.double(), weight.double())[:rows].cpu() - y[:rows].double().cpu()
    torch.testing.assert_close(whole[:rows].double().cpu(), wanted + base, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("names", "pairs", "fits"),
    [
        (["learned", "rules", "places", None], 2, True),
        (["learned"], 1, True),
        (["pairs"], 2, True),
        (["pairs"], 1, False),  # beside a merged adapter
        (["four"], 2, False),  # in several passes
        (["pairs", "learned"], 2, True),
    ],
)
def test_which_routed_rows_a_graphs_tiles_hold(names: list[str | None], pairs: int, fits: bool) -> None:
    served = Served()
    assert served.routing.fits_tiles(served.batch(names), pairs) == fits


def test_no_more_sets_of_members_than_a_graph_has_tiles_for() -> None:
    served = Served()
    many = RoutedSpec(tuple("abcdefgh"), router=router(8, "token"), top_k=2)
    served.loaded["many"] = LoadedRouted(many, many.members, 5)
    assert not served.routing.fits_tiles(served.batch(["many"]), 2), "28 pairs, and ten targets"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_replayed_decode_step_routes_its_rows_without_waiting() -> None:
    """More rows than the dense kernels take; one graph, other rows each time."""
    served = Served()
    served.capture(96)
    x, embeds = torch.randn(96, HIDDEN, device="cuda"), torch.randn(96, HIDDEN, device="cuda")
    weight = torch.randn(WIDE, HIDDEN, device="cuda")
    static = served.batch([None] * 96)
    assert served.backend.graph_tables is not None and served.backend.batch_info is not None
    view = served.backend.graph_tables.routing(96)

    def step() -> torch.Tensor:
        served.backend.batch_info.routing = view
        served.routing.route(embeds, static)
        return atmm_linear(x, weight, None, served.a, served.b, view, [0, WIDE])

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for names in (*BATCHES, *BATCHES):
        batch = served.batch([names[i % len(names)] for i in range(90)])
        merged = len(names) % 2 == 0
        torch.cuda.set_sync_debug_mode("error")
        try:
            served.prepare(batch, merged, use_cuda_graph=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph.replay()
        zeros = torch.zeros(90, WIDE, device="cuda")
        wanted = served.wanted(zeros, x[:90], batch, embeds[:90], merged)
        base = torch.nn.functional.linear(x.double(), weight.double())[:90].cpu()
        torch.testing.assert_close(out[:90].double().cpu(), wanted + base, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tiles_of_any_height_give_the_same_rows(dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    a, b = torch.randn(4, 64, 256, **options) / 16, torch.randn(4, 512, 64, **options) / 8
    for rows in (70, 130, 300):
        owner = np.random.default_rng(rows).choice(4, rows, p=[0.8, 0.15, 0.03, 0.02])
        groups = [(np.flatnonzero(owner == k).astype(np.int32), ((k, 1.0),)) for k in range(4)]
        routing = make_routing(groups, rows, [64] * 4, [1.0] * 4, "cuda", block=64, dense=False)
        x = torch.randn(rows, 256, **options)
        found = []
        for folds in (0, 2):
            routing.folds = folds
            found.append(atmm(torch.zeros(rows, 512, **options), x, a, b, routing, [0, 512]))
        torch.testing.assert_close(found[0], found[1], atol=2e-2, rtol=2e-2)
