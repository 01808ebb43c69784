"""Images on the way in: what our short ways give is what SGLang and transformers give, bit for bit."""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sglang.srt.layers.rotary_embedding import mrope_rope_index
from sglang.srt.multimodal.processors import base_processor
from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor
from transformers.processing_utils import ProcessorMixin

from tests.conftest import TinyModel
from tests.support.served_families import FAMILIES
from tests.support.tiny_random import VOCABULARY_TEXT
from tools.tiny.build import build_tokenizer
from vlora_sgl.errors import RequestError
from vlora_sgl.multimodal import image_requests

MARK = "<|vision_start|><|image_pad|><|vision_end|>"
ASK = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Noise, in any mode."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    image = Image.fromarray(noise, "RGBA")
    return image if mode == "RGBA" else image.convert("RGB").convert(mode)


SEVERAL = [picture(84, 112), picture(300, 40, "RGBA"), picture(84, 112, "L", 1), picture(28, 28, "P")]
REQUESTS: dict[str, tuple[str, list[Image.Image]]] = {
    "plain": (ASK.format(MARK + "What is in this picture?"), [picture(112, 112)]),
    "to be made smaller": (ASK.format(MARK + "How many?"), [picture(448, 448)]),
    "to be made larger": (ASK.format(MARK), [picture(9, 17)]),
    "odd sizes": (ASK.format("red" + MARK), [picture(101, 207)]),
    "transparent": (MARK, [picture(100, 100, "RGBA")]),
    "grey": (MARK, [picture(100, 100, "L")]),
    "palette": (MARK, [picture(100, 100, "P")]),
    "black and white": (MARK, [picture(100, 100, "1")]),
    "text all around": (ASK.format(f"  a {MARK} b\n\n{MARK}{MARK} \t c {MARK}d "), SEVERAL),
    "no text": (MARK * 4, SEVERAL),
    "other scripts": (ASK.format(f"é\u0301 猫{MARK}ſ\u200b🐈"), [picture(56, 84)]),
    "what looks like a mark": (ASK.format(f"<|image_pad {MARK} <|vision_start|>"), [picture(56, 84)]),
    "a video's mark": (ASK.format(f"<|video_pad|> {MARK}"), [picture(56, 84)]),
    "fewer marks than images": (ASK.format(MARK), SEVERAL[:2]),
    "more marks than images": (ASK.format(MARK * 2), SEVERAL[:1]),
    "a placeholder that shows nothing": (f"<|image_pad|>{MARK}", SEVERAL[:1]),
}
WHOLE = "a placeholder that shows nothing"
"""The request that transformers' processor gets as a whole."""


