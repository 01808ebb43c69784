"""Adapters on experts: SGLang's mixture-of-experts layers with them compute what transformers' with PEFT's do.

Whole layers on a CPU, of tiny random models, without an engine around them; tests/e2e has engines.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn

from tests.lora.test_activation import runtime as layers_runtime  # noqa: F401 - a fixture
from tests.support.lora_adapters import EXPERTS, tiny_adapter, tiny_model
from vlora_sgl import _sgl
from vlora_sgl.errors import AdapterError, ConfigError
from vlora_sgl.kernels.atmm import expert_tiles
from vlora_sgl.lora import expert_layers
from vlora_sgl.lora.adapter import AdapterBuilder, engine_layout
from vlora_sgl.lora.backend import AtmmBackend
from vlora_sgl.lora.checkpoint import read_adapter
from vlora_sgl.lora.expert_layers import (
    ACTIVATION,
    ExpertActivation,
    _by_expert,
    activations,
    build_hooks,
    why_not_adapted,
)
from vlora_sgl.lora.layers import wrap_layer
from vlora_sgl.lora.layout import BaseLayout
from vlora_sgl.lora.merger import Merger
from vlora_sgl.lora.packed import PackedPool
from vlora_sgl.lora.row_routing import RowRouting
from vlora_sgl.platforms.cpu import is_plain_cpu

COUNT, INNER, HIDDEN = EXPERTS["num_experts"], EXPERTS["moe_intermediate_size"], 32
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SPLIT = ["gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "fused": {"target_modules": [], "target_parameters": FUSED, "r": 4},
    "wide": {"target_modules": [], "target_parameters": FUSED, "r": 8, "lora_alpha": 4, "use_rslora": True},
    "down": {"target_modules": [], "target_parameters": FUSED[1:], "r": 3, "lora_alpha": 9},
    "gate_up": {"target_modules": [], "target_parameters": FUSED[:1], "r": 2, "alpha_pattern": {"gate_up_proj": 6}},
    "ranks": {"target_modules": [], "target_parameters": FUSED, "r": 2, "rank_pattern": {"down_proj": 5}},
}
Keys = dict[str, torch.Tensor]
on_a_cpu = pytest.mark.skipif(
    not is_plain_cpu(), reason="SGLang's layer of experts would run its CUDA kernels on a CPU's tensors"
)


@pytest.fixture(autouse=True)
def runtime(layers_runtime: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:  # noqa: F811
    """What SGLang's layers of experts ask for when they are built and run: one rank."""
    from sglang.srt.layers import linear
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from sglang.srt.runtime_context import get_parallel

    alone = SimpleNamespace(world_size=1, rank_in_group=0)
    for module in (_sgl, layer, linear):
        monkeypatch.setattr(module, "get_tp_group", lambda: alone, raising=False)
    monkeypatch.setattr(layer, "use_symmetric_memory", lambda *_, **__: memoryview(b""))
    sizes = {"attn_tp_size": 1, "attn_tp_rank": 0, "moe_tp_size": 1, "moe_tp_rank": 0, "moe_ep_size": 1}
    with get_parallel().override(**sizes, moe_ep_rank=0):
        yield


def text_model(model: Any) -> Any:
    """The language model of a transformers model."""
    return getattr(model.model, "language_model", model.model)


