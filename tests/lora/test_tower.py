"""The vision tower's slots: SGLang's encoders with adapters compute what transformers' with PEFT's do.

Whole encoders on a CPU, of tiny random models, without an engine around them (tests/e2e/test_tower.py has one).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

from tests.lora.test_activation import runtime as layers_runtime  # noqa: F401 - a fixture
from tests.support.lora_adapters import tiny_adapter, tiny_model
from tests.support.towers import ADAPTERS, over_all_frames
from vlora_sgl import _sgl
from vlora_sgl.errors import AdapterError, UnknownAdapterError
from vlora_sgl.lora.adapter import engine_layout
from vlora_sgl.lora.backend import GraphTables
from vlora_sgl.lora.bulk import joined
from vlora_sgl.lora.checkpoint import module_digests, read_adapter
from vlora_sgl.lora.layout import BaseLayout, is_tower
from vlora_sgl.lora.row_routing import RowRouting
from vlora_sgl.lora.stacking import stack
from vlora_sgl.lora.tower import Tower, TowerWeights, trained_layout, why_not_adapted
from vlora_sgl.multimodal.vision_demand import AFTER
from vlora_sgl.multimodal.vision_families import PATCHES
from vlora_sgl.multimodal.vision_graphs import VisionGraphs

FAMILIES = {
    "qwen2_vl": ("Qwen2VisionTransformer", {}),
    # SGLang makes 64 of an inner size of 60, as it makes 3,424 of the 7B model's 3,420.
    "qwen2_5_vl": ("Qwen2_5_VisionTransformer", {"intermediate_size": 60}),
    "qwen3_vl": ("Qwen3VLMoeVisionModel", {}),
}
NAMES: tuple[str | None, ...] = (None, "tower", "projector", "both", "whole", "language")
GRIDS = [(1, 4, 4), (1, 4, 8), (1, 8, 4), (2, 4, 4), (1, 4, 4), (4, 4, 8)]  # those with more than one frame are videos
PIXELS = 3 * 2 * 4 * 4

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture
def runtime(layers_runtime: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:  # noqa: F811
    """What SGLang's encoders ask for when they are built, and a merge of the ranks there are: one."""
    from sglang.srt.layers import linear, vocab_parallel_embedding
    from sglang.srt.models import qwen3_vl
    from sglang.srt.runtime_context import get_context, get_parallel

    alone = SimpleNamespace(world_size=1, is_first_rank=True)
    monkeypatch.setattr(qwen3_vl, "get_pp_group", lambda: alone)
    monkeypatch.setattr(qwen3_vl, "is_dp_attention_enabled", lambda: False)
    for module in (_sgl, linear, vocab_parallel_embedding):
        monkeypatch.setattr(module, "get_tp_group", lambda: alone)
    # FlashAttention 3, SGLang's choice on Hopper, is not built for 16 bits everywhere, and ends the process then.
    attention = {"mm_attention_backend": "triton_attn"} if torch.cuda.is_available() else {}
    with get_context().override_server_args(**attention), get_parallel().override(attn_tp_size=1, attn_tp_rank=0):
        yield


class Model(nn.Module):
    """As much of SGLang's models as the tower looks at."""

    def __init__(self, family: str, trained: Any) -> None:
        super().__init__()
        self.config = trained.config
        kind: Any = getattr(_sgl, FAMILIES[family][0])
        self.visual = kind(trained.config.vision_config).float()
        load(self.visual, trained.model.visual.state_dict())

    def get_image_feature(self, items: Sequence[Any]) -> torch.Tensor:
        grids = torch.cat([item.model_specific_data["image_grid_thw"] for item in items])
        return self.visual(torch.cat([item.feature for item in items]), grids)

    def get_video_feature(self, items: Sequence[Any]) -> torch.Tensor:
        grids = torch.cat([item.model_specific_data["video_grid_thw"] for item in items])
        return self.visual(torch.cat([item.feature for item in items]), grids)


