"""SGLang's language front end, imported without SGLang's runtime.

``import sglang`` patches transformers and so pulls in torch, transformers and torchvision: tens of seconds on a small
machine, for a client that only speaks HTTP. The language modules themselves need none of it. They are imported here
under a package whose ``__init__`` has not run yet; it runs as soon as anything else of SGLang is asked for, an
attribute or a submodule, so that the engine in the same process finds everything as it expects it.
"""

# ruff: noqa: E402
from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from vlora_sgl import seams
from vlora_sgl.seams import Place


class _Completer:
    """Runs SGLang's postponed ``__init__`` before the first import that is not one of the language modules."""

    def __init__(self, package: ModuleType) -> None:
        self.package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.startswith("sglang."):
            self.complete()

    def attribute(self, name: str) -> object:
        """``sglang.NAME`` for a name that the postponed ``__init__`` would have set."""
        if self not in sys.meta_path:
            raise AttributeError(f"module 'sglang' has no attribute {name!r}")
        self.complete()
        return getattr(self.package, name)

    def complete(self) -> None:
        sys.meta_path.remove(self)
        spec = self.package.__spec__
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(self.package)


def _postpone_runtime() -> _Completer | None:
    """Put SGLang's package in place without running it, unless it is there already (or not installed at all)."""
    spec = importlib.util.find_spec("sglang") if "sglang" not in sys.modules else None
    if spec is None:
        return None
    package = importlib.util.module_from_spec(spec)
    completer = _Completer(package)
    places = [Place(sys.modules, "sglang", package), Place(vars(package), "__getattr__", completer.attribute)]
    seams.place("sys.meta_path", places)
    return completer


_completer = _postpone_runtime()

from sglang.global_config import global_config as global_config
from sglang.lang import tracer as tracer
from sglang.lang.backend.base_backend import BaseBackend as BaseBackend
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint as RuntimeEndpoint
from sglang.lang.chat_template import get_chat_template as get_chat_template
from sglang.lang.chat_template import get_chat_template_by_model_path as get_chat_template_by_model_path
from sglang.lang.choices import ChoicesDecision as ChoicesDecision
from sglang.lang.choices import ChoicesSamplingMethod as ChoicesSamplingMethod
from sglang.lang.choices import greedy_token_selection as greedy_token_selection
from sglang.lang.choices import token_length_normalized as token_length_normalized
from sglang.lang.choices import unconditional_likelihood_normalized as unconditional_likelihood_normalized
from sglang.lang.interpreter import ProgramState as ProgramState
from sglang.lang.interpreter import ProgramStateGroup as ProgramStateGroup
from sglang.lang.interpreter import StreamExecutor as StreamExecutor
from sglang.lang.ir import SglArgument as SglArgument
from sglang.lang.ir import SglConcateAndAppend as SglConcateAndAppend
from sglang.lang.ir import SglConstantText as SglConstantText
from sglang.lang.ir import SglExpr as SglExpr
from sglang.lang.ir import SglExprList as SglExprList
from sglang.lang.ir import SglFork as SglFork
from sglang.lang.ir import SglFunction as SglFunction
from sglang.lang.ir import SglGen as SglGen
from sglang.lang.ir import SglGetForkItem as SglGetForkItem
from sglang.lang.ir import SglRoleBegin as SglRoleBegin
from sglang.lang.ir import SglRoleEnd as SglRoleEnd
from sglang.lang.ir import SglSamplingParams as SglSamplingParams
from sglang.lang.ir import SglSelect as SglSelect
from sglang.lang.ir import SglVariable as SglVariable
from sglang.lang.ir import SglVarScopeBegin as SglVarScopeBegin
from sglang.lang.ir import SglVideo as SglVideo

if _completer is not None:
    seams.place("sys.meta_path", [Place(sys.meta_path, slice(0, 0), [_completer])])
