"""The hub itself, as far as it is asked for files: a server that speaks its protocol."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.managers.test_sources import FILES, fetch
from vlora_sgl.errors import AdapterSourceError
from vlora_sgl.managers.downloads import CONFIG, WEIGHTS, NotThere

REPOSITORY, COMMIT = "org/fire", "c" * 40


class Hub(http.server.ThreadingHTTPServer):
    """One repository of models.

    Attributes:
        files: of it.
        digests: SHA-256 of large files, where it is another than the true one.
        asked: paths, in order.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = dict(FILES)
        self.digests: dict[str, str] = {}
        self.asked: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def described(self, name: str) -> dict[str, Any]:
        data = self.files[name]
        oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        found: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": oid}
        if name.endswith(".safetensors"):
            digest = self.digests.get(name, hashlib.sha256(data).hexdigest())
            found["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 100}
        elif name in self.digests:
            found["oid"] = self.digests[name]
        return found


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        api = f"/api/models/{REPOSITORY}"
        name = self.path.rpartition("/")[2]
        if self.path.split("?")[0] in (api, f"{api}/revision/main"):
            self.answer(200, json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": []}).encode())
        elif self.path.split("?")[0] == f"{api}/tree/main":
            self.answer(200, json.dumps([self.server.described(one) for one in self.server.files]).encode())
        elif self.path.startswith(f"/{REPOSITORY}/resolve/") and name in self.server.files:
            data = self.server.files[name]
            first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            part = data[int(first) : int(last) + 1 if last else None]
            span = {"Content-Range": f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"}
            self.answer(206, part, span)
        else:
            kind = "Revision" if self.path.startswith(f"{api}/") else "Repo"
            self.answer(404, b"{}", {"X-Error-Code": f"{kind}NotFound"})

    do_HEAD = do_GET

    def answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        told = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}
        for name, value in told.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    server = Hub()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants._HF_DEFAULT_ENDPOINT, address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("place", ["hf://org/fire", "hf://org/fire@main"])
def test_an_adapter_comes_from_the_hub(hub: Hub, tmp_path: Path, place: str) -> None:
    hub.files |= {"adapter_model.bin": b"pickle", "README.md": b"words"}
    assert fetch(place, tmp_path / "a") == FILES
    assert not any("adapter_model.bin" in path or "README" in path for path in hub.asked)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_file_that_is_not_what_the_hub_says_is_refused(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.digests[name] = "0" * (64 if name == WEIGHTS else 40)
    with pytest.raises(AdapterSourceError, match=f"{name} has another digest"):
        fetch("hf://org/fire", tmp_path / "a")


@pytest.mark.parametrize("place", ["hf://org/water", "hf://org/fire@v9", "hf://org/fire/below"])
def test_what_the_hub_has_not_is_not_there(hub: Hub, tmp_path: Path, place: str) -> None:
    with pytest.raises(NotThere):
        fetch(place, tmp_path / "a")
