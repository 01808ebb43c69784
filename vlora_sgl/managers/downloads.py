"""One adapter's files from a source to a directory: bounded, verified, and nothing but safetensors and JSON.

Files are asked for by name, so that no source needs to be listed. Where there is a ``SHA256SUMS`` (what
``sha256sum *`` writes) it says which they are, and each must have its digest; the Hugging Face hub's own digests are
checked, too.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vlora_sgl.errors import AdapterSourceError, AdapterUnavailableError, VLoraError
from vlora_sgl.sources import CONFIG, LOOPBACK

SUMS, WEIGHTS = "SHA256SUMS", "adapter_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
OPTIONAL = ("vlora_adapter.json", "vlora_heads.safetensors", "added_tokens.json")
CONNECT_S, SILENCE_S = 10.0, 30.0
MOST_SETTINGS = 16 << 20

_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.(safetensors|json)")
_SUM = re.compile(r"([0-9a-f]{64}) [ *](?:\./)?(.+)")
# Of errors of libraries that need not be installed, by the names of their classes.
_PASSING = {
    "ClientConnectionError",
    "ConnectionError",
    "HTTPClientError",
    "TransportError",
    "FSTimeoutError",
    "TimeoutException",
}
_CUT = {"ClientPayloadError", "IncompleteReadError", "ResponseStreamingError", "IncompleteRead"}
_MISSING = {"RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError", "LocalEntryNotFoundError"}


class NotThere(Exception):
    """The source has no such adapter."""


def download(place: str, digest: str | None, into: Path, most: int, seconds: float) -> None:
    """Fetch an adapter. Blocks; raises nothing but what it says.

    Args:
        place: its URL.
        digest: of its ``SHA256SUMS``.
        into: an empty directory.
        most: bytes of all its files.
        seconds: in which it has to be there.

    Raises:
        NotThere: there is none.
        AdapterSourceError: what there is is not what it should be, or may not be had.
        AdapterUnavailableError: the source cannot be reached, is too slow, or there is no room.
    """
    try:
        _Download(place, into, most, time.monotonic() + seconds).run(digest)
    except (VLoraError, NotThere):
        raise
    except Exception as error:
        raise _told(error) from None


class _Download:
    def __init__(self, place: str, into: Path, most: int, deadline: float) -> None:
        self.into, self.left, self.deadline = into, most, deadline
        self.fs, self.root, self.told_of = file_system(place)

    def run(self, digest: str | None) -> None:
        """Fetch all files there are."""
        if self.fetch(SUMS, limit=MOST_SETTINGS):
            if digest is not None and _sha256(self.into / SUMS) != digest:
                raise AdapterSourceError(f"{SUMS} has another digest than the one that was given")
            sums = _read_sums(self.into / SUMS)
            for name, expected in sums.items():
                if not self.fetch(name, expected):
                    raise AdapterSourceError(f"{SUMS} lists {name}, which is not there")
            return
        if digest is not None:
            raise AdapterSourceError(f"a digest was given, and there is no {SUMS}")
        if not self.fetch(CONFIG):
            raise NotThere()
        if not self.fetch(WEIGHTS):
            for name in self.shards():
                if not self.fetch(name):
                    raise AdapterSourceError(f"{INDEX} lists {name}, which is not there")
        for name in OPTIONAL:
            self.fetch(name)

    def shards(self) -> list[str]:
        """The files that an index lists."""
        if not self.fetch(INDEX):
            raise AdapterSourceError(f"there is {CONFIG}, but no {WEIGHTS}")
        try:
            names = sorted(set(json.loads((self.into / INDEX).read_bytes())["weight_map"].values()))
        except (ValueError, LookupError, TypeError, AttributeError):
            raise AdapterSourceError(f"{INDEX} is no index of shards") from None
        return [_checked(name) for name in names]

    def fetch(self, name: str, expected: str | None = None, limit: int | None = None) -> bool:
        """Fetch a file, if it is there, and compare its digest."""
        path, target = f"{self.root}/{name}", self.into / name
        bound = min(self.left, MOST_SETTINGS if name.endswith(".json") else self.left if limit is None else limit)
        counted = _counting(name, bound, self.deadline)
        try:
            told = self.told_of(path)
            self.fs.get_file(path, str(target), callback=counted)
        except Exception as error:
            target.unlink(missing_ok=True)
            if isinstance(error, FileNotFoundError) or _classes(error) & _MISSING:
                return False
            raise
        size = target.stat().st_size
        if counted.size not in (None, size):
            raise AdapterSourceError(f"{name} was cut off: {size} of {counted.size} bytes came")
        self.left -= size
        _verify(target, expected, told)
        return True


def file_system(place: str) -> tuple[Any, str, Callable[[str], Mapping[str, Any]]]:
    """fsspec's file system of a place, the place in it, and what tells the hub's digests of a file there."""
    import fsspec

    scheme, _, path = place.partition("://")
    if scheme == "hf" and (cached := in_hub_cache(path)) is not None:
        # A file of the hub's cache is a link to one that is called as its digest.
        return fsspec.filesystem("file"), str(cached), lambda file: {"blob_id": Path(file).resolve().name}
    if scheme == "hf":
        hub = fsspec.filesystem(scheme, skip_instance_cache=True)  # it would remember what was there
        return hub, path, hub.info
    if scheme in ("http", "https"):
        return fsspec.filesystem(scheme, skip_instance_cache=True, client_kwargs=_client(place)), place, _nothing
    patience = {"connect_timeout": CONNECT_S, "read_timeout": SILENCE_S}
    options = {"config_kwargs": patience, "use_listings_cache": False} if scheme == "s3" else {}
    return fsspec.filesystem(scheme, **options), path, _nothing


def _nothing(file: str) -> Mapping[str, Any]:
    return {}


def in_hub_cache(path: str) -> Path | None:
    """Where the hub's cache on this machine has an adapter, if nobody needs to ask the hub for it: the revision is a
    commit, or ``HF_HUB_OFFLINE`` is set.

    Args:
        path: ``org/name[@revision][/folder]``.

    Raises:
        NotThere: it is not there, and the hub may not be asked.
    """
    import huggingface_hub
    from huggingface_hub import constants

    match = re.fullmatch(r"([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.+))?", path)
    if match is None:
        return None
    repository, revision, folder = match.groups()
    offline = bool(constants.HF_HUB_OFFLINE)
    if not offline and not re.fullmatch(r"[0-9a-f]{40}", revision or ""):
        return None
    try:
        kept = huggingface_hub.snapshot_download(repository, revision=revision, local_files_only=True)
    except Exception:
        if offline:
            raise NotThere() from None
        return None
    found = Path(kept) / (folder or "")
    if (found / CONFIG).is_file():
        return found
    if offline:
        raise NotThere()
    return None


def _client(place: str) -> dict[str, Any]:
    """What aiohttp's client is made with: proxies and passwords of the environment, no redirect to another host."""
    import aiohttp
    from yarl import URL

    async def follow(session: Any, context: Any, params: Any) -> None:
        there = params.url.join(URL(params.response.headers.get("Location", "")))
        if there.origin() != params.url.origin():
            raise AdapterSourceError(f"it redirects to another host, {there.host}")

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(follow)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
    trusted = urlsplit(place).hostname not in LOOPBACK
    # Compressed, it would have another length than was told.
    headers = {"Accept-Encoding": "identity"}
    return {"trace_configs": [trace], "timeout": timeout, "trust_env": trusted, "headers": headers}


