"""Vision heads in training: their features, where their weights start, their targets, and their answers.

A head reads what the LM head reads (the post-norm hidden states), at the place serving reads it: the prompt's last
token, or the image's tokens (``vlora_sgl/heads/worker.py``; a test holds both equal).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vlora_sgl.errors import ConfigError
from vlora_sgl.generate.datasets import Example
from vlora_sgl.heads.base import Grid, VisionHead
from vlora_sgl.heads.count import CountHead
from vlora_sgl.heads.detect import Boxes

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    Model = PreTrainedModel | PeftModel


@contextmanager
def hidden_states(model: Model) -> Iterator[list[Tensor]]:
    """Within it, the list holds the LM head's input [B, T, hidden] of the latest forward pass."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen[:] = [args[0]]

    hook = model.get_output_embeddings().register_forward_pre_hook(keep)
    try:
        yield seen
    finally:
        hook.remove()


def image_grids(row: dict[str, Tensor], config: PretrainedConfig) -> list[Grid]:
    """The image-token cells of each image of a processed example.

    Raises:
        ConfigError: a model whose image tokens are not one grid (outside the Qwen2-VL family).
    """
    merge = getattr(config.vision_config, "spatial_merge_size", None)
    if merge is None or "image_grid_thw" not in row:
        raise ConfigError("dense heads need a model whose image tokens form a grid (the Qwen2-VL family)")
    cell = config.vision_config.patch_size * merge
    return [Grid(h // merge, w // merge, cell) for _, h, w in row["image_grid_thw"].tolist()]


def target(head: VisionHead, example: Example, grids: Sequence[Grid] = ()) -> Boxes | int:
    """What ``head`` should answer: a label's index, a count, or ``Boxes`` in pixels of the model's input image.

    Raises:
        ConfigError: an answer that the head cannot give, by example.
    """
    where = ", ".join(map(str, example.images))
    if head.features == "image_tokens":
        if len(grids) != 1:
            raise ConfigError(f"{where}: a dense head is trained on one image per example, got {len(grids)}")
        unknown = {label for label, _ in example.boxes} - set(head.labels)
        if unknown:
            raise ConfigError(f"{where}: boxes labelled {sorted(unknown)}, head {head.name!r} has {head.labels}")
        size = torch.tensor([grids[0].columns, grids[0].rows] * 2, dtype=torch.float32) * grids[0].cell
        boxes = torch.tensor([box for _, box in example.boxes], dtype=torch.float32).reshape(-1, 4) * size
        return Boxes(boxes, torch.tensor([head.labels.index(label) for label, _ in example.boxes], dtype=torch.long))
    if isinstance(head, CountHead):
        if not example.answer.isdecimal():
            raise ConfigError(f"{where}: head {head.name!r} counts, and the answer is {example.answer!r}")
        return int(example.answer)
    if example.answer not in head.labels:
        raise ConfigError(f"{where}: the answer {example.answer!r} is no label of head {head.name!r}: {head.labels}")
    return head.labels.index(example.answer)


def start_from_answers(head: VisionHead, model: Model, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Start a closed-set head as the LM head's rows of its answers' first tokens; ``False`` if these are not distinct.

    Such a head is right wherever greedy decoding is: the token that is likeliest of all is so among the labels' too.
    Training goes on from there.
    """
    if head.features != "last_token":
        return False
    answers = [str(n) for n in range(head.outputs)] if isinstance(head, CountHead) else head.labels
    first = [tokenizer.encode(answer, add_special_tokens=False)[0] for answer in answers]
    if len(set(first)) < len(first):
        return False
    output = model.get_output_embeddings()
    head.linear.weight.data.copy_(output.weight[first])
    bias = getattr(output, "bias", None)
    head.linear.bias.data.copy_(bias[first]) if bias is not None else head.linear.bias.data.zero_()
    return True


def raw_outputs(
    head: VisionHead, hidden: Tensor, input_ids: Tensor, prompt_lengths: Sequence[int], image_token: int | None
) -> list[Tensor]:
    """Each row's raw outputs: [outputs], or for a dense head [image tokens, outputs].

    Args:
        hidden: [B, T, hidden], right-padded.
        prompt_lengths: tokens of each prompt, the generation prompt included.
    """
    if head.features == "last_token":
        last = torch.tensor(prompt_lengths, device=hidden.device) - 1
        return list(head(hidden[torch.arange(len(last), device=hidden.device), last]))
    return [head(row[ids == image_token]) for row, ids in zip(hidden, input_ids, strict=True)]


def batch_loss(
    head: VisionHead, raw: Sequence[Tensor], targets: Sequence[Boxes | int], grids: Sequence[Grid]
) -> Tensor:
    """Mean loss of a batch; ``grids`` has one per row, and is read by dense heads only."""
    device = raw[0].device
    if head.features == "last_token":
        return head.loss(torch.stack(list(raw)), torch.tensor(targets, device=device))
    losses = [
        head.loss(one, (Boxes(wanted.boxes.to(device), wanted.labels.to(device)), grid))
        for one, wanted, grid in zip(raw, targets, grids, strict=True)
        if isinstance(wanted, Boxes)
    ]
    return torch.stack(losses).mean()
