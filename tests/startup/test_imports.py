"""What an engine process leaves out of its imports, and what it must not lose by it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vlora_sgl.startup import imports


def checkpoint(directory: Path, *architectures: str) -> str:
    (directory / "config.json").write_text(json.dumps({"architectures": architectures}))
    return str(directory)


def test_import_is_cheap() -> None:
    code = "import time; t = time.perf_counter(); import vlora_sgl, sys; d = time.perf_counter() - t;"
    code += "print(d, 'torch' in sys.modules, 'sglang' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert float(output[0]) < 0.5
    assert output[1:] == ["False", "False"]


def test_only_the_served_model_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(imports.DISABLED_MODELS, raising=False)
    imports.disable_other_models(checkpoint(tmp_path, "Qwen2_5_VLForConditionalGeneration"))
    disabled = set(os.environ.pop(imports.DISABLED_MODELS).split(","))
    assert "llama" in disabled
    assert not disabled & {"qwen2_5_vl", "registry", "transformers"}


@pytest.mark.parametrize("architectures", [(), ("NobodyKnowsThisForCausalLM",)], ids=["none", "unknown"])
def test_nothing_is_disabled_when_no_module_defines_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architectures: tuple[str, ...]
) -> None:
    monkeypatch.delenv(imports.DISABLED_MODELS, raising=False)
    imports.disable_other_models(checkpoint(tmp_path, *architectures))
    assert imports.DISABLED_MODELS not in os.environ


@pytest.mark.parametrize(
    ("architecture", "parts", "kept"),
    [
        (
            "LlavaForConditionalGeneration",
            {"text": "llama", "vision": "clip_vision_model"},
            {"llama", "clip", "llava"},
        ),
        ("LlavaLlamaForCausalLM", {}, {"llama", "llava"}),
        ("Mistral3ForConditionalGeneration", {"text": "mistral", "vision": "pixtral"}, {"mistral", "pixtral"}),
    ],
)
def test_a_wrappers_parts_are_not_disabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, parts: dict[str, str], kept: set[str]
) -> None:
    monkeypatch.delenv(imports.DISABLED_MODELS, raising=False)
    path = checkpoint(tmp_path, architecture)
    settings = {"architectures": [architecture]}
    settings |= {f"{part}_config": {"model_type": kind} for part, kind in parts.items()}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    imports.disable_other_models(path)
    disabled = set(os.environ.pop(imports.DISABLED_MODELS).split(","))
    assert "qwen2_5_vl" in disabled and not disabled & kept


def test_a_wrapper_of_parts_that_are_no_modules_may_want_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(imports.DISABLED_MODELS, raising=False)
    imports.disable_other_models(checkpoint(tmp_path, "LlavaForConditionalGeneration"))
    assert imports.DISABLED_MODELS not in os.environ


def test_the_users_switch_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(imports.DISABLED_MODELS, "llama")
    imports.disable_other_models(checkpoint(tmp_path, "Qwen2_5_VLForConditionalGeneration"))
    assert os.environ[imports.DISABLED_MODELS] == "llama"


def test_a_hidden_package_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "USELESS_ON_CPU", ("colorsys",))
    monkeypatch.setattr(imports, "has_accelerator", lambda: False)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with imports.without_useless_packages():
        assert importlib.util.find_spec("colorsys") is None
        with pytest.raises(ImportError):
            import colorsys
    import colorsys

    assert colorsys.rgb_to_hsv(0, 0, 0) == (0, 0, 0)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--model-path", "m", "--port", "1"], "m"),
        (["--port", "1", "--model=m"], "m"),
        (["--port", "1"], ""),
        (["--model-path"], ""),
    ],
)
def test_model_path_of(argv: list[str], expected: str) -> None:
    assert imports.model_path_of(argv) == expected
