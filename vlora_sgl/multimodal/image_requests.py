"""Images on the way in: on the host where they are small, without what is done once per image token.

SGLang opens and resizes every image on the GPU that serves. There the tokenizer's process takes turns with the
scheduler's: it waits for slices of time between steps, and every step waits for it. A processor of transformers writes
an image's placeholder hundreds of times into the text, tokenizes that, and compares each token, as a tensor, with each
kind of placeholder: milliseconds for 256 tokens, in which the device does nothing.
Each function here wraps one of theirs, covers the case that it is for, and leaves every other to the original.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image

from vlora_sgl import _sgl
from vlora_sgl.core import JsonDict
from vlora_sgl.errors import RequestError

STEPS = ("__call__", "prepare_inputs_layout", "validate_inputs", "_process_images", "get_text_with_replacements")
"""A processor that has these of ``ProcessorMixin``, and says what stands for an image, does nothing else to a text."""

WITHOUT_EFFECT = frozenset({"padding", "padding_side", "return_tensors", "verbose"})
WITHOUT_EFFECT |= {"return_token_type_ids", "return_mm_token_type_ids", "return_text_replacement_offsets"}
"""Settings of a tokenizer that change no id of a single text. (SGLang reads none of the last three.)"""

HOST_PIXELS = 3 << 19
"""Pixels of a request's images up to which the host opens and resizes them: seven of 448 x 448 (256 tokens of a Qwen).
Seven take some 45 ms of a core; threads share their opening, and torch's their resizing. One of 224 x 224 takes 1.5.
"""


class _Request(threading.local):
    """The request that a thread is at work on.

    Attributes:
        on_host: whether its images are processed by the host.
    """

    on_host = False


_request = _Request()


def fast_device(original: Callable[..., str | None], self: object, processor: object) -> str | None:
    """Wraps ``BaseMultimodalProcessor._fast_image_processor_device``: where torchvision resizes a request's images."""
    return "cpu" if _request.on_host else original(self, processor)


def process_mm_data(
    original: Callable[..., object],
    self: Any,
    input_text: object,
    images: object = None,
    videos: object = None,
    audios: object = None,
    processor: object = None,
    **kwargs: object,
) -> object:
    """Wraps ``BaseMultimodalProcessor.process_mm_data``: a text with images only is processed in two halves, and small
    images on the host."""
    plain = isinstance(input_text, str) and images and not (videos or audios or kwargs or self.image_config)
    if plain and not self._tokenizer_auto_adds_specials:
        processor, _ = self._resolve_processor(processor)
        if (halves := halves_of(processor)) is not None:
            processor = halves
    _request.on_host = not videos and small(images)
    try:
        return original(self, input_text, images, videos, audios, processor, **kwargs)
    finally:
        _request.on_host = False


def small(images: object) -> bool:
    """Whether these are images in host memory, of at most ``HOST_PIXELS`` together."""
    listed = images if isinstance(images, list) else [images]
    pixels = [one.width * one.height for one in listed if isinstance(one, Image.Image)]
    return len(pixels) == len(listed) and sum(pixels) <= HOST_PIXELS


class Halves:
    """Stands in for a processor of transformers: images are its image processor's, ids those of the text as it came,
    with each placeholder repeated.

    A placeholder splits a text before anything else looks at it, so that what is around it is tokenized alike whether
    it stands there once or a thousand times.

    Args:
        processor: one that ``is_plain``.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.tokenizer, self.image_processor = processor.tokenizer, processor.image_processor
        self._settings: dict[object, JsonDict | None] = {}

    def __call__(self, text: list[str], images: list[object], **kwargs: object) -> object:
        """The processor's answer for one text, without masks and token types, which are not read."""
        placeholder, settings = self.processor.image_token_id, None
        ids: list[int] = []
        if kwargs.keys() <= {"padding", "return_tensors", "device"}:
            settings = self._settings_for(kwargs.get("device"))
        if settings is not None and text[0].count(self.processor.image_token) == len(images):
            ids = self.tokenizer(text[0])["input_ids"]
        if settings is None or ids.count(placeholder) != len(images):
            return self.processor(text=text, images=images, **kwargs)
        features, token = self.image_processor(images, **settings), self.processor.image_token
        shown = [self.processor.replace_image_token(features, image_idx=n) for n in range(len(images))]
        counts = [one.count(token) for one in shown]
        if any(one != token * count for one, count in zip(shown, counts, strict=True)):
            return self.processor(text=text, images=images, **kwargs)  # an image is more than its placeholders
        for name in self.processor.unused_input_names:
            features.pop(name, None)
        features["input_ids"] = torch.tensor([repeated(ids, placeholder, counts)])
        return features

    def _settings_for(self, device: object) -> JsonDict | None:
        """What the processor would tell its image processor; ``None`` where it would tell the tokenizer more than how
        to return its ids. Found once: SGLang never asks differently."""
        if device not in self._settings:
            merged = self.processor._merge_kwargs(
                self.processor.valid_processor_kwargs,
                tokenizer_init_kwargs=self.tokenizer.init_kwargs,
                padding=True,
                return_tensors="pt",
                **({} if device is None else {"device": device}),
            )
            covered = merged["text_kwargs"].keys() <= WITHOUT_EFFECT
            self._settings[device] = merged["images_kwargs"] if covered else None
        return self._settings[device]