@pytest.fixture(scope="module", params=["torchvision", "pil"])
def processor(request: pytest.FixtureRequest, tiny_model: TinyModel) -> QwenVLImageProcessor:
    """SGLang's processor of the tiny model, whose images transformers resizes in either of its ways."""
    loaded = AutoProcessor.from_pretrained(tiny_model.path)
    loaded.image_processor = AutoImageProcessor.from_pretrained(tiny_model.path, backend=request.param)
    assert ("Pil" in type(loaded.image_processor).__name__) == (request.param == "pil")
    settings = SimpleNamespace(
        **dict.fromkeys(("skip_tokenizer_init", "rl_on_policy_target", "disable_fast_image_processor"), False),
        **dict.fromkeys(("mm_io_worker_num", "mm_processor_worker_num", "tokenizer_worker_num"), 1),
        mm_process_config={},
    )
    return QwenVLImageProcessor(AutoConfig.from_pretrained(tiny_model.path), settings, loaded, "default")


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Puts our wrappers in place when called, as the plugin does."""

    def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, functools.wraps(original)(lambda *a, **k: wrapper(original, *a, **k)))

    def install() -> None:
        wrap(base_processor.BaseMultimodalProcessor, "process_mm_data", image_requests.process_mm_data)
        wrap(base_processor.BaseMultimodalProcessor, "_fast_image_processor_device", image_requests.fast_device)
        wrap(ProcessorMixin, "_check_special_mm_tokens", image_requests.check_special_tokens)
        wrap(mrope_rope_index, "get_rope_index", image_requests.get_rope_index)

    monkeypatch.setattr(base_processor, "_is_cpu", True)  # else the fast one moves images to CUDA
    yield install
    image_requests.halves_of.cache_clear()


@pytest.fixture
def whole_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that transformers' processor gets."""
    texts: list[str] = []
    original = ProcessorMixin.__call__

    def call(self: Any, images: Any = None, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        texts.extend(text)
        return original(self, images, text, *args, **kwargs)

    monkeypatch.setattr(ProcessorMixin, "__call__", call)
    return texts


def answer(processor: QwenVLImageProcessor, text: str | list[int], images: list[Image.Image]) -> Any:
    """Everything that the scheduler would get of a request, hashes included; or the error."""
    request = SimpleNamespace(video_data=None, audio_data=None, rid="r")
    try:
        out = asyncio.run(processor.process_mm_data_async(images, text, request))
    except (ValueError, RuntimeError) as error:
        return type(error), str(error)
    for item in out.mm_items:
        item.set_pad_value()
    items = [(i.modality, i.hash, i.pad_value, i.offsets, i.feature, i.image_grid_thw) for i in out.mm_items]
    return out.input_ids, out.mrope_positions, out.mrope_position_delta, *itertools.chain(*items)


def assert_same(mine: Any, theirs: Any) -> None:
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        if isinstance(other, torch.Tensor):
            assert (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)
            assert torch.equal(one, other)
        else:
            assert one == other


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_is_what_it_was(
    processor: QwenVLImageProcessor, ours: Callable[[], None], whole_calls: list[str], name: str
) -> None:
    text, images = REQUESTS[name]
    theirs = answer(processor, text, images)
    whole_calls.clear()
    ours()
    for _ in range(2):
        assert_same(answer(processor, text, images), theirs)
    assert bool(whole_calls) == (name == WHOLE)


def test_a_request_of_tokens_is_what_it_was(processor: QwenVLImageProcessor, ours: Callable[[], None]) -> None:
    text, images = REQUESTS["text all around"]
    ids = processor._tokenizer(text)["input_ids"]
    theirs = answer(processor, ids, images)
    ours()
    assert_same(answer(processor, ids, images), theirs)
    assert_same(answer(processor, text, images), theirs)


def test_settings_for_images_take_the_old_way(
    processor: QwenVLImageProcessor, ours: Callable[[], None], whole_calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "image_config", {"do_normalize": False})
    text, images = REQUESTS["plain"]
    theirs = answer(processor, text, images)
    ours()
    assert_same(answer(processor, text, images), theirs)
    assert len(whole_calls) == 2


def test_a_text_without_images_is_not_ours(processor: QwenVLImageProcessor, ours: Callable[[], None]) -> None:
    ours()
    seen = []
    image_requests.process_mm_data(
        lambda self, text, images, videos, audios, used, **kwargs: seen.append((used, kwargs)),
        processor,
        MARK,
        images=[picture(28, 28)],
        videos=[torch.zeros(2, 3, 28, 28)],
        processor_video_config={},
    )
    assert seen == [(None, {"processor_video_config": {}})]


def test_small_images_are_resized_by_the_host(
    processor: QwenVLImageProcessor, ours: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, images = REQUESTS["plain"]
    theirs = answer(processor, text, images)
    ours()
    monkeypatch.setattr(base_processor, "_is_cpu", False)  # SGLang would take a GPU
    assert_same(answer(processor, text, images), theirs)


HALF = picture(1024, 768)


@pytest.mark.parametrize(
    "images, videos, device",
    [
        ([HALF, HALF], None, "cpu"),
        (HALF, None, "cpu"),
        ([HALF, HALF, picture(1, 1)], None, "cuda:0"),
        ([HALF, torch.zeros(3, 8, 8, dtype=torch.uint8)], None, "cuda:0"),
        ([HALF], [torch.zeros(2, 3, 28, 28)], "cuda:0"),
    ],
    ids=["as many pixels as may be", "one", "one pixel more", "opened on the device", "beside a video"],
)
def test_other_images_go_where_sglang_has_them(images: Any, videos: Any, device: str) -> None:
    def asked(*_: object) -> str | None:
        return image_requests.fast_device(lambda *_: "cuda:0", None, None)

    self: Any = SimpleNamespace(image_config={}, _tokenizer_auto_adds_specials=True)
    assert image_requests.process_mm_data(asked, self, MARK, images, videos) == device
    assert asked() == "cuda:0"  # of the next request, too, and of one that fails
    with pytest.raises(ZeroDivisionError):
        image_requests.process_mm_data(lambda *_: 1 / 0, self, MARK, images, videos)
    assert asked() == "cuda:0"


@pytest.mark.parametrize(
    "change",
    [
        lambda loaded: setattr(loaded.tokenizer.added_tokens_decoder[loaded.image_token_id], "lstrip", True),
        lambda loaded: setattr(loaded, "image_token_id", 0),
        lambda loaded: loaded.tokenizer.init_kwargs.update(truncation=True),
    ],
    ids=["a placeholder that takes spaces", "a placeholder that is none", "a tokenizer that truncates"],
)
def test_other_processors_are_not_covered(tiny_model: TinyModel, change: Callable[[Any], None]) -> None:
    loaded = AutoProcessor.from_pretrained(tiny_model.path)
    decoder = loaded.tokenizer.added_tokens_decoder
    fake = SimpleNamespace(
        added_tokens_decoder={key: SimpleNamespace(**vars_of(token)) for key, token in decoder.items()},
        init_kwargs=dict(loaded.tokenizer.init_kwargs),
    )
    standing_in = copy.copy(loaded)
    vars(standing_in).update(tokenizer=fake, _merge_kwargs=functools.partial(merge, loaded))
    assert image_requests.halves_of(standing_in)._settings_for("cpu") is not None  # type: ignore[union-attr]
    image_requests.halves_of.cache_clear()
    change(standing_in)
    found = image_requests.halves_of(standing_in)
    image_requests.halves_of.cache_clear()
    assert found is None or found._settings_for("cpu") is None


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_what_stands_in_for_a_processor_gives_what_it_gives(name: str, whole_calls: list[str]) -> None:
    kind = FAMILIES[name]
    loaded = kind.processor(build_tokenizer(VOCABULARY_TEXT))
    text, images = f"red{kind.shown} green{kind.shown * 2}", SEVERAL[:3]
    shown = [image.convert("RGB") for image in images]
    halves = image_requests.halves_of(loaded)
    assert halves is not None
    mine = halves(text=[text], images=shown, padding=True, return_tensors="pt")
    assert not whole_calls
    theirs = loaded(text=[text], images=shown, padding=True, return_tensors="pt")
    assert mine.keys() == theirs.keys() - {"attention_mask", "mm_token_type_ids"}  # type: ignore[attr-defined]
    for key, value in mine.items():  # type: ignore[attr-defined]
        assert_same([value], [theirs[key]])


@pytest.mark.parametrize("name", ["mistral3", "gemma3"])
def test_processors_with_steps_of_their_own_are_not_covered(name: str) -> None:
    tokenizer = build_tokenizer(VOCABULARY_TEXT)
    tokenizer._set_model_specific_special_tokens(FAMILIES[name].more_tokens or {})
    assert image_requests.halves_of(FAMILIES[name].processor(tokenizer)) is None


def merge(loaded: Any, kinds: Any, tokenizer_init_kwargs: dict[str, Any], **kwargs: Any) -> Any:
    """transformers' merging of settings, for another tokenizer's."""
    return ProcessorMixin._merge_kwargs(loaded, kinds, tokenizer_init_kwargs=tokenizer_init_kwargs, **kwargs)


def vars_of(token: Any) -> dict[str, Any]:
    return {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word", "normalized")}


def test_tokens_are_counted_as_before() -> None:
    ids = torch.tensor([[1, 7, 7, 2]])
    loaded = SimpleNamespace(image_token="<i>", image_token_id=7)
    original = ProcessorMixin._check_special_mm_tokens
    for text, wrong in (("<i><i>", False), ("<i>", True)):
        for given in (ids, ids.tolist()):
            try:
                image_requests.check_special_tokens(original, loaded, [text], {"input_ids": given}, ["image", "video"])
                assert not wrong
            except ValueError as error:
                assert wrong and "ids=[2] and text=[1]" in str(error)


START, IMAGE, VIDEO = 90, 91, 92
PROMPTS: dict[str, tuple[list[int], list[list[int]], bool]] = {
    "one": ([1, 2, START, *[IMAGE] * 6, 3], [[1, 4, 6]], True),
    "at the start and the end": ([START, *[IMAGE] * 6, START, *[IMAGE] * 2], [[1, 4, 6], [1, 4, 2]], True),
    "taller than what follows": ([START, *[IMAGE] * 9, 3, 4], [[1, 18, 2]], True),
    "three": (
        [5, START, IMAGE, 6, 7, START, *[IMAGE] * 4, 8, START, *[IMAGE] * 2],
        [[1, 2, 2], [1, 4, 4], [1, 2, 4]],
        True,
    ),
    "frames": ([1, START, *[IMAGE] * 8, 3], [[2, 4, 4]], False),
    "a video": ([1, START, *[VIDEO] * 4, START, *[IMAGE] * 4, 3], [[1, 4, 4]], False),
    "an empty grid": ([1, START, *[IMAGE] * 4, START, IMAGE, 3], [[1, 1, 4], [1, 2, 10]], False),
    "a grid too many": ([1, START, *[IMAGE] * 4, 3], [[1, 4, 4], [1, 4, 4]], False),
    "a grid too large": ([1, START, *[IMAGE] * 4, 3], [[1, 4, 8]], False),
    "an image without a mark": ([1, *[IMAGE] * 4, 3], [[1, 4, 4]], False),
    "text in an image": ([1, START, IMAGE, IMAGE, 7, IMAGE, IMAGE, 3], [[1, 4, 4]], False),
}


@pytest.mark.parametrize("model", ["qwen2_vl", "qwen2_5_vl", "paddleocr_vl"])
@pytest.mark.parametrize("name", PROMPTS)
def test_positions_are_sglangs(model: str, name: str) -> None:
    tokens, grids, covered = PROMPTS[name]
    calls = []

    def original(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return mrope_rope_index.get_rope_index(*args, **kwargs)

    def run(function: Callable[..., Any]) -> Any:
        ids, grid = torch.tensor([tokens]), torch.tensor(grids)
        try:
            return function(2, IMAGE, VIDEO, START, model, 2, ids, grid, None, None, use_audio_in_video=False)
        except (IndexError, TypeError, RuntimeError) as error:
            return type(error), str(error)

    assert_same(run(functools.partial(image_requests.get_rope_index, original)), run(mrope_rope_index.get_rope_index))
    assert bool(calls) != (covered and model != "paddleocr_vl")


@pytest.mark.parametrize("model", ["qwen2_vl", "qwen2_5_vl"])
def test_a_mark_of_an_image_at_the_end_is_a_token_like_others(model: str) -> None:
    """SGLang looks at the token behind it."""

    def positions(last: int) -> Any:
        ids, grids = torch.tensor([[1, START, *[IMAGE] * 4, last]]), torch.tensor([[1, 4, 4]])
        original = mrope_rope_index.get_rope_index
        return image_requests.get_rope_index(original, 2, IMAGE, VIDEO, START, model, 2, ids, grids, None)

    assert_same(positions(START), positions(3))


@pytest.mark.parametrize("name", ["a video", "frames", "a grid too many"])
def test_where_only_sglang_knows_positions_a_mark_at_the_end_is_refused(name: str) -> None:
    tokens, grids, _ = PROMPTS[name]
    ids = torch.tensor([[*tokens, START]])
    original = mrope_rope_index.get_rope_index
    with pytest.raises(RequestError, match="must not end"):
        image_requests.get_rope_index(original, 2, IMAGE, VIDEO, START, "qwen2_vl", 2, ids, torch.tensor(grids), None)


def test_features_for_another_process_are_complete_before_it_hears_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: done.append("waited"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)

    def original(self: Any, tensor: Any) -> str:
        done.append("copied")
        return "wrapped"

    for is_cuda, expected in ((False, ["copied"]), (True, ["copied", "waited"])):
        done.clear()
        tensor: Any = SimpleNamespace(is_cuda=is_cuda, device="cuda:0")
        assert image_requests.wrap_for_cuda_ipc(original, None, tensor) == "wrapped"
        assert done == expected
