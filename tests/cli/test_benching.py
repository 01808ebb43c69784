"""``vlora bench``: what it prints of rounds, and (with ``--slow``) that it measures both systems here."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from vlora_sgl.cli import benching, main
from vlora_sgl.cli.result import CommandError

ASKED = Namespace(requests=8, tokens=4, concurrency=2, rounds=3)


def rounds(*rates: float) -> list[dict[str, float | None]]:
    return [{"tokens_per_second": rate, "ttft_ms": 10 * rate, "tpot_ms": None} for rate in rates]


def test_medians_are_shown_with_their_spread_and_what_is_missing_is_said() -> None:
    text = benching._render({"vlora_sgl": rounds(3, 1, 2), "sglang": {"error": "sglang: no GPU"}}, [None, "a"], ASKED)
    assert "the base model and 1 adapters" in text.replace("\n", " ")
    (row,) = (line for line in text.splitlines() if line.startswith("vlora_sgl "))
    assert row.split("  ")[1:] and "2.0 (1.0 - 3.0)" in row and "20.0 (10.0 - 30.0)" in row and row.endswith(" -")
    assert text.splitlines()[-1] == "not measured: sglang: no GPU"


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ([], ["--model-path", "m"]),
        (
            ["a=x", "b=y"],
            ["--model-path", "m", "--max-loras-per-batch", "3", "--enable-lora", "--lora-paths", "a=x", "b=y"],
        ),
    ],
)
def test_both_systems_get_the_flags_of_the_model_that_was_named(given: list[str], flags: list[str]) -> None:
    assert benching._flags(Namespace(model_path=Path("m"), lora_paths=given)) == flags


def test_a_server_that_does_not_start_says_its_last_line() -> None:
    with (
        pytest.raises(CommandError, match=r"json\.tool does not start here: .*error"),
        benching._server("json.tool", ["--no"]),
    ):
        pass


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_this_machine_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--requests", "6", "--concurrency", "3", "--tokens", "4", "--rounds", "1"]
    assert main(["bench", *asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["rounds"]) == {"vlora_sgl", "sglang"}
    (ours,) = found["rounds"]["vlora_sgl"]
    assert ours["tokens_per_second"] > 0 and ours["ttft_ms"] > 0 and ours["tpot_ms"] > 0
    stock = found["rounds"]["sglang"]
    assert stock[0]["tokens_per_second"] > 0 if isinstance(stock, list) else stock["error"]