class Model(nn.Module):
    """As much of SGLang's models as has experts."""

    def __init__(self, trained: Any, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        from sglang.srt.models.qwen3_moe import Qwen3MoeSparseMoeBlock

        self.config = trained.config.get_text_config()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList()
        for number, layer in enumerate(text_model(trained).layers):
            own = nn.Module()
            own.mlp = mlp = Qwen3MoeSparseMoeBlock(number, self.config).float()
            gate_up = layer.mlp.experts.gate_up_proj.unflatten(1, (2, -1)).chunk(ranks, 2)[rank].flatten(1, 2)
            mlp.experts.w13_weight.data.copy_(gate_up)
            mlp.experts.w2_weight.data.copy_(layer.mlp.experts.down_proj.chunk(ranks, 2)[rank])
            mlp.gate.weight.data.copy_(layer.mlp.gate.weight)
            self.model.layers.append(own)


class World:
    """An engine's layers with slots of adapters, and their references."""

    def __init__(
        self, family: str, paths: dict[str, Path], copy: str | None = "device", rank: int = 0, ranks: int = 1
    ) -> None:
        slots = 6
        self.family, self.paths = family, paths
        self.trained: Any = made(family)
        self.model = Model(self.trained, rank, ranks)
        self.layout = engine_layout(self.model)
        self.backend = AtmmBackend(slots, torch.device("cpu"))
        self.modules: list[dict[str, Any]] = []
        for number, layer in enumerate(self.model.model.layers):
            experts = wrap_layer(_sgl.get_lora_layer, layer.mlp.experts, self.backend)
            layer.mlp.experts = experts
            self.modules.append({f"model.layers.{number}.mlp.experts": experts})
        kinds = {"gate_up_proj", "down_proj"}
        self.pool = PackedPool(
            experts=True, base_hf_config=self.model.config, max_loras_per_batch=slots, dtype=torch.float32, tp_size=1,
            tp_rank=0, attn_tp_size=1, max_lora_rank=8, target_modules=kinds, base_model=self.model,
            eviction_policy="lru", lora_added_tokens_size=0,
        )  # fmt: skip
        for layers in (*self.pool.A_buffer.values(), *self.pool.B_buffer.values()):
            for matrix in layers:
                matrix.fill_(torch.nan)  # what no adapter wrote is never read
        for number, layer in enumerate(self.modules):
            for module in layer.values():
                at = ((f"{kind}_moe", side) for kind in ("gate_up_proj", "down_proj") for side in self.sides)
                module.set_lora_info(*(side[kind][number] for kind, side in at))
        self.builder = AdapterBuilder(self.model, self.model.config, None, self.backend, torch.float32)
        self.adapters: dict[str, Any] = {}
        self.rows = RowRouting(self.pool, self.adapters, {})
        self.pool.uid_to_buffer_id[None] = 0
        for slot, name in enumerate(paths, start=1):
            self.load(name, slot)
        self.merger = Merger(
            self.adapters, self.pool, self.rows, self.modules, kinds, torch.device("cpu"), copy
        )  # fmt: skip
        self.references: dict[str | None, Any] = {None: self.trained}

    @property
    def sides(self) -> tuple[Any, Any]:
        return self.pool.A_buffer, self.pool.B_buffer

    def load(self, name: str, slot: int) -> None:
        adapter = self.adapters[name] = self.builder.read(name, self.paths[name])
        self.pool.load_lora_weight_to_buffer(name, slot, adapter, self.modules, None, None)
        self.pool.uid_to_buffer_id[name], self.pool.buffer_id_to_uid[slot] = slot, name

    def run(self, layer: int, x: torch.Tensor, names: Sequence[str | None], merged: str | None = None) -> torch.Tensor:
        """A row for each of these adapters, while ``merged`` is merged."""
        self.merger.carry_out(merged)
        runs = [(self.rows.pairs_of(name, merged), 1) for name in names]
        self.backend.route(*self.rows.tables_of(runs))
        return self.model.model.layers[layer].mlp(x)

    def expected(self, layer: int, x: torch.Tensor, names: Sequence[str | None]) -> torch.Tensor:
        rows = []
        for name, row in zip(names, x, strict=True):
            if name not in self.references:
                base = made(self.family)
                self.references[name] = PeftModel.from_pretrained(base, self.paths[name]).eval().base_model.model
            mlp = text_model(self.references[name]).layers[layer].mlp
            rows.append(mlp(row[None, None])[0])
        return torch.cat(rows)


def made(family: str) -> Any:
    """A tiny model whose experts' weights are larger than its adapters', as those of trained ones are."""
    model: Any = tiny_model(family)
    for layer in text_model(model).layers:
        for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            weight.data *= 10
    return model


def inputs(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_vl_moe"])
def paths(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Path]]:
    """Adapters as PEFT writes them, of different ranks, scales and parameters."""
    root, family = tmp_path_factory.mktemp(request.param), request.param
    for seed, (name, options) in enumerate(ADAPTERS.items(), start=1):
        if "vl" in family:
            options = {**options, "exclude_modules": r".*visual.*"}
        tiny_adapter(tiny_model(family), root / name, seed=seed, strength=0.15, **options)
    return family, {name: root / name for name in ADAPTERS}


NAMES = [None, *ADAPTERS, "fused", None, "down", *ADAPTERS]


@on_a_cpu
@pytest.mark.parametrize("merged", [None, *ADAPTERS])
def test_every_row_has_its_adapter(paths: tuple[str, dict[str, Path]], merged: str | None) -> None:
    """Five adapters and base rows in a batch, unmerged and with any of them merged."""
    world = World(*paths)
    x = inputs(len(NAMES))
    for layer in range(len(world.modules)):
        expected = world.expected(layer, x, NAMES)
        plain = world.expected(layer, x, [None] * len(NAMES))
        for name, own, base in zip(NAMES, expected, plain, strict=True):
            assert (name is None) == torch.allclose(own, base, atol=1e-3), "adapters must change the answer"
        assert merged is None or world.merger.refusal(merged) is None
        found = world.run(layer, x, NAMES, merged)
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)


