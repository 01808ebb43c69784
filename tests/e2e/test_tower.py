"""Adapters of the vision tower and the projector: answers to pictures are those of transformers + PEFT.

An engine for each family, because only there can a mode be forced from batch to batch. It prefills in chunks that are
shorter than a picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.e2e.test_families import PATCHES_OF_14, SHOWN, save_family
from tests.support.engine_runs import EngineProcess
from tests.support.head_reference import data_url, make_image
from tests.support.towers import TOKENS, Reference, make_adapters

pytestmark = pytest.mark.e2e

CHUNK = 16
FAMILIES = ["qwen2_5_vl", *(pytest.param(family, marks=pytest.mark.slow) for family in ("qwen2_vl", "qwen3_vl"))]
NAMES: tuple[str | None, ...] = (None, "tower", "projector", "both", "all", "language")


@dataclass
class Tower:
    """One family's engine, its files and what is expected of it."""

    family: str
    engine: EngineProcess
    adapters: dict[str, Path]
    reference: Reference

    def image(self, seed: int) -> Image.Image:
        return make_image(seed, (112, 84) if self.family in PATCHES_OF_14 else (32, 24))

    def prompt(self, images: int = 1) -> str:
        return f"<|im_start|>user\n{SHOWN[self.family] * images}What is this?<|im_end|>\n<|im_start|>assistant\n"

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
        ).answers

    def cold(self, mode: str) -> None:
        self.engine.force_mode(mode)
        self.engine.flush()


@pytest.fixture(scope="module", params=FAMILIES)
def tower(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tower]:
    root = tmp_path_factory.mktemp(request.param)
    model = save_family(request.param, root / "model")
    adapters = make_adapters(root, model)
    options = {
        "model_path": str(model),
        "enable_lora": True,
        "lora_paths": [f"language={adapters['language']}"],
        "max_loras_per_batch": 7,
        "max_lora_rank": 32,
        "chunked_prefill_size": CHUNK,
    }
    with EngineProcess(options) as engine:
        reference = Reference(model, adapters)
        engine.ready()
        assert engine.state()["pool"]["tower"]["bytes"] == 0, "no adapter of the tower, no memory for it"
        for name in NAMES[1:-1]:
            assert engine.load(str(name), adapters[str(name)]) is None
        yield Tower(request.param, engine, adapters, reference)


@pytest.mark.parametrize("mode", ["unmerged", "merged", "mixture"])
def test_one_image_and_one_each(tower: Tower, mode: str) -> None:
    for seeds in ((5,), (1, 2, 3, 4, 5, 6)):
        wanted = [tower.wanted(name, seed) for name, seed in zip(NAMES, seeds * (6 // len(seeds)), strict=True)]
        if len(seeds) == 1:
            assert len({tuple(ids) for ids in wanted}) == len(NAMES), "the adapters must change the answer"
        tower.cold(mode)
        for _ in range(2):  # the second time from the caches
            assert [answer["output_ids"] for answer in tower.ask(NAMES, *seeds)] == wanted
        for name, seed, ids in zip(NAMES, seeds * (6 // len(seeds)), wanted, strict=True):
            tower.cold(mode)
            assert tower.ask([name], seed)[0]["output_ids"] == ids, f"{name} alone"