@lru_cache(maxsize=64)  # SGLang keeps one per thread
def halves_of(processor: Any) -> Halves | None:
    """What stands in for a processor; ``None`` for one that is not covered."""
    if not is_plain(processor):
        return None
    token = processor.tokenizer.added_tokens_decoder.get(processor.image_token_id)
    if token is None or token.lstrip or token.rstrip or token.single_word or token.normalized:
        return None  # what is around such a token may depend on it
    return Halves(processor)


def is_plain(processor: object) -> bool:
    """Whether transformers makes ids of a text with images by ``STEPS`` alone, as for LLaVA and Qwen."""
    kind: Any = type(processor)
    base = _sgl.ProcessorMixin
    if not isinstance(processor, base) or kind.replace_image_token is base.replace_image_token:
        return False
    return all(getattr(kind, step) is getattr(base, step) for step in STEPS)


def repeated(ids: Iterable[int], placeholder: int, counts: Iterable[int]) -> list[int]:
    """``ids`` with the n-th placeholder ``counts[n]`` times in its place."""
    remaining = iter(counts)
    found: list[int] = []
    for token in ids:
        found += [placeholder] * next(remaining) if token == placeholder else [token]
    return found


def check_special_tokens(
    original: Callable[..., None], self: object, text: list[str], text_inputs: JsonDict, modalities: list[str]
) -> None:
    """Wraps ``ProcessorMixin._check_special_mm_tokens``, which would compare the elements of a tensor one by one."""
    ids = text_inputs["input_ids"]
    original(self, text, {"input_ids": ids.tolist() if isinstance(ids, torch.Tensor) else ids}, modalities)


def get_rope_index(
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    spatial_merge_size: int,
    image_token_id: int,
    video_token_id: int,
    vision_start_token_id: int,
    model_type: str,
    tokens_per_second: float | None = None,
    input_ids: Any = None,
    image_grid_thw: Any = None,
    video_grid_thw: Any = None,
    *rest: object,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Wraps SGLang's ``get_rope_index``: positions of a Qwen2-VL or Qwen2.5-VL prompt whose vision is still images.

    Returns:
        positions in time, height and width, int64 ``[3, 1, tokens]``, and by how much the next position is off the
        number of tokens, ``[1, 1]``.

    Raises:
        RequestError: the prompt ends with the token before an image's, behind which SGLang looks.
    """
    given = input_ids, image_grid_thw
    if (
        model_type in ("qwen2_vl", "qwen2_5_vl")
        and (tokens_per_second is not None or model_type == "qwen2_vl")
        and video_grid_thw is None
        and all(isinstance(t, torch.Tensor) and t.dtype is torch.int64 and t.is_cpu for t in given)
        and len(input_ids) == 1
    ):
        tokens = input_ids[0].numpy()
        grids = [(t, h // spatial_merge_size, w // spatial_merge_size) for t, h, w in image_grid_thw.tolist()]
        # SGLang counts images by the marks before them.
        marked = np.flatnonzero(tokens[:-1] == vision_start_token_id) + 1
        images = np.count_nonzero(tokens[marked] == image_token_id)
        if images == len(grids) and not (tokens == video_token_id).any():
            positions = still_positions(tokens == image_token_id, grids)
            if positions is not None:
                return positions
    if isinstance(input_ids, torch.Tensor) and input_ids[..., -1:].eq(vision_start_token_id).any():
        raise RequestError("a prompt with images or videos must not end with the mark of a beginning one")
    return original(
        spatial_merge_size,
        image_token_id,
        video_token_id,
        vision_start_token_id,
        model_type,
        tokens_per_second,
        input_ids,
        image_grid_thw,
        video_grid_thw,
        *rest,
        **kwargs,
    )


def still_positions(
    is_image: np.ndarray, grids: list[tuple[int, int, int]]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Positions and offset as ``get_rope_index`` gives them; ``None`` where tokens and grids do not match.

    Args:
        is_image: which tokens are image tokens, bool ``[tokens]``.
        grids: frames, rows and columns of each image, in tokens.
    """
    sizes = [rows * columns if frames == 1 else 0 for frames, rows, columns in grids]
    if 0 in sizes or is_image.sum() != sum(sizes):
        return None
    places = np.flatnonzero(is_image)
    positions = np.empty((3, 1, len(is_image)), np.int64)
    end = following = used = 0  # of the tokens, of the positions, of the image tokens
    for _, rows, columns in grids:
        start = int(places[used])
        used += rows * columns
        if places[used - 1] - start != rows * columns - 1:
            return None  # text inside an image
        first = following + start - end
        positions[:, 0, end:start] = np.arange(following, first)
        end = start + rows * columns
        positions[0, 0, start:end] = first
        positions[1, 0, start:end] = np.repeat(np.arange(first, first + rows), columns)
        positions[2, 0, start:end] = np.tile(np.arange(first, first + columns), rows)
        following = first + max(rows, columns)
    last = following + len(is_image) - end
    positions[:, 0, end:] = np.arange(following, last)
    return torch.from_numpy(positions), torch.tensor([[last - len(is_image)]])


def wrap_for_cuda_ipc(original: Callable[..., object], self: object, tensor: torch.Tensor) -> object:
    """Wraps ``BaseMultimodalProcessor._wrap_tensor_for_cuda_ipc``, which copies features to where the scheduler reads.

    SGLang tells the scheduler of them without waiting for that copy. A request that is on its way sooner must wait.
    """
    wrapped = original(self, tensor)
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return wrapped
