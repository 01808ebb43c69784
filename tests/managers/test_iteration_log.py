"""The iteration log: seconds of busy and of idle stretches, and overlapped launches."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlora_sgl.core import InferenceMode
from vlora_sgl.errors import ConfigError
from vlora_sgl.managers.policies.cost_table import shipped
from vlora_sgl.managers.policies.iteration_log import Iteration, IterationLog, IterationTimes, read_log

COSTS = shipped()["atmm"]


def test_seconds_run_from_the_result_before_or_from_the_launch(tmp_path: Path) -> None:
    now = 100.0
    log = IterationTimes([IterationLog(tmp_path / "log", COSTS)], clock=lambda: now)
    ran = Iteration(False, {"a": 3, None: 1}, 40.0, None, "a", InferenceMode.MIXTURE, 0.5)
    log.launched(1, ran)
    now = 101.0
    log.launched(2, ran)  # overlapped: before the first one's result
    now = 102.0
    log.done(1)
    now = 105.0
    log.done(2)
    log.done(3)  # never launched: an idle batch
    now = 200.0
    log.launched(4, ran)
    now = 200.25
    log.done(4)
    with (tmp_path / "log").open("a") as file:
        file.write('{"prefill": tr')  # the engine was killed
    costs, rows = read_log(tmp_path / "log")
    assert costs == COSTS
    assert [row["seconds"] for row in rows] == pytest.approx([2.0, 3.0, 0.25])
    assert rows[0]["groups"] == {"a": 3, "": 1}
    assert (rows[0]["before"], rows[0]["merged"], rows[0]["mode"]) == (None, "a", "mixture")


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_text('{"prefill": true}\n')
    with pytest.raises(ConfigError, match="is no iteration log"):
        read_log(tmp_path / "log")
