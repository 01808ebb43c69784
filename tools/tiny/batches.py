"""Token batches for the embedded model's pretraining, and the batched forward pass over one fixed geometry.

Every image here is 112 x 112, so the vision tower's attention is one dense batch and positions are a formula. The
stock forward loops over images in Python; a test holds this one equal to it.

A row holds one scene and many questions. In most rows every question stands alone: it sees the image and itself, at
the positions it would have in a dialogue of its own. Were it to see the questions before it, it could read its answer
off them ("Is there a red ring?" gives away the color of the ring), and the model would learn to read, not to look.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision
from transformers.vision_utils import get_vision_position_ids

from tools.tiny import scenes as S

IMAGE_TOKENS = 16
IGNORE = -100
ROW_TOKENS = {1: 160, 3: 128}  # the most of a row with so many images
CONVERSATIONS = 0.2  # share of rows that are one dialogue of several turns instead of questions that stand alone
TURNS = {1: 5, 3: 2}  # of a dialogue about so many images
WEIGHTS = {
    "colour": 3.0, "shape": 1.5, "count": 3.0, "count_colour": 2.0, "position": 1.5, "relation": 0.5, "digit": 4.0,
    "caption": 1.5, "box": 0.7, "repeat": 0.7, "motion": 3.0,
}  # fmt: skip
"""How much likelier a question of a kind is to be asked than others; kinds that are not here have 1."""

Row = tuple[list[int], list[int], list[int], list[int]]
"""A row's token ids and labels, which token of its dialogue each is, and the segment of each: 0 is the images'."""


class Encoder:
    """Turns dialogues into token rows, remembering the pieces of text it has tokenized."""

    def __init__(self, tokenizer: Any) -> None:
        start, image, end = tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"])
        self.vision = [start, *[image] * IMAGE_TOKENS, end]
        self.pad = tokenizer.pad_token_id
        self.piece = functools.lru_cache(200_000)(functools.partial(tokenizer.encode, add_special_tokens=False))

    def row(self, turns: Sequence[tuple[str, str]], images: int = 1, system: bool = False, alone: bool = False) -> Row:
        """As many (question, answer) about one or three images as the row holds; only answers are in the loss.

        Args:
            system: begin with a system prompt.
            alone: every question is a dialogue and a segment of its own; by default all are turns of one dialogue.
        """
        before = self.piece("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n") if system else []
        ids = before + self.piece("<|im_start|>user\n") + self.vision * images
        start = len(ids)
        labels, index, segment = [IGNORE] * start, list(range(start)), [0] * start
        between = self.piece("\n") + self.piece("<|im_start|>user\n")
        for number, (question, answer) in enumerate(turns, 1):
            prompt = between if number > 1 and not alone else []
            prompt = prompt + self.piece(question) + self.piece("<|im_end|>\n<|im_start|>assistant\n")
            reply = self.piece(answer) + self.piece("<|im_end|>")
            more = prompt + reply
            if len(ids) + len(more) > ROW_TOKENS[images]:
                continue
            first = start if alone else len(ids)
            index += range(first, first + len(more))
            segment += [number * alone] * len(more)
            ids, labels = ids + more, labels + [IGNORE] * len(prompt) + reply
        return ids, labels, index, segment

    def tensors(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """``ids``, ``index``, ``segment``: (B, T); ``where``, ``wanted``: (N,): flat positions and the token next.

        T is the longest row, rounded up to a multiple of 32: so full batches have one T and compile once.
        """
        length = -(-max(len(ids) for ids, *_ in rows) // 32) * 32
        ids, labels, index, segment = (
            torch.from_numpy(np.array([part + [fill] * (length - len(part)) for part in parts]))
            for parts, fill in zip(zip(*rows, strict=True), (self.pad, IGNORE, 0, 0), strict=True)
        )
        following = labels.roll(-1, 1).flatten()  # the first label of a row, now its last, is none
        where = (following != IGNORE).nonzero()[:, 0]
        return {"ids": ids, "index": index, "segment": segment, "where": where, "wanted": following[where]}


def make_batch(
    encoder: Encoder, count: int, seed: int, kinds: tuple[str, ...] = S.QUESTION_TYPES, moving: bool = False
) -> dict[str, Any]:
    """A pretraining batch: scenes to draw, what lies in their cells, and rows of as many questions as fit.

    Args:
        kinds: of questions.
        moving: three images per row, in which one object moves, instead of one.
    """
    draw, rng = np.random.default_rng(seed), random.Random(seed)
    frames, directions = S.motion(count, draw) if moving else ([S.sample(count, draw)], [])
    rows = []
    for i in range(count):
        asked = S.questions(frames[0], i, rng, ("colour", "shape") if moving else kinds)
        if moving:
            asked.append(("motion", S.MOTION_QUESTION, directions[i]))
        elif kinds == S.QUESTION_TYPES:
            word = rng.choice(S.WORDS)
            asked.append(("repeat", S.REPEAT_QUESTION.format(word), word))
        # The smallest of exponential variates with these rates: drawn without replacement by weight.
        asked.sort(key=lambda one: rng.expovariate(WEIGHTS.get(one[0], 1.0)))
        system, alone = rng.random() < 0.15, rng.random() >= CONVERSATIONS
        turns = [one[1:] for one in asked]
        rows.append(encoder.row(turns if alone else turns[: TURNS[len(frames)]], len(frames), system, alone))
    return {"frames": frames, "cells": None if moving else cell_targets(frames[0]), **encoder.tensors(rows)}


def cell_targets(scenes: S.Scenes) -> dict[str, Tensor]:
    """What lies in each of the 4 x 4 image-token cells, for the auxiliary head.

    Returns:
        colour, shape: (B, 16) int64, -100 where no object's centre lies in the cell; digit: (B,) int64, -100 for none.
    """
    drawn = np.nonzero(scenes.size > 0)
    column, row = (scenes.centre[drawn] // 28).clip(0, 3).astype(int).T
    at = drawn[0], row * 4 + column
    colour, shape = np.full((2, len(scenes), 16), IGNORE)
    colour[at], shape[at] = scenes.colour[drawn], scenes.shape[drawn]
    found = {"colour": colour, "shape": shape, "digit": np.where(scenes.digit >= 0, scenes.digit, IGNORE)}
    return {name: torch.from_numpy(value) for name, value in found.items()}


def patches(images: Tensor, processor: Any) -> Tensor:
    """What the image processor makes of 112 x 112 images: (B, 3, 112, 112) uint8 -> (B, 64, 1176) float32."""
    usual = processor.image_processor
    mean, std = torch.tensor([usual.image_mean, usual.image_std], device=images.device)[..., None, None]
    x = (images.float() / 255 - mean) / std
    x = x.reshape(-1, 3, 4, 2, 14, 4, 2, 14).permute(0, 2, 5, 3, 6, 1, 4, 7)  # B gh gw mh mw C ph pw
    x = x.reshape(-1, 64, 3, 1, 196).expand(-1, -1, -1, 2, -1)  # a still image is two equal frames
    return x.reshape(-1, 64, 1176)


def vision_block(block: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One of the tower's blocks over many images at once, (B, 64, width); cosines and sines are (64, D)."""
    q, k, v = block.attn.qkv(block.norm1(x)).unflatten(-1, (3, block.attn.num_heads, -1)).unbind(2)
    q, k = apply_rotary_pos_emb_vision(q, k, cos, sin)
    a = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    x = x + block.attn.proj(a.transpose(1, 2).flatten(2))
    return x + block.mlp(block.norm2(x))


