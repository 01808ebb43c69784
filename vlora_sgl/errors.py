"""Every error vlora_sgl raises on purpose.

VLoraError                      anything of ours; catch this to catch all
+-- ConfigError (ValueError)    a flag, file or combination that cannot work; raised before anything starts
+-- ContractError (ImportError) this SGLang is not the one we extend; the operator must install the pinned one
+-- AdapterError (ValueError)   an adapter that cannot be loaded as it is; the message names the tensor or key
+-- UnknownAdapterError (KeyError)  no adapter of that name; carries the names that exist
+-- HeadError (ValueError)      a vision head that is missing, malformed or does not fit
+-- RequestError (ValueError)   a request that cannot be served as asked
"""

from __future__ import annotations

from collections.abc import Iterable


class VLoraError(Exception):
    """Base class of all errors of this package."""

    http_status = 400


class ConfigError(VLoraError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class ContractError(VLoraError, ImportError):
    """The installed SGLang lacks a name or a signature that this release extends."""

    http_status = 500


class AdapterError(VLoraError, ValueError):
    """An adapter directory that cannot be loaded as it is."""


class UnknownAdapterError(VLoraError, KeyError):
    """A name that no loaded adapter has.

    Args:
        name: the name asked for.
        loaded: the names that would have been accepted.
    """

    http_status = 404

    def __init__(self, name: str, loaded: Iterable[str]) -> None:
        self.name = name
        self.loaded = tuple(sorted(loaded))
        super().__init__(f"no adapter named {name!r}; loaded: {', '.join(self.loaded) or 'none'}")

    def __str__(self) -> str:
        return str(self.args[0])


class HeadError(VLoraError, ValueError):
    """A vision head that is missing, malformed, or does not fit its adapter or request."""


class RequestError(VLoraError, ValueError):
    """A request that cannot be served as asked."""
