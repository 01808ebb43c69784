"""The contract with SGLang 0.5.17, and what happens when a piece of it is missing.

These import the whole engine, which takes a while on a cold machine.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from vlora_sgl import _sgl, plugin
from vlora_sgl.errors import ContractError


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)


def test_the_installed_sglang_is_what_we_extend() -> None:
    plugin.check_contract()


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


NAMED = (  # what code of ours compares classes with
    *("Qwen2Attention", "MRotaryEmbedding", "Qwen2VLForConditionalGeneration"),
    *("Qwen2VisionTransformer", "Qwen2_5_VisionTransformer", "Qwen3VLMoeVisionModel"),
    *("InternVisionModel", "InternVLChatModel"),
    *("Qwen2_5_VLForConditionalGeneration", "Gemma3ForConditionalGeneration"),
    *("FlashAttentionBackend", "TorchNativeAttnBackend", "TritonAttnBackend"),
)


@pytest.mark.parametrize("name", sorted({*NAMED, *(row.target.partition(".")[0] for row in plugin.TABLE)}))
def test_a_renamed_class_or_function_fails_the_contract(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name not in _sgl.NAMES:
        assert name in ("sys", "logging", "torch", "argparse"), "only these are no names of SGLang's"
        return
    module, _, attribute = _sgl.NAMES[name].partition(":")
    renamed = f"{module}:{attribute}Renamed" if attribute else f"{module}_renamed"
    monkeypatch.setitem(_sgl.NAMES, name, renamed)
    monkeypatch.delitem(_sgl.__dict__, name, raising=False)
    with pytest.raises(ContractError, match=f"lacks {renamed}"):
        plugin.check_contract()


@pytest.mark.parametrize("target", [row.target for row in plugin.TABLE if "." in row.target])
def test_a_renamed_attribute_fails_the_contract(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    _sgl.check_target(target)
    with pytest.raises(ContractError, match="is gone"):
        _sgl.check_target(f"{target}_renamed")


@pytest.mark.parametrize("name", NAMED)
def test_classes_are_compared_by_where_they_are_defined(name: str) -> None:
    module, _, attribute = _sgl.NAMES[name].partition(":")
    assert _sgl.is_a(type(attribute, (), {"__module__": module})(), name)
    assert not _sgl.is_a(type(attribute, (), {"__module__": "elsewhere"})(), name)
    if name not in _sgl.NOT_ON_A_CPU:  # there the source of that module is looked at
        found = getattr(_sgl, name)
        assert (found.__module__, found.__qualname__) == (module, attribute)


def test_install_puts_ours_in_place_and_verify_notices_a_missing_seam() -> None:
    """In a process of its own, because it changes SGLang's classes."""
    code = """
import functools, sys
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
    (sys.modules["sglang.srt.mem_cache.registry"], "_RADIX_CACHE_REGISTRY", None),
):
    if value is None:
        ours = _sgl.RADIX_CACHES.pop("vlora")
        try:
            plugin.verify()
        except ContractError as error:
            print(error)
        _sgl.RADIX_CACHES["vlora"] = ours
        continue
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
    assert len(lines) == 4
    assert lines[0].startswith("Scheduler is not replaced by vlora_sgl.managers.scheduler:VLoraScheduler")
    assert all("OpenAIServingBase._resolve_lora_path" in line for line in lines[1:3])
    assert "RADIX_CACHES is not replaced" in lines[3]


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