def encode_images(visual: Any, pixels: Tensor, run: Callable[..., Tensor] = vision_block) -> Tensor:
    """The vision tower over 112 x 112 images: (B, 64, 1176) -> (B, 16, hidden). ``run``: or a compiled one."""
    x = F.linear(pixels, visual.patch_embed.proj.weight.flatten(1))  # a convolution whose windows do not overlap
    places = get_vision_position_ids(torch.tensor([[1, 8, 8]]), visual.spatial_merge_size).to(x.device)
    angles = visual.rotary_pos_emb(places).repeat(1, 2)
    for block in visual.blocks:
        x = run(block, x, angles.cos(), angles.sin())
    return visual.merger(x.flatten(0, 1)).unflatten(0, (-1, IMAGE_TOKENS))


def forward(model: Any, ids: Tensor, image_embeddings: Tensor, index: Tensor, segment: Tensor) -> Tensor:
    """Final hidden states (B, T, hidden) of rows with their image tokens' embeddings (images in row order) put in.

    Args:
        index: (B, T), which token of its dialogue each is.
        segment: (B, T); a token sees those before it of its own segment and of segment 0.
    """
    text = model.model.language_model
    embeddings = text.embed_tokens(ids)
    is_image = ids == model.config.image_token_id
    x = embeddings.masked_scatter(is_image[..., None], image_embeddings.to(embeddings.dtype))
    # Rows and columns of an image's 16 tokens count up to 4, and what follows begins there: 12 less than its index.
    before = is_image.cumsum(1) - is_image.long()
    inside = before % IMAGE_TOKENS * is_image
    start = index - inside - before // IMAGE_TOKENS * 12
    positions = torch.stack([start, start + inside // 4, start + inside % 4])
    one, other = segment[:, None, :, None], segment[:, None, None, :]
    past = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
    mask = past & ((one == other) | (other == 0))
    return text(
        inputs_embeds=x, position_ids=positions, attention_mask={"full_attention": mask}, use_cache=False
    ).last_hidden_state