def _counting(name: str, most: int, deadline: float) -> Any:
    """fsspec's callback that ends what is too much, or too slow."""
    from fsspec.callbacks import Callback

    class Counting(Callback):
        def call(self, *args: object, **kwargs: object) -> None:
            if max(self.value, self.size or 0) > most:
                raise AdapterSourceError(f"{name} has more than the {most} bytes that are left for it")
            if time.monotonic() > deadline:
                raise AdapterUnavailableError(f"{name} takes too long")

    return Counting()


def _verify(file: Path, expected: str | None, known: Mapping[str, Any]) -> None:
    """Compare a file with its digest, and with those that the hub, or its cache, has of it."""
    lfs = known.get("lfs")
    blob = str((known.get("blob_id") or "") if lfs is None else lfs["sha256"])
    ways = {64: _sha256, 40: _git_blob}
    if any(ways[len(one)](file) != one for one in (expected or "", blob) if len(one) in ways):
        raise AdapterSourceError(f"{file.name} has another digest than it should have")


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _git_blob(file: Path) -> str:
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _read_sums(file: Path) -> dict[str, str]:
    """Digests by file."""
    found = {}
    for line in file.read_text(errors="replace").splitlines():
        match = _SUM.fullmatch(line.strip())
        if match is None:
            raise AdapterSourceError(f"{SUMS} has a line that sha256sum does not write")
        if _FILE.fullmatch(match[2]):
            found[match[2]] = match[1]
    if CONFIG not in found:
        raise AdapterSourceError(f"{SUMS} does not list {CONFIG}")
    return found


def _checked(name: object) -> str:
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise AdapterSourceError(f"{INDEX} lists what is no file of an adapter")
    return name


def _classes(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _told(error: Exception) -> Exception:
    """What went wrong, by kind. What a library says of it may hold addresses and keys, and is not told."""
    kind, classes = type(error).__name__, _classes(error)
    response = getattr(error, "response", None)
    status = getattr(error, "status", None) or getattr(response, "status_code", None)
    if isinstance(error, FileNotFoundError) or classes & _MISSING:
        return NotThere()
    if classes & _CUT:
        return AdapterSourceError(f"the download was cut off ({kind})")
    if isinstance(status, int) and status < 500 and status != 429:
        return AdapterSourceError(f"it answers with status {status}")
    if isinstance(error, PermissionError):
        return AdapterSourceError(f"it does not let this server read ({kind})")
    passing = isinstance(status, int) or isinstance(error, OSError | TimeoutError) or classes & _PASSING
    why = "it cannot be reached, or does not answer in time" if status is None else f"it answers with status {status}"
    if passing:
        return AdapterUnavailableError(f"{why} ({kind})")
    return AdapterSourceError(f"it cannot be read ({kind})")


Download = Callable[[str, str | None, Path, int, float], None]
