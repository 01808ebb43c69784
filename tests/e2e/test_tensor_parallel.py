"""Two ranks answer as one, with identical plans: over gloo on a CPU, over NCCL on two GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import TinyModel
from tests.support import towers
from tests.support.engine_runs import EngineProcess
from tests.support.head_reference import data_url, make_image, question
from tests.support.modes import Expected, check_all, engine_options
from vlora_sgl.platforms.cpu import is_plain_cpu
from vlora_sgl.server_args import VLoraArgs

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,  # three processes of an engine
    pytest.mark.skipif(not is_plain_cpu() and torch.cuda.device_count() < 2, reason="needs two GPUs, or a plain CPU"),
]

SEEN = 4
"""A picture that every adapter of the tower answers differently."""


ATTENTION = ["torch_native"] if is_plain_cpu() else ["triton", "fa3"]


@pytest.fixture(scope="module", params=ATTENTION)
def engine(
    tiny_model: TinyModel, mode_adapters: dict[str, Path], request: pytest.FixtureRequest
) -> Iterator[EngineProcess]:
    # SGLang wants one NUMA node a rank on a CPU, or to be told the cores (which it then binds only with AMX).
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"} if is_plain_cpu() else {}
    options = {
        **engine_options(tiny_model.path, mode_adapters),
        "tp_size": 2,
        "max_loras_per_batch": 8,
        "max_lora_rank": 32,
        "attention_backend": request.param,
    }
    # On a GPU prefills replay graphs, too.
    options |= {} if is_plain_cpu() else {"cuda_graph_backend_prefill": "breakable"}
    # Algorithm 1 merges whenever a batch is one adapter's; by costs that hardly pays for a model this small.
    with EngineProcess(options, vlora=VLoraArgs(policy="vlora", dora=True), environment=cores) as process:
        yield process


@pytest.mark.parametrize("mode", ["auto", "unmerged", "merged", "mixture"])
def test_every_mode_answers_as_one_rank_and_ranks_plan_alike(
    engine: EngineProcess, expected: dict[str | None, Expected], mode: str
) -> None:
    engine.force_mode(mode)
    ran = set()
    batches: list[list[str | None]] = [["all"], ["mlp", "all", "attention", None, "all", "all"], [None, None, "mlp"]]
    for names in (*batches, ["vocabulary", "all", None, "vocabulary"], ["attention"]):
        run = check_all(engine, names, expected)
        one, other = ([(s.kind, s.rows, s.tokens, s.plan) for s in steps] for steps in run.ranks)
        assert one == other
        assert all(plan[0] for _, _, _, plan in one)
        ran |= {plan[1] for _, _, _, plan in one}
    assert ran & ({"merged"} if mode == "auto" else {mode})


@pytest.mark.parametrize("mode", ["unmerged", "merged", "mixture"])
def test_what_is_more_than_lora_answers_as_on_one_rank(
    engine: EngineProcess,
    expected: dict[str | None, Expected],
    expected_of_forms: dict[str | None, Expected],
    form_adapters: dict[str, Path],
    mode: str,
) -> None:
    """DoRA's norms are of whole rows, of which a rank has a part where ranks share the inputs."""
    for name, path in form_adapters.items():
        assert engine.load(name, path) is None
    engine.force_mode(mode)
    wanted = {**expected, **expected_of_forms}
    for names in (["dora"], ["bias", "bias"], ["lora_bias"], [*form_adapters, "all", None, "dora", "dora"]):
        run = check_all(engine, names, wanted)
        one, other = ([(s.kind, s.rows, s.tokens, s.plan) for s in steps] for steps in run.ranks)
        assert one == other
        if mode == "merged" and len(set(names)) == 1:
            assert "merged" in {plan[1] for _, _, _, plan in one}
    for name in form_adapters:
        assert engine.unload(name) is None


@pytest.mark.parametrize("mode", ["unmerged", "merged", "mixture"])
def test_adapters_of_the_vision_tower_answer_as_on_one_rank(
    engine: EngineProcess, tiny_model: TinyModel, tmp_path: Path, mode: str
) -> None:
    """A rank has a part of every head and column of the encoder's layers, and of the slots beside them."""
    adapters = towers.make_adapters(tmp_path, tiny_model.path)
    reference = towers.Reference(tiny_model.path, adapters)
    names: list[str | None] = [None, *towers.ADAPTERS]
    for name in towers.ADAPTERS:
        assert engine.load(name, adapters[name]) is None
    engine.force_mode(mode)
    for seeds in ([SEEN] * len(names), range(1, len(names) + 1)):
        images = [make_image(seed) for seed in seeds]
        wanted = [
            reference.ids(question("What is this?"), *one) for one in zip(names, [[i] for i in images], strict=True)
        ]
        assert len(set(seeds)) > 1 or len({tuple(ids) for ids in wanted}) == len(names)
        sampling = {"temperature": 0, "max_new_tokens": towers.TOKENS, "ignore_eos": True}
        shown = {"image_data": [[data_url(image)] for image in images], "sampling_params": sampling}
        run = engine.generate(prompt=[question("What is this?")] * len(names), lora_path=names, **shown)
        for answer, ids in zip(run.answers, wanted, strict=True):
            assert not is_plain_cpu() or answer["output_ids"] == ids
    for name in towers.ADAPTERS:
        assert engine.unload(name) is None


def test_an_adapter_unloaded_while_merged_leaves_both_shards_base(
    engine: EngineProcess, expected: dict[str | None, Expected], mode_adapters: dict[str, Path]
) -> None:
    engine.force_mode("merged")
    check_all(engine, ["all"], expected)
    assert engine.unload("all") is None
    check_all(engine, [None, "mlp"], expected)
    assert engine.load("all", mode_adapters["all"]) is None
    check_all(engine, ["all"], expected)
