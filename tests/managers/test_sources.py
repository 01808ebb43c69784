"""Adapters that come from elsewhere: a local HTTP server, the hub's cache, a folder; and what goes wrong."""

from __future__ import annotations

import asyncio
import hashlib
import http.server
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.managers.test_adapter_lifecycle import Front, run
from vlora_sgl import _sgl
from vlora_sgl.errors import AdapterSourceError, AdapterUnavailableError, ConfigError
from vlora_sgl.managers import adapter_sources, downloads, folder_watch
from vlora_sgl.managers.adapter_cache import COMING, AdapterCache
from vlora_sgl.managers.adapter_lifecycle import AdapterLifecycle
from vlora_sgl.managers.adapter_registry import UnknownAdapterResponse
from vlora_sgl.managers.adapter_sources import SourceResponse
from vlora_sgl.managers.downloads import CONFIG, SUMS, WEIGHTS, NotThere, download
from vlora_sgl.server_args import ENVIRONMENT_VARIABLE
from vlora_sgl.sources import Source, read_source, read_sources

FILES = {CONFIG: b'{"r": 8}', WEIGHTS: b"weights" * 1000, "vlora_adapter.json": b"{}"}
MOST = 1 << 20


def sums(files: dict[str, bytes]) -> bytes:
    """As sha256sum writes them."""
    return "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items()).encode()


