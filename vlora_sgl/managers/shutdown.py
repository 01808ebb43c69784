"""How a server that is told to stop ends: within a limit, in order, with exit status 0.

Who comes is refused, who is there may finish; what still runs shortly before the limit is aborted, the engine's
processes end, connections close, and what they leave on the machine is removed. SGLang waits for requests for ever,
and then kills itself. A second signal is taken as: do not wait for requests.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from fastapi import HTTPException

from vlora_sgl import _sgl
from vlora_sgl.errors import StoppingError
from vlora_sgl.managers import leftovers

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
POLL_S = 0.05
ENDING_S = 5.0
"""Of the limit, what is kept for the end itself; half of a limit that is shorter than twice this."""
LAST_WORDS_S = 1.0
"""How long connections may take to close once all is answered, and as long again the interpreter to end."""
SCHEDULER = "scheduler"


class StoppingResponse(StoppingError, HTTPException, ValueError):
    """The same error as an HTTP 503, for both of SGLang's protocols (one catches ValueError, one HTTPException)."""

    def __init__(self) -> None:
        StoppingError.__init__(self)
        self.status_code = self.http_status
        self.detail = str(self)
        self.headers = None


class Shutdown:
    """The end of one server.

    Attributes:
        ends_process: whether signals to this process are the server's; an engine in a program leaves them to it.

    Args:
        manager: the tokenizer manager.
        seconds: the limit: the process is gone so long after the signal.
    """

    def __init__(self, manager: Any, seconds: float) -> None:
        self._manager, self._seconds = manager, seconds
        self._ending = min(ENDING_S, seconds / 2)
        self._asked = asyncio.Event()
        self._patient_until = 0.0
        self._http: Any = None
        self.ends_process = False

    @property
    def asked(self) -> bool:
        """Whether the server has been told to stop."""
        return self._asked.is_set()

    async def asked_within(self, seconds: float) -> None:
        """Return when the server is told to stop, or after so many seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._asked.wait(), seconds)

    def check(self) -> None:
        """Let a request in.

        Raises:
            StoppingResponse: the server has been told to stop.
        """
        if self.asked:
            raise StoppingResponse()

    # It is told

    def listen(self, loop: asyncio.AbstractEventLoop, before: Callable[..., object] | int | None) -> None:
        """Take over the signals from SGLang, which has just taken one of them; in a program, give that back to it.

        Args:
            before: what handled SIGTERM before SGLang did. uvicorn leaves its server there and nowhere else.
        """
        if not self.ends_process:
            loop.remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
            return
        self._http = getattr(before, "__self__", None)
        for number in SIGNALS:
            loop.add_signal_handler(number, self.ask, number)
        loop.add_signal_handler(signal.SIGQUIT, self.fail)

    def ask(self, number: int) -> None:
        """A signal: begin to end; at the second, wait no longer for requests."""
        name = signal.Signals(number).name
        if self.asked:
            self._patient_until = 0.0
            logger.warning("%s again: requests are not waited for", name)
            return
        self._manager.gracefully_exit = True  # SGLang's health checks
        patience = self._seconds - self._ending
        self._patient_until = time.monotonic() + patience
        end_at_latest(self._seconds)
        logger.warning("%s: %d requests may take %.3g s more; new ones get a 503", name, self._running, patience)
        self._asked.set()

    def fail(self) -> None:
        """One of the engine's processes has failed, and has said why: end all, with status 1."""
        if self.asked:
            return
        end_at_latest(ENDING_S, status=1)
        self._manager.dump_requests_before_crash()
        logger.error("a process of the engine has failed; this server ends")
        end_processes()
        leftovers.remove()
        leave(1)

    # It ends

    async def run(self) -> None:
        """Wait for the signal, and end in order; the process ends when uvicorn's server has."""
        await self._asked.wait()
        await self._drain()
        await self._end_engine()
        await self._close_connections()

    async def _drain(self) -> None:
        while self._running and time.monotonic() < self._patient_until:
            await asyncio.sleep(POLL_S)
        if self._running:
            logger.warning("%d requests still run and are aborted", self._running)
            self._manager.abort_request(abort_all=True)
            await until(lambda: not self._running, self._ending / 4)

    @property
    def _running(self) -> int:
        return len(self._manager.rid_to_state)

    async def _end_engine(self) -> None:
        """Let the schedulers release what they hold, then end what is left."""
        ranks = stop_ranks(self._manager)
        await until(lambda: not any(rank.is_alive() for rank in ranks), self._ending / 4)
        end_processes()
        leftovers.remove()

    async def _close_connections(self) -> None:
        """Have uvicorn close them; clients that do not read their answers are cut off."""
        if not hasattr(self._http, "should_exit"):  # another server than uvicorn's: it goes with the process
            leave(0)
        self._http.should_exit = True
        end_at_latest(2 * LAST_WORDS_S + POLL_S)
        await asyncio.sleep(LAST_WORDS_S)  # mostly the event loop ends in here, and this task with it
        for connection in list(self._http.server_state.connections):
            connection.transport.abort()


async def until(done: Callable[[], bool], seconds: float) -> None:
    """Wait for something, but no longer than this."""
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)


def stop_ranks(manager: Any) -> Sequence[Any]:
    """Ask an engine's schedulers to release what they hold and to end; their processes."""
    watchdog = manager._subprocess_watchdog
    if watchdog is None:
        return ()
    watchdog.stop()  # from now on a process that ends is none that has crashed
    manager._dispatch_to_scheduler(_sgl.ShutdownReq())
    named = zip(watchdog._names, watchdog._processes, strict=True)
    return [process for name, process in named if name.startswith(SCHEDULER)]


def end_processes(pids: Collection[int] | None = None) -> None:
    """Kill processes that this one has started, with all that they have started.

    Args:
        pids: of an engine's; all that ``multiprocessing`` has started, if left out.
    """
    children = [child for child in multiprocessing.active_children() if pids is None or child.pid in pids]
    for child in children:
        if child.pid is not None:
            _sgl.kill_process_tree(child.pid)
    for child in children:
        child.join(LAST_WORDS_S)


def end_at_latest(seconds: float, status: int = 0) -> None:
    """Whatever else hangs: end this process after so many seconds."""

    def end() -> None:
        time.sleep(seconds)
        end_processes()
        leftovers.remove()
        leave(status)

    threading.Thread(target=end, name="end-at-latest", daemon=True).start()


def leave(status: int) -> NoReturn:
    """End this process as ``sys.exit`` does, without waiting for threads, and for links whose other end is gone."""
    if threading.current_thread() is threading.main_thread():
        atexit._run_exitfuncs()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
