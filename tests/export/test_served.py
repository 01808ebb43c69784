"""An exported model served: by ours, which keeps the adapters' names, and by stock SGLang, which knows nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Server
from tests.support.head_reference import data_url, make_image, question
from vlora_sgl.defaults import engine_defaults
from vlora_sgl.export.run import ExportPlan, export

pytestmark = [pytest.mark.e2e, pytest.mark.slow]  # each test starts an engine
ROOT = Path(__file__).parents[2]
PROMPT = question("Describe the image in one word.")
STOCK = ("device", "dtype", "attention_backend", "sampling_backend", "disable_fast_image_processor")
STOCK += ("cuda_graph_backend_decode", "cuda_graph_backend_prefill", "disable_overlap_schedule", "max_total_tokens")


@pytest.fixture(scope="module")
def exported(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared server's model with A merged in."""
    out = tmp_path_factory.mktemp("exported") / "out"
    export(ExportPlan(server.model.path, "A", server.model.adapters, out), progress=False)
    return out


@pytest.fixture(scope="module")
def original(server: Server) -> dict[str, Any]:
    """What the original base, A and B answer, by the names they are asked for."""
    image = data_url(make_image(1))
    names = (None, "A", "B")
    answers = {str(n): server.generate(text=PROMPT, image_data=[image], lora_path=n)["output_ids"] for n in names}
    assert len(set(map(tuple, answers.values()))) == 3
    return answers


def served(kind: str, directory: Path, names: list[str | None], options: dict[str, Any]) -> Any:
    command = [sys.executable, "-m", "tests.export.serve_exported", kind, str(directory), json.dumps(names), PROMPT]
    command += [data_url(make_image(1)), json.dumps(options)]
    run = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=280
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_ours_answers_to_the_names_of_the_original(exported: Path, original: dict[str, Any]) -> None:
    """Told nothing but the directory: A is the model itself, B its delta, no name the delta of the base."""
    assert served("ours", exported, [None, "A", "B"], {}) == original


def test_stock_sglang_loads_the_merged_base_and_every_delta(exported: Path, original: dict[str, Any]) -> None:
    options = {name: value for name, value in engine_defaults().items() if name in STOCK}
    options |= {"lora_backend": "torch_native"} if options.get("device") == "cpu" else {}
    options["lora_paths"] = [f"{name}={exported}/adapters/{name}" for name in ("B", "base", "A")]
    answers = served("stock", exported, [None, "B", "base", "A"], options)
    assert answers == {"None": original["A"], "B": original["B"], "base": original["None"], "A": original["A"]}
