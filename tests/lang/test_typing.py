"""What an editor or a type checker knows of a program: its parameters, its state, its values."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import vlora_sgl as vlora

@vlora.function
def ask(s: vlora.ProgramState, path: str, question: str) -> None:
    s += vlora.user(vlora.image(path) + question)
    s += vlora.assistant(vlora.detect("found", "cup", adapter="A"))

state = ask("a.jpg", "Where?")
reveal_type(ask)
reveal_type(state)
reveal_type(state.get("found", vlora.Boxes)[0].score)
reveal_type(state.get("found", vlora.Boxes).draw("a.jpg"))
reveal_type(ask.run("a.jpg", "Where?", adapter="A", temperature=0.5))
ask("a.jpg")
ask("a.jpg", 3)
vlora.gen("x", max_tokns=3)
state.get("found", vlora.Boxes).drwa("a.jpg")
"""
EXPECTED = [
    (10, "vlora_sgl.lang.api.Function[[path: "),
    (11, '"vlora_sgl.lang.interpreter.ProgramState"'),
    (12, 'float | None"'),
    (13, '"PIL.Image.Image"'),
    (14, '"vlora_sgl.lang.interpreter.ProgramState"'),
    (15, 'Missing positional argument "question"'),
    (16, 'has incompatible type "int"; expected "str"'),
    (17, 'Unexpected keyword argument "max_tokns"'),
    (18, '"Boxes" has no attribute "drwa"'),
]


def test_a_type_checker_sees_through_programs(tmp_path: Path) -> None:
    assert (ROOT / "vlora_sgl" / "py.typed").is_file(), "without it, users' checkers take every name for Any"
    (tmp_path / "snippet.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(tmp_path / "snippet.py")]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=280)
    said = [line.partition("snippet.py:")[2] for line in done.stdout.splitlines()]
    for line, text in EXPECTED:
        assert any(one.startswith(f"{line}:") and text in one for one in said), (line, text, done.stdout)
