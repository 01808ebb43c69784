"""The contract with SGLang 0.5.17, and what happens when a piece of it is missing.

These import the whole engine, which takes a while on a cold machine.
"""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

from vlora_sgl import _sgl, plugin
from vlora_sgl.errors import ContractError


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)


def test_the_installed_sglang_is_what_we_extend() -> None:
    _sgl.check_contract()


@pytest.mark.parametrize(
    ("table", "key", "value", "message"),
    [
        ("NAMES", "Scheduler", "sglang.srt.managers.scheduler:Gone", "lacks sglang.srt.managers.scheduler:Gone"),
        ("SIGNATURES", "Scheduler.run_batch", ("self", "work"), r"run_batch takes .*expected"),
        ("SIGNATURES", "Scheduler.gone", ("self",), "Scheduler.gone is gone"),
    ],
    ids=["name", "signature", "method"],
)
def test_a_difference_is_reported_by_name(
    monkeypatch: pytest.MonkeyPatch, table: str, key: str, value: object, message: str
) -> None:
    monkeypatch.setitem(getattr(_sgl, table), key, value)
    monkeypatch.delitem(_sgl.__dict__, key, raising=False)
    with pytest.raises(ContractError, match=message):
        _sgl.check_contract()


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sgl, "version", lambda package: "0.5.18")
    with pytest.raises(ContractError, match=r"extends sglang==0\.5\.17; installed is 0\.5\.18"):
        _sgl.check_version()


def test_our_tables_name_things_that_exist() -> None:
    for ours in (*plugin.REPLACEMENTS.values(), *plugin.WRAPPED.values()):
        assert callable(pkgutil.resolve_name(ours))


def test_install_puts_ours_in_place_and_verify_notices_a_missing_seam() -> None:
    """In a process of its own, because it changes SGLang's classes."""
    code = """
import functools
from vlora_sgl import _sgl, plugin
from vlora_sgl.errors import ContractError
originals = [_sgl.Scheduler]  # in a list, because SGLang rewrites plain module-level bindings
plugin.install()
plugin.install()
plugin.verify()
import sglang.srt.managers.scheduler as scheduler
assert scheduler.Scheduler.__name__ == "VLoraScheduler"
for module, name, value in (
    (scheduler, "Scheduler", originals[0]),
    (_sgl.OpenAIServingBase, "_resolve_lora_path", lambda self, request_model, explicit_lora_path: None),
    (_sgl.OpenAIServingBase, "_resolve_lora_path", functools.wraps(print)(lambda *args: None)),
):
    ours = module.__dict__[name]
    setattr(module, name, value)
    try:
        plugin.verify()
    except ContractError as error:
        print(error)
    setattr(module, name, ours)
plugin.verify()
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if "would serve without it" in line]
    assert len(lines) == 3
    assert "sglang.srt.managers.scheduler.Scheduler" in lines[0]
    assert all("OpenAIServingBase._resolve_lora_path" in line for line in lines[1:])


def test_a_missing_seam_stops_the_start_with_one_line() -> None:
    code = """
import sys
from vlora_sgl import _sgl, launch_server
_sgl.NAMES["Scheduler"] = "sglang.srt.managers.scheduler:Renamed"
sys.exit(launch_server.main(["--model-path", "nowhere"]))
"""
    result = run_python(code)
    assert result.returncode == 2
    ours = [line for line in result.stderr.splitlines() if line.startswith("vlora_sgl:")]
    assert len(ours) == 1
    assert "lacks sglang.srt.managers.scheduler:Renamed" in ours[0]
    assert "Traceback" not in result.stderr
