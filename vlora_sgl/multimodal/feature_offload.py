"""Image features back to host memory without waiting for the encoder.

After a batch is embedded, SGLang copies every feature that is on the device to host memory, ``item.feature =
feature.to("cpu")``, before it launches the decoder: in a later chunk, or after a retraction, the encoder may be asked
again. To pageable memory that copy is no asynchronous one. The host stands still until the encoder is through and 5 to
19 MB an image have followed, though the embedding is cached and the copy is hardly ever read.

Here the copy is made by a thread, on a stream of its own. Meanwhile, and afterwards until somebody needs the feature,
an ``Offload`` stands in ``item.feature``; it is no tensor, so SGLang's copy leaves it alone. A feature that came from
host memory, and that SGLang moved to the device for the encoder, is not copied at all: its original takes its place
again.

Who reads ``item.feature`` of an item that was embedded before (SGLang 0.5.17):

- The encoder, and what moves its input to the device: both within ``_get_chunked_prefill_embedding``, for a later
  chunk, a retracted request and the next request of a session (whose items are the same objects, in a longer list).
  ``settle`` runs before it. It may leave a copy under way where the embedding is cached: SGLang looks all images of a
  batch up before it encodes, hence evicts, any.
- SGLang's own copy behind it, by ``isinstance(feature, torch.Tensor)``.
- ``release_features`` (a finished request, a closed session) writes ``None``. Only the scheduler's thread writes
  ``item.feature``, never the one that copies, so nothing comes back to a released item.
- Hashing, splitting of items, transports and the broadcast to other ranks come before the first embedding. Should an
  item be pickled or copied deeply later, its ``Offload`` becomes the tensor.
- Models that embed by themselves (mllama and older LLaVA code) never call what we wrap: their items hold no
  ``Offload``.

Nothing of ours reads it after the tokenizer's process (``managers.tokenizer_manager.hash_images``).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from queue import SimpleQueue

import torch

from vlora_sgl import _sgl
from vlora_sgl._sgl_types import MultimodalDataItem

logger = logging.getLogger(__name__)

BACKLOG_BYTES = 256 << 20
"""Features on the device that may wait for their copy, beside what SGLang reckons with; beyond, the host waits."""


class Offload:
    """Stands for a feature that is being copied to host memory, or has been.

    Args:
        tensor: the feature on its device. Held until the copy is complete, so that its memory is nobody else's.

    Attributes:
        settled: set once the copy is complete, or has failed.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.settled = threading.Event()

    def done(self) -> bool:
        """Whether ``wait`` returns at once."""
        return self.settled.is_set()

    def wait(self) -> torch.Tensor:
        """The feature in host memory; where it could not be copied, on its device still."""
        self.settled.wait()
        return self._tensor

    def __reduce__(self) -> tuple[Callable[[torch.Tensor], torch.Tensor], tuple[torch.Tensor]]:
        return _itself, (self.wait(),)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class FeatureOffloader:
    """Copies features to host memory, one after the other, in a thread that starts with the first one.

    Args:
        limit: bytes that may wait on the device.
    """

    def __init__(self, limit: int = BACKLOG_BYTES) -> None:
        self.limit = limit
        self._waiting: deque[tuple[threading.Event, int]] = deque()  # no tensors: a released feature is to be free
        self._jobs: SimpleQueue[tuple[Offload, torch.cuda.Event]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def around_embedding(self, items: Sequence[MultimodalDataItem]) -> Iterator[None]:
        """On entry the features that an encoder may be asked for are tensors that the device reads by itself; on exit
        none is left on the device."""
        cached = cached_hashes(items)
        self.settle(items, cached)
        before = [item.feature for item in items]
        self.stage(items, cached)
        yield
        self.take(items, before)

    def take(self, items: Sequence[MultimodalDataItem], before: Sequence[object] | None = None) -> None:
        """Leave no feature of these items on the device.

        Args:
            before: their features before SGLang moved them there, where it did.
        """
        copies: dict[int, Offload] = {}
        for item, original in zip(items, before or [None] * len(items), strict=True):
            feature = item.feature
            if not isinstance(feature, torch.Tensor):
                continue
            if isinstance(original, torch.Tensor) and not self.on_device(original):
                item.feature = original
                continue
            if not self.on_device(feature):
                continue
            # Several requests about one image bring it several times; what one hash stands for is the same pixels.
            if item.hash not in copies:
                copies[item.hash] = self.offload(feature)
            item.feature = copies[item.hash]

    def settle(self, items: Sequence[MultimodalDataItem], cached: Set[int]) -> None:
        """Put tensors in the place of their ``Offload``, but for copies under way that nobody will ask for.

        Args:
            cached: hashes of those whose embeddings are.
        """
        for item in items:
            feature = item.feature
            if isinstance(feature, Offload) and (feature.done() or item.hash not in cached):
                item.feature = feature.wait()

    def stage(self, items: Sequence[MultimodalDataItem], cached: Set[int]) -> None:
        """Put pinned copies in the place of features in host memory that the encoder will be asked for."""
        for item in items:
            feature = item.feature
            if isinstance(feature, torch.Tensor) and not self.on_device(feature) and item.hash not in cached:
                item.feature = self.pinned(feature)

    def offload(self, tensor: torch.Tensor) -> Offload:
        """Have a tensor copied, behind what its device's current stream has been given; waits beyond the limit."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="feature-offload", daemon=True)
            self._thread.start()
        offload = Offload(tensor)
        self._jobs.put((offload, self.mark(tensor)))
        self._waiting.append((offload.settled, tensor.nbytes))
        while self._waiting and (self._waiting[0][0].is_set() or sum(n for _, n in self._waiting) > self.limit):
            self._waiting.popleft()[0].wait()
        return offload

    def _run(self) -> None:
        while True:
            self._copy_next()

    def _copy_next(self) -> None:
        # A function of its own: the loop, waiting for work, would keep the last feature on the device.
        offload, mark = self._jobs.get()
        try:
            offload._tensor = self.copy(offload._tensor, mark)
        except Exception as error:  # for want of host memory, say: then it stays where it is, until its next use
            logger.warning("an image's features stay on the device: %s", error)
        finally:
            offload.settled.set()

    # What a device needs; tests have devices of their own.

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a feature takes device memory."""
        return tensor.is_cuda

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in pinned memory; the tensor itself where there is no device to read it."""
        return tensor.pin_memory() if torch.cuda.is_initialized() else tensor

    def mark(self, tensor: torch.Tensor) -> torch.cuda.Event:
        """What ``copy`` has to wait for: all that the current stream of the tensor's device has been given."""
        event = torch.cuda.Event(blocking=True)  # a thread that polls would take a core from the scheduler
        event.record(torch.cuda.current_stream(tensor.device))
        return event

    def copy(self, tensor: torch.Tensor, mark: torch.cuda.Event) -> torch.Tensor:
        """The tensor in (pageable) host memory. Runs in the thread; torch holds no lock meanwhile.

        When it returns, every stream is through with the tensor: its memory may go back to the allocator, with which
        the copy's stream has not been registered.
        """
        mark.synchronize()  # not on the stream: the driver would be busy with a copy that cannot start
        if tensor.device not in self._streams:
            self._streams[tensor.device] = torch.cuda.Stream(tensor.device)
        with torch.cuda.stream(self._streams[tensor.device]):
            return tensor.to("cpu")


def cached_hashes(items: Sequence[MultimodalDataItem]) -> set[int]:
    """The hashes of items whose embeddings are cached for sure.

    Items of several images are cached by request, not by item: beside one of those, none is.
    """
    cache = _sgl.mm_utils.embedding_cache
    if cache is None or not all(len(item.offsets or ()) == 1 for item in items):
        return set()
    return {item.hash for item in items if cache.has(item.hash)}


offloader = FeatureOffloader()
"""This process's."""
