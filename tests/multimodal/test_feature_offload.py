"""Features leave the device behind the scheduler's back, and are there again before anybody needs them."""

from __future__ import annotations

import pickle
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlora_sgl import _sgl
from vlora_sgl.multimodal.embedding_count import chunked_prefill_embedding
from vlora_sgl.multimodal.encoder_cache import EncoderCache
from vlora_sgl.multimodal.feature_offload import FeatureOffloader, Offload, cached_hashes

DEVICE, HOST = torch.float16, torch.float32
"""Which memory a tensor of these tests is in."""

SECONDS = 20.0


class Offloader(FeatureOffloader):
    """Copies when it is told to, between memories that a machine without an accelerator has."""

    def __init__(self, limit: int = 1 << 20, allowed: int = 0) -> None:
        super().__init__(limit)
        self.allowed = threading.Semaphore(allowed)
        self.copied: list[float] = []
        self.staged: list[float] = []
        self.failure: Exception | None = None

    def on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype == DEVICE

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        self.staged.append(tensor[0].item())
        return tensor.clone()

    def mark(self, tensor: torch.Tensor) -> Any:
        return tensor[0].item()

    def copy(self, tensor: torch.Tensor, mark: Any) -> torch.Tensor:
        assert self.allowed.acquire(timeout=SECONDS)
        if self.failure is not None:
            raise self.failure
        self.copied.append(mark)
        return tensor.to(HOST)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> EncoderCache:
    found = EncoderCache(1 << 20)
    monkeypatch.setattr(_sgl.mm_utils, "embedding_cache", found)
    return found


def item(number: int, dtype: torch.dtype = DEVICE, images: int = 1, size: int = 8) -> Any:
    feature = torch.full((size,), float(number), dtype=dtype)
    return SimpleNamespace(hash=number, offsets=[(0, 3)] * images, feature=feature)


def embed(offloader: Offloader, *items: Any, encode: Callable[[Any], None] = lambda _: None) -> None:
    with offloader.around_embedding(items):
        for one in items:
            encode(one)


def known(cache: EncoderCache, *numbers: int) -> None:
    from sglang.srt.mem_cache.multimodal_cache import EmbeddingResult

    for number in numbers:
        cache.set(number, EmbeddingResult(embedding=torch.zeros(1)))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_no_tensor_is_left_for_sglang_and_nobody_waits(cache: EncoderCache) -> None:
    offloader, first, second = Offloader(), item(1), item(2)
    embed(offloader, first, second)  # returns, though no copy may be made
    assert isinstance(first.feature, Offload) and not first.feature.done() and not offloader.copied
    offloader.allowed.release(2)
    assert first.feature.wait().dtype == HOST and torch.equal(second.feature.wait(), torch.full((8,), 2.0))
    assert offloader.copied == [1, 2]  # in order


def test_a_feature_is_there_before_the_encoder_asks_again(cache: EncoderCache) -> None:
    offloader, one = Offloader(allowed=9), item(1)
    embed(offloader, one)
    seen: list[torch.dtype] = []

    def encode(asked: Any) -> None:
        seen.append(asked.feature.dtype)
        asked.feature = asked.feature.to(DEVICE)  # as SGLang moves it

    embed(offloader, one, encode=encode)
    # What was in host memory already is put back; no second copy.
    assert seen == [HOST] and one.feature.dtype == HOST and offloader.copied == [1]


def test_only_what_is_not_cached_is_waited_for(cache: EncoderCache) -> None:
    offloader, here, lost = Offloader(), item(1), item(2)
    embed(offloader, here)
    known(cache, 1)
    embed(offloader, here)
    assert isinstance(here.feature, Offload)
    embed(offloader, lost)
    threading.Timer(0.05, lambda: offloader.allowed.release(2)).start()
    offloader.settle([lost], cached_hashes([lost]))
    assert lost.feature.dtype == HOST
    offloader.settle([here], cached_hashes([here]))  # done by now, so it costs nothing
    assert here.feature.dtype == HOST


def test_items_of_several_images_are_always_waited_for(cache: EncoderCache) -> None:
    offloader, several = Offloader(), item(1, images=2)
    known(cache, 1)
    embed(offloader, several)
    threading.Timer(0.05, offloader.allowed.release).start()
    offloader.settle([several], cached_hashes([several]))
    assert several.feature.dtype == HOST


def test_one_image_of_several_requests_is_copied_once(cache: EncoderCache) -> None:
    offloader = Offloader(allowed=9)
    same = [item(1) for _ in range(7)]
    embed(offloader, *same, item(2))
    assert len({id(one.feature) for one in same}) == 1
    until(lambda: offloader.copied == [1, 2])


def test_what_is_on_the_host_stays_as_it_is(cache: EncoderCache) -> None:
    offloader, mine, embedded = Offloader(), item(1, HOST), item(2)
    embedded.feature = None
    feature = mine.feature

    def encode(asked: Any) -> None:
        if asked is mine:
            asked.feature = asked.feature.to(DEVICE)

    embed(offloader, mine, embedded, encode=encode)
    assert mine.feature is feature and embedded.feature is None and offloader._thread is None


