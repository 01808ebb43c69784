"""Adapters that start after the image: their delta is masked before the invocation start, in training as in serving.

Serving runs the prompt's tokens up to the end of its last image on the base model (``mem_cache/radix_cache.py`` places
the invocation start, ``lora/invocation.py`` splits the rows), so every such adapter shares the image's keys and values
with the base.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vlora_sgl.errors import ConfigError
from vlora_sgl.heads.store import AFTER_IMAGE

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = ["AFTER_IMAGE", "activate_after_image", "after_image"]


def after_image(input_ids: Tensor, image_token: int) -> Tensor:
    """Which tokens run with the adapter: those behind a row's last image token, all of a row without one.

    Args:
        input_ids: (B, T) int64.
    Returns:
        (B, T) bool.
    """
    place = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)
    end = ((input_ids == image_token) * place).amax(1, keepdim=True)
    return place > end


def activate_after_image(peft_model: PeftModel) -> PeftModel:
    """Make every forward pass of a PEFT model add its LoRA delta behind the last image only; returns the model.

    Raises:
        ConfigError: a model without an image token, or a LoRA layer that is not linear.
    """
    image_token = getattr(peft_model.config, "image_token_id", None)
    if image_token is None:
        raise ConfigError(f"{type(peft_model.config).__name__} names no image_token_id: where would the image end?")
    mask: list[Tensor] = []

    def see(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        mask[:] = [after_image(args[0], image_token)[..., None]]

    def cut(module: nn.Module, args: tuple[Tensor, ...], delta: Tensor) -> Tensor:
        return delta * mask[0].to(delta.dtype)

    up = [module for name, module in peft_model.named_modules() if ".lora_B." in name]
    if not up or not all(isinstance(module, torch.nn.Linear) for module in up):
        raise ConfigError("an adapter that starts after the image needs LoRA on linear layers, and on nothing else")
    # The embedding is the one module that sees the token ids on every path: forward, generate, with and without PEFT.
    peft_model.get_input_embeddings().register_forward_pre_hook(see)
    for module in up:
        module.register_forward_hook(cut)
    return peft_model
