"""The step benchmark without a GPU: figures from rows, who writes them, and vLLM's engine behind its questions."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from benchmarks.kernels import bench_step
from benchmarks.kernels.bench_step import (
    CASES,
    FORMS,
    NOW,
    PHASES,
    Worker,
    absolute,
    adapters_of,
    all_ratios,
    form_figures,
    over_bytes,
    ratios,
    write_figures,
)
from benchmarks.serving.shape7b import SHAPES, adapter_numbers
from benchmarks.summary import read
from vlora_sgl.combined import parts

STUB = '''
"""As much of vLLM as the benchmark's engine asks for; it checks what it is asked."""
class SamplingParams:
    def __init__(self, **given):
        vars(self).update(given)
class LLM:
    def __init__(self, **given):
        import json, pathlib
        config = json.loads((pathlib.Path(given["model"]) / "config.json").read_text())
        assert config["architectures"] == ["Qwen2ForCausalLM"]
        assert given["enable_lora"] and given["max_loras"] == 8 and given["max_lora_rank"] == 64
    def generate(self, prompts, parameters, use_tqdm, lora_request=None):
        assert len(prompts) == 16 and all(len(p["prompt_token_ids"]) == 5 for p in prompts)
        names = {r.name for r in lora_request or ()}
        assert len(names) in (0, 1, 8) and (lora_request is None or len(lora_request) == 16)
        import time; time.sleep(0.001 * parameters.max_tokens + 0.01 * len(names))
