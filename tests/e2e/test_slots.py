"""A server whose adapter slots have ranks of their own (``--vlora-slot-ranks``): the same answers from less memory.

It needs a server of its own, so it runs with ``--slow`` only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.conftest import Server, TinyModel, serve
from tests.soak.phases import GREEDY, TOKENS, Churn, adapters, answer, load, post, question, quiet_answers, users_left
from tests.support.reference import Reference
from tests.support.tiny_random import make_adapter

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SLOTS = (64, 32, 16, 16, 16)
RANKS = (4, 8, 16, 32, 64)
SHORT = "<|im_start|>user\nHow many objects are there?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def paths(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters of every rank."""
    root = tmp_path_factory.mktemp("ranks")
    return {
        f"r{rank}{which}": make_adapter(root / f"{rank}{which}", tiny_model.path, 100 * which + rank, rank=rank)
        for rank in RANKS
        for which in (1, 2)
    }


@pytest.fixture(scope="module")
def server(
    tiny_model: TinyModel, paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Five slots, ten adapters."""
    log = tmp_path_factory.mktemp("slots") / "log.txt"
    with serve(TinyModel(tiny_model.path, paths), log, "--vlora-slot-ranks", *map(str, SLOTS)) as running:
        yield running


def state(server: Server) -> dict[str, Any]:
    return dict(requests.get(f"{server.url}/server_info", timeout=60).json()["internal_states"][0]["vlora"])


def test_five_ranks_and_the_base_in_one_batch_equal_peft(server: Server, paths: dict[str, Path]) -> None:
    reference = Reference(server.model.path, paths)
    rows: list[str | None] = [f"r{rank}1" for rank in RANKS]
    rows += [None, *reversed(rows)]
    expected = {name: reference.generate(SHORT, name, None)[:TOKENS] for name in set(rows)}
    assert len({tuple(ids) for ids in expected.values()}) == 6, "the adapters must change the answer"
    assert {name: answer(server, SHORT, name) for name in expected} == expected
    before = state(server)["batches_by_mode"]
    replies = server.generate(text=[SHORT] * len(rows), lora_path=rows, sampling_params=GREEDY)
    assert [reply["output_ids"] for reply in replies] == [expected[name] for name in rows]
    steps = sum(state(server)["batches_by_mode"].values()) - sum(before.values())
    assert steps <= 2 * TOKENS, f"the rows ran one after the other, in {steps} iterations"


def test_the_slots_cost_their_own_ranks(server: Server) -> None:
    pool = state(server)["pool"]
    assert pool["ranks"] == [0, *sorted(SLOTS)]
    # 128 wide, 256 in the middle, 3 layers: ranks x (inputs of A, one per projection, and outputs of B), in float32
    per_rank = 3 * 4 * (3 * 128 + 3 * 128 + 128 + 128 + 2 * 128 + 2 * 256 + 256 + 128)
    assert pool["bytes"] == sum(SLOTS) * per_rank
    assert pool["bytes"] < 0.4 * 6 * 64 * per_rank, "six slots of rank 64 are what SGLang's pool would take"


def test_pins_leave_a_slot_for_the_largest_rank(server: Server) -> None:
    assert post(server, "pin_lora_adapter", lora_name="r41").status_code == 200
    try:
        reply = post(server, "pin_lora_adapter", lora_name="r641")
        assert reply.status_code == 400 and "no slot of rank 64 stays for the others" in reply.text
    finally:
        assert post(server, "pin_lora_adapter", lora_name="r41", pinned=False).status_code == 200


def test_adapters_come_go_move_and_hang_up_without_loss(
    server: Server, paths: dict[str, Path], tmp_path: Path
) -> None:
    prompts = [question(number) for number in range(2)]
    # The operator pins what comes: of rank 64 that would be refused, and twice at once while one replaces the other.
    contents = {"X": paths["r82"], "Y": paths["r162"]}
    fixed = [name for name in paths if name not in ("r82", "r162")]
    expected = quiet_answers(server, prompts, contents, fixed)
    tally = Churn(server, expected, prompts, "coming", contents, tmp_path).run(seconds=15, clients=4)
    assert tally.faults == []
    assert users_left(server) == {}
    assert tally.outcomes["in a batch"] and tally.outcomes["operated"] > 3
    ranks = {row["slot"]: row["rank"] for row in adapters(server).values() if row["slot"] is not None}
    assert all(rank <= [0, *sorted(SLOTS)][slot] for slot, rank in ranks.items())


def test_a_rank_that_no_slot_holds_is_refused(server: Server, tmp_path: Path) -> None:
    reply = load(server, "wide", make_adapter(tmp_path, server.model.path, 1, rank=65))
    assert reply.status_code == 400 and "rank 65 does not fit the slots of rank 64" in reply.text
