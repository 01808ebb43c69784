"""The page at ``/ui``: three files that a server or a cluster sends as they are (docs/page.md).

They hold nothing of a server's and need no key. What the page shows it asks for like any client, with the key that its
user types. The browser may load and ask for nothing from anywhere else, and runs no code but the one script.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

FILES: Mapping[str, tuple[str, str]] = {
    "/ui": ("index.html", "text/html; charset=utf-8"),
    "/ui/page.css": ("page.css", "text/css; charset=utf-8"),
    "/ui/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
"""Path -> file in this directory, and its type."""

_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' blob: data:",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "; ".join(f"{what} {sources}" for what, sources in _POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@lru_cache
def content(path: str) -> bytes:
    """The file that ``FILES`` has under a path."""
    return (Path(__file__).parent / FILES[path][0]).read_bytes()
