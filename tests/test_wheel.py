"""A wheel has what a server needs, and nothing else; its command runs in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.conftest import free_port, wait_until_healthy
from vlora_sgl.models import tiny

ROOT = Path(__file__).parents[1]
LARGEST = 40 << 20


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(to), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (path,) = to.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel, which has its dependencies from this one."""
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    python = home / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*command, "--disable-pip-version-check"], check=True)
    found = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, check=True
    )
    (Path(found.stdout.decode().strip()) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return home / "bin"


def run(program: Path, *arguments: str, **environment: str) -> str:
    outside = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, cwd=program.parent, env={**outside, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_has_the_package_and_its_data_alone(wheel: Path) -> None:
    assert wheel.stat().st_size < LARGEST
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"vlora_sgl"}
    tracked = subprocess.run(["git", "ls-files", "vlora_sgl"], cwd=ROOT, capture_output=True, text=True)
    assert tracked.returncode or set(tracked.stdout.split()) <= set(names), "every file of the package is in it"
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_what_was_installed_runs_alone(installed: Path) -> None:
    where = run(installed / "python", "-c", "import vlora_sgl; print(vlora_sgl.__file__)")
    assert Path(where.strip()).is_relative_to(installed.parent), where
    assert "usage" in run(installed / "vlora", "ask", "--help").lower()
    adapter = next(iter(tiny.adapters().values()))
    report = json.loads(run(installed / "vlora", "inspect", str(adapter), "--json"))
    assert report


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_of_what_was_installed_answers(installed: Path, tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    port = str(free_port())
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [str(installed / "vlora"), "serve", "--port", port], stdout=log, stderr=log, cwd=tmp_path
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, server, tmp_path / "log")
        answers = json.loads(
            run(installed / "vlora", "ask", str(tmp_path / "red.png"), "What colour?", "--json", VLORA_URL=url)
        )
        assert answers
    finally:
        server.terminate()
        server.wait(60)
