"""Adapter directories of any content: loaded or refused with one line that is not too long, and in bounded time."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.support.fuzz import adapters
from tests.support.lora_adapters import tiny_adapter, tiny_config, tiny_model
from vlora_sgl.errors import MESSAGE_CHARS, AdapterError, HeadError
from vlora_sgl.heads.store import load_heads, read_description
from vlora_sgl.lora.access import allowed_directory
from vlora_sgl.lora.checkpoint import read_adapter
from vlora_sgl.lora.layout import BaseLayout
from vlora_sgl.routed.spec import is_routed, member_names, read_routed

SEEDS, EACH = range(8), 60


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good")
    tiny_adapter(
        tiny_model("qwen2_5_vl"), path, target_modules=r".*layers.*(q_proj|down_proj)", exclude_modules=".*visual.*"
    )
    return path


@pytest.mark.parametrize("seed", SEEDS)
def test_a_directory_of_any_content_is_read_or_refused(seed: int, good: Path, tmp_path: Path) -> None:
    pick, layout, refused = random.Random(seed), BaseLayout.from_config(tiny_config("qwen2_5_vl")), 0
    for _ in range(EACH):
        directory, began = adapters.directory(pick, tmp_path, good), time.monotonic()
        try:
            allowed_directory(str(directory), [str(tmp_path)])
            if is_routed(directory):
                read_routed(directory, "r", 64, 512)
                member_names(directory, "r")
            read_adapter(directory, layout)
            load_heads(directory, 64, "cpu", read_description(directory))
        except (AdapterError, HeadError) as error:
            refused += 1
            assert "\n" not in str(error) and 0 < len(str(error)) <= MESSAGE_CHARS + 1, directory
        except Exception as error:
            raise AssertionError(f"{directory}: {error!r}") from error
        assert time.monotonic() - began < 10, directory
    assert EACH // 4 < refused < EACH
