"""Our own settings: one dataclass, its command line, and what of SGLang's we refuse."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import TinyModel
from vlora_sgl import _sgl, defaults
from vlora_sgl.defaults import UNSUPPORTED, refuse_unsupported
from vlora_sgl.errors import AdapterError, ConfigError
from vlora_sgl.managers.policies import POLICIES
from vlora_sgl.server_args import (
    ENVIRONMENT_VARIABLE,
    NOT_ON_A_CPU,
    POLICY_NAMES,
    VLoraArgs,
    changed_while_serving,
    fields_in,
    option_string,
    refuse_on_a_cpu,
    split_argv,
)
from vlora_sgl.startup.measured import SAYS


def test_our_flags_leave_the_rest_in_order() -> None:
    ours, rest = split_argv(["--port", "1", "--vlora-mode", "mixture", "--vlora-adapter-root", "a", "--tp", "2"])
    assert (ours.mode, ours.adapter_root) == ("mixture", ("a",))
    assert rest == ["--port", "1", "--tp", "2"]


def test_a_repeated_flag_collects_and_the_default_stays_empty() -> None:
    assert split_argv(["--vlora-adapter-root", "a", "--vlora-adapter-root", "b"])[0].adapter_root == ("a", "b")
    assert split_argv([])[0] == VLoraArgs()


def test_a_flag_is_not_guessed_from_its_beginning() -> None:
    assert split_argv(["--vlora-mod", "merged"])[1] == ["--vlora-mod", "merged"]


def test_settings_survive_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "")
    settings = VLoraArgs(mode="merged", policy="cost", merge_copy="host", adapter_root=("a", "b"))
    settings.to_environment()
    assert VLoraArgs.from_environment() == settings


def test_settings_are_parsed_once_and_never_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, '{"policy": "merged"}')
    first = VLoraArgs.from_environment()
    assert VLoraArgs.from_environment() is first and first.policy == "merged"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, '{"policy": "vlora"}')
    assert VLoraArgs.from_environment().policy == "vlora"
    monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    assert VLoraArgs.from_environment() == VLoraArgs()


@pytest.mark.parametrize("text", ["", "{", '{"nobody": 1}', "[1]"])
def test_a_foreign_environment_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=ENVIRONMENT_VARIABLE):
        VLoraArgs.from_environment({ENVIRONMENT_VARIABLE: text})


def test_a_wrong_value_names_its_flag_and_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"--vlora-mode must be one of auto, unmerged, merged, mixture; got 'fast'"):
        VLoraArgs(mode="fast")


def test_a_policy_is_a_name_or_an_import_path() -> None:
    assert set(POLICY_NAMES) == set(POLICIES)
    assert split_argv(["--vlora-policy", "some.module:Class"])[0].policy == "some.module:Class"
    with pytest.raises(ConfigError, match="must be one of cost, vlora, unmerged, merged, or module:Class; got 'fifo'"):
        VLoraArgs(policy="fifo")


def test_a_policy_that_cannot_be_imported_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, '{"policy": "nowhere.at_all:Class"}')
    with pytest.raises(ConfigError, match=r"expected module:Class that can be imported, got 'nowhere.at_all:Class'"):
        refuse_unsupported(sglang_settings())


def test_a_running_server_imports_no_policy_that_it_was_not_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    change = {"vlora_policy:some.module:Class": 1}
    with pytest.raises(ConfigError, match="a running server takes cost, vlora"):
        changed_while_serving(VLoraArgs(), change)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, '{"policy": "some.module:Class"}')
    assert changed_while_serving(VLoraArgs(policy="cost"), change).policy == "some.module:Class"


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        VLoraArgs().mode = "merged"  # type: ignore[misc]


def test_help_has_every_flag_in_a_group_of_its_own() -> None:
    parser = argparse.ArgumentParser()
    VLoraArgs.add_cli_args(parser)
    text = parser.format_help().partition("vlora_sgl:")[2]
    for item in dataclasses.fields(VLoraArgs):
        assert option_string(item) in text


def sglang_settings(**changed: Any) -> SimpleNamespace:
    fine: dict[str, Any] = {name: value for name, value, _ in UNSUPPORTED}
    named = {"lora_paths": [], "served_model_name": "m", "model_path": "/m"}
    return SimpleNamespace(**{**fine, **named, "speculative_algorithm": None, **changed})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pp_size", 2),
        ("disaggregation_mode", "prefill"),
        ("tokenizer_worker_num", 2),
        ("use_ray", True),
        ("enable_dp_attention", True),
        ("speculative_algorithm", "EAGLE"),
        ("speculative_algorithm", "NGRAM"),
    ],
)
def test_unsupported_settings_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}={value}"):
        refuse_unsupported(sglang_settings(**{name: value}))


def test_what_works_is_let_through() -> None:
    refuse_unsupported(sglang_settings())


def test_a_grammar_backend_that_kills_the_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "is_plain_cpu", lambda: True)
    with pytest.raises(ConfigError, match="--grammar-backend=xgrammar does not work on a plain CPU"):
        refuse_unsupported(sglang_settings(grammar_backend="xgrammar"))
    monkeypatch.setattr(defaults, "is_plain_cpu", lambda: False)
    refuse_unsupported(sglang_settings(grammar_backend="xgrammar"))


def test_the_rust_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    with pytest.raises(ConfigError, match="SGLANG_RUST_SERVER"):
        refuse_unsupported(sglang_settings())


def test_defaults_give_way_to_what_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "is_plain_cpu", lambda: True)
    flags = defaults.command_line_defaults(["--dtype=bfloat16", "--attention-backend", "triton"])
    assert "--dtype" not in flags
    assert "--attention-backend" not in flags
    assert flags[flags.index("--device") + 1] == "cpu"
    assert "--disable-fast-image-processor" in flags


def test_an_accelerator_gets_no_cpu_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "is_plain_cpu", lambda: False)
    assert not set(defaults.engine_defaults()) & set(defaults.CPU_DEFAULTS)


@pytest.mark.parametrize(
    ("ranks", "asked", "wanted"), [(1, None, "breakable"), (2, None, "disabled"), (2, "breakable", "breakable")]
)
def test_several_ranks_capture_prefills_only_when_asked(ranks: int, asked: str | None, wanted: str) -> None:
    graphs = SimpleNamespace(prefill=SimpleNamespace(backend="breakable", bs=[8]))
    named = {"model_path": "", "enable_lora_overlap_loading": None, **dict.fromkeys(SAYS)}
    settings = SimpleNamespace(tp_size=ranks, cuda_graph_backend_prefill=asked, cuda_graph_config=graphs, **named)
    assert defaults.settle(settings).cuda_graph_config.prefill.backend == wanted


def test_settings_that_change_while_serving() -> None:
    changed = changed_while_serving(VLoraArgs(), {"vlora_policy:cost": 1, "vlora_theta": 2, "vlora_mode:merged": 1})
    assert (changed.policy, changed.theta, changed.mode) == ("cost", 2.0, "merged")


@pytest.mark.parametrize(
    "change", [{"vlora_policy:nosuch": 1}, {"vlora_policy": 1}, {"vlora_theta": -1}, {"vlora_merge_copy:host": 1}]
)
def test_other_changes_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        changed_while_serving(VLoraArgs(), change)


@pytest.mark.parametrize("name", [name for name, _, _ in NOT_ON_A_CPU])
def test_what_a_plain_cpu_cannot_do_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flag, fine = f"--{name.replace('_', '-')}", next(fine for one, fine, _ in NOT_ON_A_CPU if one == name)
    switch = name.startswith("enable_")
    for argv in ([flag], [flag, "--tp", "1"]) if switch else ([flag, "other"], [f"{flag}=other"]):
        with pytest.raises(ConfigError, match=f"{flag}(=other)? does not work on a plain CPU: "):
            refuse_on_a_cpu(fields_in(["--model-path", "m", *argv]))
    for value in fine:
        refuse_on_a_cpu(fields_in([flag, str(value)]))
    value = True if switch else "other"  # by Engine, or an abbreviation
    for plain in (True, False):
        monkeypatch.setattr(defaults, "is_plain_cpu", lambda plain=plain: plain)
        with pytest.raises(ConfigError, match=flag) if plain else contextlib.nullcontext():
            refuse_unsupported(sglang_settings(**{name: value}))


def test_settings_are_refused_before_anything_heavy_is_imported() -> None:
    code = """
