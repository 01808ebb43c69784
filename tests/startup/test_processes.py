"""The engine's processes do not outlive the one that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

PROGRAM = """
import multiprocessing, os, sys, time
from vlora_sgl.startup import processes

def work():
    processes.leave_signals_to_the_main_process()
    processes.end_with_the_main_process()
    os.write(1, f"{os.getpid()}\\n".encode())  # whole, beside the other one's
    time.sleep(60)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    for _ in range(2):
        context.Process(target=work).start()
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_no_process_outlives_the_program(method: str, number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, str(tmp_path / "program.py"), method]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    assert program.stdout is not None
    with program:
        workers = [psutil.Process(int(program.stdout.readline())) for _ in range(2)]
        started = psutil.Process(program.pid).children(recursive=True)
        assert {one.pid for one in workers} <= {one.pid for one in started}
        for one in workers:
            one.send_signal(signal.SIGTERM)  # is the program's to heed
        time.sleep(0.3)
        assert all(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in workers)
        program.send_signal(number)
    deadline = time.monotonic() + 10
    while left := [one for one in started if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