def load(encoder: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Fill an encoder of SGLang's with transformers' weights: gate and up stacked, sizes padded with zeros."""
    filled = set()
    for name, parameter in encoder.named_parameters():
        at = name.replace("qkv_proj", "qkv")
        parts = [at] if "gate_up" not in at else [at.replace("gate_up", side) for side in ("gate", "up")]
        parameter.data.zero_()
        for part, room in zip(parts, parameter.data.chunk(len(parts)), strict=True):
            room[tuple(map(slice, weights[part].shape))] = weights[part]
            filled.add(part)
    assert filled == weights.keys() - {name for name in weights if "inv_freq" in name}


class Rows(RowRouting):
    """Slots of the language model, which ``give`` fills."""

    def __init__(self, adapters: dict[str, Any], slots: int) -> None:
        self.pool: Any = SimpleNamespace(max_loras_per_batch=slots)
        self.give()
        super().__init__(self.pool, adapters, {})

    def give(self, *adapters: str) -> None:
        self.pool.uid_to_buffer_id = {None: 0, **{name: slot for slot, name in enumerate(adapters, start=1)}}
        self.pool.buffer_id_to_uid = [None, *adapters]


class World:
    """One family: the engine's encoder with its tower, and what transformers + PEFT compute."""

    def __init__(self, family: str, root: Path) -> None:
        self.family, vision = family, FAMILIES[family][1]
        self.model = Model(family, tiny_model(family, vision=vision))
        self.before = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.layout = engine_layout(self.model)
        self.trained = trained_layout(self.layout, self.model)
        self.adapters: dict[str, Any] = {}
        self.made: Tower | None = None
        self.paths = {str(name): root / str(name) for name in NAMES[1:]}
        for seed, (name, path) in enumerate(self.paths.items(), start=1):
            tiny_adapter(tiny_model(family, vision=vision), path, seed=seed, strength=0.3, **ADAPTERS[name])
        self.reference: Any = tiny_model(family, vision=vision)
        for name, path in self.paths.items():
            if isinstance(self.reference, PeftModel):
                self.reference.load_adapter(path, adapter_name=name)
            else:
                self.reference = PeftModel.from_pretrained(self.reference, path, adapter_name=name)
        self.reference.eval()

    def weights(self, name: str) -> TowerWeights | None:
        modules = read_tower(self.paths[name], self.trained)
        stacked = stack(modules, self.layout, self.model.visual.dtype)
        return TowerWeights.of(stacked, self.layout, joined(module_digests(modules))) if modules else None

    def tower(self, slots: int = 7, copy: str | None = "device") -> tuple[Tower, Rows]:
        rows = Rows(self.adapters, slots)
        self.adapters.clear()
        for name in NAMES[1:]:
            self.adapters[str(name)] = SimpleNamespace(tower=self.weights(str(name)))
        encoder = self.model.visual
        self.made = Tower(self.model, self.layout, rows, encoder.dtype, encoder.device, copy)
        return self.made, rows

    def wanted(self, name: str | None, pixels: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
        visual = self.reference.base_model.model.model.visual
        with mock.patch.object(modeling_qwen2_5_vl, "get_vision_cu_seqlens", over_all_frames), ExitStack() as stack:
            if name is None:
                stack.enter_context(self.reference.disable_adapter())
            else:
                self.reference.set_adapter(name)
            return tokens_of(visual(pixels, torch.tensor([grid])))


def read_tower(path: Path, layout: BaseLayout) -> dict[str, Any]:
    """An adapter's modules of the tower, checked against the engine's encoder, which has no language model here."""
    whole = replace(layout, shapes={**layout.shapes, **_text().shapes}, num_layers=_text().num_layers)
    return {name: pair for name, pair in read_adapter(path, whole).modules.items() if is_tower(name)}


@functools.cache
def _text() -> BaseLayout:
    layout = BaseLayout.from_model(tiny_model("qwen2_vl"))
    return replace(layout, shapes={name: shape for name, shape in layout.shapes.items() if not is_tower(name)})


def tokens_of(output: Any) -> torch.Tensor:
    """[tokens, width] as SGLang's encoder gives it: inner layers' beside the last."""
    if torch.is_tensor(output):
        return output
    inner = getattr(output, "deepstack_features", None) or []
    return torch.cat([output.pooler_output, *inner], dim=-1)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


_worlds: dict[str, World] = {}


@pytest.fixture
def world(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    if torch.cuda.is_available():
        pytest.skip("SGLang's layers take a CPU's tensors only where there is no CUDA")
    if family not in _worlds:
        _worlds[family] = World(family, tmp_path_factory.mktemp(family))
    one = _worlds[family]
    yield one
    if one.made is not None:
        one.made.provide([])
    after = one.model.state_dict()
    assert after.keys() == one.before.keys() and all(torch.equal(after[name], one.before[name]) for name in after)


def items(
    adapters: Sequence[str | None], seeds: Sequence[int], grids: Sequence[tuple[int, ...]], what: str = "image"
) -> list[Any]:
    made = []
    for adapter, seed, grid in zip(adapters, seeds, grids, strict=True):
        pixels = torch.randn(grid[0] * grid[1] * grid[2], PIXELS, generator=torch.Generator().manual_seed(seed))
        data = {f"{what}_grid_thw": torch.tensor([grid])}
        made.append(SimpleNamespace(feature=pixels, model_specific_data=data, vlora_adapter=adapter))
    return made


def check(world: World, shown: Sequence[Any], names: Sequence[str | None], what: str = "image") -> None:
    found = getattr(world.model, f"get_{what}_feature")(shown)
    grids = [tuple(item.model_specific_data[f"{what}_grid_thw"][0].tolist()) for item in shown]
    parts = found.split([t * h * w // 4 for t, h, w in grids])
    for item, name, grid, part in zip(shown, names, grids, parts, strict=True):
        wanted = world.wanted(name, item.feature, grid)
        off = (part - wanted).abs().max() / wanted.abs().max()
        assert off < 1e-4, f"{name}, {grid}: {off}"


def sees(name: str | None) -> str | None:
    return None if name in (None, "language") else name


def load_all(world: World, **options: Any) -> tuple[Tower, Rows]:
    tower, rows = world.tower(**options)
    tower.provide([one.tower for one in world.adapters.values() if one.tower is not None])
    rows.give(*(str(name) for name in NAMES[1:]))
    tower.fetch(world.adapters, rows.pool.uid_to_buffer_id)
    return tower, rows


def test_adapters_change_what_images_become(world: World) -> None:
    (item,) = items(["x"], [1], GRIDS[:1])
    found = {name: world.wanted(name, item.feature, GRIDS[0]) for name in NAMES}
    assert torch.equal(found[None], found["language"])
    scale = found[None].abs().max()
    for one, other in itertools.combinations([name for name in NAMES if name != "language"], 2):
        assert (found[one] - found[other]).abs().max() > 0.05 * scale, (one, other)


@pytest.mark.parametrize("what", ["image", "video"])
@pytest.mark.parametrize("merged", [None, "tower", "projector", "both", "whole", "language"])
def test_one_image_and_one_each_in_one_call(world: World, merged: str | None, what: str) -> None:
    tower, _ = load_all(world)
    if merged is not None:
        tower.merge(merged, world.adapters[merged].tower, 1 + NAMES[1:].index(merged))
        assert tower.merged == sees(merged)
    seen = [sees(name) for name in NAMES]
    check(world, items(seen, [1] * 6, [GRIDS[0]] * 6, what), NAMES, what)
    check(world, items(seen, range(6), GRIDS, what), NAMES, what)
    for name in NAMES:
        check(world, items([sees(name)], [9], [GRIDS[5]], what), [name], what)


def test_where_nothing_can_be_merged_the_rest_is_served(world: World) -> None:
    tower, _ = load_all(world, copy=None)
    assert "never merged" in str(tower.refusal(world.adapters["tower"].tower)) and tower.merged is None
    tower.merge("tower", world.adapters["tower"].tower, 1)
    check(world, items([sees(name) for name in NAMES], range(6), GRIDS), NAMES)


def test_slots_are_there_for_what_is_loaded_and_for_nothing_else(world: World) -> None:
    tower, rows = world.tower()
    assert tower.state() == {"rank": 0, "modules": [], "bytes": 0}
    check(world, items([None], [1], GRIDS[:1]), [None])
    projector, both = world.adapters["projector"].tower, world.adapters["both"].tower
    tower.provide([projector])
    assert tower.state()["rank"] == 32 and all("merger" in kind for kind in tower.state()["modules"])
    assert not any("base_layer" in name for name, _ in world.model.visual.blocks.named_modules())
    few = tower.state()["bytes"]
    assert few == 4 * 7 * 32 * sum(a + b for name, (b, a) in world.layout.shapes.items() if "merger" in name)
    tower.provide([projector, both])
    assert tower.state()["rank"] == 32 and tower.state()["bytes"] > few
    rows.give("projector", "both")
    tower.fetch(world.adapters, rows.pool.uid_to_buffer_id)
    check(world, items(["projector", None, "both"], range(3), GRIDS[:3]), ["projector", None, "both"])
    tower.provide([both])  # nothing shrinks while it is used
    assert tower.state()["rank"] == 32
    tower.provide([])
    assert tower.state() == {"rank": 0, "modules": [], "bytes": 0}
    assert not any("base_layer" in name for name, _ in world.model.named_modules())
    assert world.model.get_image_feature.__func__ is Model.get_image_feature


def test_slots_that_grow_keep_their_adapters(world: World) -> None:
    tower, rows = world.tower()
    small, large = world.adapters["tower"].tower, world.adapters["projector"].tower
    tower.provide([small])
    rows.give("tower")
    tower.fetch(world.adapters, rows.pool.uid_to_buffer_id)
    tower.merge("tower", small, 1)
    check(world, items(["tower", None], range(2), GRIDS[:2]), ["tower", None])
    tower.provide([small, large])
    assert tower.merged is None, "the slots that it was merged from are gone"
    with pytest.raises(UnknownAdapterError):
        tower.routing.pairs_of("tower")
    rows.give("tower", "projector")
    tower.fetch(world.adapters, rows.pool.uid_to_buffer_id)
    names = ["tower", "projector", None]
    check(world, items(names, range(3), GRIDS[:3]), names)
    rows.give("projector", "tower")  # another slot each
    tower.fetch(world.adapters, rows.pool.uid_to_buffer_id)
    check(world, items(names, range(3), GRIDS[:3]), names)


def test_a_device_without_room_refuses_and_serves_what_was_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower, rows = world.tower()
    projector, both = world.adapters["projector"].tower, world.adapters["both"].tower
    tower.provide([projector])
    zeros = torch.zeros

    def full(*shape: Any, **how: Any) -> torch.Tensor:
        if len(tower.modules) > 4:
            raise torch.OutOfMemoryError("no memory")
        return zeros(*shape, **how)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", full)
        with pytest.raises(AdapterError, match="no room on the device for 7 slots of rank 32"):
            tower.provide([projector, both])
        assert tower.state()["bytes"] == 0
        tower.provide([projector])
    rows.give("projector")
    tower.fetch(world.adapters, rows.pool.uid_to_buffer_id)
    check(world, items(["projector", None], range(2), GRIDS[:2]), ["projector", None])


def test_digests_are_of_the_tower_alone(world: World) -> None:
    names = ("tower", "projector", "both", "whole")
    digests = {world.weights(name).digest for name in names}  # type: ignore[union-attr]
    assert len(digests) == len(names)
    assert world.weights("whole").digest in digests, "read again, the same"  # type: ignore[union-attr]
    assert world.weights("language") is None


def test_what_is_no_such_encoder_is_refused(world: World) -> None:
    assert why_not_adapted(world.model, "atmm") is None
    assert "--lora-backend atmm" in str(why_not_adapted(world.model, "csgmv"))
    assert "not one of Qwen2-VL" in str(why_not_adapted(nn.Linear(1, 1), "atmm"))
    world.model.visual.use_data_parallel = True
    assert "--mm-enable-dp-encoder" in str(why_not_adapted(world.model, "atmm"))
    world.model.visual.use_data_parallel = False


def read(table: GraphTables) -> list[dict[int, float]]:
    """What each row applies by a graph's table: slots, with their weights times their scales."""
    view, found = table.routing(table.max_rows), [{} for _ in range(table.max_rows)]
    if table.max_rows <= table.dense_rows:
        for row, slot in view.gates.nonzero().tolist():
            found[row][slot] = view.gates[row, slot].item()
        return found
    for tile, place, at in view.tile_gates[: int(view.n_tiles)].nonzero().tolist():
        word, row = int(view.tile_slots[tile, place]), int(view.tile_rows[tile, at])
        if row >= 0 and word:  # a tile that is not full, and slots that it has none of
            found[row][word & 0xFFFF] = view.tile_gates[tile, place, at].item()
    return found


@pytest.mark.parametrize("grid", [GRIDS[0], GRIDS[5]])
@pytest.mark.parametrize("merged", [None, "both"])
def test_tables_of_a_graph_say_what_every_image_of_a_call_applies(
    world: World, merged: str | None, grid: tuple[int, ...]
) -> None:
    tower, rows = load_all(world)
    if merged is not None:
        tower.merge(merged, world.adapters[merged].tower, 1 + NAMES[1:].index(merged))
    routing, structure = tower.routing, PATCHES[FAMILIES[world.family][0]](world.model.visual)
    scales = {
        slot: world.adapters[uid].tower.scale
        for uid, slot in rows.pool.uid_to_buffer_id.items()
        if uid not in (None, "language")
    }
    for names in (NAMES, ("tower",) * 6, (None, "whole", "whole", None, "projector", "both")):
        applied = routing.applied_by(items([sees(name) for name in names], range(6), [grid] * 6))
        assert applied is not None and routing.fit(applied)
        pairs = max(map(len, applied))  # as the graph's kind has it
        tables = routing.tables((6 * structure.rows(grid)[0], 6 * structure.rows(grid)[1]), pairs)
        tiles = [one.routing(one.max_rows).tile_slots for one in tables]
        assert all(of_graph is None or of_graph.shape[1] == pairs for of_graph in tiles)  # few rows have gates
        assert any(of_graph is not None for of_graph in tiles)
        routing.refresh(tables, [()] * 6)
        assert not any(found for table in tables for found in read(table))
        routing.refresh(tables, applied)
        for table, own in zip(tables, structure.rows(grid), strict=True):
            wanted = [{slot: weight * scales[slot] for slot, weight in pairs} for pairs in applied for _ in range(own)]
            for found, expected in zip(read(table), wanted, strict=True):
                assert found == pytest.approx(expected)
    assert not routing.fit([((1, 1.0), (2, 1.0), (3, -1.0))]), "more slots than a graph's tables have"
    assert not routing.fit([((slot % 7, 1.0 + slot),) for slot in range(15)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are captured on a GPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_with_adapters_give_what_the_eager_encoder_gives(family: str, tmp_path: Path) -> None:
    world = World(family, tmp_path)
    world.model.cuda().to(torch.float16)
    tower, _ = load_all(world)
    graphs = VisionGraphs(PATCHES[FAMILIES[family][0]](world.model.visual), 16)
    tower.routing.graphs, graphs.adapters = graphs, tower.routing
    eager, world.model.visual.forward = world.model.visual.forward, graphs

    def shown() -> list[Any]:
        made = items([sees(name) for name in NAMES], [1] * 6, [GRIDS[0]] * 6)
        for item in made:
            item.feature = item.feature.cuda()
        return made

    for merged in (None, "both", "tower", None):
        if merged is None:
            tower.restore()
        else:
            tower.merge(merged, world.adapters[merged].tower, 1 + NAMES[1:].index(merged))
        for _ in range(AFTER):
            world.model.get_image_feature(shown())
        while graphs.capture_wanted():
            pass
        before = graphs.replays
        answers = [world.model.get_image_feature(shown()) for _ in range(2)]
        assert graphs.replays == before + 2, "all six of one size, whichever adapter is theirs, in one"
        assert torch.equal(answers[-1], answers[-2])
        graphs.limit, held = 0, graphs.limit
        wanted = world.model.get_image_feature(shown())
        graphs.limit = held
        off = (answers[-1] - wanted).abs().max() / wanted.abs().max()
        assert off < 0.02, f"{merged}: {off}"
        parts = answers[-1].float().cpu().chunk(len(NAMES))
        for name, item, part in zip(NAMES, shown(), parts, strict=True):
            exact = world.wanted(name, item.feature.cpu(), GRIDS[0])
            assert (part - exact).abs().max() / exact.abs().max() < 0.05, f"{name} beside {merged}"
    world.model.visual.forward = eager
    tower.provide([])
    assert graphs.state()["graphs"] == 1
