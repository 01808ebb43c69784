"""The commands of the README and the guides: those that ask are run as written, those that start are read as given."""

from __future__ import annotations

import argparse
import base64
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from tests.support.head_reference import make_image
from vlora_sgl.cli.main import make_parser
from vlora_sgl.models import tiny

ROOT = Path(__file__).parents[2]
ADAPTERS = Path(tiny.path()).parent / "adapters"
GENERATED = ("figures.md", "evaluation.md")
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in GENERATED)]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)

STARTS = ("pip install", "make ", ". .venv", "vlora serve", "torchrun ", "python -m vlora_sgl.")
"""Commands that install, train or start servers: other tests run those programs (tests/cli, tests/export,
tests/generate, tests/cluster, tests/test_wheel.py); here their modules and flags are looked at."""
ASKS = ("vlora ", "curl ")
NAMES = {
    "ADAPTER_DIR": str(ADAPTERS / "photos"),
    "path/to/adapter": str(ADAPTERS / "photos"),
    "path/to/base": str(tiny.path()),
    "/adapters/my-routed": str(ADAPTERS.parent / "routed"),
    "my-routed": "a-routed",
    '"default:A"': '"default:digits"',
    '"fire"': '"digits"',
    '"night"': '"photos"',
    "lora_name=fire": "lora_name=surfaces-late",
    "data:image/png;base64,...": "",  # filled in below
}
"""What the documents leave to the reader, and what stands for it here."""


def commands(page: Path) -> list[str]:
    """The shell commands of a page, continued lines joined, comments taken off."""
    found = []
    for language, block in BLOCK.findall(page.read_text()):
        if language not in ("", "sh", "bash"):
            continue
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            if found and found[-1].count("'") % 2:
                found[-1] += "\n" + line
            elif line.startswith((*STARTS, *ASKS)):
                found.append(re.sub(r"\s+#\s.*$", "", line))
    return found


def asks(command: str) -> bool:
    return command.startswith(ASKS) and not command.startswith(STARTS)


ALL = [(page.name, command) for page in PAGES for command in commands(page)]
ASKED = list(dict.fromkeys(command for _, command in ALL if asks(command)))
STARTED = list(dict.fromkeys(command for _, command in ALL if not asks(command)))


def test_there_are_commands() -> None:
    assert len(ASKED) > 10 and len(STARTED) > 8


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the documents name."""
    folder = tmp_path_factory.mktemp("shell")
    for name in ("photo.jpg", "street.png"):
        make_image(1).save(folder / name)
    for file in (ADAPTERS / "surfaces").iterdir():
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def shared(embedded: str) -> Iterator[str]:
    """The embedded model's server, which other tests ask too: it has the same adapters before and after."""
    before = _adapters(embedded)
    yield embedded
    for name in _adapters(embedded) - before:
        requests.post(f"{embedded}/unload_lora_adapter", json={"lora_name": name}, timeout=60).raise_for_status()
    assert _adapters(embedded) == before


def _adapters(url: str) -> set[str]:
    models = requests.get(f"{url}/v1/models", timeout=60).json()["data"]
    return {model["id"] for model in models if model.get("parent")}


@pytest.mark.parametrize("command", ASKED, ids=lambda command: command[:50])
def test_what_asks_is_answered(command: str, shared: str, place: Path) -> None:
    """As written, in a shell, with the server's address and what the reader has put in."""
    for written, here in NAMES.items():
        command = command.replace(written, here or _data_url(place / "photo.jpg"))
    command = re.sub(r"(http://)?(localhost|127\.0\.0\.1):30000", shared, command)
    if command.startswith("vlora convert"):
        pytest.skip("needs a trained and an initial adapter: tests/lora/test_convert.py")
    if "surfaces-late" in command:
        loaded = {"lora_name": "surfaces-late", "lora_path": str(ADAPTERS / "surfaces-late")}
        requests.post(f"{shared}/load_lora_adapter", json=loaded, timeout=60)
    program, _, rest = command.partition(" ")
    if program == "vlora":
        given = f"{shlex.quote(sys.executable)} -m vlora_sgl.cli {rest}"
    elif shutil.which("curl"):
        given = f"curl --fail-with-body --silent --show-error --max-time 100 {rest}"
    else:
        pytest.skip("curl is not installed")
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "VLORA_URL": shared, "HOME": str(place)}
    done = subprocess.run(["sh", "-c", given], cwd=place, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


def _data_url(image: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(image.read_bytes()).decode()


@pytest.fixture(scope="module")
def flags() -> dict[str, set[str]]:
    """The flags of every program, by the beginning of its command line."""
    from sglang.srt.server_args import ServerArgs

    from vlora_sgl.server_args import VLoraArgs, option_string

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    served = {*parser._option_string_actions, *map(option_string, VLoraArgs.__dataclass_fields__.values())}
    fronts = (ROOT / "vlora_sgl" / "cluster").rglob("*.py"), (ROOT / "vlora_sgl").glob("launch_*.py")
    cluster = {flag for files in fronts for file in files for flag in _named(file)}
    assert "--replicas" in cluster
    tools = {name: {f for file in (ROOT / "vlora_sgl" / name).glob("*.py") for f in _named(file)} for name in TOOLS}
    return {
        "vlora serve": served | cluster,
        "python -m vlora_sgl.launch_server": served,
        "python -m vlora_sgl.launch_cluster": served | cluster,
        **{f"python -m vlora_sgl.{name}": own for name, own in tools.items()},
    }


TOOLS = ("export", "generate")


def _named(file: Path) -> list[str]:
    return re.findall(r'"(--[a-z][a-z-]*)"', file.read_text())


@pytest.mark.parametrize("command", STARTED, ids=lambda command: command[:50])
def test_what_starts_has_the_flags_that_are_given(command: str, flags: dict[str, set[str]]) -> None:
    if command.startswith("make "):
        assert re.search(rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif command.startswith(("pip install", ". .venv")):
        extras = re.findall(r"\[(\w+)\]", command)
        assert all(f"{extra} = [" in (ROOT / "pyproject.toml").read_text() for extra in extras)
    else:
        module = command.replace("torchrun --nproc-per-node 4", "python")
        begins = [program for program in flags if module.startswith(program)]
        assert begins, f"nothing here starts with {module}"
        assert {word for word in module.split() if word.startswith("--")} <= flags[begins[0]]


def test_every_command_of_vlora_is_in_the_guides() -> None:
    text = "".join(page.read_text() for page in PAGES)
    actions = make_parser()._subparsers
    assert actions is not None
    names = next(iter(actions._group_actions)).choices
    assert names is not None
    assert [name for name in names if not re.search(rf"(vlora |`){name}\b", text)] == []
