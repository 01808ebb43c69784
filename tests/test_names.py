"""One rule for names, on every way in; wrong ones cost one line, before anything heavy is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vlora_sgl import launch_cluster
from vlora_sgl.errors import AdapterError, AdapterNameError, ConfigError, VLoraError, quoted
from vlora_sgl.names import (
    MOST_CHARS,
    adapters_of,
    check_adapter_name,
    check_directories,
    check_names,
    check_path,
    given_names,
)

WRONG = {
    "empty": "",
    "blank": " ",
    "a space before": " a",
    "a space behind": "a ",
    "a line": "a\nb",
    "a terminal's escape": "a\x1b[2J",
    "invisible": "\u200b",
    "right to left": "\u202ea",
    "half a pair": "\ud800",
    "long": "a" * (MOST_CHARS + 1),
    "base:adapter": "base:a",
    "a colon": ":",
    "NAME=DIR": "a=b",
    "NAME@VERSION": "a@3",
    "the base model": "default",
    "the served name": "served",
    "the model's path": "/models/base",
    "no text": 5,
    "nothing": None,
    "a list": ["a"],
}


@pytest.mark.parametrize("name", WRONG.values(), ids=WRONG)
def test_what_no_adapter_can_be_called(name: Any) -> None:
    with pytest.raises(AdapterNameError) as caught:
        check_adapter_name(name, ("served", "/models/base"))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300
    with pytest.raises(AdapterNameError):
        check_names([(name, "/a")], "served", "/models/base")


@pytest.mark.parametrize(
    "name",
    ["a", "A b", "base", "org/name", "/dir/a", "Ünïcode", "数字", "a.b-c_d", "a@b", "a@0", "@3", "a" * MOST_CHARS],
)
def test_what_adapters_may_be_called(name: str) -> None:
    assert check_adapter_name(name, ("served", "/models/base")) == name


@pytest.mark.parametrize("path", ["", "\0", "a\nb", "x" * 5000, "a/" + "y" * 256, "é" * 128, "\ud800", None, 5, ["a"]])
def test_what_no_directory_can_be_called(path: Any) -> None:
    with pytest.raises(AdapterError, match="a directory must be a path") as caught:
        check_path(path)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("served", ["a:b", "", " a", "a\n", "x" * 300])
def test_what_no_model_can_be_served_as(served: str) -> None:
    with pytest.raises(ConfigError, match="--served-model-name"):
        check_names([], served, "/m")


def test_a_model_whose_path_cannot_be_its_name_needs_another() -> None:
    with pytest.raises(ConfigError, match="give it another name with --served-model-name"):
        check_names([], None, "/a:b")
    check_names([], "b", "/a:b")


def test_two_adapters_of_one_name() -> None:
    with pytest.raises(AdapterNameError, match=r"--lora-paths: two adapters are called 'a': '/x' and '/y'"):
        check_names([("a", "/x"), ("b", "/x"), ("a", "/y")])


FORMS: dict[str, Any] = {
    "NAME=DIR": ["a=/x", " b=/y=z "],
    "JSON": ['{"lora_name": "a", "lora_path": "/x"}', '{"lora_name": "b", "lora_path": "/y=z", "pinned": true}'],
    "dicts": [{"lora_name": "a", "lora_path": "/x"}, {"lora_name": "b", "lora_path": "/y=z"}],
    "a dict": {"a": "/x", "b": "/y=z"},
    "references": [SimpleNamespace(lora_name="a", lora_path="/x"), SimpleNamespace(lora_name="b", lora_path="/y=z")],
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_adapters_are_read_in_every_form_that_sglang_takes(form: Any) -> None:
    assert adapters_of(form) == [("a", "/x"), ("b", "/y=z")]


def test_a_directory_alone_is_the_name() -> None:
    assert adapters_of(["/x"]) == [("/x", "/x")] and adapters_of(None) == []


@pytest.mark.parametrize("form", ["a=/x", 5, [5], [{"lora_name": "a"}], ["{"], ['{"lora_name": "a"}'], [None]])
def test_another_form_is_refused(form: Any) -> None:
    with pytest.raises(ConfigError, match="--lora-paths"):
        adapters_of(form)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    check_directories([("a", str(tmp_path))])
    for wrong in (str(tmp_path / "no"), "", None):
        with pytest.raises(ConfigError, match="adapter 'b': there is no directory"):
            check_directories([("a", str(tmp_path)), ("b", wrong)])


def test_a_command_line_is_read_as_sglang_reads_it() -> None:
    argv = [
        "--model=/m",
        "--lora-paths",
        "a=/x",
        "b=/y",
        "--tp",
        "2",
        "--served-model-name",
        "s",
        "--lora-backend",
        "z",
    ]
    assert given_names(argv) == {"adapters": [("a", "/x"), ("b", "/y")], "served": "s", "model": "/m"}
    assert given_names([]) == {"adapters": [], "served": None, "model": ""}


@pytest.mark.parametrize(
    "value", ["x" * 10**6, ["y" * 999] * 999, {"k" * 999: 1}, 10**400, 10**5000, "a\nb", object()], ids=range(7)
)
def test_a_message_quotes_anything_shortly_on_one_line(value: Any) -> None:
    assert len(quoted(value)) <= 80 and quoted(value).isprintable()


SETTINGS = {
    "a served name with a colon": ["--served-model-name", "a:b"],
    "one name for two": ["--lora-paths", "a={dir}", "a={other}"],
    "the base model's name": ["--lora-paths", "default={dir}"],
    "the served name for an adapter": ["--served-model-name", "a", "--lora-paths", "a={dir}"],
    "no such directory": ["--lora-paths", "a={dir}/nowhere"],
    "a name with a colon": ["--lora-paths", "a:b={dir}"],
    "no JSON": ["--lora-paths", "{{"],
    "no name": ["--served-model-name"],
    "a flag of ours": ["--vlora-max-body-bytes", "lots"],
    "a choice of ours": ["--vlora-mode", "fast"],
    "a bound of ours": ["--vlora-max-body-bytes", "1"],
}


@pytest.mark.parametrize("launcher", ["launch_server", "launch_cluster"])
def test_a_wrong_setting_costs_one_line_before_anything_heavy_is_imported(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    script = f"import json, sys\nfrom vlora_sgl.{launcher} import main\nfor argv in json.loads(sys.argv[1]):\n"
    script += "    print(main(argv), sorted({'torch', 'sglang', 'fastapi', 'aiohttp'} & set(sys.modules)))"
    argvs = [
        ["--model-path", "/m", *(part.format(dir=tmp_path, other=tmp_path / "other") for part in setting)]
        for setting in SETTINGS.values()
    ]
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(argvs)], capture_output=True, text=True, timeout=60, check=True
    )
    lines = done.stderr.splitlines()
    assert done.stdout.splitlines() == ["2 []"] * len(SETTINGS), done.stderr
    assert len(lines) == len(SETTINGS) and all(line.startswith("vlora_sgl: ") for line in lines), done.stderr


def test_a_clusters_adapters_share_one_list_of_names(tmp_path: Path) -> None:
    wrong = [
        ["--on-demand", "a=/x", "a=/y"],
        ["--on-demand", "a=/x", "--model-path", "m", "--lora-paths", "a=/y"],
        ["--on-demand", "default=/x"],
        ["--on-demand", "s=/x", "--model-path", "m", "--served-model-name", "s"],
    ]
    for argv in wrong:
        with pytest.raises(VLoraError):
            launch_cluster.parse(argv)
    with pytest.raises(ConfigError, match="--on-demand: adapter 'a': there is no directory"):
        launch_cluster.check_adapters(launch_cluster.parse(["--on-demand", f"a={tmp_path}/no"]))
    # Another machine's directories are for that to look at.
    launch_cluster.check_adapters(launch_cluster.parse(["--on-demand", "a=/no", "--join", "http://x"]))
