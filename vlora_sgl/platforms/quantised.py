"""Quantised models on a plain CPU: SGLang's loading, and a linear that takes its weight back to the engine's type.

SGLang's formats run on GPU kernels. Here their parameters are created and filled by SGLang, sharded as it shards them;
then a layer's weight is brought to the one form of ``vlora_sgl.scaled``, and a forward multiplies by what that means.
Activations are not quantised: a layer computes what the checkpoint's numbers say, not what a GPU's kernel rounds.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import Parameter

from vlora_sgl import _sgl
from vlora_sgl.errors import ConfigError
from vlora_sgl.scaled import E4M3, Scaled, quantise
from vlora_sgl.server_args import QUANTISED_ON_A_CPU

CONFIGS = ("Fp8Config", "W8A8Fp8Config", "W8A8Int8Config", "CompressedTensorsConfig", "AWQConfig", "GPTQConfig")
FORMATS = dict(zip(QUANTISED_ON_A_CPU, CONFIGS, strict=True))
"""SGLang's name of a format -> its configuration, of those that are read."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of a word's eight nibbles each column is in."""


def config_for(name: str) -> type[Any]:
    """SGLang's configuration of a format with linears that run on a CPU.

    Raises:
        ConfigError: the format is not read here.
    """
    if name not in FORMATS:
        raise ConfigError(f"--quantization={name} does not work on a plain CPU, which reads {', '.join(FORMATS)}")
    base = getattr(_sgl, FORMATS[name])
    return type(f"Cpu{base.__name__}", (_OnCpu, base), {})


class _OnCpu:
    """Comes before one of SGLang's configurations."""

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """SGLang's choice for a layer; of quantised linears ours.

        Raises:
            ConfigError: quantised experts, or a scheme that is not read here.
        """
        if isinstance(layer, _sgl.FusedMoE):
            raise ConfigError(f"{prefix}: quantised experts are not served on a plain CPU")
        try:
            method = super().get_quant_method(layer, prefix)  # type: ignore[misc]
        except (NotImplementedError, ImportError) as error:
            raise ConfigError(f"{prefix}: its quantisation is not read on a plain CPU: {error}") from error
        if isinstance(layer, _sgl.LinearBase) and not isinstance(method, _sgl.UnquantizedLinearMethod):
            kind = type(method)
            # By its old name: SGLang asks for that when it chooses how parameters are filled.
            ours: Any = object.__new__(type(kind.__name__, (DequantisingLinearMethod, kind), {}))
            vars(ours).update(vars(method), name=prefix)
            return ours
        return method

    def _check_scheme_supported(self, min_capability: int, error: bool = True) -> bool:
        """SGLang asks the GPU."""
        return True


class DequantisingLinearMethod:
    """A quantised linear with torch alone; comes before SGLang's method, which creates what the checkpoint fills.

    Attributes:
        name: of the layer, for messages.
    """

    name: str

    def process_weights_after_loading(self, layer: Any) -> None:
        """Bring the layer's weight to one form: ``weight``, ``weight_scale`` and ``scale_block``."""
        found = self._read(layer)
        for name in ("weight_scale_inv", "qweight", "qzeros", "scales", "g_idx"):
            layer._parameters.pop(name, None)
        layer.weight = Parameter(found.weight, requires_grad=False)
        layer.weight_scale = Parameter(found.scale, requires_grad=False)
        layer.scale_block = found.block

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight = Scaled(layer.weight, layer.weight_scale, layer.scale_block).wide()
        return F.linear(x, weight.to(x.dtype), bias)

    def _read(self, layer: Any) -> Scaled:
        if hasattr(layer, "qweight"):
            config = self.quant_config  # type: ignore[attr-defined]
            return read_gptq(layer, config, self.name) if hasattr(layer, "g_idx") else read_awq(layer, config)
        if not isinstance(getattr(layer, "weight", None), torch.Tensor):
            scheme = type(getattr(layer, "scheme", self)).__name__
            raise ConfigError(f"{self.name}: weights of {scheme} are not read on a plain CPU")
        weight = layer.weight.data
        if weight.dtype not in (E4M3, torch.int8):  # a checkpoint that is quantised as it is loaded
            return quantise(weight, (1, weight.shape[1]), E4M3)
        scale = getattr(layer, "weight_scale_inv", None)
        scale = (layer.weight_scale if scale is None else scale).data.float()
        if scale.ndim == 1:  # one for each of the stacked projections
            widths = torch.tensor(layer.logical_widths)
            scale = scale.repeat_interleave(widths)[:, None]
        block = self._block(layer) or (1, weight.shape[1])
        return Scaled(weight, scale.contiguous(), block)

    def _block(self, layer: Any) -> tuple[int, int] | None:
        holders = getattr(layer, "scheme", None), self
        found = [block for holder in holders if (block := getattr(holder, "weight_block_size", None))]
        return (int(found[0][0]), int(found[0][1])) if found else None


def read_awq(layer: Any, config: Any) -> Scaled:
    """AWQ's packed weight: words [K, N / 8], zeros and scales of groups of inputs."""
    words, zeros, scales = (getattr(layer, name).data for name in ("qweight", "qzeros", "scales"))
    numbers = _nibbles(words, AWQ_ORDER) - _nibbles(zeros, AWQ_ORDER).repeat_interleave(config.group_size, 0)
    return _transposed(numbers, scales, config.group_size)


def read_gptq(layer: Any, config: Any, name: str) -> Scaled:
    """GPTQ's packed weight: words [K / 8, N], zeros and scales of groups of inputs.

    Raises:
        ConfigError: other than four bits, or inputs that are not in the groups' order.
    """
    if config.weight_bits != 4:
        raise ConfigError(f"{name}: GPTQ of {config.weight_bits} bits is not read on a plain CPU, of 4 it is")
    words, zeros, scales = (getattr(layer, name).data for name in ("qweight", "qzeros", "scales"))
    group = config.group_size if config.group_size > 0 else 8 * len(words)
    if not torch.equal(layer.g_idx.data.long(), torch.arange(8 * len(words)) // group):
        raise ConfigError(f"{name}: GPTQ with desc_act is not read on a plain CPU: its groups are not in order")
    first = 0 if config.checkpoint_format == "gptq_v2" else 1  # the older one stores a zero less 1
    numbers = _nibbles(words.T, range(8)).T - (_nibbles(zeros, range(8)) + first).repeat_interleave(group, 0)
    return _transposed(numbers, scales, group)


def _nibbles(words: torch.Tensor, order: Any) -> torch.Tensor:
    """[R, 8 C] int8 of words [R, C] int32: column c is nibble ``order[c % 8]``."""
    shifts = torch.tensor([4 * place for place in order], dtype=torch.int32)
    return ((words[..., None] >> shifts) & 15).flatten(1).to(torch.int8)


def _transposed(numbers: torch.Tensor, scales: torch.Tensor, group: int) -> Scaled:
    return Scaled(numbers.T.contiguous(), scales.T.float().contiguous(), (1, group))