class Web(http.server.ThreadingHTTPServer):
    """A server of files that may misbehave.

    Attributes:
        files: by path, without the first slash.
        asked: how often, by path.
        status: to answer with instead, by path.
        goes_to: redirects, by path.
        slow: what to wait for before an answer.
        cut: paths whose answers break off in the middle.
        seen: headers of the last request.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.asked: Counter[str] = Counter()
        self.status: dict[str, int] = {}
        self.goes_to: dict[str, str] = {}
        self.slow = threading.Event()
        self.slow.set()
        self.cut: set[str] = set()
        self.seen: dict[str, str] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def put(self, name: str, files: dict[str, bytes] = FILES) -> None:
        self.files |= {f"{name}/{file}": data for file, data in files.items()}


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Web

    def do_GET(self) -> None:
        path = self.path.lstrip("/")
        self.server.asked[path] += 1
        self.server.seen = dict(self.headers)
        self.server.slow.wait(20)
        if path in self.server.goes_to:
            self.send_response(302)
            self.send_header("Location", self.server.goes_to[path])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        status = self.server.status.get(path, 200 if path in self.server.files else 404)
        data = self.server.files.get(path, b"") if status == 200 else b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if path in self.server.cut else data)
        if path in self.server.cut:
            self.connection.close()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def web() -> Iterator[Web]:
    server = Web()
    yield server
    server.slow.set()
    server.shutdown()
    server.server_close()


def got(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


# What the flag says

ESCAPES = (
    *("..", "a/../b", "/etc", "a//b", ".hidden", "a\\b", "a%2e", "a?x", "a#x", "a b", "", "a/", "ä", "a:b"),
    *("../a", "a/..", "a/.b", "\0", "a\n"),
)


@pytest.mark.parametrize(
    ("text", "name", "place"),
    [
        ("hf://org", "fire", "hf://org/fire"),
        ("hf://org/many@v1/", "a/b", "hf://org/many@v1/a/b"),
        ("fire=hf://org/name@main", "fire", "hf://org/name@main"),
        ("s3://bucket/adapters", "fire", "s3://bucket/adapters/fire"),
        ("gs://bucket", "fire-2.x", "gs://bucket/fire-2.x"),
        ("fire=https://host/dir", "water", None),
        *(("https://host/dir", name, None) for name in ESCAPES),
    ],
)
def test_a_name_is_below_its_source_or_nowhere(text: str, name: str, place: str | None) -> None:
    source = read_source(text)
    assert source.place_of(name) == place
    assert place is None or source.covers(place)


@pytest.mark.parametrize(
    "text",
    [
        "", "fire=", "ftp://host/a", "http://host/a", "https://", "https://user:password@host/a", "https://host/a?key=1",
        "s3://key@bucket/a", "https://host/a#md5=1", "https://host/a#sha256=12", f"https://host/a#sha256={'0' * 64}",
        "a:b=https://host/a", "default=s3://a/b", "fire@2=s3://a/b",
    ],
)  # fmt: skip
def test_what_is_no_source_is_refused(text: str) -> None:
    with pytest.raises(ValueError) as refused:
        read_source(text)
    assert "password" not in str(refused.value) and "key=1" not in str(refused.value)


def test_a_source_covers_what_is_below_it_only() -> None:
    source = read_source("s3://bucket/adapters")
    assert source.covers("s3://bucket/adapters/a/b")
    for place in (
        "s3://bucket/adapters/../other",
        "s3://bucket/adaptersX/a",
        "s3://other/adapters/a",
        "/etc",
        "s3://bucket",
    ):
        assert not source.covers(place)
    assert not read_source("a=s3://bucket/a").covers("s3://bucket/a/b")


def test_a_folder_that_is_not_there_and_a_package_that_is_missing_end_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_sources([str(tmp_path), "https://host/a"])
    with pytest.raises(ConfigError, match="there is no directory"):
        read_sources([str(tmp_path / "nowhere")])
    monkeypatch.setitem(read_sources.__globals__["PACKAGES"], "s3", "a_package_that_nobody_has")
    with pytest.raises(ConfigError, match=r"a_package_that_nobody_has: pip install 'vlora-sgl\[sources\]'"):
        read_sources(["s3://bucket/a"])


# Downloads


def fetch(
    place: str, into: Path, digest: str | None = None, most: int = MOST, seconds: float = 20
) -> dict[str, bytes]:
    into.mkdir(exist_ok=True)
    download(place, digest, into, most, seconds)
    return got(into)


def test_an_adapter_is_fetched_file_by_file(web: Web, tmp_path: Path) -> None:
    web.put("a", {**FILES, "evil.bin": b"pickle", "adapter_model.bin": b"pickle"})
    assert fetch(f"{web.url}/a", tmp_path / "a") == FILES
    shards = {"adapter_model-1.safetensors": b"1", "adapter_model-2.safetensors": b"2"}
    index = json.dumps(
        {"weight_map": {"x": "adapter_model-1.safetensors", "y": "adapter_model-2.safetensors"}}
    ).encode()
    web.put("b", {CONFIG: b"{}", downloads.INDEX: index, **shards})
    assert fetch(f"{web.url}/b", tmp_path / "b") == {CONFIG: b"{}", downloads.INDEX: index, **shards}
    listed = {**FILES, "more.safetensors": b"more"}
    web.put("c", {**listed, "run.py": b"code", SUMS: sums({**listed, "run.py": b"code"})})
    assert set(fetch(f"{web.url}/c", tmp_path / "c")) == {*listed, SUMS}, "what is listed, and nothing but data"
    digest = hashlib.sha256(web.files[f"c/{SUMS}"]).hexdigest()
    assert fetch(f"{web.url}/c", tmp_path / "d", digest)
    web.goes_to[f"a/{WEIGHTS}"] = f"{web.url}/b/adapter_model-1.safetensors"
    assert fetch(f"{web.url}/a", tmp_path / "e")[WEIGHTS] == b"1", "the same host may say that it is elsewhere"


Spoil = Callable[[Web], object]
OTHER = "http://localhost:1/x"
WRONG: dict[str, tuple[Spoil, type[Exception], str]] = {
    "nothing": (lambda web: web.files.clear(), NotThere, ""),
    "no weights": (lambda web: web.files.pop(f"a/{WEIGHTS}"), AdapterSourceError, "but no adapter_model.safetensors"),
    "forbidden": (lambda web: web.status.update({f"a/{CONFIG}": 403}), AdapterSourceError, "status 403"),
    "broken": (lambda web: web.status.update({f"a/{WEIGHTS}": 500}), AdapterUnavailableError, "status 500"),
    "throttled": (lambda web: web.status.update({f"a/{WEIGHTS}": 429}), AdapterUnavailableError, "status 429"),
    "cut": (lambda web: web.cut.add(f"a/{WEIGHTS}"), AdapterSourceError, "cut off"),
    "redirected": (lambda web: web.goes_to.update({f"a/{WEIGHTS}": OTHER}), AdapterSourceError, "host, localhost"),
    "a listed file that is not there": (
        lambda web: web.put("a", {SUMS: sums({**FILES, "x.json": b""})}), AdapterSourceError, "lists x.json",
    ),
    "another digest": (
        lambda web: web.put("a", {SUMS: sums({**FILES, WEIGHTS: b"other"})}), AdapterSourceError, "digest",
    ),
    "sums that are none": (lambda web: web.put("a", {SUMS: b"<html>"}), AdapterSourceError, "SHA256SUMS has a"),
    "an index out of the directory": (
        lambda web: (web.files.pop(f"a/{WEIGHTS}"), web.files.update({
            f"a/{downloads.INDEX}": b'{"weight_map": {"x": "../../b/adapter_model.safetensors"}}'})),
        AdapterSourceError, "no file of an adapter",
    ),
    "too large": (lambda web: web.put("a", {WEIGHTS: b"x" * (MOST + 1)}), AdapterSourceError, "more than"),
    "settings of a gigabyte": (lambda web: web.put("a", {CONFIG: b"x" * (MOST + 1)}), AdapterSourceError, "more than"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_goes_wrong_is_told_by_kind(web: Web, tmp_path: Path, wrong: str) -> None:
    web.put("a")
    spoil, kind, message = WRONG[wrong]
    spoil(web)
    with pytest.raises(kind, match=message or None) as told:
        fetch(f"{web.url}/a", tmp_path / "a")
    assert "\n" not in str(told.value) and "127.0.0.1" not in str(told.value)
    assert max(web.asked.values()) <= 1, "nothing is asked for twice"


def test_a_digest_that_was_given_must_be_that_of_the_sums(web: Web, tmp_path: Path) -> None:
    web.put("a")
    with pytest.raises(AdapterSourceError, match="there is no SHA256SUMS"):
        fetch(f"{web.url}/a", tmp_path / "a", "0" * 64)
    web.put("a", {SUMS: sums(FILES)})
    with pytest.raises(AdapterSourceError, match="another digest than the one that was given"):
        fetch(f"{web.url}/a", tmp_path / "a", "0" * 64)


def test_a_source_that_is_silent_or_not_there_is_unavailable(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "SILENCE_S", 0.3)
    web.put("a")
    web.slow.clear()
    with pytest.raises(AdapterUnavailableError, match="does not answer in time"):
        fetch(f"{web.url}/a", tmp_path / "a")
    web.slow.set()
    with pytest.raises(AdapterUnavailableError, match="takes too long"):
        fetch(f"{web.url}/a", tmp_path / "a", seconds=-1)
    with pytest.raises(AdapterUnavailableError, match="cannot be reached"):
        fetch("http://127.0.0.1:9/a", tmp_path / "a")


def test_credentials_are_the_environment_s_and_never_told(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert downloads._client("https://host/a")["trust_env"] and not downloads._client(f"{web.url}/a")["trust_env"]
    web.put("a")
    error = RuntimeError("secret https://key:secret@host/?X-Amz-Signature=secret")
    monkeypatch.setattr(downloads._Download, "run", lambda self, digest: (_ for _ in ()).throw(error))
    with pytest.raises(AdapterSourceError) as told:
        fetch(f"{web.url}/a", tmp_path / "a")
    assert "secret" not in str(told.value) and told.value.__cause__ is None and told.value.__suppress_context__


# The hub's cache


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub's with one adapter, offline."""
    from huggingface_hub import constants

    commit, root = "c" * 40, tmp_path / "hub" / "models--org--fire"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    (root / "blobs").mkdir()
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for name, data in FILES.items():
        large = name.endswith(".safetensors")
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        blob = root / "blobs" / (hashlib.sha256(data).hexdigest() if large else git)
        blob.write_bytes(data)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return root


