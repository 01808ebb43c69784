"""What an engine process need not import: packages that cannot work on this machine, models that are not served.

SGLang imports every model it knows and every optional package it finds, in each process. On two CPU cores that is
most of the time until the first answer (docs/design/startup.md has the figures).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

from vlora_sgl import _sgl, seams
from vlora_sgl.platforms.cpu import has_accelerator

# Optional to those who import them, and of no use to an engine on a plain CPU: kernels for CUDA and quantisation,
# and metrics that transformers wants for assisted generation.
USELESS_ON_CPU = ("flashinfer", "torchao", "sklearn")

# SGLang's own switch: names of its model modules to leave out.
DISABLED_MODELS = "SGLANG_DISABLED_MODEL_ARCHS"


@contextlib.contextmanager
def without_useless_packages() -> Iterator[None]:
    """While this lasts, packages of no use on a plain CPU look as if they were not installed."""
    hidden = [] if has_accelerator() else [name for name in USELESS_ON_CPU if name not in sys.modules]
    with contextlib.ExitStack() as stack:
        for name in hidden:  # None makes an import fail, as documented
            stack.enter_context(seams.swapped("sys.modules", sys.modules, name, None))
        yield


def disable_other_models(model_path: str) -> None:
    """Have SGLang skip the models that a local checkpoint's architecture does not name.

    Leaves everything in place when the user has set SGLang's switch, when the path is not a local directory, or when
    no module defines the architecture (SGLang then falls back to transformers' implementation).
    """
    config = Path(model_path) / "config.json"
    package = _package_directory(_sgl.MODELS_PACKAGE)
    if DISABLED_MODELS in os.environ or package is None or not config.is_file():
        return
    with contextlib.suppress(ValueError):
        settings = json.loads(config.read_text())
        names = settings.get("architectures") or []
        defines = re.compile("|".join(rf"class {re.escape(name)}\b" for name in names) or r"(?!)")
        sources = {path.stem: path.read_text() for path in package.glob("*.py")}
        others = [stem for stem, text in sources.items() if not defines.search(text)]
        # A wrapper such as LLaVA's looks its parts up by name; where their kinds name no modules it may want any.
        parts = {_kind(settings.get(f"{part}_config")) for part in ("text", "vision")} & sources.keys()
        parts |= {"llama"} if "LlavaLlamaForCausalLM" in names else set()  # whose configuration has no parts
        wraps = any("ModelRegistry" in text for text in sources.values() if defines.search(text))
        if len(others) < len(sources) and (parts or not wraps):
            keep = {"__init__", "registry", "transformers", *parts}
            os.environ[DISABLED_MODELS] = ",".join(sorted(set(others) - keep))


def _kind(part: object) -> str:
    """What a part of a model says it is, as a module of SGLang's would be called."""
    return str(part.get("model_type")).removesuffix("_vision_model") if isinstance(part, dict) else ""


def import_needed_processors(original: Callable[..., None], package_name: str, overwrite: bool = False) -> None:
    """Wraps SGLang's ``import_processors``: leaves out the processors all of whose models are disabled."""
    disabled = set(os.environ.get(DISABLED_MODELS, "").split(","))
    directory = _package_directory(package_name)

    def needed(module: str) -> bool:
        assert directory is not None
        source = (directory / f"{module.rpartition('.')[2]}.py").read_text()
        models = set(re.findall(r"sglang\.srt\.models\.(\w+)", source))
        return not models or not models <= disabled

    def iter_modules(path: Iterable[str], prefix: str) -> list[pkgutil.ModuleInfo]:
        return [module for module in pkgutil.iter_modules(path, prefix) if module.ispkg or needed(module.name)]

    needed_modules = SimpleNamespace(iter_modules=iter_modules)
    with seams.swapped("multimodal_processor.pkgutil", _sgl.multimodal_processor, "pkgutil", needed_modules):
        original(package_name, overwrite)


def model_path_of(argv: Sequence[str]) -> str:
    """The value of ``--model-path`` (or ``--model``) on a command line; empty when it is not there."""
    for position, argument in enumerate(argv):
        flag, separator, value = argument.partition("=")
        if flag in ("--model-path", "--model"):
            return value if separator else "".join(argv[position + 1 : position + 2])
    return ""


def _package_directory(name: str) -> Path | None:
    """Where a package's sources lie, found without importing it or its parents."""
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top)
    directory = Path(spec.origin).parent.joinpath(*rest) if spec is not None and spec.origin else None
    return directory if directory is not None and directory.is_dir() else None
