"""Every error vlora_sgl raises on purpose.

VLoraError                      anything of ours; catch this to catch all
+-- ConfigError (ValueError)    a flag, file or combination that cannot work; raised before anything starts
+-- ContractError (ImportError) this SGLang is not the one we extend; the operator must install the pinned one
+-- AdapterError (ValueError)   an adapter that cannot be loaded as it is; the message names the tensor or key
|   +-- AdapterNameError        a name that no adapter can have, or that another has
+-- AdapterSourceError (RuntimeError)  what the source of an adapter has is not what it should be
|   +-- AdapterUnavailableError an adapter that cannot be had now; ask again later
+-- UnknownAdapterError (KeyError)  no adapter of that name; carries the names that exist
+-- HeadError (ValueError)      a vision head that is missing, malformed or does not fit
+-- RequestError (ValueError)   a request that cannot be served as asked
    +-- BodyTooLargeError       a body of more bytes than a server takes
    +-- ImageError              an image that cannot be opened, or is not opened as it is
+-- StoppingError (RuntimeError) the server has been told to stop; ask another, or again later
+-- WaitError (RuntimeError)    what a request waits for takes longer than a request may wait; it goes on
+-- ClusterError (RuntimeError)  no replica of a cluster can take the request now; ask again later
    +-- ReplicaLostError        the replicas that were answering the request ended
+-- MissingDependencyError (ImportError)  an optional package that this use needs; the message says how to get it
+-- ProgramError (RuntimeError) a statement of a program failed; the message names its file and line
    +-- ProgramCancelled        the program's run was cancelled by its caller
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MESSAGE_CHARS = 4000
"""What a message may have; one that quotes what somebody sent could be as long as that."""
QUOTED_CHARS = 80
LISTED_NAMES = 100
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = QUOTED_CHARS
_SHORT.maxlevel = 3


def quoted(value: object) -> str:
    """A value as a message quotes it: short, and on one line."""
    try:
        text = _SHORT.repr(value)
    except Exception:  # a value that cannot even be printed
        text = type(value).__name__
    return text if len(text) <= QUOTED_CHARS else text[: QUOTED_CHARS - 1] + "…"


def listed(names: Sequence[str]) -> str:
    """Names as a message lists them."""
    more = f" and {len(names) - LISTED_NAMES} more" if len(names) > LISTED_NAMES else ""
    return (", ".join(names[:LISTED_NAMES]) or "none") + more


class VLoraError(Exception):
    """Base class of all errors of this package. Of a long message the middle is left out."""

    http_status = 400

    def __init__(self, *args: object, **named: str | None) -> None:
        super().__init__(*(_shortened(one) if isinstance(one, str) else one for one in args), **named)


class ConfigError(VLoraError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class ContractError(VLoraError, ImportError):
    """The installed SGLang lacks a name or a signature that this release extends."""

    http_status = 500


class AdapterError(VLoraError, ValueError):
    """An adapter directory that cannot be loaded as it is."""


class AdapterNameError(AdapterError):
    """A name that an adapter cannot have, or that another has already."""


class AdapterSourceError(VLoraError, RuntimeError):
    """What the source of an adapter has is not what it should be, or may not be had."""

    http_status = 502

    def __str__(self) -> str:
        return str(self.args[0])


class AdapterUnavailableError(AdapterSourceError):
    """An adapter that cannot be had now, for a reason that may pass."""

    http_status = 503


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
        super().__init__(f"no adapter named {quoted(name)}; loaded: {listed(self.loaded)}")

    def __str__(self) -> str:
        return str(self.args[0])


class HeadError(VLoraError, ValueError):
    """A vision head that is missing, malformed, or does not fit its adapter or request."""


class RequestError(VLoraError, ValueError):
    """A request that cannot be served as asked."""


class BodyTooLargeError(RequestError):
    """A body of more bytes than a server takes.

    Args:
        most: bytes that it takes.
        flag: the setting that says so.
    """

    http_status = 413

    def __init__(self, most: int, flag: str = "--vlora-max-body-bytes") -> None:
        super().__init__(f"the body must have {most} bytes at most ({flag})")


class ImageError(RequestError):
    """An image that cannot be read, is none, is damaged, or has too many pixels.

    Attributes:
        source: what a request had for it, where a request did.
    """

    source: object = None


class StoppingError(VLoraError, RuntimeError):
    """A server that has been told to stop takes no more requests."""

    http_status = 503

    def __init__(self) -> None:
        super().__init__("this server has been told to stop and takes no more requests")

    def __str__(self) -> str:
        return str(self.args[0])


class WaitError(VLoraError, RuntimeError):
    """What was waited for has not come within ``--vlora-wait-seconds``; the message names it.

    Attributes:
        begun: whether it goes on.
    """

    http_status = 504
    begun = True

    def __str__(self) -> str:
        return str(self.args[0])


class ClusterError(VLoraError, RuntimeError):
    """No replica of the cluster can take a request now."""

    http_status = 503


class ReplicaLostError(ClusterError):
    """The replicas that were answering a request ended, and it is not sent to another."""

    http_status = 502


class MissingDependencyError(VLoraError, ImportError):
    """An optional package is not installed.

    Args:
        package: its name on the package index.
        purpose: what needs it, as in "reading the video a.mp4".
    """

    def __init__(self, package: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package {package!r}: pip install {package}", name=package)


@dataclass(frozen=True, slots=True)
class Location:
    """Where in a user's program a statement stands."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} (in {self.function})"


class ProgramError(VLoraError, RuntimeError):
    """A statement of a program failed.

    Attributes:
        reason: what went wrong.
        location: the statement's file, line and function, or None where no single statement is at fault.
    """

    def __init__(self, reason: str, location: Location | None = None) -> None:
        super().__init__(reason, location)
        self.reason = reason
        self.location = location

    def locate(self, location: Location) -> None:
        """Say where, unless that is known already."""
        if self.location is None:
            self.location = location

    def __str__(self) -> str:
        return self.reason if self.location is None else f"{self.location}: {self.reason}"


class ProgramCancelled(ProgramError):
    """The run was cancelled by its caller."""


def _shortened(message: str) -> str:
    end = MESSAGE_CHARS // 4
    return message if len(message) <= MESSAGE_CHARS else f"{message[: MESSAGE_CHARS - end]}…{message[-end:]}"