@pytest.mark.parametrize("revision", ["", "@main", "@" + "c" * 40])
def test_the_hub_s_cache_is_read_offline(hub: Path, tmp_path: Path, revision: str) -> None:
    assert fetch(f"hf://org/fire{revision}", tmp_path / "a") == FILES


@pytest.mark.parametrize("place", ["org/water", "org/fire@v2", "org/fire/below", "org/fire@" + "d" * 40])
def test_what_the_hub_s_cache_lacks_is_not_there(hub: Path, tmp_path: Path, place: str) -> None:
    with pytest.raises(NotThere):
        fetch(f"hf://{place}", tmp_path / "a")


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_blob_that_is_not_what_it_is_called_is_refused(hub: Path, tmp_path: Path, name: str) -> None:
    (hub / "snapshots" / ("c" * 40) / name).resolve().write_bytes(b"{}")
    with pytest.raises(AdapterSourceError, match=f"{name} has another digest"):
        fetch("hf://org/fire", tmp_path / "a")


# The cache


def adapter(cache: AdapterCache, place: str, size: int) -> Path:
    directory = cache.coming()
    (directory / CONFIG).write_bytes(place.encode().ljust(size))
    return cache.put(place, directory)


def test_the_least_recently_used_leave_and_what_is_in_use_stays(tmp_path: Path) -> None:
    used: set[str] = set()
    cache = AdapterCache(tmp_path, 100, lambda: used)
    kept = {}
    for age, name in enumerate("abc"):
        kept[name] = adapter(cache, name, 30)
        cache.release(str(kept[name]))
        os.utime(kept[name], (age, age))
    used.add(str(kept["a"]))
    cache.hold(kept["b"])
    cache.release(str(kept["b"]))
    kept["d"] = adapter(cache, "d", 30)
    assert [name for name, path in kept.items() if path.is_dir()] == ["a", "b", "d"]
    with pytest.raises(AdapterUnavailableError, match="no room for 50 bytes"):
        adapter(cache, "e", 50)  # d has just come
    assert not kept["b"].is_dir() and kept["a"].is_dir() and kept["d"].is_dir()
    cache.release(str(kept["d"]))
    assert adapter(cache, "e", 50).is_dir() and not kept["d"].is_dir()
    again = adapter(cache, "a", 30)
    assert again == kept["a"], "equal content is there once"


