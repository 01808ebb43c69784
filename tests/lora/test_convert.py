"""Adapters whose initialisation changed the base: converted they do on the base model what they did, as PEFT's do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.corda import preprocess_corda
from safetensors.torch import load_file, save_file

from tests.support.lora_adapters import tiny_adapter, tiny_model
from vlora_sgl.cli import main
from vlora_sgl.errors import AdapterError
from vlora_sgl.lora.checkpoint import WEIGHTS_NAME, read_adapter
from vlora_sgl.lora.convert import convert
from vlora_sgl.lora.layout import BaseLayout

IDS = torch.arange(24).view(2, 12) * 5 % 128
PATTERNS = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 20}}
FORMS: dict[str, dict[str, Any]] = {
    "pissa": {"init_lora_weights": "pissa"},
    "pissa fast": {"init_lora_weights": "pissa_niter_4"},
    "olora": {"init_lora_weights": "olora"},
    "corda": {"init_lora_weights": "corda", "corda_config": CordaConfig(corda_method="kpm")},
    "rslora": {"init_lora_weights": "pissa", "use_rslora": True},
    "patterns": {"init_lora_weights": "olora", **PATTERNS},
    "rslora and patterns": {"init_lora_weights": "pissa", "use_rslora": True, **PATTERNS},
}


def trained(root: Path, base: Any, **form: Any) -> tuple[Path, Path, torch.Tensor]:
    """An adapter saved before and after it was (as good as) trained, and what it then answers."""
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "up_proj"], **form)
    if form["init_lora_weights"] == "corda":
        preprocess_corda(base, config, run_model=lambda: base(torch.arange(128)[None]))
    model = get_peft_model(base, config).eval()
    model.save_pretrained(root / "initial")
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(root / "trained")
    with torch.no_grad():
        return root / "trained", root / "initial", model(IDS).logits


@pytest.mark.parametrize("form", FORMS)
def test_the_converted_adapter_answers_on_the_base_model_as_the_trained_one_did(form: str, tmp_path: Path) -> None:
    base = tiny_model("qwen2")
    with torch.no_grad():
        plain = base(IDS).logits
    after, before, logits = trained(tmp_path, tiny_model("qwen2"), **FORMS[form])
    assert not torch.allclose(logits, plain, atol=1e-2), "it must have been trained"
    with pytest.raises(AdapterError, match="vlora convert TRAINED INITIAL OUTPUT"):
        read_adapter(after)
    assert main(["convert", str(after), str(before), str(tmp_path / "plain")]) == 0
    assert read_adapter(tmp_path / "plain", BaseLayout.from_config(base.config)).report.max_rank == 8
    with torch.no_grad():
        served = PeftModel.from_pretrained(base, tmp_path / "plain").eval()(IDS).logits
    torch.testing.assert_close(served, logits, atol=2e-4, rtol=1e-4)


def test_pefts_own_conversion_is_loaded_as_it_is_and_gives_the_same(tmp_path: Path) -> None:
    base = tiny_model("qwen2")
    after, before, _ = trained(tmp_path, base, init_lora_weights="olora")
    model = PeftModel.from_pretrained(tiny_model("qwen2"), after)
    shutil.copytree(before, tmp_path / "marked")  # PEFT wants to be told that its factors are taken as they are
    model.save_pretrained(tmp_path / "peft", path_initial_model_for_weight_conversion=str(tmp_path / "marked"))
    convert(after, before, tmp_path / "ours")
    theirs, ours = (read_adapter(tmp_path / name) for name in ("peft", "ours"))
    assert theirs.report.digest == ours.report.digest


@pytest.mark.parametrize("init", ["eva", "gaussian", "orthogonal", True, False])
def test_an_initialisation_that_leaves_the_base_alone_is_plain(init: Any, tmp_path: Path) -> None:
    tiny_adapter(tiny_model("qwen2"), tmp_path, target_modules=["q_proj"])
    set_option(tmp_path, init_lora_weights=init)
    assert read_adapter(tmp_path).report.modules == {"q_proj": 3}


def set_option(directory: Path, **options: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **options}))


def rename_first(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS_NAME)
    first = sorted(tensors)[0]
    save_file({key.replace("layers.0", "layers.9") if key == first else key: t for key, t in tensors.items()},
              directory / WEIGHTS_NAME)  # fmt: skip


FAULTS: dict[str, tuple[Any, str]] = {
    "another rank": (lambda d: set_option(d / "initial", r=3), "r is 3, of the trained adapter it is 4"),
    "another scale": (lambda d: set_option(d / "initial", lora_alpha=7), "lora_alpha is 7"),
    "other modules": (lambda d: rename_first(d / "initial"), "expected base_model.model.model.layers.0"),
    "no initial one": (lambda d: shutil.rmtree(d / "initial"), "adapter_config.json"),
    "a pickle": (lambda d: (d / "trained" / WEIGHTS_NAME).rename(d / "trained" / "adapter_model.bin"), "pickle"),
    "loftq": (lambda d: set_option(d / "trained", init_lora_weights="loftq"), "merge_and_unload"),
    "dora": (lambda d: set_option(d / "trained", use_dora=True), "DoRA|use_dora"),
    "a place that is taken": (lambda d: (d / "plain").mkdir(), "is there already"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_converted_is_refused_and_nothing_is_written(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, tiny_model("qwen2"), init_lora_weights="olora")
    inject, message = FAULTS[fault]
    inject(tmp_path)
    before = sorted(tmp_path.iterdir())
    arguments = [str(tmp_path / name) for name in ("trained", "initial", "plain")]
    assert main(["convert", *arguments]) == 1
    with pytest.raises(AdapterError, match=message):
        convert(*map(Path, arguments))
    assert "refused: " in capsys.readouterr().err and sorted(tmp_path.iterdir()) == before


def test_mica_leaves_the_base_alone_and_is_plain(tmp_path: Path) -> None:
    base = tiny_model("qwen2")
    _, _, logits = trained(tmp_path, base, init_lora_weights="mica")
    read = read_adapter(tmp_path / "trained", BaseLayout.from_config(base.config))
    plain = tiny_model("qwen2")
    modules = dict(plain.named_modules())
    for name, pair in read.modules.items():
        modules[f"model.{name}"].weight.data += pair.delta().float()
    with torch.no_grad():
        torch.testing.assert_close(plain(IDS).logits, logits, atol=2e-4, rtol=1e-4)