def test_what_the_encoder_will_read_is_pinned_meanwhile(cache: EncoderCache) -> None:
    offloader, on_device, here, known_one = Offloader(allowed=9), item(1), item(2, HOST), item(3, HOST)
    known(cache, 3)
    before = here.feature
    seen: list[torch.Tensor] = []
    embed(offloader, on_device, here, known_one, encode=lambda asked: seen.append(asked.feature))
    assert offloader.staged == [2] and seen[1] is not before and torch.equal(seen[1], before)
    assert here.feature is before and seen[2] is known_one.feature  # though nobody moved it to the device
    several = item(3, HOST, images=2)
    embed(offloader, several, known_one)  # several images are not cached by their item
    assert offloader.staged == [2, 3, 3]


def test_a_released_feature_does_not_come_back(cache: EncoderCache) -> None:
    offloader, one = Offloader(), item(1)
    embed(offloader, one)
    one.feature = None  # MultimodalInputs.release_features
    offloader.allowed.release()
    until(lambda: bool(offloader.copied))
    offloader.settle([one], cached_hashes([one]))
    assert one.feature is None


def test_a_copy_that_fails_leaves_the_feature_and_the_thread(
    cache: EncoderCache, caplog: pytest.LogCaptureFixture
) -> None:
    offloader, one = Offloader(allowed=9), item(1)
    offloader.failure = RuntimeError("no host memory")
    embed(offloader, one)
    offloader.settle([one], cached_hashes([one]))
    assert one.feature.dtype == DEVICE and "stay on the device: no host memory" in caplog.text
    offloader.failure = None
    embed(offloader, one)  # tried again with the next use
    assert one.feature.wait().dtype == HOST


@pytest.mark.parametrize("size", [8, 1000], ids=["in all", "one alone"])
def test_a_full_backlog_makes_the_host_wait(cache: EncoderCache, size: int) -> None:
    offloader = Offloader(limit=40)  # bytes: two features of 16 wait, the third does not
    items = [item(number, size=size) for number in range(3)]
    finished = threading.Event()

    def run() -> None:
        embed(offloader, *items)
        finished.set()

    threading.Thread(target=run, daemon=True).start()
    assert not finished.wait(0.1)
    offloader.allowed.release(1 if size == 8 else 3)
    assert finished.wait(SECONDS)
    assert [one.feature.done() for one in items] == ([True, False, False] if size == 8 else [True] * 3)


def test_memory_is_let_go(cache: EncoderCache) -> None:
    offloader, one = Offloader(allowed=1), item(1)
    on_device = weakref.ref(one.feature)
    embed(offloader, one)
    until(lambda: on_device() is None)  # once it is copied
    on_host = weakref.ref(one.feature)
    one.feature = None
    until(lambda: on_host() is None)


def test_pickled_it_is_the_tensor(cache: EncoderCache) -> None:
    offloader, one = Offloader(allowed=1), item(1)
    embed(offloader, one)
    assert torch.equal(pickle.loads(pickle.dumps(one)).feature, torch.ones(8))


def test_the_hook_offloads(cache: EncoderCache, monkeypatch: pytest.MonkeyPatch) -> None:
    from vlora_sgl.multimodal import embedding_count

    monkeypatch.setattr(embedding_count, "offloader", Offloader(allowed=1))
    one, ids = item(1), torch.zeros(4)
    chunked_prefill_embedding(lambda *_: (None, ids), None, [one], [0, 1], [0], [4], [[(0, 3)]], ids)
    assert one.feature.wait().dtype == HOST


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_host_goes_on_and_the_values_are_those_behind_the_encoder(cache: EncoderCache) -> None:
    offloader = FeatureOffloader()
    features = torch.zeros(5 << 20, device="cuda")
    offloader.offload(torch.zeros(1, device="cuda")).wait()  # the thread and its stream are there
    one = SimpleNamespace(hash=1, offsets=[(0, 3)], feature=features)
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(1_000_000_000)  # the encoder: half a second
    features.fill_(7)
    with offloader.around_embedding([one]):
        pass
    assert time.perf_counter() - start < 0.1 and not one.feature.done()
    del features
    for _ in range(8):  # the allocator must not give its memory away
        torch.full((5 << 20,), -1.0, device="cuda")
    copied = one.feature.wait()
    assert copied.device.type == "cpu" and bool((copied == 7).all())
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_step_does_not_hold_up_features_of_the_host(cache: EncoderCache) -> None:
    offloader, features = FeatureOffloader(), torch.arange(2 << 20).float()
    one = SimpleNamespace(hash=1, offsets=[(0, 3)], feature=features)
    with offloader.around_embedding([one]):  # memory for it is there from now on
        one.feature = one.feature.to("cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(1_000_000_000)  # half a second of other requests
    with offloader.around_embedding([one]):
        assert one.feature.is_pinned()
        one.feature = moved = one.feature.to("cuda", non_blocking=True)
    assert time.perf_counter() - start < 0.1 and one.feature is features
    assert torch.equal(moved.cpu(), features)