import sys
from vlora_sgl import launch_server
launch_server.has_accelerator = lambda: False
status = launch_server.main(["--model-path", "m", "--enable-hierarchical-cache"])
assert status == 2 and not {"torch", "sglang.srt", "transformers"} & set(sys.modules), sorted(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("vlora_sgl: --enable-hierarchical-cache does not work on a plain CPU: ")


@pytest.mark.parametrize("name", ["drain_seconds", "wait_seconds"])
@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_limits_are_at_least_a_second(name: str, seconds: float) -> None:
    with pytest.raises(ConfigError, match=f"--vlora-{name.partition('_')[0]}-seconds must be 1 or more"):
        VLoraArgs(**{name: seconds})


def test_directories_without_adapters_are_refused_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").mkdir()
    path = str(tmp_path)
    for given in (
        [SimpleNamespace(lora_name="a", lora_path=path)], [{"lora_name": "a", "lora_path": path}],
        [f"a={path}"], [path], {"a": path},
    ):  # fmt: skip
        with pytest.raises(AdapterError, match="is a directory, expected a file"):
            refuse_unsupported(sglang_settings(lora_paths=given))


def test_sglangs_way_to_load_adapters_beside_the_steps_gives_way_to_ours(tiny_model: TinyModel) -> None:
    options = {**defaults.engine_defaults(), "enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["all"]}
    asked = _sgl.ServerArgs(
        model_path=str(tiny_model.path), enable_lora_overlap_loading=True, max_loaded_loras=8, **options
    )
    assert defaults.settle(asked).enable_lora_overlap_loading is False
    with pytest.raises(ConfigError, match="--vlora-fetch-ahead must be 0 or more"):
        VLoraArgs(fetch_ahead=-1)
