"""SGLang's LoRA layers with base and adapters in one operator.

Stock layers compute the base linear and then add the adapters' part. ATMM is faster where it does both (one grid for
few rows, one pass over the output for many), so these subclasses hand it the base weight where that is a plain matrix.
Under tensor parallelism the adapters' part joins each rank's partial result before the reduction: the same sum.
In a prefill gate_up leaves its adapters to the activation behind it, which reads the output anyhow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vlora_sgl import _sgl
from vlora_sgl.errors import ConfigError
from vlora_sgl.kernels.atmm import Rotation, Vectors, on_kernels
from vlora_sgl.kernels.atmm.launch import MAX_PARTS
from vlora_sgl.kernels.devices import on_hopper
from vlora_sgl.kernels.rotary import rotate_and_store
from vlora_sgl.lora.deferred import DeferredAdapters
from vlora_sgl.lora.expert_layers import AtmmExperts
from vlora_sgl.lora.quantised import fused, why_not_served
from vlora_sgl.lora.vocabulary import AtmmEmbedding, AtmmLMHead
from vlora_sgl.scaled import E4M3, Scaled
from vlora_sgl.seams import Place, Places

Output = tuple[torch.Tensor, torch.Tensor | None]
"""Of a linear layer, with the bias that it has skipped."""

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...], Vectors | None]
"""What ``atmm`` takes after ``y``: x, a, b, offsets, vectors."""


class Atmm:
    """What the layers below share; ``set_lora_info`` reads the operands once.

    Attributes:
        vectors: its part of the table of ``lora.vectors``, [slots, 2, N] float32; ``None`` where there is none.
        scaled: the base weight in e4m3, where few rows multiply by it and the adapters in one operator.
    """

    base_layer: Any
    lora_backend: Any
    lora_active: bool
    vectors: torch.Tensor | None = None
    scaled: Scaled | None = None

    @property
    def columns(self) -> tuple[int, ...]:
        """Bounds of the stacked projections' columns of the output, from 0 to N."""
        found = getattr(self, "output_offset_cpu", None)
        if found is None:
            found = self._output_offset  # type: ignore[attr-defined]
        return tuple(found.tolist())

    def set_lora_info(self, *buffers: torch.Tensor) -> None:
        """Take the pool's buffers, a [slots, parts * R, K] and b [slots, N, R]."""
        super().set_lora_info(*buffers)  # type: ignore[misc]
        self.a, self.b = buffers
        self.offsets = self.columns
        if len(self.offsets) - 1 > MAX_PARTS:
            raise ValueError(f"{len(self.offsets) - 1} stacked projections; ATMM takes up to {MAX_PARTS}")
        weight = getattr(self.base_layer, "weight", None)
        self.fusible = (
            weight is not None
            and plain_weight(self)
            and weight.shape == (self.offsets[-1], self.a.shape[2])
            and self.a.dtype in (weight.dtype, E4M3)
            and weight.is_contiguous()
        )
        self.scaled = fused(self.base_layer) if self.a.is_cuda and on_hopper() else None

    def slice_lora_b_weights(self, b: torch.Tensor) -> torch.Tensor:
        """This rank's rows of B [N, R]. SGLang copies the parts of a stacked linear together even where it has all."""
        if getattr(self.base_layer, "tp_size", 1) == 1:
            return b
        mine: torch.Tensor = super().slice_lora_b_weights(b)  # type: ignore[misc]
        return mine

    @property
    def own_bias(self) -> torch.Tensor | None:
        """The bias that this rank adds to its product, if any."""
        return None if self.base_layer.skip_bias_add else self.base_layer.bias

    def project(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Base and adapters: [M, N]."""
        base, backend = self.base_layer, self.lora_backend
        if self.fusible:
            return backend.linear(x, base.weight, bias, self.a, self.b, self.offsets, self.vectors)
        if self.scaled is not None and backend.few_rows:
            return backend.scaled(x, self.scaled, bias, self.a, self.b, self.offsets, self.vectors)
        return backend.add(base.quant_method.apply(base, x, bias), *self.operands(x, bias))

    def operands(self, x: torch.Tensor, bias: torch.Tensor | None) -> Operands:
        """What the adapters' part of an output needs that was computed with this bias."""
        vectors = None if self.vectors is None else Vectors(self.vectors, bias)
        return x, self.a, self.b, self.offsets, vectors

    def column_forward(self, x: torch.Tensor) -> Output:
        """A column-parallel or replicated linear: (output, bias that was skipped)."""
        base = self.base_layer
        y = self.project(x, self.own_bias)
        if getattr(base, "gather_output", False):
            y = _sgl.tensor_model_parallel_all_gather(y)
        return y, base.bias if base.skip_bias_add else None


class AtmmColumnLinear(Atmm, _sgl.ColumnParallelLinearWithLoRA):
    """One column-parallel projection."""

    def forward(self, input_: torch.Tensor) -> Output:
        return self.column_forward(input_) if self.lora_active else super().forward(input_)


class AtmmTorchLinear(AtmmColumnLinear):
    """torch's own linear, which every rank holds whole: projectors of image encoders are made of them."""

    def __init__(self, layer: nn.Linear, lora_backend: Any) -> None:
        sizes = layer.in_features, layer.out_features
        with torch.device("meta"):
            whole = _sgl.ColumnParallelLinear(
                *sizes, layer.bias is not None, params_dtype=layer.weight.dtype, tp_rank=0, tp_size=1
            )
        whole.weight, whole.bias = layer.weight, layer.bias
        super().__init__(whole, lora_backend)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(input_)[0]


class AtmmMergedColumnLinear(Atmm, _sgl.MergedColumnParallelLinearWithLoRA):
    """gate_up and other stacked column-parallel projections.

    Attributes:
        deferred: shared with the activation that adds the adapters' part of a prefill, where there is one.
    """

    deferred: DeferredAdapters[Operands] | None = None

    def project(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Base and adapters, or the base alone with the adapters left to the activation: [M, N]."""
        if self.deferred is None or not self.lora_backend.defers_activation:
            return super().project(x, bias)
        y: torch.Tensor = self.base_layer.quant_method.apply(self.base_layer, x, bias)
        self.deferred.leave(y, self.operands(x, bias))
        return y

    def forward(self, input_: torch.Tensor) -> Output:
        if self.deferred is not None:
            self.deferred.check_taken()
        return self.column_forward(input_) if self.lora_active else super().forward(input_)


class AtmmSiluAndMul(nn.Module):
    """SGLang's activation, with the adapters' part of its input where the gate_up linear before it left that.

    Args:
        base_layer: SGLang's.
        linear: the gate_up linear; from now on it leaves what it may.
    """

    def __init__(self, base_layer: nn.Module, linear: AtmmMergedColumnLinear) -> None:
        super().__init__()
        self.base_layer, self.lora_backend = base_layer, linear.lora_backend
        self.deferred = linear.deferred = DeferredAdapters[Operands]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        operands = self.deferred.take(x)
        return self.base_layer(x) if operands is None else self.lora_backend.silu_and_mul(x, *operands)


class AtmmQKVLinear(Atmm, _sgl.QKVParallelLinearWithLoRA):
    """q, k and v of unequal widths."""

    def rotated(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Base and adapters, with q rotated, and k and v in the cache: q [M, HEADS * D]. For decoding."""
        if self.lora_active and self.fusible and self.vectors is None:
            weight = self.base_layer.weight
            return self.lora_backend.rotated(x, weight, self.own_bias, self.a, self.b, self.offsets, rotation)
        return rotate_and_store(self.forward(x)[0], *rotation.operands)

    def forward(self, input_: torch.Tensor) -> Output:
        return self.column_forward(input_) if self.lora_active else super().forward(input_)


class AtmmReplicatedLinear(Atmm, _sgl.ReplicatedLinearWithLoRA):
    """A linear that every rank holds whole."""

    def forward(self, x: torch.Tensor) -> Output:
        return self.column_forward(x) if self.lora_active else super().forward(x)


class AtmmRowLinear(Atmm, _sgl.RowParallelLinearWithLoRA):
    """o_proj and down_proj."""

    @property
    def own_bias(self) -> torch.Tensor | None:
        """The first rank's; the sum over ranks must have it once."""
        return None if self.base_layer.tp_rank > 0 else super().own_bias

    def forward(self, input_: torch.Tensor, skip_all_reduce: bool = False, forward_batch: object = None) -> Output:
        base = self.base_layer
        if not self.lora_active or not base.input_is_parallel:
            return super().forward(input_, skip_all_reduce, forward_batch)
        y = self.project(input_, self.own_bias)
        reduce = base.reduce_results and base.tp_size > 1 and not skip_all_reduce
        if reduce and not _sgl.should_skip_mlp_all_reduce():
            group = _sgl.get_parallel().attn_tp_group if base.use_dp_attention_reduce else None
            y = group.all_reduce(y) if group is not None else _sgl.tensor_model_parallel_all_reduce(y)
        return y, base.bias if base.skip_bias_add else None

    def apply_lora(self, base_output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """For inputs that the stock forward splits first."""
        return self.lora_backend.add(base_output, *self.operands(x, self.own_bias))


def plain_weight(module: Any) -> bool:
    """Whether a wrapped linear's weight is a plain matrix of its outputs' rows."""
    base, weight = module.base_layer, getattr(module.base_layer, "weight", None)
    if weight is None or not isinstance(base.quant_method, _sgl.UnquantizedLinearMethod):
        return False
    return bool(weight.ndim == 2 and weight.is_floating_point() and weight.shape[0] == module.columns[-1])


def layer_class(layer: nn.Module) -> type[nn.Module] | None:
    """Our class for a layer of SGLang's, or ``None`` where the stock one is to be used."""
    for base, ours in (
        (_sgl.QKVParallelLinear, AtmmQKVLinear),
        (_sgl.MergedColumnParallelLinear, AtmmMergedColumnLinear),
        (_sgl.ColumnParallelLinear, AtmmColumnLinear),
        (_sgl.RowParallelLinear, AtmmRowLinear),
        (_sgl.ReplicatedLinear, AtmmReplicatedLinear),
        (_sgl.ParallelLMHead, AtmmLMHead),
        (_sgl.VocabParallelEmbedding, AtmmEmbedding),
        (_sgl.FusedMoE, AtmmExperts),
        (nn.Linear, AtmmTorchLinear),
    ):
        if isinstance(layer, base):
            return ours
    return None


def wrap_layer(original: Callable[..., nn.Module], layer: nn.Module, lora_backend: Any) -> nn.Module:
    """Wraps SGLang's ``get_lora_layer``: for ATMM a linear is wrapped by a class of ours, if there is one.

    Raises:
        ConfigError: the layer is quantised in a format that is not served with adapters.
    """
    if isinstance(layer, _sgl.LinearBase) and (why := why_not_served(layer)) is not None:
        raise ConfigError(f"{why} (docs/quantization.md)")
    ours = layer_class(layer) if lora_backend.name == "atmm" else None
    return ours(layer, lora_backend) if ours is not None else original(layer, lora_backend)


def activations(runner: Any) -> Places:
    """What stands in the place of a model runner's activations."""
    if getattr(runner, "lora_manager", None) is None:
        return "LoRA is off"
    return pair_activations(runner.model) if on_kernels(torch.device(runner.device)) else "it runs on a CPU"


def pair_activations(model: nn.Module) -> list[Place]:
    """An ``AtmmSiluAndMul`` behind every wrapped gate_up whose output goes straight into SiluAndMul.

    Other models scale, clamp or reorder between the two, some in place; so only MLPs are taken whose ``forward`` is
    known to do nothing there.
    """
    straight = {_sgl.LlamaMLP.forward: "act_fn", _sgl.Qwen2MLP.forward: "act_fn", _sgl.Qwen2_5_VLMLP.forward: "act"}
    places = []
    for mlp in list(model.modules()):
        name = straight.get(type(mlp).forward)
        if name is None:
            continue
        linear, activation = mlp.gate_up_proj, getattr(mlp, name)
        if (
            isinstance(linear, AtmmMergedColumnLinear)
            and isinstance(activation, _sgl.SiluAndMul)
            and not linear.base_layer.gather_output
        ):
            places.append(Place(mlp, name, AtmmSiluAndMul(activation, linear)))
    return places