# Arrivals


class Arriving(Front):
    """A front with sources, whose engine loads whatever comes."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *sources: str, **settings: Any) -> None:
        given = {"adapter_source": sources, "source_cache": str(tmp_path / "cache"), "wait_seconds": 5, **settings}
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, json.dumps(given))
        super().__init__(settings.pop("limit", None))

    async def ask(self, name: str) -> str:
        """The directory that a request for it is answered with."""
        await self.adapters.fetch(name)
        request = await self.begin(name)
        (uid,) = request.lora_id
        await self.end(request)
        return self.held[uid]


def test_the_first_request_fetches_and_all_others_find_it(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        web.put("fire")
        front = Arriving(tmp_path, monkeypatch, web.url)
        assert front.adapters.may_serve("fire") and not front.adapters.knows("fire")
        found = set(await asyncio.gather(*(front.ask("fire") for _ in range(8))))
        assert web.asked[f"fire/{WEIGHTS}"] == 1, "one fetch for all"
        (directory,) = found
        assert got(Path(directory)) == FILES and {await front.ask("fire")} == found
        assert web.asked[f"fire/{WEIGHTS}"] == 1
        for name in ("..", "water", "a:b"):
            with pytest.raises((SourceResponse, UnknownAdapterResponse)) as told:
                await front.ask(name)
            assert told.value.status_code == 404
        assert [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(COMING)] == []

    run(scenario())


@pytest.mark.parametrize(("status", "kind"), [(404, 404), (403, 502), (500, 503)])
def test_a_failure_is_told_to_all_and_not_tried_again_at_once(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, kind: int
) -> None:
    async def scenario() -> None:
        front = Arriving(tmp_path, monkeypatch, web.url)
        web.status[f"fire/{CONFIG}"] = status

        async def told() -> Any:
            with pytest.raises(SourceResponse) as error:
                await front.ask("fire")
            return error.value.status_code, str(error.value)

        answers = {await told() for _ in range(20)} | set(await asyncio.gather(*(told() for _ in range(20))))
        assert {code for code, _ in answers} == {kind} and len(answers) == 1
        assert web.asked[f"fire/{CONFIG}"] == 1
        web.put("fire")
        del web.status[f"fire/{CONFIG}"]
        assert (await told())[0] == kind, "not yet"
        reply = await front.adapters.pin("fire", True)
        assert reply.success and await front.ask("fire"), "an operator's order is"

    run(scenario())


def test_who_waits_for_a_slow_source_is_told_and_nobody_else_waits(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        web.put("fire")
        front = Arriving(tmp_path, monkeypatch, web.url, wait_seconds=1)
        web.slow.clear()
        begin = time.monotonic()
        asking = asyncio.create_task(front.ask("fire"))
        await asyncio.sleep(0.05)
        assert (await front.load("other")).success and time.monotonic() - begin < 0.8, "loads go on"
        with pytest.raises(SourceResponse, match="still on its way") as told:
            await asking
        assert told.value.status_code == 503
        web.slow.set()
        assert await front.ask("fire")
        assert web.asked[f"fire/{WEIGHTS}"] == 1, "the fetch went on"

    run(scenario())


def test_what_the_engine_refuses_is_the_source_s_fault(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        web.put("fire")
        front = Arriving(tmp_path, monkeypatch, web.url)
        front.refuse = True
        with pytest.raises(SourceResponse, match="refused") as told:
            await front.ask("fire")
        assert told.value.status_code == 502 and front.adapters.known == {}

    run(scenario())


def test_a_full_cache_is_said_and_what_leaves_comes_back(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(map(len, FILES.values()))

    async def scenario() -> None:
        for name in ("fire", "water", "earth"):
            web.put(name, {**FILES, "vlora_adapter.json": json.dumps(name).encode()})
        front = Arriving(tmp_path, monkeypatch, web.url, source_cache_bytes=2 * size + 100)
        await front.ask("fire")
        await front.ask("water")
        with pytest.raises(SourceResponse, match="no room for") as told:
            await front.ask("earth")
        assert told.value.status_code == 503
        front.adapters._server_args.max_loaded_loras = 1  # so the first of them leave memory
        await front.adapters.unload(_sgl.UnloadLoRAAdapterReqInput(lora_name="water"))
        assert await front.ask("fire") and (await front.adapters.pin("earth", False)).success
        assert sorted(front.adapters.known) == ["earth", "fire"] and len(front.held) == 1
        assert await front.ask("water") and await front.ask("fire")
        assert web.asked[f"fire/{WEIGHTS}"] == 2, "it had left the cache, and came again"

    run(scenario())


def test_an_operator_loads_below_a_source_and_reloads_what_it_has_now(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        web.put("x/fire")
        front = Arriving(tmp_path, monkeypatch, f"{web.url}/x")

        def order(path: str) -> Any:
            return _sgl.LoadLoRAAdapterReqInput(lora_name="a", lora_path=path, pinned=False)

        for path in (f"{web.url}/y/fire", f"{web.url}/x/../fire", "https://elsewhere/x/fire"):
            reply = await front.adapters.load(order(path))
            assert not reply.success and "--vlora-adapter-source" in reply.error_message
        with pytest.raises(SourceResponse) as told:
            await front.adapters.load(order(f"{web.url}/x/nowhere"))
        assert told.value.status_code == 404
        assert (await front.adapters.load(order(f"{web.url}/x/fire"))).success
        before = await front.ask("a")
        assert (await front.adapters.reload("a")).version == 2 and await front.ask("a") == before, "nothing is new"
        web.put("x/fire", {WEIGHTS: b"new"})
        assert (await front.adapters.reload("a")).version == 3
        assert (Path(await front.ask("a")) / WEIGHTS).read_bytes() == b"new"
        web.status[f"x/fire/{CONFIG}"] = 500
        with pytest.raises(SourceResponse):
            await front.adapters.reload("a")
        assert (Path(await front.ask("a")) / WEIGHTS).read_bytes() == b"new", "the old one stays"

    run(scenario())


def test_an_earlier_server_s_fetch_is_used_where_it_cannot_have_changed_or_nothing_else_is_to_be_had(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        web.put("fire", {**FILES, SUMS: sums(FILES)})
        digest = hashlib.sha256(web.files[f"fire/{SUMS}"]).hexdigest()
        fixed = f"fire={web.url}/fire#sha256={digest}"
        await Arriving(tmp_path, monkeypatch, fixed).ask("fire")
        assert web.asked[f"fire/{SUMS}"] == 1
        await Arriving(tmp_path, monkeypatch, fixed).ask("fire")
        assert web.asked[f"fire/{SUMS}"] == 1
        await Arriving(tmp_path, monkeypatch, web.url).ask("fire")
        assert web.asked[f"fire/{SUMS}"] == 2, "it may have changed"
        web.status |= {f"fire/{name}": 500 for name in (*FILES, SUMS)}
        assert await Arriving(tmp_path, monkeypatch, web.url).ask("fire")

    run(scenario())


# Folders


def test_a_folder_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_watch, "POLL_S", 0.02)

    async def scenario() -> None:
        folder = tmp_path / "folder"
        folder.mkdir()
        front = Arriving(tmp_path, monkeypatch, str(folder))
        with pytest.raises(UnknownAdapterResponse):
            await front.ask("fire")

        def write(files: dict[str, bytes]) -> None:
            for name, data in files.items():
                (folder / "fire" / name).write_bytes(data)

        async def until(holds: Callable[[], bool]) -> None:
            async with asyncio.timeout(5):
                while not holds():
                    await asyncio.sleep(0.01)

        (folder / "fire").mkdir()
        write(FILES)
        assert dict(front.adapters.sources.offered()) == {"fire": str(folder / "fire")}
        assert await front.ask("fire") == str(folder / "fire")
        versions = front.adapters.versions["fire"]
        await asyncio.sleep(0.2)
        assert versions.current == 1, "nothing has changed"
        write({WEIGHTS: b"new"})
        await until(lambda: versions.current == 2)
        front.refuse = True
        write({WEIGHTS: b"bad"})
        await asyncio.sleep(0.2)
        front.refuse = False
        await asyncio.sleep(0.2)
        assert versions.current == 2, "what was refused is tried again when it changes"
        write({WEIGHTS: b"good"})
        await until(lambda: versions.current == 3)
        for file in (folder / "fire").iterdir():
            file.unlink()
        await until(lambda: front.adapters.known == {})
        assert not front.adapters.may_serve("fire")
        write(FILES)
        assert await front.ask("fire"), "and back"

    run(scenario())


def test_nothing_is_found_beside_a_folder(tmp_path: Path) -> None:
    for place in ("in/fire", "out", "in/.hidden"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / CONFIG).write_text("{}")
    sources = adapter_sources.AdapterSources(
        [Source(str(tmp_path / "in"))], AdapterCache(tmp_path / "cache", 1), AdapterLifecycle.load
    )
    assert sources.may_have("fire")
    assert not any(map(sources.may_have, ("../out", "..", ".hidden", "fire/..", str(tmp_path / "out"), "default")))


def test_what_nobody_foresaw_is_told_and_remembered_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        front, asked = Arriving(tmp_path, monkeypatch, "https://host/a"), []

        def broken(*given: Any) -> None:
            asked.append(given)
            raise ZeroDivisionError("key=secret")

        front.adapters.sources._fetch = broken
        for _ in range(3):
            with pytest.raises(SourceResponse, match=r"ZeroDivisionError$") as told:
                await front.ask("fire")
            assert told.value.status_code == 502
        assert len(asked) == 1

    run(scenario())
