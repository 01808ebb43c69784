"""Quantised bases answer as transformers with what their numbers mean, and PEFT's adapters."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import TinyModel
from tests.support.engine_runs import EngineProcess
from tests.support.modes import Expected, ask, check, check_all, engine_options, expected_answers
from tests.support.quantised import FORMATS, Format, make
from vlora_sgl.kernels.merge.folded import fold_reference
from vlora_sgl.platforms.cpu import is_plain_cpu
from vlora_sgl.scaled import E4M3, quantise
from vlora_sgl.server_args import VLoraArgs

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not is_plain_cpu(), reason="on a GPU SGLang's kernels quantise activations too"),
]
BATCHES: list[list[str | None]] = [["all"], ["mlp", "all", "attention", None, "all", "all"], [None, None, "mlp"]]


@dataclass
class Served:
    """An engine, the answers of its format's meaning, and where they came from."""

    name: str
    engine: EngineProcess
    expected: dict[str | None, Expected]
    meant: Path
    adapter: Path


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "fp8-block" else pytest.mark.slow) for name in FORMATS],
)
def served(
    request: pytest.FixtureRequest,
    tiny_model: TinyModel,
    mode_adapters: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """An engine of each format; one of them in every run of the tests."""
    adapters = {name: mode_adapters[name] for name in ("all", "attention", "mlp")}
    quantised, meant = make(request.param, tiny_model.path, tmp_path_factory.mktemp("quantised"))
    options = engine_options(quantised, adapters)
    if (flag := FORMATS[request.param].flag) is not None:
        options["quantization"] = flag
    with EngineProcess(options, vlora=VLoraArgs(policy="vlora")) as engine:
        yield Served(request.param, engine, expected_answers(meant, adapters), meant, adapters["all"])


def test_unmerged_answers_are_those_of_what_the_checkpoint_means(served: Served) -> None:
    served.engine.force_mode("unmerged")
    for names in BATCHES:
        check_all(served.engine, names, served.expected)


def fold_checkpoint(form: Format, meant: Path, adapter: Path, root: Path) -> Path:
    """The checkpoint with an adapter folded in as docs/quantization.md says: each projection by itself, in float64."""
    shutil.copytree(meant, root)
    tensors, lora = (load_file(path) for path in (root / "model.safetensors", adapter / "adapter_model.safetensors"))
    scaling = 2.0  # of make_adapter's: alpha is twice the rank
    for key in [key for key in lora if "lora_A" in key]:
        name = key.removeprefix("base_model.model.").removesuffix("lora_A.weight") + "weight"
        name = next(
            found for found in tensors if found.endswith(name.split("layers.", 1)[1]) and "visual" not in found
        )
        shape = tensors[name].shape
        block = (128, 128) if "block" in str(form.config) and "128" in str(form.config) else (1, shape[1])
        base = quantise(tensors[name], block, E4M3)
        assert torch.equal(base.wide(), tensors[name]), "the checkpoint's own scales"
        b = lora[key.replace("lora_A", "lora_B")]
        tensors[name] = fold_reference(base, lora[key], b, scaling).wide()
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
    return root


def test_folded_answers_are_those_of_folded_weights_and_restoring_brings_the_base_back(
    served: Served, tmp_path: Path
) -> None:
    engine, state = served.engine, served.engine.state()
    rows = list(state["adapters"].values())
    engine.force_mode("merged")
    run = ask(engine, ["all", "all"])
    modes = {step.plan[1] for step in run.steps if step.plan}
    if not FORMATS[served.name].folds:
        assert modes == {"unmerged"} and all(row["merge_loss"] is None for row in rows)
        return
    assert all(row["never_merged"] is None and 0.001 < row["merge_loss"] < 0.05 for row in rows)
    assert len(rows) == 3 and "merged" in modes
    if (
        "tensor" not in served.name
    ):  # one scale for a matrix: the rows' new ones are others than a fresh quantisation's
        folded = fold_checkpoint(FORMATS[served.name], served.meant, served.adapter, tmp_path / "folded")
        wanted = expected_answers(folded, {})[None]
        assert wanted.logprobs != served.expected["all"].logprobs
        for answer in run.answers:
            check(answer, wanted)
    engine.force_mode("unmerged")
    check_all(engine, BATCHES[1], served.expected)
