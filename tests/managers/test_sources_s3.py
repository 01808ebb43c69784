"""Adapters from a bucket: real s3fs, and a bucket that is none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.managers.test_adapter_lifecycle import run
from tests.managers.test_sources import FILES, Arriving, fetch, sums
from vlora_sgl.errors import AdapterSourceError, AdapterUnavailableError
from vlora_sgl.managers.adapter_sources import SourceResponse
from vlora_sgl.managers.downloads import SUMS, WEIGHTS, NotThere

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

pytestmark = [
    # Said inside other people's modules.
    pytest.mark.filterwarnings("ignore:::(botocore|aiobotocore|moto|werkzeug|s3fs)"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A file system with an empty bucket; the environment leads to it."""
    import s3fs
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://{host}:{port}"), ("AWS_ACCESS_KEY_ID", "key-of-the-server"),
        ("AWS_SECRET_ACCESS_KEY", "secret-of-the-server"), ("AWS_DEFAULT_REGION", "us-east-1"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem()
    files.mkdir("bucket")
    yield files
    requests.post(f"http://{host}:{port}/moto-api/reset", timeout=10).raise_for_status()
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


def put(bucket: Any, place: str, files: dict[str, bytes] = FILES) -> None:
    for name, data in files.items():
        bucket.pipe(f"bucket/{place}/{name}", data)


def test_an_adapter_comes_from_a_bucket(bucket: Any, tmp_path: Path) -> None:
    put(bucket, "adapters/fire", {**FILES, "run.py": b"code"})
    assert fetch("s3://bucket/adapters/fire", tmp_path / "a") == FILES
    put(bucket, "adapters/water", {**FILES, SUMS: sums({**FILES, WEIGHTS: b"other"})})
    with pytest.raises(AdapterSourceError, match="another digest"):
        fetch("s3://bucket/adapters/water", tmp_path / "b")
    for place in ("bucket/adapters/earth", "nowhere/adapters/fire"):
        with pytest.raises(NotThere):
            fetch(f"s3://{place}", tmp_path / "c")


def test_a_bucket_that_is_not_to_be_had_is_said_without_keys(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    type(bucket).clear_instance_cache()
    with pytest.raises(AdapterUnavailableError) as told:
        fetch("s3://bucket/adapters/fire", tmp_path / "a")
    assert "of-the-server" not in str(told.value) and "127.0.0.1" not in str(told.value)


def test_the_first_request_fetches_from_a_bucket_and_a_reload_what_is_there_now(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(bucket, "adapters/fire")

    async def scenario() -> None:
        front = Arriving(tmp_path, monkeypatch, "s3://bucket/adapters")
        (directory,) = set(await asyncio.gather(*(front.ask("fire") for _ in range(4))))
        assert (Path(directory) / WEIGHTS).read_bytes() == FILES[WEIGHTS]
        await asyncio.to_thread(put, bucket, "adapters/fire", {WEIGHTS: b"new"})
        assert await front.ask("fire") == directory
        assert (await front.adapters.reload("fire")).version == 2
        assert (Path(await front.ask("fire")) / WEIGHTS).read_bytes() == b"new"
        with pytest.raises(SourceResponse) as told:
            await front.ask("earth")
        assert told.value.status_code == 404

    run(scenario())
