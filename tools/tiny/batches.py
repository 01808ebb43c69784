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
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tools.tiny import scenes as S

IMAGE_TOKENS = 16
IGNORE = -100
ROW_TOKENS = 160  # the most of a row with one image
MOTION_ROW_TOKENS = 128
CONVERSATIONS = 0.2  # share of rows that are one dialogue of several turns instead of questions that stand alone
CONVERSATION_TURNS = 5
WEIGHTS = {
    "colour": 3.0, "shape": 1.5, "count": 3.0, "count_colour": 2.0, "position": 1.5, "relation": 0.5, "digit": 4.0,
    "caption": 1.5, "box": 0.7, "repeat": 0.7,
}  # fmt: skip
"""How much likelier a question of a kind is to be asked than others; kinds that are not here have 1."""
_KEPT_PIECES = 200_000
_WORD = re.compile(r" ?\w+|[^\w\s]+|\s+")


class Encoder:
    """Turns dialogues into token rows, remembering the pieces of text it has tokenized."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[str, list[int]] = {}
        self._turns: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
        image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self.image_token = image
        self.vision = [
            tokenizer.convert_tokens_to_ids("<|vision_start|>"),
            *[image] * IMAGE_TOKENS,
            tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        ]
        self.pad = tokenizer.pad_token_id

    def piece(self, text: str) -> list[int]:
        """The tokens of one piece of text."""
        found = self._pieces.get(text)
        if found is None:
            if len(self._pieces) >= _KEPT_PIECES:
                self._pieces.clear()
            found = self._pieces[text] = self._tokenizer.encode(text, add_special_tokens=False)
        return found

    def prefix(self, images: int = 1, system: bool = False) -> list[int]:
        """What comes before the first question about ``images`` images."""
        before = self.piece("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n") if system else []
        return before + self.piece("<|im_start|>user\n") + self.vision * images

    def turn(self, question: str, answer: str) -> tuple[list[int], list[int]]:
        """Token ids and labels from a question to the end of its answer; only the answer is in the loss."""
        found = self._turns.get((question, answer))
        if found is None:
            if len(self._turns) >= _KEPT_PIECES:
                self._turns.clear()
            prompt = self.piece(question) + self.piece("<|im_end|>\n<|im_start|>assistant\n")
            # Word by word, as the tokenizer itself splits: a caption is new, its words are not.
            reply = [token for word in _WORD.findall(answer) for token in self.piece(word)] + self.piece("<|im_end|>")
            found = self._turns[question, answer] = (prompt + reply, [IGNORE] * len(prompt) + reply)
        return found

    def dialogue(
        self, turns: list[tuple[str, str]], images: int = 1, system: bool = False
    ) -> tuple[list[int], list[int]]:
        """Token ids and labels of a conversation about ``images`` images."""
        ids = self.prefix(images, system)
        labels = [IGNORE] * len(ids)
        between = self.piece("\n") + self.piece("<|im_start|>user\n")
        for number, (question, answer) in enumerate(turns):
            if number:
                ids, labels = ids + between, labels + [IGNORE] * len(between)
            more, wanted = self.turn(question, answer)
            ids, labels = ids + more, labels + wanted
        return ids, labels

    def pad_rows(self, rows: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
        """Right-pad to a multiple of 8: ids and labels, both (B, T) int64."""
        length = (max(len(ids) for ids, _ in rows) + 7) // 8 * 8
        ids = np.full((len(rows), length), self.pad, np.int64)
        labels = np.full((len(rows), length), IGNORE, np.int64)
        for r, (i, l) in enumerate(rows):
            ids[r, : len(i)], labels[r, : len(l)] = i, l
        return torch.from_numpy(ids), torch.from_numpy(labels)


class Rows:
    """A batch in the making: rows of ``length`` tokens, each a prefix and then questions that stand alone, or not."""

    def __init__(self, encoder: Encoder, count: int, length: int) -> None:
        self._encoder = encoder
        self.length = length
        self.ids = np.full((count, length), encoder.pad, np.int64)
        self.labels = np.full((count, length), IGNORE, np.int64)
        self.index = np.tile(np.arange(length), (count, 1))
        self.segment = np.zeros((count, length), np.int16)

    def alone(self, row: int, prefix: list[int], asked: list[tuple[str, str, str]]) -> None:
        """Fill a row with as many of the questions (kind, question, answer) as it holds, each standing alone."""
        start = at = len(prefix)
        self.ids[row, :at] = prefix
        for number, (_, question, answer) in enumerate(asked, 1):
            ids, labels = self._encoder.turn(question, answer)
            end = at + len(ids)
            if end > self.length:
                if at > self.length - 12:
                    break  # too little is left for any question
                continue
            self.ids[row, at:end], self.labels[row, at:end] = ids, labels
            self.index[row, at:end] -= at - start
            self.segment[row, at:end] = number
            at = end

    def conversation(self, row: int, asked: list[tuple[str, str, str]], images: int, system: bool) -> None:
        """Fill a row with one dialogue, cut after the last turn that it holds."""
        turns = [(question, answer) for _, question, answer in asked]
        ids, labels = self._encoder.dialogue(turns, images, system)
        while len(ids) > self.length:
            turns.pop()
            ids, labels = self._encoder.dialogue(turns, images, system)
        self.ids[row, : len(ids)], self.labels[row, : len(ids)] = ids, labels

    def tensors(self) -> dict[str, Tensor]:
        """``ids``, ``index``, ``segment``: (B, T); ``where``, ``wanted``: (N,): flat positions and the token next.

        T is the longest row, rounded up to a multiple of 32: so full batches have one T and compile once.
        """
        used = int((self.ids != self._encoder.pad).any(0).nonzero()[0][-1]) + 1
        length = min(-(-used // 32) * 32, self.length)
        following = np.full((len(self.ids), length), IGNORE, np.int64)
        following[:, : length - 1] = self.labels[:, 1:length]
        where = np.nonzero(following.ravel() != IGNORE)[0]
        found = {
            "ids": self.ids[:, :length], "index": self.index[:, :length], "segment": self.segment[:, :length],
            "where": where, "wanted": following.ravel()[where],
        }  # fmt: skip
        return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in found.items()}


def scene_batch(encoder: Encoder, count: int, seed: int, kinds: tuple[str, ...] = S.QUESTION_TYPES) -> dict[str, Any]:
    """A pretraining batch of one image per row and as many questions as fit."""
    scenes = S.sample(count, np.random.default_rng(seed))
    rng = random.Random(seed)
    rows = Rows(encoder, count, ROW_TOKENS)
    repeat = kinds == S.QUESTION_TYPES
    for i in range(count):
        asked = S.questions(scenes, i, rng, kinds)
        if repeat:
            word = rng.choice(S.WORDS)
            asked.append(("repeat", S.repeat_question(word), word))
        # The smallest of exponential variates with these rates: drawn without replacement by weight.
        asked.sort(key=lambda one: rng.expovariate(WEIGHTS.get(one[0], 1.0)))
        system = rng.random() < 0.15
        if rng.random() < CONVERSATIONS:
            rows.conversation(i, asked[:CONVERSATION_TURNS], 1, system)
        else:
            rows.alone(i, encoder.prefix(1, system), asked)
    return {"frames": [scenes], "cells": cell_targets(scenes), **rows.tensors()}


def motion_batch(encoder: Encoder, count: int, seed: int) -> dict[str, Any]:
    """A pretraining batch of three images per row, in which one object moves."""
    frames, directions = S.motion(count, np.random.default_rng(seed))
    rng = random.Random(seed)
    rows = Rows(encoder, count, MOTION_ROW_TOKENS)
    for i, direction in enumerate(directions):
        shape, colour = S.SHAPES[frames[0].shape[i, 0]], tuple(S.COLOURS)[frames[0].colour[i, 0]]
        asked = [
            ("motion", S.MOTION_QUESTION, direction),
            ("colour", f"What color is the {shape}?", colour),
            ("shape", f"What shape is {colour}?", shape),
        ]
        system = rng.random() < 0.15
        if rng.random() < CONVERSATIONS:
            rng.shuffle(asked)
            rows.conversation(i, asked[:2], len(frames), system)
        else:
            rows.alone(i, encoder.prefix(len(frames), system), asked)
    return {"frames": frames, "cells": None, **rows.tensors()}


def cell_targets(scenes: S.Scenes) -> dict[str, Tensor]:
    """What lies in each of the 4 x 4 image-token cells, for the auxiliary head.

    Returns:
        colour, shape: (B, 16) int64, -100 where no object's centre lies in the cell; present: (B, 16) float32;
        digit: (B,) int64, -100 for none.
    """
    count = len(scenes)
    cell = (scenes.centre // 28).clip(0, 3).astype(int)
    index = cell[..., 1] * 4 + cell[..., 0]
    colour = np.full((count, 16), IGNORE)
    shape = np.full((count, 16), IGNORE)
    present = np.zeros((count, 16), np.float32)
    for slot in range(S.MAX_OBJECTS):
        rows = np.nonzero(scenes.size[:, slot] > 0)[0]
        colour[rows, index[rows, slot]] = scenes.colour[rows, slot]
        shape[rows, index[rows, slot]] = scenes.shape[rows, slot]
        present[rows, index[rows, slot]] = 1
    digit = np.where(scenes.digit >= 0, scenes.digit, IGNORE)
    return {
        k: torch.from_numpy(v)
        for k, v in {"colour": colour, "shape": shape, "present": present, "digit": digit}.items()
    }


def patches(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """What ``Qwen2VLImageProcessor`` makes of 112 x 112 images: (B, 3, 112, 112) uint8 -> (B, 64, 1176) float32."""
    x = (images.float() / 255 - mean[:, None, None]) / std[:, None, None]
    count = x.shape[0]
    x = x.reshape(count, 3, 4, 2, 14, 4, 2, 14).permute(0, 2, 5, 3, 6, 1, 4, 7)  # B gh gw mh mw C ph pw
    x = x.reshape(count, 64, 3, 1, 196).expand(-1, -1, -1, 2, -1)  # a still image is two equal frames
    return x.reshape(count, 64, 1176)


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight.float()).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (B, T, heads, D) by cosines and sines (B or 1, T, 1, D)."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def _vision_block(x: Tensor, cos: Tensor, sin: Tensor, heads: int, weights: tuple[Tensor, ...]) -> Tensor:
    """One block of the vision tower, (B, 64, width); the weights in the order of ``parameters()``."""
    norm1, norm2, qkv_w, qkv_b, out_w, out_b, gate_w, gate_b, up_w, up_b, down_w, down_b = weights
    q, k, v = F.linear(_norm(x, norm1, 1e-6), qkv_w, qkv_b).unflatten(-1, (3, heads, -1)).unbind(2)
    q, k = _rotate(q, cos, sin).to(v.dtype), _rotate(k, cos, sin).to(v.dtype)
    a = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    x = x + F.linear(a.transpose(1, 2).flatten(2), out_w, out_b)
    h = _norm(x, norm2, 1e-6)
    return x + F.linear(F.silu(F.linear(h, gate_w, gate_b)) * F.linear(h, up_w, up_b), down_w, down_b)


def _text_block(
    x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, head_size: int, epsilon: float, weights: tuple[Tensor, ...]
) -> Tensor:
    """One block of the language model, (B, T, width); the weights in the order of ``parameters()``."""
    q_w, q_b, k_w, k_b, v_w, v_b, out_w, gate_w, up_w, down_w, norm1, norm2 = weights
    h = _norm(x, norm1, epsilon)
    q = F.linear(h, q_w, q_b).unflatten(-1, (-1, head_size))
    k = F.linear(h, k_w, k_b).unflatten(-1, (-1, head_size))
    v = F.linear(h, v_w, v_b).unflatten(-1, (-1, head_size))
    group = q.shape[2] // k.shape[2]
    q, k = _rotate(q, cos, sin).to(v.dtype), _rotate(k, cos, sin).to(v.dtype)
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    a = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    x = x + F.linear(a.transpose(1, 2).flatten(2), out_w)
    h = _norm(x, norm2, epsilon)
    return x + F.linear(F.silu(F.linear(h, gate_w)) * F.linear(h, up_w), down_w)


@functools.cache
def _compiled(block: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # A block takes its weights as arguments, so all blocks of a kind share one compilation.
    return torch.compile(block, dynamic=False)


def encode_images(visual: Any, pixels: Tensor, fast: bool = False) -> Tensor:
    """The vision tower over 112 x 112 images: (B, 64, 1176) -> (B, 16, hidden). ``fast`` compiles its blocks."""
    count = pixels.shape[0]
    x = F.linear(pixels, visual.patch_embed.proj.weight.flatten(1))  # a convolution whose windows do not overlap
    merged = torch.arange(64, device=x.device)
    block, inner = merged // 4, merged % 4
    rows, columns = block // 4 * 2 + inner // 2, block % 4 * 2 + inner % 2
    angles = visual.rotary_pos_emb(torch.stack([rows, columns], -1))
    angles = torch.cat([angles, angles], -1)
    cos, sin = angles.cos()[None, :, None].to(x.dtype), angles.sin()[None, :, None].to(x.dtype)
    run = _compiled(_vision_block) if fast else _vision_block
    for layer in visual.blocks:
        x = run(x, cos, sin, layer.attn.num_heads, tuple(layer.parameters()))
    return visual.merger(x.reshape(count * 64, -1)).reshape(count, IMAGE_TOKENS, -1)


def positions(ids: Tensor, image_token: int, index: Tensor | None = None) -> Tensor:
    """M-RoPE positions of rows whose images are all 4 x 4 tokens: (3, B, T) int64.

    Args:
        index: (B, T), which token of its dialogue each is; left out: of its row.
    """
    is_image = ids == image_token
    nth = is_image.long().cumsum(1) - 1  # how many image tokens so far
    inside = nth % IMAGE_TOKENS
    before = torch.arange(ids.shape[1], device=ids.device)[None].expand_as(ids) if index is None else index
    # An image of 16 tokens advances the position by 4, so each full image before a token takes 12 off its index.
    full = torch.where(is_image, nth // IMAGE_TOKENS, (nth + 1) // IMAGE_TOKENS)
    base = before - 12 * full - torch.where(is_image, inside, 0)
    return torch.stack(
        [base, base + torch.where(is_image, inside // 4, 0), base + torch.where(is_image, inside % 4, 0)]
    )


def forward(
    model: Any,
    ids: Tensor,
    image_embeddings: Tensor,
    image_token: int,
    index: Tensor | None = None,
    segment: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """Final hidden states (B, T, hidden) of rows with their image tokens' embeddings (images in row order) put in.

    Args:
        index: as in ``positions``.
        segment: (B, T); a token sees those before it of its own segment and of segment 0. Left out: all before it.
        fast: compile the blocks.
    """
    text = model.model.language_model
    embeddings = text.embed_tokens(ids)
    x = embeddings.masked_scatter((ids == image_token)[..., None], image_embeddings.to(embeddings.dtype))
    size = text.config.hidden_size // text.config.num_attention_heads
    section = torch.tensor(text.config.rope_parameters["mrope_section"], device=ids.device)
    axis = torch.repeat_interleave(torch.arange(3, device=ids.device), section, output_size=size // 2)
    angles = positions(ids, image_token, index)[axis].permute(1, 2, 0).float() * text.rotary_emb.inv_freq.float()
    angles = torch.cat([angles, angles], -1)[:, :, None]
    length = ids.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()[None, None]
    if segment is not None:
        one, other = segment[:, None, :, None], segment[:, None, None, :]
        mask = mask & ((one == other) | (other == 0))
    run = _compiled(_text_block) if fast else _text_block
    cos, sin = angles.cos(), angles.sin()
    for layer in text.layers:
        x = run(x, cos, sin, mask, size, text.config.rms_norm_eps, tuple(layer.parameters()))
    return text.norm(x)