'''
REQUEST = """
import pathlib
class LoRARequest:
    def __init__(self, name, number, path):
        assert number > 0 and (pathlib.Path(path) / "adapter_model.safetensors").exists()
        self.name = name
"""


def rows(**steps: float) -> list[dict[str, Any]]:
    """Of one phase: ``engine__case`` -> its step; a prefill takes a hundred times as long."""
    found = []
    for name, step in steps.items():
        engine, _, case = name.partition("__")
        found.append(
            {"engine": engine, "case": case, "phase": 0, "rows": 32, "step_ms": step, "prefill_ms": 100 * step}
        )
    return found


def test_figures_are_over_the_faster_of_two_backends() -> None:
    made = rows(off__base=5.0, off_triton__base=4.0, ours__base=4.0, ours__eight=6.0, slots64__eight=6.3)
    found = all_ratios(made)
    assert (found["base_over_off"], found["decode8_over_off"], found["prefill8_over_off"]) == (1.0, 1.5, 1.5)
    assert found["slots64_over_slots8"] == pytest.approx(1.05)
    assert not any("vllm" in name for name in found)
    slower = [{**row, "phase": 1, "step_ms": 2 * row["step_ms"]} for row in made if "ours" not in row["engine"]]
    apart = all_ratios([*(row for row in made if row["engine"] != "slots64"), *slower])
    assert apart["slots64_over_slots8"] == pytest.approx(1.05), "each phase has its own clock"
    beside = ratios([*made, *rows(vllm__base=5.0, vllm__eight=12.0)], 0)
    assert (beside["decode8_vs_vllm"], beside["prefill_base_vs_vllm"]) == (0.5, 0.8)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_32_adapters_cost_beside_their_bytes(shape: str) -> None:
    rate = 4e12
    needed = 1e3 * 32 * 2 * adapter_numbers(16, shape) / rate
    made = rows(off__base=5.0, off_triton__base=6.0, each16__each=5.0 + 3 * needed)
    assert over_bytes(made, shape, rate)["decode32_over_bytes"] == pytest.approx(3.0)
    assert over_bytes(rows(off__base=5.0), shape, rate) == over_bytes(rows(each16__each=5.0), shape, rate) == {}


@pytest.mark.parametrize("case, different", [("one", 1), ("eight", 8), ("each", 32), ("mixture", 8)])
def test_rows_have_the_adapters_that_a_case_says(case: str, different: int) -> None:
    named = adapters_of(case, 32)
    assert named is not None and len(named) == 32 and len(set(named)) == different
    engines = [name for name, cases in CASES.items() if case in cases]
    assert all(bench_step.adapters_for(name, 32) >= different for name in engines)


@pytest.mark.parametrize("count", [2, 4])
def test_rows_of_several_adapters_use_all_eight(count: int) -> None:
    named = adapters_of(f"combined{count}", 32)
    assert named is not None and len(named) == 32 and len(set(named)) == 8
    together = [[adapter for adapter, _ in parts(str(name))] for name in named]
    assert all(len(set(own)) == count for own in together) and len({*chain(*together)}) == 8


def test_figures_of_forms(tmp_path: Path) -> None:
    plain = {"off__base": 4.0, "forms__base": 4.02, "forms__one": 5.0, "forms__eight": 6.0}
    made = rows(**plain, forms__combined2=6.0, forms__combined4=7.2, dora__eight=6.3)
    found = form_figures(made)
    assert found == {"dora_over_lora": pytest.approx(1.05), "combined4_over_2": pytest.approx(1.2)}
    more = form_figures([*made, *rows(before__base=4.0, before__one=5.0, before__eight=6.04)])
    assert more["plain_step_change"] == pytest.approx(-0.01), "the largest, whichever way it goes"
    given = {"attention": None, "quantization": None, "input": 256, "shape": "7b", "tp": 1}
    args = type("", (), {**given, "summary": tmp_path / "summary.json"})
    write_figures(more, args)  # type: ignore[arg-type]
    assert {row["name"] for row in read(args.summary)} == {f"formats.{name}" for name in more}  # type: ignore[attr-defined]
    assert all(CASES[name] for name in FORMS)


class Started:
    """Stands for ``Worker``: keeps the command of each engine, none of which comes up."""

    commands: ClassVar[list[list[str]]] = []

    @classmethod
    def run(cls, command: list[str], log: Path, environment: object, tree: object = None) -> Started:
        log.write_text("")
        cls.commands.append(command)
        return cls()

    def wait(self, seconds: float) -> None:
        """Not ready."""

    def stop(self) -> None:
        """Nothing runs."""


def engines_asked_for(monkeypatch: pytest.MonkeyPatch, start: Callable[[], object]) -> dict[str, Any]:
    """Engine -> the command line that its process would read."""
    monkeypatch.setattr(Worker, "run", Started.run)
    Started.commands = []
    start()
    lines = [command[command.index("benchmarks.kernels.bench_step") + 1 :] for command in Started.commands]
    return {line.engine: line for line in map(bench_step.parse, lines)}


def built(monkeypatch: pytest.MonkeyPatch, line: Any) -> dict[str, Any]:
    """What an engine's process makes its engine of; ``vlora``: of ours alone."""
    kept: dict[str, Any] = {}

    class Engine:
        def __init__(self, **given: Any) -> None:
            kept.update(given)

    # The module itself would install the plugin in this process.
    monkeypatch.setitem(sys.modules, "vlora_sgl.engine", SimpleNamespace(Engine=Engine))
    monkeypatch.setattr(bench_step, "build_stock_engine", lambda **given: kept.update(given))
    bench_step.build(line.engine, [], line)
    return kept


@pytest.mark.parametrize("more", [[], ["--quantization", "fp8"], ["--tp", "2"], ["--forms"], ["--together"]])
def test_every_engine_is_asked_for_in_words_that_it_knows(monkeypatch: pytest.MonkeyPatch, more: list[str]) -> None:
    args = bench_step.parse(["--tiny", "--attention", "triton", *more, "--skip", "vllm", *NOW])
    lines = engines_asked_for(monkeypatch, lambda: bench_step.run_phases(args, time.monotonic() + 60))
    phases = (FORMS,) if args.forms else PHASES
    assert lines.keys() == {name for phase in phases for name in phase} - {"vllm", *NOW}
    for name, line in lines.items():
        given = built(monkeypatch, line)
        assert ("vlora" in given) == (not name.startswith(("off", "stock")))
        assert (given.get("quantization"), given.get("tp_size", 1)) == (args.quantization, args.tp)
        assert given.get("enable_lora", False) == (line.rank > 0)


def test_engines_of_another_checkout_are_asked_for_what_that_knows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "benchmarks" / "kernels"
    folder.mkdir(parents=True)
    (folder / "bench_step.py").write_text('parser.add_argument("--attention")')
    args = bench_step.parse(["--tiny", "--forms", "--attention", "triton", "--before", str(tmp_path)])
    monkeypatch.setattr(Worker, "run", Started.run)
    Started.commands = []
    bench_step.run_phases(args, time.monotonic() + 60)
    asked = [" ".join(command) for command in Started.commands]
    assert sum("--fast-paths" in command for command in asked) == len(FORMS) - len(NOW)
    assert all("--attention triton" in command for command in asked) and len(asked) == len(FORMS)


WANTED = """
default.decode8_over_off default.decode1_over_off default.base_over_off default.mixture_over_off
default.decode8_r16_over_off default.prefill8_over_off default.prefill8_r16_over_off default.slots64_over_slots8
default.decode32_over_bytes default.decode8_vs_vllm default.prefill_base_vs_vllm
"""


@pytest.mark.parametrize("infix, shape", [("", "7b"), ("3b.", "3b"), ("llava.", "llava-7b")])
@pytest.mark.parametrize("suffix, prompt", [("", 256), (".long", 3072)])
@pytest.mark.parametrize(
    "quantization, ranks, prefix", [(None, 1, "default"), ("fp8", 1, "fp8"), (None, 2, "scale.tp2")]
)
def test_every_figure_has_a_writer(
    infix: str, shape: str, suffix: str, prompt: int, quantization: str | None, ranks: int, prefix: str, tmp_path: Path
) -> None:
    steps = {f"{engine}__{case}": 5.0 for phase in PHASES for engine in phase for case in CASES[engine]}
    made = rows(**{name: step for name, step in steps.items() if quantization or not name.startswith("merged")})
    found = all_ratios(made) | over_bytes(made, shape, 4e12)
    given = {"attention": None, "quantization": quantization, "input": prompt, "shape": shape, "tp": ranks}
    args = type("", (), {**given, "summary": tmp_path / "summary.json"})
    write_figures(found, args)  # type: ignore[arg-type]
    wanted = [*WANTED.split(), *(["default.merged_over_off"] if quantization else [])]
    names = {name.replace("default.", f"{prefix}.{infix}") + suffix for name in wanted}
    on = ".fp8_base" if quantization else ""
    eight_bits = {f"fp8.adapters.{infix}{name}_over_off{on}{suffix}" for name in ("decode8", "prefill8")}
    assert {row["name"] for row in read(tmp_path / "summary.json")} == names | (eight_bits if ranks == 1 else set())


@pytest.fixture
def vllm_python(tmp_path: Path) -> Path:
    """A Python that has a vLLM, and nothing of ours."""
    package = tmp_path / "site" / "vllm"
    (package / "lora").mkdir(parents=True)
    (package / "__init__.py").write_text(STUB)
    (package / "lora" / "__init__.py").write_text("")
    (package / "lora" / "request.py").write_text(REQUEST)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexport PYTHONPATH={tmp_path / "site"}\ncd /\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def test_engines_side_by_side_have_times_of_their_own(tmp_path: Path) -> None:
    made = rows(ours__eight=6.0, stock__eight=16.0, vllm__eight=12.0, ours__base=5.0)
    found = absolute(made)
    tokens = {"vlora": 1e3 * 32 / 6.0, "sglang": 2e3, "vllm": 1e3 * 32 / 12.0}
    assert {name: found[f"decode8_tokens_per_second.{name}"] for name in tokens} == pytest.approx(tokens)
    assert {name for name in found if name.startswith("prefill8_ms")} == {f"prefill8_ms.{name}" for name in tokens}
    summary = tmp_path / "summary.json"
    write_figures(found, bench_step.parse(["--summary", str(summary)]), "a card")
    recorded = {one["name"]: one["unit"] for one in json.loads(summary.read_text())}
    assert recorded["default.prefill8_ms.vllm"] == "ms"
    assert recorded["default.decode8_tokens_per_second.vlora"] == "tokens/s"
    write_figures(found, bench_step.parse(["--attention", "triton", "--summary", str(summary)]), "a card")
    assert len(json.loads(summary.read_text())) == 6, "Triton's have none"


def test_vllms_engine_is_asked_as_the_others_are(vllm_python: Path, tmp_path: Path) -> None:
    flags = {"batch": 16, "input": 5, "steps": 4, "repeats": 2, "tiny": True, "shape": "7b"}
    args: Any = type("", (), {**flags, "vllm_python": str(vllm_python)})
    bench_step.write_models(tmp_path, {"vllm": 64}, args)
    worker = Worker.start("vllm", 64, 0, args, tmp_path)
    try:
        assert worker.wait(120) == "ready", (tmp_path / "vllm.log").read_text()
        found = bench_step.measure({"vllm": worker}, args, time.monotonic() + 60)
    finally:
        worker.stop()
    assert [(row["engine"], row["case"]) for row in found] == [("vllm", "base"), ("vllm", "eight")]
    base, eight = (row["prefill_ms"] for row in found)
    assert eight > base + 50, (tmp_path / "vllm.log").read_text()
