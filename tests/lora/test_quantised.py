"""Linears of quantised checkpoints: loaded by SGLang, computed on a CPU, with adapters beside them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.lora.test_vectors import runtime  # noqa: F401 - a fixture
from tests.support.quantised import FORMATS
from vlora_sgl import _sgl
from vlora_sgl.errors import ConfigError
from vlora_sgl.kernels.merge.folded import fold_reference
from vlora_sgl.lora.backend import AtmmBackend
from vlora_sgl.lora.layers import wrap_layer
from vlora_sgl.lora.merge_bound import UpdateSize
from vlora_sgl.lora.merger import Merger
from vlora_sgl.lora.quantised import foldable, fused
from vlora_sgl.platforms.quantised import config_for
from vlora_sgl.platforms.torch_cpu import TorchCpuPlatform
from vlora_sgl.scaled import E4M3, Scaled, block_largest, quantise, to_type
from vlora_sgl.server_args import QUANTISED_ON_A_CPU, refuse_on_a_cpu

HIDDEN, WIDTH, SLOTS, RANK = 128, 256, 3, 8
SERVED = "model.layers.0.mlp."

PACKED = {
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128},
        }
    },
}


def config_of(name: str) -> Any:
    form = FORMATS[name]
    settings = form.config or {"quant_method": "", "activation_scheme": "dynamic"}
    return config_for(form.flag or settings["quant_method"]).from_config({**settings, "packed_modules_mapping": {}})


def load(layer: Any, written: list[dict[str, torch.Tensor]], stacked: bool) -> None:
    """As SGLang's models load a checkpoint: by each parameter's own loader."""
    parameters = dict(layer.named_parameters())
    for shard, tensors in enumerate(written):
        for kind, tensor in tensors.items():
            loader = parameters[kind].weight_loader
            loader(parameters[kind], tensor, shard) if stacked else loader(parameters[kind], tensor)


def make_linear(name: str, stacked: bool) -> tuple[Any, torch.Tensor]:
    """gate_up or down, and its weight as the checkpoint means it."""
    torch.manual_seed(0)
    config = config_of(name)
    with torch.device("cpu"):
        layer = (
            _sgl.MergedColumnParallelLinear(
                HIDDEN, [WIDTH, WIDTH], bias=False, quant_config=config, prefix=f"{SERVED}gate_up_proj"
            )
            if stacked
            else _sgl.RowParallelLinear(WIDTH, HIDDEN, bias=False, quant_config=config, prefix=f"{SERVED}down_proj")
        )
    shapes = [(WIDTH, HIDDEN)] * 2 if stacked else [(HIDDEN, WIDTH)]
    written, meant = zip(
        *(FORMATS[name].write(torch.randn(shape) * (1 + i)) for i, shape in enumerate(shapes)), strict=True
    )
    load(layer, list(written), stacked)
    layer.quant_method.process_weights_after_loading(layer)
    return layer, torch.cat(meant)


@pytest.mark.parametrize("stacked", [True, False], ids=["gate_up", "down"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_linear_computes_what_the_checkpoint_means_with_its_adapters(name: str, stacked: bool) -> None:
    base, meant = make_linear(name, stacked)
    parts, (n, k) = 2 if stacked else 1, meant.shape
    layer: Any = wrap_layer(_sgl.get_lora_layer, base, AtmmBackend(SLOTS, torch.device("cpu")))
    a, b = torch.randn(SLOTS, parts * RANK, k) / 8, torch.randn(SLOTS, n, RANK)
    layer.set_lora_info(a, b)
    layer.lora_backend.route([(((1, 1.0),), 3), ((), 2)], [0, RANK, 0], [0.0, 0.5, 0.0])
    layer.set_lora = True
    x = torch.randn(5, k)
    found = layer(x)[0]
    exact = x.double() @ meant.double().T
    own = [
        x.double() @ a[1, part * RANK : (part + 1) * RANK].double().T @ b[1, rows].double().T
        for part, rows in enumerate(torch.arange(n).chunk(parts))
    ]
    update = 0.5 * torch.cat(own, 1)
    assert update[:3].norm() > 0.05 * exact[:3].norm()
    exact[:3] += update[:3]
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4 * float(exact.abs().mean()))


@pytest.mark.parametrize("name", FORMATS)
def test_what_can_be_folded_into_is_said(name: str) -> None:
    base, meant = make_linear(name, True)
    found = foldable(base)
    assert isinstance(found, Scaled) == FORMATS[name].folds, found
    if isinstance(found, Scaled):
        torch.testing.assert_close(found.wide(), meant)
        assert found.weight.data_ptr() == base.weight.data_ptr()


@pytest.mark.parametrize("shape", [(1, WIDTH), (WIDTH, 1), (WIDTH,)])
def test_what_sglang_lays_out_for_its_kernels_on_a_gpu_is_folded_in_place(shape: tuple[int, ...]) -> None:
    """A scale for each output, of a weight that is kept as the transposed view: a fold writes to both."""
    method = type("Fp8LinearMethod", (), {"__module__": _sgl.NAMES["Fp8LinearMethod"].partition(":")[0]})()
    made = quantise(torch.randn(WIDTH, HIDDEN), (1, HIDDEN), E4M3)
    layer = SimpleNamespace(quant_method=method, weight=made.weight.T, weight_scale=made.scale.view(shape))
    found = foldable(layer)
    assert isinstance(found, Scaled) and torch.equal(found.wide(), made.wide())
    found.scale.mul_(2)
    assert torch.equal(layer.weight_scale.view(-1, 1), made.scale)
    assert found.weight.data_ptr() == layer.weight.data_ptr()
    layer.weight_scale = torch.ones(1)
    assert "expected float32" in str(foldable(layer))


def test_what_few_rows_multiply_by_where_their_adapters_join() -> None:
    """A scale an output and a scale a row; no scale of the whole input, no blocks, no sizes that are padded."""
    kind = type("Fp8LinearMethod", (), {"__module__": _sgl.NAMES["Fp8LinearMethod"].partition(":")[0]})
    method: Any = kind()
    method.cutlass_fp8_supported, method.block_quant = True, False
    made = quantise(torch.randn(WIDTH, HIDDEN), (1, HIDDEN), E4M3)
    layer = SimpleNamespace(quant_method=method, weight=made.weight.T, weight_scale=made.scale.T, input_scale=None)
    found = fused(layer)
    assert found is not None and torch.equal(found.wide(), made.wide())
    for change in ({"input_scale": torch.ones(1)}, {"weight": made.weight[:, :24].T}, {"weight_scale": torch.ones(1)}):
        assert fused(SimpleNamespace(**{**vars(layer), **change})) is None
    for name, value in (("cutlass_fp8_supported", False), ("block_quant", True)):
        before = getattr(method, name)
        setattr(method, name, value)
        assert fused(layer) is None
        setattr(method, name, before)
    assert fused(SimpleNamespace(quant_method=None)) is None


@pytest.mark.parametrize("name", ["mxfp4", "gguf", "bitsandbytes", "modelopt_fp4", "quark", "moe_wna16"])
def test_other_formats_are_refused_by_name_on_a_cpu(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"--quantization={name}.*fp8, w8a8_fp8"):
        TorchCpuPlatform().get_quantization_config(name)
    with pytest.raises(ConfigError, match=f"quantization={name}"):
        refuse_on_a_cpu({"quantization": name})


def test_what_is_read_passes_the_flags() -> None:
    for name in QUANTISED_ON_A_CPU:
        refuse_on_a_cpu({"quantization": name})


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("gptq", {"bits": 8}, "8 bits"),
        ("compressed-fp8-channel", PACKED, "CompressedTensorsWNA16 are not read on a plain CPU"),
    ],
)
def test_schemes_that_are_not_read_are_refused(name: str, change: dict[str, Any], reason: str) -> None:
    form = FORMATS[name]
    assert form.config is not None
    config = config_for(form.config["quant_method"]).from_config(
        {**form.config, **change, "packed_modules_mapping": {}}
    )
    with pytest.raises(ConfigError, match=reason):
        layer = _sgl.RowParallelLinear(WIDTH, HIDDEN, bias=False, quant_config=config, prefix=f"{SERVED}down_proj")
        layer.quant_method.process_weights_after_loading(layer)


def test_groups_out_of_order_are_refused() -> None:
    torch.manual_seed(0)
    config = config_of("gptq")
    layer: Any = _sgl.RowParallelLinear(WIDTH, HIDDEN, bias=False, quant_config=config, prefix=f"{SERVED}down_proj")
    written, _ = FORMATS["gptq"].write(torch.randn(HIDDEN, WIDTH))
    written["g_idx"] = written["g_idx"].flip(0)
    load(layer, [written], False)
    with pytest.raises(ConfigError, match="desc_act"):
        layer.quant_method.process_weights_after_loading(layer)


def test_a_linear_of_another_method_is_refused_where_adapters_are_put_on_it() -> None:
    class Fp4LinearMethod:
        pass

    layer: Any = _sgl.RowParallelLinear(WIDTH, HIDDEN, bias=False)
    layer.quant_method = Fp4LinearMethod()
    with pytest.raises(ConfigError, match="Fp4LinearMethod are not served"):
        wrap_layer(_sgl.get_lora_layer, layer, AtmmBackend(SLOTS, torch.device("cpu")))


@pytest.mark.parametrize("dtype", [E4M3, torch.int8], ids=["e4m3", "int8"])
@pytest.mark.parametrize(("shape", "block"), [((7, 50), (1, 50)), ((200, 300), (128, 128)), ((4, 64), (1, 32))])
def test_quantising_is_half_a_step_off_at_most(
    shape: tuple[int, int], block: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    values = torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]
    values[-1] = 0
    found = quantise(values, block, dtype)
    error = (found.wide() - values).abs()
    assert torch.isfinite(found.wide()).all()
    largest = block_largest(values, block).repeat_interleave(block[0], 0)[: shape[0]]
    largest = largest.repeat_interleave(block[1], 1)[:, : shape[1]]
    if dtype == torch.int8:
        assert (error <= largest / 127 * 0.5001).all()
    else:
        assert (error <= (values.abs() * 2**-4).maximum(largest / 448 * 2**-10) * 1.0001).all()
    again = quantise(found.wide(), block, dtype)
    assert torch.equal(again.weight.view(torch.uint8), found.weight.view(torch.uint8))
    assert to_type(torch.tensor([1e9]), dtype).float().isfinite().all()


NAMES = {"gate_up_proj": True, "down_proj": False}


class World:
    """gate_up and down of one layer, with one adapter in a slot, and what merges it."""

    def __init__(self, name: str, tolerance: float = 0.05, update: float = 1.0) -> None:
        backend = AtmmBackend(SLOTS, torch.device("cpu"))
        self.modules, self.meant, weights = {}, {}, {}
        for kind, stacked in NAMES.items():
            base, meant = make_linear(name, stacked)
            module: Any = wrap_layer(_sgl.get_lora_layer, base, backend)
            parts, (n, k) = 2 if stacked else 1, meant.shape
            module.set_lora_info(torch.randn(SLOTS, parts * RANK, k) / 8, torch.randn(SLOTS, n, RANK) * update)
            own = f"layers.0.mlp.{kind}"
            weights[f"{own}.lora_A.weight"], weights[f"{own}.lora_B.weight"] = module.a[1], module.b[1]
            self.modules[f"model.{own}"], self.meant[kind] = module, meant
        adapter = SimpleNamespace(
            config=SimpleNamespace(r=RANK),
            scaling=0.5,
            layers=[SimpleNamespace(weights=weights)],
            embedding_layers={},
            update_sizes={f"layers.0.mlp.{kind}": (UpdateSize(1.0, 1.0, 1.0, 1.0),) for kind in NAMES},
        )
        pool = SimpleNamespace(max_lora_rank=RANK, places=range(SLOTS), dtype=torch.float32)
        rows = SimpleNamespace(slot_of=lambda adapter: 1)
        device = torch.device("cpu")
        self.merger = Merger(
            {"x": adapter},
            pool,
            rows,
            [self.modules],
            set(NAMES),
            device,
            "device",
            None,
            tolerance,  # type: ignore
        )

    def run(self, kind: str, x: torch.Tensor, runs: Any) -> torch.Tensor:
        module = self.modules[f"model.layers.0.mlp.{kind}"]
        module.lora_backend.route(runs, [0, RANK, 0], [0.0, 0.5, 0.0])
        module.set_lora = True
        found: torch.Tensor = module(x)[0]
        return found


FOLDED = [name for name, form in FORMATS.items() if form.folds]


@pytest.mark.parametrize("name", FOLDED)
def test_a_folded_adapter_is_taken_out_of_other_rows_and_restored(name: str) -> None:
    world = World(name)
    merger = world.merger
    assert merger.refusal("x") is None
    lost = merger.loss("x")
    assert lost is not None and 0.005 < lost < 0.04
    before = {kind: foldable(module.base_layer) for kind, module in world.modules.items()}
    copies = {kind: [part.clone() for part in one[:2]] for kind, one in before.items() if isinstance(one, Scaled)}
    assert merger.carry_out("x") == "x"
    for kind in NAMES:
        module = world.modules[f"model.layers.0.mlp.{kind}"]
        x = torch.randn(64, module.a.shape[2])
        exact = x.double() @ world.meant[kind].double().T
        own = exact + 0.5 * (world.run(kind, x, [(((1, 2.0),), 64)]) - world.run(kind, x, [((), 64)])).double()
        merged = world.run(kind, x, [((), 64)]).double()
        assert (own - exact).norm() > 0.05 * exact.norm()
        for found, wanted in ((merged, own), (world.run(kind, x, [(((1, -1.0),), 64)]).double(), exact)):
            # On these inputs, which have no direction of their own, the loss is the error but for their chance.
            assert (found - wanted).norm() <= 1.1 * lost * own.norm(), kind
    merger.unmerge()
    for kind, module in world.modules.items():
        found = foldable(module.base_layer)
        assert isinstance(found, Scaled)
        assert torch.equal(found.weight.view(torch.uint8), copies[kind][0].view(torch.uint8))
        assert torch.equal(found.scale, copies[kind][1])


@pytest.mark.parametrize("name", FOLDED)
def test_a_fold_is_the_references(name: str) -> None:
    world = World(name)
    bases = {}
    for kind, module in world.modules.items():
        one = foldable(module.base_layer)
        assert isinstance(one, Scaled)
        bases[kind] = Scaled(one.weight.clone(), one.scale.clone(), one.block)
    world.merger.carry_out("x")
    for kind, module in world.modules.items():
        found, bounds = foldable(module.base_layer), module.columns
        assert isinstance(found, Scaled)
        for part in range(len(bounds) - 1):
            rows = slice(bounds[part], bounds[part + 1])
            a = module.a[1, part * RANK : (part + 1) * RANK]
            wanted = fold_reference(bases[kind].rows(rows), a, module.b[1, rows], 0.5)
            assert torch.equal(found.rows(rows).scale, wanted.scale)
            assert (found.rows(rows).weight.float() == wanted.weight.float()).float().mean() > 0.999


def test_what_would_lose_more_than_the_tolerance_stays_unmerged() -> None:
    world = World("fp8-block", tolerance=0.01)
    reason = world.merger.refusal("x")
    assert reason is not None and "--vlora-merge-tolerance 0.01" in reason


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_is_folded_into_other_formats_nor_without_a_tolerance(name: str) -> None:
    world = World(name, tolerance=0.0)
    assert world.merger.switcher is None and world.merger.loss("x") is None
    if not FORMATS[name].folds:
        assert World(name).merger.switcher is None