@on_a_cpu
def test_merged_weights_come_back_to_the_bit(paths: tuple[str, dict[str, Path]]) -> None:
    world = World(*paths)
    before = {name: value.clone() for name, value in world.model.named_parameters()}
    x, order = inputs(4), [*ADAPTERS, None, *reversed(ADAPTERS), None, "down", "fused", None]
    for merged in order:
        alone = world.run(1, x, [merged] * 4, merged)
        torch.testing.assert_close(alone, world.expected(1, x, [merged] * 4), rtol=2e-4, atol=2e-5)
        changed = {name for name, value in world.model.named_parameters() if not torch.equal(value, before[name])}
        assert bool(changed) == (merged is not None)
    size = world.merger.switcher.table.nbytes(world.merger.switcher.table.groups)  # type: ignore[union-attr]
    assert size == 2 * 4 * 3 * COUNT * 3 * INNER * HIDDEN


@on_a_cpu
def test_base_rows_and_merged_rows_alone_cost_nothing(
    paths: tuple[str, dict[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, x = World(*paths), inputs(3)
    monkeypatch.setattr(AtmmBackend, "experts", lambda *_: pytest.fail("adapters were looked for"))
    for name in (None, "wide"):
        found = world.run(0, x, [name] * 3, name)
        torch.testing.assert_close(found, world.expected(0, x, [name] * 3), rtol=2e-4, atol=2e-5)


@on_a_cpu
def test_hooks_of_sglangs_runner_add_the_same(paths: tuple[str, dict[str, Path]]) -> None:
    """Its runner hands them what it has computed, each choice of a token by itself."""
    world, x = World(*paths), inputs(len(NAMES))
    world.run(0, x, NAMES)
    experts = world.model.model.layers[0].mlp.experts
    (gate_up, down), ids = experts.linears.values(), torch.rand(len(x), COUNT).argsort(1)[:, :2].int()
    weights = torch.ones(ids.shape)
    made = build_hooks(lambda *_: pytest.fail("SGLang's own"), x, experts._get_lora_info(), ids)
    y = _by_expert(x.repeat_interleave(2, 0), gate_up.weight, ids.reshape(-1)).view(len(x), 2, -1)
    made.after_gate_up(x, y, weights, ids)
    gate, up = y.view(2 * len(x), -1).chunk(2, -1)
    inner = torch.nn.functional.silu(gate) * up
    y = _by_expert(inner, down.weight, ids.reshape(-1)).view(len(x), 2, -1)
    made.after_down(inner, y, weights, ids)
    torch.testing.assert_close(y.sum(1), experts._on_torch(x, weights, ids))
    assert build_hooks(lambda *given: given, x, "another's", ids) == (x, "another's", ids)


class Activated:
    """SGLang's runner with our activation in it, as a GPU has it."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.plain, self.joint = world, 0, 0
        monkeypatch.setattr(_sgl.fused_moe, ACTIVATION, self.original, raising=False)
        monkeypatch.setattr(AtmmBackend, "silu_experts", self.silu_experts)
        with monkeypatch.context() as on_a_gpu:
            on_a_gpu.setattr(expert_layers, "on_kernels", lambda *_: True)
            ((owner, key, self.activation),) = self.places(SimpleNamespace())
        assert getattr(owner, key) == self.original and isinstance(self.activation, ExpertActivation)

    def places(self, manager: Any) -> Any:
        return activations(SimpleNamespace(lora_manager=manager, model=self.world.model, device="cpu"))

    def original(self, y: torch.Tensor, out: torch.Tensor) -> None:
        gate, up = y.chunk(2, -1)
        out.copy_(torch.nn.functional.silu(gate) * up)
        self.plain += 1

    def silu_experts(self, y: torch.Tensor, out: torch.Tensor, *operands: Any) -> None:
        self.original(self.world.backend.add_experts(y, *operands), out)
        self.plain, self.joint = self.plain - 1, self.joint + 1

    def run(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What SGLang's runner does, with hooks: its sum over the choices."""
        experts = self.world.model.model.layers[layer].mlp.experts
        (gate_up, down), top_k = experts.linears.values(), ids.shape[1]
        made = build_hooks(lambda *_: pytest.fail("SGLang's own"), x, experts._get_lora_info(), ids)
        y = _by_expert(x.repeat_interleave(top_k, 0), gate_up.weight, ids.reshape(-1))
        made.after_gate_up(x, y.view(len(x), top_k, -1), weights, ids)
        inner = torch.empty(len(y), y.shape[1] // 2)
        self.activation(y, inner)
        y = _by_expert(inner, down.weight, ids.reshape(-1)).view(len(x), top_k, -1)
        made.after_down(inner, y, weights, ids)
        return y.sum(1)


@on_a_cpu
@pytest.mark.parametrize("most", [0, 1 << 20])
def test_the_activation_adds_what_many_rows_left(
    paths: tuple[str, dict[str, Path]], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few rows it is SGLang's."""
    monkeypatch.setattr(expert_tiles, "ONE_LAUNCH", most)
    world, x = World(*paths), inputs(len(NAMES))
    runner = Activated(world, monkeypatch)
    world.run(0, x, NAMES)
    experts = world.model.model.layers[0].mlp.experts
    ids, weights = torch.rand(len(x), COUNT).argsort(1)[:, :2].int(), torch.ones(len(x), 2)
    found = runner.run(0, x, ids, weights)
    assert (runner.joint, runner.plain) == ((0, 1) if most else (1, 0))
    torch.testing.assert_close(found, experts._on_torch(x, weights, ids))


@on_a_cpu
def test_adapters_that_no_activation_took_are_an_error(
    paths: tuple[str, dict[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_tiles, "ONE_LAUNCH", 0)
    world, x = World(*paths), inputs(len(NAMES))
    runner = Activated(world, monkeypatch)
    world.run(0, x, NAMES)
    ids, weights = torch.zeros(len(x), 1, dtype=torch.int32), torch.ones(len(x), 1)
    activation, runner.activation = runner.activation, lambda *_: None
    runner.run(0, x, ids, weights)
    with pytest.raises(RuntimeError, match="was never added"):
        runner.run(1, x, ids, weights)
    with pytest.raises(RuntimeError, match="given another tensor"):
        activation(torch.zeros(3, 4), torch.zeros(3, 2))


@on_a_cpu
def test_where_the_activation_stays_sglangs(
    paths: tuple[str, dict[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Activated(World(*paths), monkeypatch)
    assert runner.places(None) == "LoRA is off"
    assert runner.places(SimpleNamespace()) == "it runs on a CPU"
    runner.world.model = nn.Linear(1, 1)  # type: ignore[assignment]
    assert "no experts" in runner.places(SimpleNamespace())


@on_a_cpu
@pytest.mark.parametrize("merged", [None, "wide"])
def test_ranks_share_every_experts_inner_size(paths: tuple[str, dict[str, Path]], merged: str | None) -> None:
    """Two ranks' sums are one's output."""
    from sglang.srt.runtime_context import get_parallel

    worlds = []
    for rank in range(2):
        with get_parallel().override(moe_tp_size=2, moe_tp_rank=rank):
            worlds.append(World(*paths, rank=rank, ranks=2))
    x = inputs(len(NAMES))
    expected = worlds[0].expected(1, x, NAMES)
    found = []
    for world in worlds:
        world.model.model.layers[1].mlp.tp_size = 1  # what it would sum over ranks is summed here
        found.append(world.run(1, x, NAMES, merged))
    assert not torch.allclose(found[0], found[1], atol=1e-3)
    torch.testing.assert_close(found[0] + found[1], expected, rtol=2e-4, atol=2e-5)


# Layouts of files


def rewrite(source: Path, target: Path, weights: Keys, **config: Any) -> Path:
    """An adapter with other tensors."""
    shutil.copytree(source, target)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, target / "adapter_model.safetensors")
    file = target / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return target


def split_adapter(root: Path, experts: Sequence[int], name: str = "split", only: Sequence[str] = SPLIT) -> Path:
    """An adapter with keys for every expert, of those named; the rest of them zero in ``whole``'s file."""
    made = tiny_adapter(tiny_model("qwen3"), root / f"{name}-template", target_modules=["q_proj"], r=4)
    del made
    torch.manual_seed(5)
    weights: Keys = {}
    for layer in range(3):
        for expert in range(COUNT):
            for leaf in SPLIT:
                inner, outer = (INNER, HIDDEN) if leaf == "down_proj" else (HIDDEN, INNER)
                at = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{leaf}"
                factors = 0.3 * torch.randn(4, inner), 0.3 * torch.randn(outer, 4)
                if expert in experts and leaf in only:
                    weights[f"{at}.lora_A.weight"], weights[f"{at}.lora_B.weight"] = factors
    config = {"target_modules": list(only), "r": 4, "lora_alpha": 6, "rank_pattern": {}, "alpha_pattern": {}}
    return rewrite(root / f"{name}-template", root / name, weights, **config)


def whole(partial: Path, root: Path) -> Path:
    """The same adapter with zeros for what it leaves out: PEFT's conversion wants all experts."""
    weights = load_file(partial / "adapter_model.safetensors")
    full = load_file(split_adapter(root, range(COUNT), "all-experts") / "adapter_model.safetensors")
    filled = {name: weights.get(name, torch.zeros_like(tensor)) for name, tensor in full.items()}
    return rewrite(partial, root / "filled", filled, target_modules=SPLIT)


@on_a_cpu
@pytest.mark.parametrize(
    "experts, only", [(range(COUNT), SPLIT), ([1, 4], SPLIT), ([0], ["down_proj"]), (range(COUNT), ["up_proj"])]
)
@pytest.mark.parametrize("merged", [None, "split"])
def test_keys_of_single_experts(tmp_path: Path, experts: Sequence[int], only: list[str], merged: str | None) -> None:
    """Any of them; compared with PEFT's own conversion of the whole."""
    path = split_adapter(tmp_path, experts, only=only)
    world, x = World("qwen3_moe", {"split": path}), inputs(12)
    world.paths = {"split": whole(path, tmp_path)}
    expected = world.expected(2, x, ["split"] * 12)
    assert not torch.allclose(expected, world.expected(2, x, [None] * 12), atol=1e-3)
    torch.testing.assert_close(world.run(2, x, ["split"] * 12, merged), expected, rtol=2e-4, atol=2e-5)


def test_what_pefts_conversion_writes_is_taken_apart_again(tmp_path: Path) -> None:
    """Gate and up beside each other in twice the rank: the slots need half of that."""
    path = split_adapter(tmp_path, range(COUNT))
    converted = PeftModel.from_pretrained(tiny_model("qwen3_moe"), path)
    converted.save_pretrained(tmp_path / "converted")
    layout = BaseLayout.from_model(tiny_model("qwen3_moe"))
    before, after = (read_adapter(where, layout).modules for where in (path, tmp_path / "converted"))
    assert before.keys() == after.keys()
    for name, pair in before.items():
        assert after[name].rank == pair.rank == 4
        torch.testing.assert_close(after[name].delta(), pair.delta())


def turned(source: Path, target: Path, rank: int) -> Path:
    """As PEFT wrote it while it took a parameter's second axis for the inputs: A of the outputs, B of the inputs."""
    weights = load_file(source / "adapter_model.safetensors")
    found: Keys = {}
    for name, a in weights.items():
        if "experts" not in name or "lora_A" not in name:
            continue
        b = weights[name.replace("lora_A", "lora_B")]
        own_a, own_b = a.view(COUNT, rank, -1), b.view(len(b), rank, COUNT)
        found[name] = own_b.permute(2, 1, 0).reshape(COUNT * rank, -1)
        found[name.replace("lora_A", "lora_B")] = own_a.permute(2, 1, 0).reshape(a.shape[1], -1)
    return rewrite(source, target, found)


def test_both_ways_round_are_read(paths: tuple[str, dict[str, Path]], tmp_path: Path) -> None:
    family, found = paths
    layout = BaseLayout.from_model(tiny_model(family))
    one = read_adapter(found["fused"], layout).modules
    other = read_adapter(turned(found["fused"], tmp_path / "turned", 4), layout).modules
    assert one.keys() == other.keys() and len(one) == 3 * 3 * COUNT
    for name, pair in one.items():
        torch.testing.assert_close(other[name].delta(), pair.delta())


def test_layouts_of_models_and_engines_agree(paths: tuple[str, dict[str, Path]]) -> None:
    world, own = World(*paths), BaseLayout.from_model(tiny_model(paths[0]))
    experts = {name: shape for name, shape in world.layout.shapes.items() if ".experts." in name}
    assert len(experts) == 3 * 3 * COUNT and experts.items() <= own.shapes.items()
    stacked = {name: parts for name, parts in world.layout.fused.items() if ".experts." in name}
    assert stacked and stacked.items() <= dict(own.fused).items()


# Refusals


def test_dense_mlps_beside_experts_are_found(paths: tuple[str, dict[str, Path]]) -> None:
    """SGLang's pool has no slots for them, nor for shared experts of another size."""
    world = World(*paths, copy=None)
    assert world.pool.lacking(world.modules) is None
    world.modules[1]["model.layers.1.mlp.down_proj"] = nn.Identity()
    assert world.pool.lacking(world.modules) == "model.layers.1.mlp.down_proj"
    shared: Any = SimpleNamespace(columns=(0, 8, 16))
    world.modules[1] = {"model.layers.1.mlp.shared_expert.gate_up_proj": shared}
    world.pool.B_buffer["gate_up_proj"] = [torch.empty(6, size, 8) for size in (16, 16, 16)]
    assert world.pool.lacking(world.modules) is None
    shared.columns = (0, 4, 8)
    assert world.pool.lacking(world.modules) == "model.layers.1.mlp.shared_expert.gate_up_proj"


def changed(source: Path, target: Path, change: Any, **config: Any) -> Path:
    weights = load_file(source / "adapter_model.safetensors")
    change(weights)
    return rewrite(source, target, weights, **config)


def put_router(weights: Keys) -> None:
    at = "base_model.model.model.layers.0.mlp.gate"
    weights |= {f"{at}.lora_A.weight": torch.ones(4, HIDDEN), f"{at}.lora_B.weight": torch.ones(COUNT, 4)}


def put_far_expert(weights: Keys) -> None:
    at = f"base_model.model.model.layers.0.mlp.experts.{COUNT}.up_proj"
    weights |= {f"{at}.lora_A.weight": torch.ones(4, HIDDEN), f"{at}.lora_B.weight": torch.ones(INNER, 4)}


def cut(side: str, axis: int, of: int) -> Any:
    """Leaves out the last rows or columns of one factor of down_proj."""

    def change(weights: Keys) -> None:
        name = f"base_model.model.model.layers.1.mlp.experts.lora_{side}.weight"
        weights[name] = weights[name].narrow(axis, 0, weights[name].shape[axis] - of)

    return change


def drop_b(weights: Keys) -> None:
    del weights["base_model.model.model.layers.1.mlp.experts.lora_B.weight"]


def both_ways(weights: Keys) -> None:
    """A second adapter of what has one already."""
    for side in "AB":
        at = f"base_model.model.model.layers.0.mlp.experts.%slora_{side}.weight"
        weights[at % "base_layer.base_layer."] = weights[at % ""].clone()


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "router": (put_router, {}, r"layers\.0\.mlp\.gate\.lora_A.*router of experts"),
    "past-the-last": (put_far_expert, {}, rf"no module layers\.0\.mlp\.experts\.{COUNT}\.up_proj"),
    "inputs": (cut("A", 1, 1), {}, r"layers\.1\.mlp\.experts: updates of \[32, 95\] fit none"),
    "outputs": (cut("B", 0, 1), {}, r"updates of \[31, 96\] fit none"),
    "ranks-differ": (cut("A", 0, 1), {}, r"A has rank 23, B 24"),
    "rank": (lambda weights: None, {"r": 3}, r"expected rank 3 for every expert of .*gate_up_proj"),
    "rank-divides": (lambda weights: None, {"r": 2}, r"expected rank 2 for every expert of .*gate_up_proj"),
    "no-b": (drop_b, {}, r"layers\.1\.mlp\.experts\.lora_A\.weight: its lora_B is missing"),
    "twice": (both_ways, {}, r"adapts layers\.0\.mlp\.experts\.0\.down_proj, which .* adapts already"),
    "dora": (lambda weights: None, {"use_dora": True}, "lora_magnitude_vector is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(paths: tuple[str, dict[str, Path]], case: str, tmp_path: Path) -> None:
    family, found = paths
    change, config, why = REFUSED[case]
    if family != "qwen3_moe":
        pytest.skip("names differ")
    world = World(family, {}, copy=None)
    bad = changed(found["fused"], tmp_path / case, change, **config)
    with pytest.raises(AdapterError, match=why):
        read_adapter(bad, world.layout)


def test_a_model_without_experts_has_none(paths: tuple[str, dict[str, Path]]) -> None:
    with pytest.raises(AdapterError, match=r"this model has no module layers\.0\.mlp\.experts"):
        read_adapter(paths[1]["fused"], BaseLayout.from_model(tiny_model("qwen3")))


def test_factors_that_fit_both_ways_are_refused(tmp_path: Path) -> None:
    """The file does not say which is meant, and the two are different functions."""
    text = {"hidden_size": 32, "moe_intermediate_size": 16}
    tiny_adapter(tiny_model("qwen3_moe", text=text), tmp_path, target_modules=[], target_parameters=FUSED)
    with pytest.raises(AdapterError, match="fit more than one way"):
        read_adapter(tmp_path, BaseLayout.from_model(tiny_model("qwen3_moe", text=text)))


@pytest.mark.parametrize(
    "change, why",
    [
        ({"moe_ep_size": 2}, "--ep-size"),
        ({"quant_method": nn.Identity()}, "quantised"),
        ({"moe_runner_config.activation": "gelu"}, "SiLU"),
        ({"moe_runner_config.gemm1_alpha": 1.7}, "SiLU"),
        ({"moe_runner_config.routed_scaling_factor": 2.5}, "scaled by 2.5"),
    ],
)
def test_layers_of_other_forms_are_refused(change: dict[str, Any], why: str) -> None:
    layer = Model(tiny_model("qwen3_moe")).model.layers[0].mlp.experts
    assert why_not_adapted(layer) is None
    ((path, value),) = change.items()
    owner, _, name = path.rpartition(".")
    setattr(getattr(layer, owner) if owner else layer, name, value)
    with pytest.raises(ConfigError, match=why):
        wrap_layer(_sgl.get_lora_layer, layer, AtmmBackend(2, torch.device("cpu")))
