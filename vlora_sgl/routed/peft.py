"""A routed adapter inside transformers and PEFT: the reference for serving, and what a token router is trained in.

Every adapted layer computes its base output, and adds each member's delta times that member's weight at each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vlora_sgl.routed.spec import RoutedSpec
from vlora_sgl.routed.token_router import UNIT, quantised, top_weights

if TYPE_CHECKING:
    from peft import PeftModel


class RoutedModel:
    """Routes a PEFT model's adapters token by token while ``applied`` is open.

    Args:
        model: a ``PeftModel`` that has every member loaded under its name.
        spec: the routed adapter.

    Attributes:
        weights: [B, T, members] float32 of the latest forward.
        votes: [B, T, members] of the latest forward, not rounded; learned routers only.
        temperature: ``None``: weights are the ones served. Else, for training a learned router, its softmax of the
            mean votes at this temperature weighs all members.
        straight: with a temperature, weights are the ones served, and that softmax only gives their gradient.
        means: [B, T, members], the mean votes that decide, not rounded; with a temperature only.
        probabilities: [B, T, members], that softmax, of the latest forward.
    """

    def __init__(self, model: PeftModel, spec: RoutedSpec) -> None:
        self.model, self.spec = model, spec
        self.temperature: float | None = None
        self.straight = False
        self.weights = torch.zeros(0)
        self.votes = torch.zeros(0)
        self.means = torch.zeros(0)
        self.probabilities = torch.zeros(0)
        self._ids = torch.zeros(0)
        self._total: Tensor | int = 0
        self._count = 0

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, forwards and ``generate`` run routed. Sequences are padded on the right, if at all."""
        from peft.tuners.lora import LoraLayer

        hooks = [self.model.get_base_model().register_forward_pre_hook(self._note_ids, with_kwargs=True)]
        layers = [module for module in self.model.modules() if isinstance(module, LoraLayer)]
        hooks += [layer.register_forward_hook(self._adder(layer)) for layer in layers]
        first = next(
            module
            for name, module in self.model.named_modules()
            if name.endswith("layers.0") and any(isinstance(part, LoraLayer) for part in module.modules())
        )
        hooks.append(first.register_forward_pre_hook(self._route, with_kwargs=True))
        try:
            with self.model.disable_adapter():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _note_ids(self, _: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        self._ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]

    def _route(self, _: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        if x.shape[1] > 1:
            self._total, self._count = 0, 0  # a prompt: a new sequence
        if self.spec.router is None:
            self.weights = self._by_rules()
            self._count += x.shape[1]
            return
        self.votes = self.spec.router(x)
        self.weights = self._served()
        if self.temperature is not None:
            count = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
            self.means = self.votes.cumsum(1) / count if self.spec.router.context == "prefix" else self.votes
            self.probabilities = (self.means / self.temperature).softmax(-1)
            slope = self.probabilities - self.probabilities.detach()
            self.weights = self.weights + slope if self.straight else self.probabilities

    def _served(self) -> Tensor:
        """[B, T, members]: the weights of tokens with ``votes``, as serving computes them."""
        assert self.spec.router is not None
        length = self.votes.shape[1]
        votes = quantised(self.votes.detach())
        if self.spec.router.context == "token":
            count = torch.ones_like(votes[..., 0])
        else:
            votes = votes.cumsum(1) + self._total
            count = torch.arange(1, length + 1, device=votes.device).expand(votes.shape[:2]) + self._count
            self._total, self._count = votes[:, -1:], self._count + length
        return top_weights(votes.flatten(0, 1), count.flatten(), self.spec.top_k).view(votes.shape)

    def _by_rules(self) -> Tensor:
        config, ids, modalities = self.model.get_base_model().config, self._ids, self.spec.modalities
        member = torch.full_like(ids, modalities.get("text", -1))
        for first, end, chosen in self.spec.ranges:
            member = torch.where((ids >= first) & (ids < end), chosen, member)
        for modality in ("image", "video"):
            token = getattr(config, f"{modality}_token_id", None)
            if token is not None:
                member = torch.where(ids == token, modalities.get(modality, -1), member)
        place = torch.arange(ids.shape[1], device=ids.device) + self._count
        for first, end, chosen in self.spec.positions:
            member = torch.where((place >= first) & (place < end), chosen, member)
        return (member[..., None] == torch.arange(len(self.spec.members), device=ids.device)).float()

    def _adder(self, layer: Any) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        """The hook that adds the members' deltas to ``layer``'s output: all members as one adapter of summed rank."""
        here = [(k, name) for k, name in enumerate(self.spec.members) if name in layer.lora_A]
        if not here:
            return lambda _, inputs, output: output
        owner = torch.tensor(
            [k for k, name in here for _ in range(len(layer.lora_A[name].weight))],
            device=next(layer.lora_A.parameters()).device,
        )  # of each row of A

        def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            x = inputs[0]
            if x.shape[:2] != self.weights.shape[:2]:
                return output  # another tower's tokens
            a = torch.cat([layer.lora_A[name].weight for _, name in here])
            b = torch.cat([layer.lora_B[name].weight * layer.scaling[name] for _, name in here], 1)
            low = (x.to(a.dtype) @ a.T) * self.weights[..., owner].to(a.dtype)
            return output + (low @ b.T).to(output.dtype)

        return add


def mean_votes(routed: RoutedModel) -> Tensor:
    """[B, T, members]: mean vote of every token's prefix, of the latest forward, as serving rounds it."""
    votes = quantised(routed.votes).cumsum(1).double() / UNIT
    return votes / torch.arange(1, votes.shape[1] + 1, device=votes.device)[:, None]
