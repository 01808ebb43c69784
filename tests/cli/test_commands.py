"""The command line by itself: every command explains itself, and those that need no engine answer at once."""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from pkgutil import resolve_name

import pytest

from tests.conftest import free_port
from vlora_sgl.cli import main
from vlora_sgl.cli.commands import COMMANDS, Command
from vlora_sgl.cli.completion import script_of
from vlora_sgl.cli.main import make_parser
from vlora_sgl.cli.result import table

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "sglang", "transformers", "numpy", "PIL", "requests", "aiohttp", "fastapi", "pydantic"}
NO_SERVER = 3

each_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)


@each_command
def test_help_has_an_example_that_the_parser_takes(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main([command.name, "--help"])
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr().out
    assert status == 0 and command.example in said and command.help[1:] in " ".join(said.split())
    words = shlex.split(command.example.replace("$(", "").replace(")", ""))
    at = words.index("vlora") if "vlora" in words else None
    arguments = words[at + 1 :] if at is not None else shlex.split(words[-1])[1:]
    assert arguments[0] == command.name
    if not command.forwards:
        make_parser().parse_args(arguments)


@each_command
def test_what_carries_a_command_out_is_there(command: Command) -> None:
    assert callable(resolve_name(command.run))


def test_the_installed_script_is_this_command() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert {name: resolve_name(target) for name, target in scripts.items()} == {"vlora": main}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", TELLS_MODULES, *arguments]
    there = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=there, check=False)


TELLS_MODULES = """
import sys
from vlora_sgl.cli import main
try:
    status = main()
except SystemExit as end:
    status = end.code
print(" ".join({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("--help",), 0), (("--version",), 0), (("doctor",), None), (("completion", "bash"), 0),
        (("serve", "--help"), 0), (("ls",), NO_SERVER), (("ps",), NO_SERVER), (("pin", "x"), NO_SERVER),
        (("nonsense",), 2), ((), 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_no_engine_is_imported_where_none_is_needed(arguments: tuple[str, ...], status: int | None) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run(*arguments, VLORA_URL=f"http://127.0.0.1:{free_port()}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert status in (None, done.returncode), done.stderr
    assert not HEAVY & set(done.stderr.splitlines()[-1].split())
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 0.4  # 0.1 s, on a busy machine


def test_without_a_server_one_line_says_what_to_do() -> None:
    done = run("ls", VLORA_URL="http://127.0.0.1:9")
    assert done.returncode == NO_SERVER and "start one with: vlora serve" in done.stderr and not done.stdout


def test_doctor_says_what_is_here_and_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert status == int(not report["ready"])
    found = {one["what"]: one for one in report["findings"]}
    assert found["Python"]["state"] == found["sglang"]["state"] == "ok"
    assert {"will be used", "cores", "memory", "address"} <= set(found)
    monkeypatch.setattr("vlora_sgl.cli.doctor._version", lambda package: None)
    assert main(["doctor"]) == 1
    assert "pip install torch" in (said := capsys.readouterr().out) and "something is missing" in said


def test_bash_completes_commands_flags_and_files(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").touch()

    def completed(*words: str) -> set[str]:
        line = " ".join(shlex.quote(word) for word in words)
        script = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _vlora; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        source = f"{script_of(make_parser())}\n{script}"
        done = subprocess.run(["bash", "-c", source], capture_output=True, text=True, cwd=tmp_path, check=True)
        return set(done.stdout.split())

    assert completed("vlora", "re") == {"reload"}
    assert {command.name for command in COMMANDS} <= completed("vlora", "")
    assert completed("vlora", "ask", "--ma") == {"--max-tokens"}
    assert completed("vlora", "ask", "pho") == {"photo.jpg"}
    assert completed("vlora", "completion", "z") == {"zsh"}


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here")
def test_zsh_reads_its_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    source = capsys.readouterr().out + "\n[[ -n ${_comps[vlora]} ]]"
    subprocess.run(["zsh", "-f", "-c", source], check=True, timeout=30)


@pytest.mark.parametrize(
    ("arguments", "module", "flags"),
    [
        (["serve", "M", "--port", "1"], "launch_server", ["--model-path", "M", "--port", "1"]),
        (["serve", "M", "--replicas", "2"], "launch_cluster", ["--model-path", "M", "--replicas", "2"]),
        (["serve", "--model-path=M"], "launch_server", ["--model-path=M"]),
        (["profile", "--rounds", "1"], "measure_costs", ["--rounds", "1"]),
    ],
)
def test_what_starts_an_engine_becomes_its_module_with_the_flags_as_they_are(
    arguments: list[str], module: str, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Became(Exception):
        pass

    def become(program: str, argv: list[str]) -> None:
        raise Became(argv[1:])

    monkeypatch.setattr("os.execv", become)
    with pytest.raises(Became) as seen:
        main(arguments)
    assert seen.value.args[0] == ["-m", f"vlora_sgl.{module}", *flags]


def test_serve_without_a_model_serves_the_embedded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from vlora_sgl.models import tiny

    given: list[str] = []
    monkeypatch.setattr("vlora_sgl.cli.modules._become", lambda module, flags: given.extend(flags) or sys.exit(0))
    with pytest.raises(SystemExit):
        main(["serve", "--port", "1"])
    assert str(tiny.path()) in given and given[-2:] == ["--port", "1"]
    assert {f"{name}={path}" for name, path in tiny.adapters().items()} <= set(given)


@pytest.mark.parametrize("name", ["generate", "export"])
def test_commands_of_other_programs_are_handed_on(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--nonsense"])
    assert end.value.code == 2 and f"vlora_sgl.{name}" in capsys.readouterr().err


def test_a_table_escapes_what_a_terminal_would_obey() -> None:
    assert table([["\x1b[31m", None, 0.125]], ["a", "b", "c"]).splitlines()[1].split() == ["\\x1b[31m", "-", "0.12"]
