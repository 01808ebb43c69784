"""SGLang's mixture-of-experts layers with adapters on their experts, through the operator.

SGLang's Triton runner computes the experts, and calls hooks behind gate_up and behind down, where the adapters join.
Of many rows (prefill) gate_up's are left to the activation behind it, which reads that output anyhow.
On a CPU, where SGLang's path has no such places, the same is done here with torch. To the pool and to the merge a
layer is two linears, which hold the weights of all experts: they are called as transformers calls its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from vlora_sgl import _sgl
from vlora_sgl.errors import ConfigError
from vlora_sgl.kernels.atmm import on_kernels
from vlora_sgl.kernels.atmm.expert_tiles import are_many
from vlora_sgl.lora.deferred import DeferredAdapters
from vlora_sgl.lora.experts import FUSED
from vlora_sgl.seams import Place, Places

ACTIVATION = "silu_and_mul"
"""Of ``_sgl.fused_moe``, which has it on a GPU."""
MOST = 1 << 16
"""Experts of all slots: they are counted in half a word."""


@dataclass(eq=False)
class ExpertLinear:
    """All experts' linears of one kind, this rank's part.

    Attributes:
        weight: [E, N, K].
        parts: stacked projections: 2 of gate_up.
        rank, ranks: of the tensor-parallel ranks that share the experts' intermediate size; gate_up has its part of
            every projection's outputs, down of the inputs.
        a, b: the slots, [slots, E, parts * R, K] and [slots, E, N, R].
    """

    weight: torch.Tensor
    parts: int
    rank: int
    ranks: int
    a: torch.Tensor = None  # type: ignore[assignment]
    b: torch.Tensor = None  # type: ignore[assignment]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Bounds of the stacked projections' columns of the output."""
        width = self.weight.shape[1] // self.parts
        return tuple(range(0, self.weight.shape[1] + 1, width))

    def shard(self, side: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of an adapter's stacked A [E * parts * r, K] or B [E * N, r], as a slot holds it."""
        experts = len(self.weight)
        if side == "A":
            own = tensor.unflatten(0, (experts, -1))
            return own if self.parts > 1 else own.chunk(self.ranks, -1)[self.rank]
        own = tensor.unflatten(0, (experts, self.parts, -1))
        return (own if self.parts == 1 else own.chunk(self.ranks, 2)[self.rank]).flatten(1, 2)

    def slices(self) -> Iterator[tuple[int, int, slice]]:
        """(expert, projection, rows of its weight), expert by expert."""
        bounds = self.offsets
        for expert in range(len(self.weight)):
            for part in range(self.parts):
                yield expert, part, slice(bounds[part], bounds[part + 1])


class AtmmExperts(_sgl.FusedMoEWithLoRA):
    """A mixture-of-experts layer.

    Attributes:
        linears: gate_up and down, by their names in ``FUSED``.
        deferred: shared with the activation that adds gate_up's adapters of many rows, where there is one.

    Raises:
        ConfigError: experts of this form, or spread over ranks in this way, are not served with adapters.
    """

    deferred: DeferredAdapters[Operands] | None = None

    def __init__(self, base_layer: Any, lora_backend: Any) -> None:
        why = why_not_adapted(base_layer)
        if why is not None:
            raise ConfigError(f"adapters on experts cannot be served here: {why}")
        super().__init__(base_layer, lora_backend)
        shared = base_layer.moe_tp_rank, base_layer.moe_tp_size
        gate_up, down = (weight.data for weight in (base_layer.w13_weight, base_layer.w2_weight))
        linears = ExpertLinear(gate_up, 2, *shared), ExpertLinear(down, 1, *shared)
        self.linears: Mapping[str, ExpertLinear] = dict(zip(FUSED, linears, strict=True))

    def set_lora_info(
        self,
        gate_up_lora_a_weights: torch.Tensor,
        gate_up_lora_b_weights: torch.Tensor,
        down_lora_a_weights: torch.Tensor,
        down_lora_b_weights: torch.Tensor,
    ) -> None:
        """Take the pool's buffers.

        Raises:
            ConfigError: more experts of all slots than the kernels can count.
        """
        if (count := gate_up_lora_a_weights.shape[0] * gate_up_lora_a_weights.shape[1]) > MOST:
            raise ConfigError(
                f"--max-loras-per-batch={len(gate_up_lora_a_weights)} makes {count} experts of slots, at most {MOST}"
            )
        super().set_lora_info(gate_up_lora_a_weights, gate_up_lora_b_weights, down_lora_a_weights, down_lora_b_weights)
        gate_up, down = self.linears.values()
        gate_up.a, gate_up.b, down.a, down.b = (
            gate_up_lora_a_weights, gate_up_lora_b_weights, down_lora_a_weights, down_lora_b_weights,
        )  # fmt: skip

    def forward(self, hidden_states: torch.Tensor, topk_output: Any, **options: Any) -> torch.Tensor:
        """As SGLang's layer: [M, hidden] of hidden_states [M, hidden], with each row's adapters."""
        if not (self.lora_active and self.lora_backend.applies):
            answer: torch.Tensor = self.base_layer.forward(hidden_states, topk_output, **options)
            return answer
        if on_kernels(hidden_states.device):
            answer = super().forward(hidden_states, topk_output, **options)
        else:
            answer = self._on_torch(hidden_states, topk_output.topk_weights, topk_output.topk_ids)
        base = self.base_layer
        if base.reduce_results and base.moe_tp_size > 1:
            answer = _sgl.tensor_model_parallel_all_reduce(answer)
        return answer

    def _get_lora_info(self) -> ExpertHooks:
        """What SGLang's runner is given for its hooks (``hooks``)."""
        return ExpertHooks(self)

    def _on_torch(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """[M, hidden], with torch alone."""
        gate_up, down = self.linears.values()
        chosen = ids.reshape(-1)
        of_tokens, of_choices = self.lora_backend.experts(ids, weights, len(gate_up.weight))
        y = _by_expert(x.repeat_interleave(ids.shape[1], 0), gate_up.weight, chosen)
        gate, up = self.lora_backend.add_experts(y, x, gate_up, of_tokens).chunk(2, -1)
        inner = F.silu(gate) * up
        y = self.lora_backend.add_experts(_by_expert(inner, down.weight, chosen), inner, down, of_choices)
        return (y.view(*ids.shape, -1).to(weights.dtype) * weights[..., None]).sum(1).to(x.dtype)


Operands = tuple[Any, torch.Tensor, ExpertLinear, Any]
"""What gate_up leaves to the activation: the backend, and x, linear and routing of its ``add_experts``."""


class ExpertActivation:
    """SGLang's ``silu_and_mul`` between experts' gate_up and down, with the adapters' part where that was left to it.

    Args:
        original: SGLang's.
        layers: which leave it, from now on.
    """

    def __init__(self, original: Callable[..., object], layers: Iterable[AtmmExperts]) -> None:
        self.original, self.deferred = original, DeferredAdapters[Operands]()
        for layer in layers:
            layer.deferred = self.deferred

    def __call__(self, y: torch.Tensor, out: torch.Tensor, *rest: Any, **options: Any) -> object:
        """Leaves silu(gate) * up of y [P, 2 I] in out [P, I]."""
        operands = self.deferred.take(y)
        if operands is None:
            return self.original(y, out, *rest, **options)
        backend, *others = operands
        return backend.silu_experts(y, out, *others)


def activations(runner: Any) -> Places:
    """What stands in the place of the activation in SGLang's runner of experts."""
    if getattr(runner, "lora_manager", None) is None:
        return "LoRA is off"
    layers = [module for module in runner.model.modules() if isinstance(module, AtmmExperts)]
    if not layers:
        return "this model has no experts that adapters apply to"
    if not on_kernels(torch.device(runner.device)) or not hasattr(_sgl.fused_moe, ACTIVATION):
        return "it runs on a CPU"
    original = getattr(_sgl.fused_moe, ACTIVATION)
    return [Place(_sgl.fused_moe, ACTIVATION, ExpertActivation(original, layers))]


class ExpertHooks:
    """What adds the adapters of a layer to what SGLang's runner computes."""

    def __init__(self, layer: AtmmExperts) -> None:
        self.layer = layer

    def hooks(self) -> Any:
        """SGLang's ``LoRAHooks``: each is given the layer's input, what it may change [M, TOPK, N], weights, ids."""
        (gate_up, down), backend = self.layer.linears.values(), self.layer.lora_backend
        deferred, routings = self.layer.deferred, list[Any]()
        if deferred is not None:
            deferred.check_taken()

        def after_gate_up(x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
            leave = deferred is not None and are_many(ids)
            routings[:] = backend.experts(ids, weights, len(gate_up.weight), base=leave)
            flat = y.view(-1, y.shape[-1])
            if deferred is not None and leave:
                deferred.leave(flat, (backend, x, gate_up, routings[0]))
            else:
                backend.add_experts(flat, x, gate_up, routings[0])

        def after_down(x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
            backend.add_experts(y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), down, routings[1])

        return _sgl.LoRAHooks(after_gate_up=after_gate_up, after_down=after_down)


def build_hooks(
    original: Callable[..., Any], hidden_states: torch.Tensor, lora_info: Any, topk_ids: torch.Tensor
) -> Any:
    """Wraps SGLang's ``build_lora_hooks``: for our layers the operator's."""
    if isinstance(lora_info, ExpertHooks):
        return lora_info.hooks()
    return original(hidden_states, lora_info, topk_ids)


def with_linears(modules: Mapping[str, Any]) -> dict[str, Any]:
    """A layer's wrapped modules, with their two linears in the places of experts."""
    found: dict[str, Any] = {}
    for name, module in modules.items():
        if isinstance(module, AtmmExperts):
            found.update({f"{name}.{kind}": linear for kind, linear in module.linears.items()})
        else:
            found[name] = module
    return found


def why_not_adapted(layer: Any) -> str | None:
    """Why a mixture-of-experts layer of SGLang's cannot have adapters; ``None`` if it can."""
    config = layer.moe_runner_config
    if layer.moe_ep_size > 1:
        return "--ep-size spreads experts over ranks; their adapters are served with tensor parallelism"
    if not isinstance(layer.quant_method, _sgl.UnquantizedFusedMoEMethod):
        return f"their weights are quantised ({type(layer.quant_method).__name__})"
    if not layer.quant_method.runner.runner_backend.is_triton():
        return f"--moe-runner-backend is {layer.quant_method.runner.runner_backend.value}, and must be triton"
    usual = config.is_gated and config.activation == "silu" and not config.apply_router_weight_on_input
    limits = config.gemm1_alpha, config.gemm1_clamp_limit, config.swiglu_limit
    special = (*limits, getattr(layer, "w13_weight_bias", None))
    if not usual or any(value is not None for value in special):
        return "they are no gated linears with SiLU and without biases"
    if config.num_fused_shared_experts or _sgl.get_exec().moe.enable_fused_moe_sum_all_reduce:
        return "shared experts, or the sum over ranks, are part of the same launch"
    if config.routed_scaling_factor not in (None, 1.0):
        return f"their sum is scaled by {config.routed_scaling_factor}"
    return None


def _by_expert(x: torch.Tensor, weight: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """[P, N]: each row of x [P, K] times the weight of the expert that it chose; 0 where that is none."""
    y = x.new_zeros((len(x), weight.shape[1]))
    for expert in chosen.unique().tolist():
        if expert >= 0:
            rows = (chosen == expert).nonzero().squeeze(1)
            y[rows] = F.linear(x[rows], weight[expert])
    return y
