"""Token batches for the embedded model's pretraining, and the batched forward pass over one fixed geometry.

Every image here is 112 x 112, so the vision tower's attention is one dense batch and positions are a formula. The
stock forward loops over images in Python; a test holds this one equal to it.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from vlora_sgl.models.tiny import scenes as S

IMAGE_TOKENS = 16
IGNORE = -100


class Encoder:
    """Turns dialogues into token rows, remembering every piece of text it has tokenized."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[str, list[int]] = {}
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
            found = self._pieces[text] = self._tokenizer.encode(text, add_special_tokens=False)
        return found

    def dialogue(
        self, turns: list[tuple[str, str]], images: int = 1, system: bool = False
    ) -> tuple[list[int], list[int]]:
        """Token ids and labels of a conversation about ``images`` images; only the answers are in the loss."""
        ids = self.piece("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n")[:] if system else []
        labels = [IGNORE] * len(ids)
        for turn, (question, answer) in enumerate(turns):
            prompt = self.piece("<|im_start|>user\n")
            if turn == 0:
                prompt = prompt + self.vision * images
            prompt = prompt + self.piece(question) + self.piece("<|im_end|>\n<|im_start|>assistant\n")
            reply = self.piece(answer) + self.piece("<|im_end|>")
            tail = self.piece("\n")
            ids = ids + prompt + reply + tail
            labels = labels + [IGNORE] * len(prompt) + reply + [IGNORE] * len(tail)
        return ids, labels

    def pad_rows(self, rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Right-pad to a multiple of 8: ids and labels, both (B, T) int64."""
        length = (max(len(ids) for ids, _ in rows) + 7) // 8 * 8
        ids = np.full((len(rows), length), self.pad, np.int64)
        labels = np.full((len(rows), length), IGNORE, np.int64)
        for r, (i, l) in enumerate(rows):
            ids[r, : len(i)], labels[r, : len(l)] = i, l
        return torch.from_numpy(ids), torch.from_numpy(labels)


def scene_batch(
    encoder: Encoder, count: int, turns: int, seed: int, kinds: tuple[str, ...] = S.QUESTION_TYPES
) -> dict[str, Any]:
    """A pretraining batch of one image and up to ``turns`` questions per row."""
    scenes = S.sample(count, np.random.default_rng(seed))
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        asked = S.questions(scenes, i, rng, kinds)
        # Half of the dialogues ask what is hard to learn first: left to chance, there is too little of it.
        hard = [q for q in asked if q[0] in ("position", "at", "relation", "box", "caption", "count")]
        chosen = asked[:turns] if rng.random() < 0.5 else (hard + asked)[:turns]
        rng.shuffle(chosen)
        rows.append(encoder.dialogue([(q, a) for _, q, a in chosen], system=rng.random() < 0.15))
    ids, labels = encoder.pad_rows(rows)
    return {"frames": [scenes], "ids": ids, "labels": labels, "cells": cell_targets(scenes)}


def motion_batch(encoder: Encoder, count: int, seed: int) -> dict[str, Any]:
    """A pretraining batch of three images per row, in which one object moves."""
    frames, directions = S.motion(count, np.random.default_rng(seed))
    rng = random.Random(seed)
    rows = []
    for i, direction in enumerate(directions):
        shape, colour = S.SHAPES[frames[0].shape[i, 0]], tuple(S.COLOURS)[frames[0].colour[i, 0]]
        turns = [(S.MOTION_QUESTION, direction), (f"What color is the {shape}?", colour)]
        rng.shuffle(turns)
        rows.append(encoder.dialogue(turns, images=len(frames), system=rng.random() < 0.15))
    ids, labels = encoder.pad_rows(rows)
    return {"frames": frames, "ids": ids, "labels": labels, "cells": None}


def cell_targets(scenes: S.Scenes) -> dict[str, torch.Tensor]:
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


def patches(images: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """What ``Qwen2VLImageProcessor`` makes of 112 x 112 images: (B, 3, 112, 112) uint8 -> (B, 64, 1176) float32."""
    x = (images.float() / 255 - mean[:, None, None]) / std[:, None, None]
    count = x.shape[0]
    x = x.reshape(count, 3, 4, 2, 14, 4, 2, 14).permute(0, 2, 5, 3, 6, 1, 4, 7)  # B gh gw mh mw C ph pw
    x = x.reshape(count, 64, 3, 1, 196).expand(-1, -1, -1, 2, -1)  # a still image is two equal frames
    return x.reshape(count, 64, 1176)


def encode_images(visual: Any, pixels: torch.Tensor) -> torch.Tensor:
    """The vision tower over 112 x 112 images: (B, 64, 1176) -> (B, 16, hidden)."""
    count = pixels.shape[0]
    x = visual.patch_embed(pixels.reshape(count * 64, -1)).reshape(count, 64, -1)
    merged = torch.arange(64, device=x.device)
    block, inner = merged // 4, merged % 4
    rows, columns = block // 4 * 2 + inner // 2, block % 4 * 2 + inner % 2
    angles = visual.rotary_pos_emb(torch.stack([rows, columns], -1))
    angles = torch.cat([angles, angles], -1)
    cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)

    def rotate(t: torch.Tensor) -> torch.Tensor:
        a, b = t.chunk(2, -1)
        return t * cos + torch.cat([-b, a], -1) * sin

    for layer in visual.blocks:
        h = layer.norm1(x)
        q, k, v = layer.attn.qkv(h).reshape(count, 64, 3, layer.attn.num_heads, -1).unbind(2)
        q, k = rotate(q), rotate(k)
        a = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + layer.attn.proj(a.transpose(1, 2).reshape(count, 64, -1))
        x = x + layer.mlp(layer.norm2(x))
    return visual.merger(x.reshape(count * 64, -1)).reshape(count, IMAGE_TOKENS, -1)


def positions(ids: torch.Tensor, image_token: int) -> torch.Tensor:
    """M-RoPE positions of rows whose images are all 4 x 4 tokens: (3, B, T) int64."""
    is_image = ids == image_token
    nth = is_image.long().cumsum(1) - 1  # how many image tokens so far
    inside = nth % IMAGE_TOKENS
    before = torch.arange(ids.shape[1], device=ids.device)[None].expand_as(ids)
    # An image of 16 tokens advances the position by 4, so each full image before a token takes 12 off its index.
    full = torch.where(is_image, nth // IMAGE_TOKENS, (nth + 1) // IMAGE_TOKENS)
    base = before - 12 * full - torch.where(is_image, inside, 0)
    return torch.stack(
        [base, base + torch.where(is_image, inside // 4, 0), base + torch.where(is_image, inside % 4, 0)]
    )


def forward(model: Any, ids: torch.Tensor, image_embeddings: torch.Tensor, image_token: int) -> torch.Tensor:
    """Final hidden states (B, T, hidden) of rows with their image tokens' embeddings (images in row order) put in."""
    embeddings = model.get_input_embeddings()(ids)
    embeddings = embeddings.masked_scatter((ids == image_token)[..., None], image_embeddings.to(embeddings.dtype))
    return model.model.language_model(
        inputs_embeds=embeddings, position_ids=positions(ids, image_token), use_cache=False
    ).last_hidden_state
