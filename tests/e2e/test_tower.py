"""Adapters of the vision tower and the projector: answers to pictures are those of transformers + PEFT.

An engine for each family, because only there can a mode be forced from batch to batch. It prefills in chunks that are
shorter than a picture.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from tests.support.engine_runs import EngineProcess
from tests.support.head_reference import data_url, make_image
from tests.support.lora_adapters import tiny_adapter
from tests.support.served_families import FAMILIES as SERVED
from tests.support.served_families import save
from tests.support.ties import LOGPROBS, assert_same_tokens
from tests.support.towers import BLOCKS, TOKENS, Reference, make_adapters
from vlora_sgl.heads import save_heads
from vlora_sgl.platforms.cpu import is_plain_cpu

pytestmark = pytest.mark.e2e

CHUNK = 16
FAMILIES = ["qwen2_5_vl", *(pytest.param(family, marks=pytest.mark.slow) for family in ("qwen2_vl", "qwen3_vl"))]
NAMES: tuple[str | None, ...] = (None, "tower", "projector", "both", "whole", "language")


@dataclass
class Tower:
    """One family's engine, its files and what is expected of it."""

    family: str
    model: Path
    engine: EngineProcess
    adapters: dict[str, Path]
    reference: Reference

    def image(self, seed: int) -> Image.Image:
        return make_image(seed, SERVED[self.family].size)

    def prompt(self, images: int = 1) -> str:
        return (
            f"<|im_start|>user\n{SERVED[self.family].shown * images}What is this?<|im_end|>\n<|im_start|>assistant\n"
        )

    def wanted(self, name: str | None, *seeds: int) -> list[int]:
        return self.reference.ids(self.prompt(len(seeds)), name, [self.image(seed) for seed in seeds])

    def ask(self, names: Sequence[str | None], *seeds: int | tuple[int, ...]) -> list[Any]:
        """Everybody about their image, or all about one."""
        shown = [(one,) if isinstance(one, int) else one for one in (seeds if len(seeds) > 1 else seeds * len(names))]
        return self.engine.generate(
            prompt=[self.prompt(len(own)) for own in shown],
            lora_path=list(names),
            image_data=[[data_url(self.image(seed)) for seed in own] for own in shown],
            sampling_params={"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
            **LOGPROBS,
        ).answers

    def check(self, wanted: Sequence[list[int]], names: Sequence[str | None], *seeds: int | tuple[int, ...]) -> None:
        """``ask`` and compare with these tokens."""
        for answer, ids in zip(self.ask(names, *seeds), wanted, strict=True):
            assert_same_tokens(answer, ids)

    def reuse(self, name: str | None, seed: int) -> tuple[int, bool]:
        """How many tokens of the prompt were cached, and whether its image was."""
        (answer,) = self.ask([name], seed)
        assert_same_tokens(answer, self.wanted(name, seed))
        found = answer["meta_info"]["vlora"]["reuse"]
        return answer["meta_info"]["cached_tokens"], not found["encoder_misses"]

    def cold(self, mode: str) -> None:
        self.engine.force_mode(mode)
        self.engine.flush()


@pytest.fixture(scope="module", params=FAMILIES)
def tower(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tower]:
    root = tmp_path_factory.mktemp(request.param)
    model, _ = save(request.param, root / "model")
    adapters = make_adapters(root, model)
    options: dict[str, Any] = {
        "model_path": str(model),
        "enable_lora": True,
        "lora_paths": [f"language={adapters['language']}"],
        "max_loras_per_batch": 7,
        "max_lora_rank": 32,
        "chunked_prefill_size": CHUNK,
    }
    if not is_plain_cpu():  # with graphs of the encoder
        options |= {
            "dtype": "float16",
            "attention_backend": "triton",
            "mm_attention_backend": "triton_attn",
            "sampling_backend": "pytorch",
            "disable_fast_image_processor": True,
            "cuda_graph_bs_decode": [1, 2, 4, 8],
            "mem_fraction_static": 0.3,
            "max_total_tokens": 65536,
        }
    with EngineProcess(options) as engine:
        reference = Reference(model, adapters)
        engine.ready()
        assert engine.state()["pool"]["tower"]["bytes"] == 0, "no adapter of the tower, no memory for it"
        for name in NAMES[1:-1]:
            assert engine.load(str(name), adapters[str(name)]) is None
        yield Tower(request.param, model, engine, adapters, reference)


@pytest.mark.parametrize("mode", ["unmerged", "merged", "mixture"])
def test_one_image_and_one_each(tower: Tower, mode: str) -> None:
    for seeds in ((5,), (1, 2, 3, 4, 5, 6)):
        wanted = [tower.wanted(name, seed) for name, seed in zip(NAMES, seeds * (6 // len(seeds)), strict=True)]
        if len(seeds) == 1:
            assert len({tuple(ids) for ids in wanted}) == len(NAMES), "the adapters must change the answer"
        tower.cold(mode)
        for _ in range(2):  # the second time from the caches
            tower.check(wanted, NAMES, *seeds)
        for name, seed, ids in zip(NAMES, seeds * (6 // len(seeds)), wanted, strict=True):
            tower.cold(mode)
            tower.check([ids], [name], seed)


def test_several_images_of_a_request(tower: Tower) -> None:
    tower.cold("unmerged")
    names = ("both", None, "whole")
    wanted = [tower.wanted(name, 1, 2, 1) for name in names]
    tower.check(wanted, names, (1, 2, 1), (1, 2, 1), (1, 2, 1))


@pytest.mark.parametrize("mode", ["unmerged", "merged", "mixture"])
def test_videos_with_adapters(tower: Tower, mode: str) -> None:
    """Frames as they are; which of a file's frames are taken is SGLang's affair, and needs a decoder."""
    if tower.family == "qwen3_vl":
        pytest.skip("its videos come with times, which only files have")
    shown = SERVED[tower.family].shown.replace("image", "video")
    text = tower.prompt(0).replace("What", f"{shown}What")
    alike, apart = [8] * len(NAMES), [8, 5, 2, 6, 4, 3]
    tower.cold(mode)
    for seeds in (alike, apart, alike):  # the last time from the caches
        videos = [video(seed, 4, SERVED[tower.family].size) for seed in seeds]
        wanted = [tower.reference.ids_of_video(text, *one) for one in zip(NAMES, videos, strict=True)]
        assert seeds == apart or len({tuple(ids) for ids in wanted}) == len(NAMES)
        run = tower.engine.generate(
            prompt=[text] * len(NAMES),
            lora_path=list(NAMES),
            video_data=[[one.numpy()] for one in videos],
            sampling_params={"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
            **LOGPROBS,
        )
        for answer, ids in zip(run.answers, wanted, strict=True):
            assert_same_tokens(answer, ids)


def video(seed: int, frames: int, size: tuple[int, int]) -> torch.Tensor:
    """Frames [T, 3, H, W], no two alike."""
    images = [np.asarray(make_image(100 * seed + frame, size).convert("RGB")) for frame in range(frames)]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()


def test_who_shares_images_and_their_kv(tower: Tower) -> None:
    """Adapters share what they compute alike, and nothing else: by content, whatever their names."""
    tower.cold("unmerged")
    assert tower.engine.load("again", tower.adapters["tower"]) is None
    assert tower.engine.load("twin", tower.adapters["twin"]) is None
    tower.reference.model.load_adapter(tower.adapters["tower"], adapter_name="again")
    image = 77
    assert tower.reuse(None, image) == (0, False)
    assert tower.reuse("language", image) == (0, True), "its images are the base model's"
    assert tower.reuse("tower", image) == (0, False)
    cached, _ = tower.reuse("again", image)
    assert cached > 0, "another name of the same content"
    for name in ("whole", "twin"):  # one language part, two towers
        assert tower.wanted(name, image) != tower.wanted("whole" if name == "twin" else "twin", image)
        assert tower.reuse(name, image) == (0, False)
    assert all(tower.reuse(name, image)[0] > 0 for name in ("whole", "twin", "tower", None))
    for name in ("again", "twin"):
        assert tower.engine.unload(name) is None


def test_a_name_with_another_tower_never_sees_the_old_ones_images(tower: Tower) -> None:
    tower.cold("merged")
    old, new = tower.wanted("whole", 5), tower.wanted("twin", 5)
    assert old != new
    tower.check([old], ["whole"], 5)
    assert tower.engine.unload("whole") is None
    assert tower.engine.load("whole", tower.adapters["twin"]) is None
    tower.check([new], ["whole"], 5)
    assert tower.engine.unload("whole") is None
    assert tower.engine.load("whole", tower.adapters["whole"]) is None
    tower.check([old], ["whole"], 5)


def test_what_cannot_be_right_is_refused(tower: Tower, tmp_path: Path) -> None:
    before = tower.engine.state()["pool"]
    shutil.copytree(tower.adapters["tower"], tmp_path / "invoked")
    save_heads(tmp_path / "invoked", (), "after_image")
    assert "up to which images are the base model's" in str(tower.engine.load("invoked", tmp_path / "invoked"))
    base = AutoModelForImageTextToText.from_pretrained(tower.model, dtype=torch.float32)
    tiny_adapter(base, tmp_path / "wide", r=40, target_modules=BLOCKS)
    assert "rank 40 in the vision tower is more than 32" in str(tower.engine.load("wide", tmp_path / "wide"))
    assert tower.engine.state()["pool"] == before


@pytest.mark.slow
def test_a_thousand_requests_over_eight_towers(tower: Tower) -> None:
    """More adapters than slots, few images: nothing is answered wrongly, and no memory grows."""
    names = [name for name in tower.adapters if name not in ("language", "twin")]
    for name in [*names]:
        assert tower.engine.load(f"{name}2", tower.adapters["twin" if name == "whole" else name]) is None
        names.append(f"{name}2")
    assert len(names) == 8
    content = {name: "twin" if name == "whole2" else name.removesuffix("2") for name in names}
    wanted = {(name, seed): tower.wanted(content[name], seed) for name in names for seed in range(4)}
    tower.cold("unmerged")
    tower.engine.force_mode("auto")
    rng, before = random.Random(0), tower.engine.state()["pool"]
    for _ in range(50):
        asked = [(rng.choice(names), rng.randrange(4)) for _ in range(20)]
        tower.check([wanted[one] for one in asked], [name for name, _ in asked], *(seed for _, seed in asked))
    assert tower.engine.state()["pool"] == before
    for name in names[4:]:
        assert tower.engine.unload(name) is None


def test_the_last_one_takes_its_memory_along(tower: Tower) -> None:
    assert tower.engine.state()["pool"]["tower"]["rank"] == 32
    for name in NAMES[1:-1]:
        assert tower.engine.unload(str(name)) is None
    assert tower.engine.state()["pool"]["tower"] == {"rank": 0, "modules": [], "bytes": 0}
    tower.check([tower.wanted("language", 5)], ["language"], 5)
    for name in NAMES[1:-1]:
        assert tower.engine.load(str(name), tower.adapters[str(name)]) is None
