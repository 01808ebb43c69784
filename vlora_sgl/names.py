"""What adapters and served models may be called: one rule, wherever a name enters.

A name is chosen by a request's ``model``, alone or as ``base:adapter``, and given on a command line as ``NAME=DIR``;
it is shown in lists, logs and labels of metrics. Nothing here imports SGLang or torch: settings are checked first.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from vlora_sgl.core import JsonDict
from vlora_sgl.errors import AdapterError, AdapterNameError, ConfigError, quoted

MOST_CHARS = 256
MOST_PATH_CHARS, MOST_PART_BYTES = 4096, 255
DEFAULT = "default"
"""The base model, by whatever name it is served."""

_VERSION = re.compile(r"(.+)@([1-9][0-9]{0,8})", re.DOTALL)
_FORM = f"1 to {MOST_CHARS} printable characters, no space at either end"


def check_adapter_name(name: object, bases: Iterable[str] = ()) -> str:
    """The name, if an adapter may have it.

    Args:
        name: whatever came for one.
        bases: names of the base model, besides ``default``.

    Raises:
        AdapterNameError: says what a name must be, and what came.
    """
    if not isinstance(name, str) or not _formed(name) or ":" in name or "=" in name:
        raise AdapterNameError(f"an adapter's name must be {_FORM}, without ':' and '='; got {quoted(name)}")
    if split_version(name)[1] is not None:
        raise AdapterNameError(f"an adapter's name must not end in @NUMBER, which is a version; got {quoted(name)}")
    if name in (DEFAULT, *bases):
        raise AdapterNameError(f"{quoted(name)} is the base model's name, and cannot be an adapter's")
    return name


def split_version(name: str) -> tuple[str, int | None]:
    """An adapter's name and the number of its version, if it gives one.

    >>> split_version("fire@3"), split_version("fire"), split_version("me@home")
    (('fire', 3), ('fire', None), ('me@home', None))
    """
    match = _VERSION.fullmatch(name)
    return (name, None) if match is None else (match[1], int(match[2]))


def versioned(name: str, number: int) -> str:
    """The name of one version of an adapter.

    >>> versioned("fire", 3)
    'fire@3'
    """
    return f"{name}@{number}"


def check_path(path: object) -> str:
    """The path of an adapter's directory, if a system could have it.

    Raises:
        AdapterError: says what a path must be, and what came.
    """
    fits = isinstance(path, str) and 0 < len(path) <= MOST_PATH_CHARS and path.isprintable()
    if not fits or any(len(part.encode()) > MOST_PART_BYTES for part in str(path).split("/")):
        form = f"1 to {MOST_PATH_CHARS} printable characters, {MOST_PART_BYTES} bytes a part at most"
        raise AdapterError(f"a directory must be a path of {form}; got {quoted(path)}")
    return str(path)


def check_names(
    adapters: Iterable[tuple[object, object]], served: str | None = None, model: str = "", source: str = "--lora-paths"
) -> None:
    """Check all names that a server starts with.

    Args:
        adapters: name and directory of each.
        served: the base model's name, if it was given one (``--served-model-name``).
        model: path of the base model, which is its name otherwise.
        source: where the adapters come from, for messages.

    Raises:
        AdapterNameError: an adapter cannot have its name, or shares it with another.
        ConfigError: the base model cannot have its own.
    """
    if served is not None and (not _formed(served) or ":" in served):
        raise ConfigError(f"--served-model-name must be {_FORM}, without ':'; got {quoted(served)}")
    if served is None and ":" in model:
        raise ConfigError(f"--model-path {quoted(model)} has a ':'; give it another name with --served-model-name")
    directories: dict[object, object] = {}
    for name, directory in adapters:
        check_adapter_name(name, [one for one in (served, model) if one])
        if name in directories:
            both = f"{quoted(directories[name])} and {quoted(directory)}"
            raise AdapterNameError(f"{source}: two adapters are called {quoted(name)}: {both}")
        directories[name] = directory


def check_directories(adapters: Iterable[tuple[object, object]], source: str = "--lora-paths") -> None:
    """Check that adapters are where they should be.

    Raises:
        ConfigError: one is not.
    """
    for name, directory in adapters:
        if not isinstance(directory, str) or not directory or not Path(directory).is_dir():
            raise ConfigError(f"{source}: adapter {quoted(name)}: there is no directory {quoted(directory)}")


def adapters_of(lora_paths: object, source: str = "--lora-paths") -> list[tuple[object, object]]:
    """Name and directory of each adapter, in all the forms that SGLang takes them in.

    Raises:
        ConfigError: another form.
    """
    if lora_paths is None:
        return []
    if isinstance(lora_paths, Mapping):
        return list(lora_paths.items())
    if not isinstance(lora_paths, Sequence) or isinstance(lora_paths, str | bytes):
        raise ConfigError(f"{source} must be a list or a dict of adapters; got {quoted(lora_paths)}")
    return [_adapter_of(one, source) for one in lora_paths]


def _adapter_of(one: object, source: str) -> tuple[object, object]:
    if isinstance(one, str) and one.strip().startswith("{"):
        try:
            one = json.loads(one)
        except ValueError as error:
            raise ConfigError(f"{source}: {quoted(one)} is no JSON: {error}") from None
    if isinstance(one, str):
        name, separator, directory = one.strip().partition("=")
        return (name, directory) if separator else (name, name)
    if isinstance(one, Mapping) and {"lora_name", "lora_path"} <= set(one):
        return one["lora_name"], one["lora_path"]
    if hasattr(one, "lora_name") and hasattr(one, "lora_path"):
        return one.lora_name, one.lora_path
    expected = '{"lora_name": NAME, "lora_path": DIR}'
    raise ConfigError(f"{source} takes NAME=DIR, DIR or {expected}; got {quoted(one)}")


class Parser(argparse.ArgumentParser):
    """A command line whose mistakes cost one line."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(message)


def given_names(argv: Sequence[str]) -> JsonDict:
    """What a server's command line says of names: ``adapters``, ``served`` and ``model`` of ``check_names``.

    Raises:
        ConfigError: a flag without its value.
    """
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--lora-paths", nargs="*")
    parser.add_argument("--served-model-name")
    parser.add_argument("--model-path", "--model", default="")
    found, _ = parser.parse_known_args(argv)
    return {
        "adapters": adapters_of(found.lora_paths),
        "served": found.served_model_name,
        "model": found.model_path,
    }


def _formed(name: str) -> bool:
    return 0 < len(name) <= MOST_CHARS and name.isprintable() and name == name.strip()
