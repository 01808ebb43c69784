"""The real trainer behind the packer, on random models of every family: states, continuation, heads, whole runs."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.support.families import FAMILIES, make
from vlora_sgl.generate.__main__ import main
from vlora_sgl.generate.datasets import write_jsonl
from vlora_sgl.generate.floors import bar
from vlora_sgl.generate.learner import Learner, generate
from vlora_sgl.generate.sources import load_run
from vlora_sgl.generate.trainer import exact_match
from vlora_sgl.heads.store import load_heads, read_description
from vlora_sgl.lora.checkpoint import read_adapter

ROOT = Path(__file__).parents[2]
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 220)}

CONFIG = """\
base: {base}
output: out
order: given
rehearsal: 0.5
curve: true
device: cpu
heads: {heads}
lora: {{rank: 8, alpha: 16, steps: {steps}, batch_size: 8, learning_rate: 0.01}}
datasets:
- {{name: warm, task: classification, floor: {floor}, data: {{splits: warm}}}}
- {{name: cold, task: classification, floor: {floor}, data: {{splits: cold}}}}
"""


def write_colours(folder: Path, names: tuple[str, ...], question: str) -> None:
    rng = random.Random(folder.name)

    def row(i: int) -> Any:
        name = names[i % len(names)]
        shade = tuple(min(255, max(0, c + rng.randint(-20, 20))) for c in COLOURS[name])
        return [Image.new("RGB", (56, 56), shade)], question, name

    for split, count in (("train", 16), ("validation", 8), ("test", 8)):
        write_jsonl(folder / f"{split}.jsonl", [row(i) for i in range(count)])


@pytest.fixture(scope="module", params=FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen2_5_vl", tmp_path_factory.mktemp("models") / "qwen")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_colours(tmp_path / "warm", ("red", "green"), "What colour is this?")
    write_colours(tmp_path / "cold", ("blue", "green"), "What colour is this?")
    return tmp_path


def config(folder: Path, base: Path, steps: int = 30, floor: float = 0.6, heads: str = "false") -> Path:
    path = folder / "c.yaml"
    path.write_text(CONFIG.format(base=base, steps=steps, floor=floor, heads=heads))
    return path


def test_every_family_learns_and_goes_on_from_a_kept_state(folder: Path, base: Path) -> None:
    run, datasets = load_run(config(folder, base))
    learner = Learner(run, datasets)
    assert learner.measure_base("warm", "test") == 0.0
    base_weights = {name: value.clone() for name, value in learner.model.state_dict().items()}
    alone = learner.fuse(("warm",))
    assert alone["warm"] >= 0.9
    both = learner.fuse(("warm", "cold"))
    assert both.keys() == {"warm", "cold"} and both["cold"] >= 0.9
    assert all(torch.equal(value, base_weights[name]) for name, value in learner.model.state_dict().items())
    assert learner.measure(("warm",), "validation") == pytest.approx(alone, abs=0.13)
    assert read_adapter(learner.state(("warm",))).modules, "the server's reader takes it as it is"
    # Another process goes on from the state on disk and gets the same adapter, bit for bit.
    weights = (learner.state(("warm", "cold")) / "adapter_model.safetensors").read_bytes()
    assert Learner(run, datasets).fuse(("warm", "cold")) == both
    assert (learner.state(("warm", "cold")) / "adapter_model.safetensors").read_bytes() == weights
    examples = datasets[0].splits["test"]
    said = generate(learner.model, learner.processor, examples)
    hits = exact_match(learner.model, learner.processor, examples)
    assert [a == e.answer for a, e in zip(said, examples, strict=True)] == hits


def test_a_fused_head_answers_for_all_its_data_sets_and_grows(folder: Path, qwen: Path) -> None:
    run, datasets = load_run(config(folder, qwen, heads="true", steps=40))
    learner = Learner(run, datasets)
    learner.fuse(("warm",))
    accuracy = learner.fuse(("warm", "cold"))
    assert min(accuracy.values()) >= 0.75
    directory = learner.state(("warm", "cold"))
    (head,) = load_heads(directory, 64).values()
    assert head.kind == "classify" and head.labels == ("green", "red", "blue")
    assert read_description(directory).prompt == "What colour is this?"
    assert learner.measure(("warm", "cold"), "validation") == pytest.approx(accuracy, abs=0.13)


def test_a_whole_run_from_the_command_line(folder: Path, qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(folder, qwen)
    code = main([str(path)])
    report = json.loads((folder / "out/report.json").read_text())
    assert code == (1 if report["floors_broken"] else 0)
    assert sorted(n for a in report["adapters"] for n in a["datasets"]) == ["cold", "warm"]
    assert report["bound"] <= len(report["adapters"])
    assert report["confidence"] == 0.95
    learnt = {tuple(step["datasets"]): step["accuracy"] for step in report["steps"]}
    for entry in report["adapters"]:
        directory = folder / "out/adapters" / entry["name"]
        assert read_adapter(directory).modules
        measured = read_description(directory).metrics
        assert set(measured) == set(entry["datasets"])
        for row in (r for r in report["datasets"] if r["adapter"] == entry["name"]):
            assert row["needed"] == bar(0.6, 8, 0.95) and row["examples"]["validation"] == 8
            assert row["validation"] == learnt[tuple(entry["datasets"])][row["name"]]
        assert all(measured[r["name"]]["test"] == r["accuracy"] for r in report["datasets"] if r["name"] in measured)
    page = (folder / "out/report.html").read_text()
    assert page.count("<svg") == 3 and not re.search(r"(src|href)=\"?https?:", page.split("<svg")[0])
    # Started again it trains nothing and ends the same; with other floors it uses what is there.
    before = (folder / "out/ledger.jsonl").read_text()
    capsys.readouterr()
    assert main([str(path), "--json"]) == code
    assert json.loads(capsys.readouterr().out)["adapters"] == report["adapters"]
    again = json.loads((folder / "out/report.json").read_text())
    assert (folder / "out/ledger.jsonl").read_text() == before
    assert again["trainings_resumed"] == again["trainings"] == report["trainings"]
    assert again["adapters"] == report["adapters"] and again["datasets"] == report["datasets"]
    config(folder, qwen, steps=31)
    assert main([str(path)]) == 2 and "another configuration" in capsys.readouterr().err


def test_a_killed_training_resumes_and_ends_as_an_unbroken_one(folder: Path, qwen: Path) -> None:
    """SIGKILL after the first finished step, in the middle of the second."""
    path = config(folder, qwen)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-m", "vlora_sgl.generate", str(path)], cwd=ROOT, env=env, stderr=-3)
    ledger = folder / "out/ledger.jsonl"
    deadline = time.monotonic() + 200
    while not (ledger.exists() and '"fuse"' in ledger.read_text()) and time.monotonic() < deadline:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = ledger.read_text()
    run, _ = load_run(path)
    learnt = [json.loads(line)["names"] for line in finished.splitlines()[1:]]
    assert learnt == [["warm"]], "killed in the middle"
    state = next((folder / "out/states").glob("01-*"))
    written = (state / "adapter_model.safetensors").stat().st_mtime_ns
    main([str(path)])
    resumed = json.loads((folder / "out/report.json").read_text())
    assert resumed["trainings_resumed"] == 1
    assert (state / "adapter_model.safetensors").stat().st_mtime_ns == written
    assert ledger.read_text().startswith(finished)
    unbroken = folder / "unbroken.yaml"
    unbroken.write_text(path.read_text().replace("output: out", "output: whole"))
    main([str(unbroken)])
    whole = json.loads((folder / "whole/report.json").read_text())
    assert whole["adapters"] == resumed["adapters"] and whole["steps"] == resumed["steps"]
    assert whole["datasets"] == resumed["datasets"]
    assert run.output == folder / "out"
