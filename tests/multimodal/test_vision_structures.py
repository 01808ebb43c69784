"""An encoder's parts compute what the encoder does, bit for bit: on a CPU as they are, on a GPU captured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from tests.lora.test_activation import runtime as layers_runtime  # noqa: F401 - a fixture
from tests.lora.test_tower import runtime  # noqa: F401 - a fixture
from tests.support.encoders import ENCODERS, QWEN, make
from vlora_sgl.multimodal import vision_families
from vlora_sgl.multimodal.encoders import encoder_of
from vlora_sgl.multimodal.vision_demand import AFTER
from vlora_sgl.multimodal.vision_families import COMMON, Patches, fitted, known_structure, structure_of
from vlora_sgl.multimodal.vision_graphs import VisionGraphs
from vlora_sgl.multimodal.vision_layers import attentions, patch_embeddings
from vlora_sgl.multimodal.vision_structures import Grid, Structure, parts_of

pytestmark = pytest.mark.usefixtures("runtime")
on_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="SGLang's layers take a CPU's tensors where there is no CUDA"
)

PATCHES: list[Grid] = [(1, 4, 4), (1, 4, 8), (1, 8, 4), (1, 6, 10), (2, 4, 6)]
CALLS = [(0, 1), (1, 1), (2, 3), (3, 2), (4, 1), (4, 3), (0, 6), (3, 7)]  # which size, how many images


def structure(family: str) -> Structure:
    found = structure_of(make(family))
    assert found is not None
    return found


def sizes(one: Structure) -> list[Grid]:
    return PATCHES if isinstance(one, Patches) else one.common() * len(PATCHES)


def images(one: Structure, grid: Grid, count: int, seed: int) -> torch.Tensor:
    return torch.randn(one.shape(grid, count), generator=torch.Generator().manual_seed(seed))


def eagerly(one: Structure, x: torch.Tensor, grid: Grid, count: int) -> torch.Tensor:
    answer: torch.Tensor = getattr(one.owner, one.method)(x, *one.rest(grid, count))
    return answer


@on_cpu
@pytest.mark.parametrize("family", ENCODERS)
@torch.no_grad()
def test_parts_compute_what_the_encoder_does(family: str) -> None:
    """Of other images than those that they were noted of; and blocks are as they were before."""
    one = structure(family)
    for size, count in CALLS:
        grid = sizes(one)[size]
        noted, other = (images(one, grid, count, seed) for seed in (1, 2))
        answer, parts = parts_of(one, getattr(one.owner, one.method), noted.clone(), grid, count)
        wanted = eagerly(one, other.clone(), grid, count)
        assert torch.equal(answer, eagerly(one, noted.clone(), grid, count))
        assert torch.equal(parts(other.clone()), wanted) and torch.equal(parts(other.clone()), wanted)
        assert not torch.equal(answer, wanted)
        assert one.grids(other, *one.rest(grid, count)) == [grid] * count
        rows = wanted.flatten(0, -2).shape[0]
        assert rows == count * one.rows(grid)[1], "what adapters of the projector get"
    assert not any("forward" in vars(block) for block in one.blocks)


@on_cpu
@pytest.mark.parametrize("family", ENCODERS)
@torch.no_grad()
def test_blocks_get_as_many_rows_as_adapters_are_told(family: str) -> None:
    one = structure(family)
    seen: list[int] = []
    linear = one.attentions[0].qkv_proj
    linear.register_forward_hook(lambda _, given, answer: seen.append(given[0].flatten(0, -2).shape[0]))
    for size, count in CALLS:
        grid = sizes(one)[size]
        eagerly(one, images(one, grid, count, 1), grid, count)
        assert seen.pop() == count * one.rows(grid)[0]


@on_cpu
@pytest.mark.parametrize("family", ENCODERS)
@torch.no_grad()
def test_weights_that_are_replaced_are_those_that_parts_read(family: str) -> None:
    """Nothing that depends on them is a constant: a trainer replaces them in place."""
    one = structure(family)
    grid = sizes(one)[3]
    x = images(one, grid, 2, 1)
    before, parts = parts_of(one, getattr(one.owner, one.method), x.clone(), grid, 2)
    for name, parameter in one.owner.named_parameters():
        kept = parameter.clone()
        parameter.mul_(1.5)
        wanted = eagerly(one, x.clone(), grid, 2)
        assert torch.equal(parts(x.clone()), wanted), name
        parameter.copy_(kept)
    assert torch.equal(parts(x.clone()), before)


@pytest.mark.parametrize("family", ENCODERS)
def test_an_item_is_as_many_images_to_adapters_as_to_graphs(family: str) -> None:
    one = structure(family)
    model = one.owner if family not in QWEN else SimpleNamespace(visual=one.owner)
    encoder = encoder_of(model)
    assert encoder is not None
    grids = PATCHES if family in QWEN else one.common() * 3
    item: Any = SimpleNamespace(model_specific_data={"image_grid_thw": torch.tensor(grids)}, feature=None)
    if family not in QWEN:
        item.feature = torch.zeros(one.shape(grids[0], 3))
    assert one.grids_of(item) == grids
    assert encoder.rows(item, "image") == [one.rows(grid) for grid in grids]


@on_cpu
@pytest.mark.parametrize("select", [-1, -2, 1])
@torch.no_grad()
def test_internvl_takes_the_states_that_it_is_configured_for(select: int) -> None:
    one = structure("internvl")
    one.owner.select_layer = select
    grid = sizes(one)[0]
    x = images(one, grid, 2, 1)
    answer, parts = parts_of(one, one.owner.extract_feature, x, grid, 2)
    assert torch.equal(parts(x), answer)


@pytest.mark.parametrize(
    "patch, least, grids",
    [
        (14, Patches.least, [(16, 16), (24, 24), (32, 32), (36, 36), (34, 46), (46, 34)]),
        (16, vision_families.Deepstack.least, [(16, 16), (20, 20), (28, 28), (32, 32), (30, 40), (40, 30)]),
    ],
)
def test_common_images_have_the_sizes_that_processors_give_them(
    patch: int, least: int, grids: list[tuple[int, int]]
) -> None:
    found = [fitted(*size, unit=2 * patch, least=least) for size in COMMON]
    assert found == [smart_resize(*size, factor=2 * patch, min_pixels=least, max_pixels=1 << 24) for size in COMMON]
    assert [(height // patch, width // patch) for height, width in found] == grids


@pytest.mark.parametrize("family", ENCODERS)
def test_common_sizes_are_of_the_encoder(family: str) -> None:
    one = structure(family)
    found = one.common()
    assert found and len(set(found)) == len(found)
    if family in QWEN:  # patches of 4 pixels here, merged two by two
        assert (1, 56, 56) in found or (1, 64, 64) in found
        assert all(t == 1 and h % 2 == w % 2 == 0 for t, h, w in found)
    else:
        assert found == [(3, 16, 16)]


def test_models_that_are_not_known_are_told_so_in_words() -> None:
    assert "none of Qwen2VisionTransformer, Qwen2_5_V" in str(known_structure(torch.nn.Linear(1, 1)))
    if not torch.cuda.is_available():
        assert known_structure(make("internvl")) == "its image encoder is not on a GPU"


@pytest.fixture
def on_gpu(request: pytest.FixtureRequest) -> Iterator[tuple[Structure, VisionGraphs]]:
    """A family's encoder with our layers and graphs in their places."""
    model = make(request.param).cuda().to(torch.bfloat16)
    one = known_structure(model)
    assert isinstance(one, Structure)
    runner: Any = type("Runner", (), {"model": model})()
    for places in (attentions(runner), patch_embeddings(runner)):
        for place in () if isinstance(places, str) else places:
            place.put()
    graphs = VisionGraphs(one, 16)
    setattr(one.owner, one.method, graphs)
    yield one, graphs
    delattr(one.owner, one.method)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are captured on a GPU")
@pytest.mark.parametrize("on_gpu", ENCODERS, indirect=True)
@torch.inference_mode()
def test_graphs_of_one_image_and_of_several_replay_what_an_eager_run_gives(
    on_gpu: tuple[Structure, VisionGraphs],
) -> None:
    one, graphs = on_gpu
    for size, count in CALLS:
        grid = sizes(one)[size]
        for _ in range(AFTER + 1):
            eagerly(one, images(one, grid, count, 1).cuda(), grid, count)
            while graphs.capture_wanted():
                pass
        before, x = graphs.replays, images(one, grid, count, 2).cuda()
        found = [eagerly(one, x, grid, count) for _ in range(2)]
        assert graphs.replays == before + 2, f"{count} images {grid} are one replay"
        wanted = graphs._eager(x.clone(), *one.rest(grid, count))
        assert torch.equal(found[0], wanted) and torch.equal(found[1], wanted)
        assert math.isfinite(wanted.float().abs().max())
    assert graphs.limit and graphs.state()["graphs"] > 1
