"""Files of adapters in bodies: in their directory when all of the body has come, and nowhere if it is refused."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from starlette.requests import ClientDisconnect

from vlora_sgl.entrypoints import uploads
from vlora_sgl.entrypoints.adapters import LoadRequest
from vlora_sgl.entrypoints.uploads import CONFIG, WEIGHTS, order_in
from vlora_sgl.errors import AdapterUnavailableError, RequestError, WaitError
from vlora_sgl.managers.uploads import Uploads
from vlora_sgl.server_args import UPLOADS_VARIABLE

FILES = {WEIGHTS: os.urandom(300_000) + b"\r\n--boundar", CONFIG: b'{"r": 1}'}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(UPLOADS_VARIABLE, str(tmp_path / "uploads"))
    return tmp_path / "uploads"


def body(*parts: tuple[str, bytes, bool]) -> bytes:
    """A form of (name, content, whether it is a file)."""
    found = []
    for name, content, is_file in parts:
        more = f'; filename="{name}"' if is_file else ""
        found += [
            f'--boundary\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode(),
            content,
            b"\r\n",
        ]
    return b"".join([*found, b"--boundary--\r\n"])


def adapter(files: Mapping[str, bytes] = FILES) -> bytes:
    return body(("lora_name", b"a", False), *((name, content, True) for name, content in files.items()))


def request(content: bytes, at_once: int = 1 << 16, whole: bool = True) -> Request:
    pieces = [content[at : at + at_once] for at in range(0, len(content), at_once)]
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": one, "more_body": True} for one in pieces]
    messages.append({"type": "http.request"} if whole else {"type": "http.disconnect"})

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    kind = b"multipart/form-data; boundary=boundary"
    return Request({"type": "http", "headers": [(b"content-type", kind)]}, receive)


async def held(one: Request, error: Exception | None = None) -> dict[str, bytes]:
    """What is in the directory while an order is followed, which may end in an error."""
    async with order_in(one, LoadRequest, Uploads()) as order:
        assert order.lora_name == "a"
        found = {file.name: file.read_bytes() for file in Path(order.lora_path).iterdir()}
        if error is not None:
            raise error
    return found


def left(root: Path) -> int:
    return len([*root.iterdir()]) if root.exists() else 0


@pytest.mark.parametrize("written", [uploads.AT_ONCE, 1000], ids=["at_the_end", "as_it_comes"])
@pytest.mark.parametrize("at_once", [7, 4096, 1 << 20], ids=lambda size: f"pieces{size}")
def test_files_are_what_was_sent(at_once: int, written: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "AT_ONCE", written)
    files = FILES if at_once > 7 else {**FILES, WEIGHTS: FILES[WEIGHTS][-5000:]}
    assert asyncio.run(held(request(adapter(files), at_once))) == files
    assert left(root) == 1


def test_a_file_may_come_as_a_field(root: Path) -> None:
    parts = ("lora_name", b"a", False), (CONFIG, FILES[CONFIG], False), (WEIGHTS, FILES[WEIGHTS], True)
    assert asyncio.run(held(request(body(*parts)))) == FILES


def test_nothing_is_written_by_the_thread_that_receives(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, own = set(), uploads.write

    def watched(*args: Any) -> None:
        threads.add(threading.get_ident())
        own(*args)

    monkeypatch.setattr(uploads, "write", watched)
    asyncio.run(held(request(adapter())))
    assert threads and threading.get_ident() not in threads


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (adapter({WEIGHTS: b"x"}), RequestError),
        (adapter({**FILES, "adapter_model.bin": b"x"}), RequestError),
        (body((WEIGHTS, b"x", True), (WEIGHTS, b"y", True), (CONFIG, b"{}", True)), RequestError),
        (body((WEIGHTS, b"x", True), (CONFIG, b"{}", True), ("lora_path", b"/", False)), RequestError),
        (body((WEIGHTS, b"x", True), (CONFIG, b"{}", True)), RequestValidationError),
        (b"--other\r\n", HTTPException),
        (adapter()[:-400], RequestError),
    ],
    ids=["no-config", "another-file", "twice", "a-path", "no-name", "no-form", "cut"],
)
def test_what_is_refused_leaves_nothing(content: bytes, error: type[Exception], root: Path) -> None:
    with pytest.raises(error):
        asyncio.run(held(request(content)))
    assert left(root) == 0


def test_a_client_that_hangs_up_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "AT_ONCE", 1000)
    with pytest.raises(ClientDisconnect):
        asyncio.run(held(request(adapter()[:200_000], whole=False)))
    assert left(root) == 0


def test_no_room_is_told_and_nothing_is_left(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        """A file on a file system that has room for 100,000 bytes."""

        def __init__(self) -> None:
            self.size = 0

        def write(self, data: Any) -> int:
            if self.size >= 100_000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.size += (taken := min(len(data), 30_000))
            return taken

        def tell(self) -> int:
            return self.size

        def close(self) -> None:
            pass

    for written in (1000, 1 << 20):
        monkeypatch.setattr(uploads, "AT_ONCE", written)
        monkeypatch.setattr(uploads, "new_file", lambda *_: Full())
        with pytest.raises(AdapterUnavailableError, match="No space left on device"):
            asyncio.run(held(request(adapter())))
        assert left(root) == 0


@pytest.mark.parametrize(("begun", "count"), [(True, 1), (False, 0)])
def test_the_files_of_a_load_that_goes_on_stay(begun: bool, count: int, root: Path) -> None:
    error = WaitError("it takes long")
    error.begun = begun
    with pytest.raises(WaitError):
        asyncio.run(held(request(adapter()), error))
    assert left(root) == count
