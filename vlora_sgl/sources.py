"""Where adapters may come from besides the command line: what ``--vlora-adapter-source`` says.

``NAME=URL`` is one adapter; a URL or a folder alone is a place below which adapters lie by their names. They are the
only places that a server ever fetches adapters from. Nothing here imports SGLang or torch: settings are checked first.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from vlora_sgl.errors import ConfigError, quoted
from vlora_sgl.names import check_adapter_name

PACKAGES = {"hf": "huggingface_hub", "s3": "s3fs", "gs": "gcsfs", "https": "aiohttp", "http": "aiohttp"}
"""What reads each scheme, besides fsspec."""
CONFIG = "adapter_config.json"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
FORM = "[NAME=]DIR, or [NAME=]URL[#sha256=HEX] with hf://org[/name][@revision], s3://, gs:// or https://"

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
_DIGEST = re.compile(r"sha256=([0-9a-f]{64})")
_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_BELOW = re.compile(rf"{_PART}(/{_PART})*")
_COMMIT = re.compile(r"@[0-9a-f]{40}(/|$)")


@dataclass(frozen=True)
class Source:
    """One of them.

    Attributes:
        place: a URL, or a folder's path; without a slash at its end.
        name: of the one adapter that it is; ``None``: adapters lie below it.
        digest: SHA-256 of the adapter's ``SHA256SUMS``.
    """

    place: str
    name: str | None = None
    digest: str | None = None

    @property
    def is_folder(self) -> bool:
        """Whether it is on this machine."""
        return "://" not in self.place

    @property
    def is_fixed(self) -> bool:
        """Whether what it holds cannot change."""
        return self.digest is not None or (self.place.startswith("hf://") and bool(_COMMIT.search(self.place)))

    def place_of(self, name: str) -> str | None:
        """Where an adapter of that name would be; ``None``: not here."""
        if self.name is not None:
            return self.place if name == self.name else None
        return f"{self.place}/{name}" if _BELOW.fullmatch(name) else None

    def may_have(self, name: str) -> bool:
        """Whether it could have an adapter of that name; of a folder, whether it has."""
        place = self.place_of(name)
        return place is not None and (not self.is_folder or (Path(place) / CONFIG).is_file())

    def covers(self, place: str) -> bool:
        """Whether a place is this one, or below it."""
        return place == self.place or (
            self.name is None
            and place.startswith(f"{self.place}/")
            and bool(_BELOW.fullmatch(place.removeprefix(f"{self.place}/")))
        )


def read_source(text: str) -> Source:
    """What the flag says.

    Raises:
        ConfigError: it is not what the flag takes.
    """
    name, separator, place = text.partition("=")
    if not separator or _URL.match(name) or name.startswith((".", "/")):
        name, place = "", text
    place, _, fragment = place.partition("#")
    digest = _DIGEST.fullmatch(fragment)
    if not place or (fragment and digest is None) or (fragment and not name):
        raise ConfigError(f"--vlora-adapter-source takes {FORM}, a digest of one adapter only; got {quoted(text)}")
    if name:
        check_adapter_name(name)
    place = _checked_url(place) if _URL.match(place) else str(Path(place).expanduser().resolve())
    return Source(place.rstrip("/"), name or None, digest[1] if digest else None)


def _checked_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in PACKAGES or not parts.netloc or (parts.scheme == "http" and parts.hostname not in LOOPBACK):
        raise ConfigError(f"--vlora-adapter-source takes {FORM}; got {quoted(url)}")
    if (parts.scheme != "hf" and "@" in parts.netloc) or parts.query:
        raise ConfigError(f"--vlora-adapter-source {parts.hostname}: credentials belong in the environment")
    return url


def read_sources(texts: Iterable[str]) -> tuple[Source, ...]:
    """All that a command line gives, in its order.

    Raises:
        ConfigError: one is not what the flag takes, a folder is not there, or a package is missing.
    """
    sources = tuple(map(read_source, texts))
    for source in sources:
        if source.is_folder and not Path(source.place).is_dir():
            raise ConfigError(f"--vlora-adapter-source: there is no directory {quoted(source.place)}")
        package = PACKAGES.get(source.place.partition("://")[0])
        if not source.is_folder and not all(map(importlib.util.find_spec, ("fsspec", str(package)))):
            needs = f"{source.place} needs the package {package}"
            raise ConfigError(f"--vlora-adapter-source: {needs}: pip install 'vlora-sgl[sources]'")
    return sources
