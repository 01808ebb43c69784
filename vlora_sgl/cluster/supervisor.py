"""Replicas as processes: started, watched, started again."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import aiohttp

from vlora_sgl.cluster.replica import Replica
from vlora_sgl.errors import ClusterError, ConfigError

START_POLL_S = 1.0
HEALTH_TIMEOUT_S = 30.0
"""SGLang's own check takes up to 20 s before it says no."""
STOP_S = 10.0
"""How long a replica that is lost, or whose time to end has passed, has before it is killed."""
REFUSED = 2
"""Exit status of a launcher whose settings are wrong, ours and argparse's."""
PR_SET_PDEATHSIG = 1
QUICK_END_S, LONGEST_PAUSE_S = 60.0, 30.0
"""A replica that ended sooner than this after its start is started again after a pause that doubles up to this."""


def say(text: str) -> None:
    """Tell the operator."""
    print(f"vlora_sgl: {text}", file=sys.stderr, flush=True)


class Supervisor:
    """Keeps one replica serving.

    Args:
        replica: what the router knows it by.
        session: for health checks.
        on_ready: called when it answers; it serves when this returns.
        interval: seconds between health checks.
        command: what starts it; None for a replica that somebody else starts.
        environment: for that process.
        log: file for its output.
        drain: seconds that it has to end its requests when the cluster ends.
        orphaned: what the process is sent when this one is killed.
    """

    def __init__(
        self,
        replica: Replica,
        session: aiohttp.ClientSession,
        on_ready: Callable[[Replica], Awaitable[None]],
        interval: float,
        command: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        drain: float = 0.0,
        orphaned: signal.Signals = signal.SIGTERM,
    ) -> None:
        self.replica, self.session, self.on_ready, self.interval = replica, session, on_ready, interval
        self.command, self.environment, self.log, self.drain = command, environment, log, drain
        self.orphaned = orphaned
        self.process: asyncio.subprocess.Process | None = None
        self._suspected = asyncio.Event()

    def suspect(self) -> None:
        """A request could not be sent, or its answer broke off: look now whether the replica is well."""
        self._suspected.set()

    async def run(self) -> None:
        """Start, watch and start again until cancelled; then have the process end its requests and itself.

        Raises:
            ConfigError: the server refused its settings, which no second start would mend.
        """
        pause = 1.0
        while True:
            began, starts, patience = time.monotonic(), self.replica.starts, self.drain + STOP_S
            try:
                await self._start()
                await self._watch()
                patience = STOP_S
            finally:
                self.replica.end()
                status = await self._stop(patience)
            if status == REFUSED and self.replica.starts == starts:
                raise ConfigError(f"replica {self.replica.number} refused its settings; its output says why")
            pause = min(2 * pause, LONGEST_PAUSE_S) if time.monotonic() - began < QUICK_END_S else 1.0
            say(f"replica {self.replica.number} is lost; waiting {pause:g} s, then starting it again")
            await asyncio.sleep(pause)

    async def _start(self) -> None:
        if self.command is None:
            return
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(self.log.open("ab")) if self.log else None
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                stdout=output,
                stderr=output,
                env=self.environment,
                start_new_session=True,
                preexec_fn=partial(_end_with_parent, self.orphaned),
            )

    async def _watch(self) -> None:
        """Return when the replica is lost."""
        ended = asyncio.ensure_future(self.process.wait()) if self.process else None
        try:
            while not await self._healthy():
                if ended and ended.done():
                    return
                await asyncio.sleep(START_POLL_S)
            try:
                await self.on_ready(self.replica)
            except ClusterError as error:
                say(str(error))
                return
            while True:
                self._suspected.clear()
                looks = [asyncio.ensure_future(self._suspected.wait()), *([ended] if ended else [])]
                await asyncio.wait(looks, timeout=self.interval, return_when=asyncio.FIRST_COMPLETED)
                looks[0].cancel()
                if (ended and ended.done()) or not (await self._healthy() or await self._healthy()):
                    return
        finally:
            if ended:
                ended.cancel()

    async def _healthy(self) -> bool:
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
        try:
            async with self.session.get(f"{self.replica.url}/health", timeout=timeout) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    def hurry(self) -> None:
        """The process is to end now, whatever it does; the first time, it was told by ``run``."""
        if self.process is not None and self.process.returncode is None:
            self.process.terminate()

    async def _stop(self, patience: float) -> int | None:
        """End the process, and its children, which share a process group. Its exit status, if it ended by itself."""
        process = self.process
        if process is None:
            return None
        status = process.returncode
        with contextlib.suppress(ProcessLookupError):
            process.terminate()  # itself alone: it needs its children to end its requests
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what has not ended, and children that outlived it
        await process.wait()
        self.process = None
        return status


def _end_with_parent(number: signal.Signals) -> None:
    """In the new process: be told to end when the cluster's launcher is killed, for it could not tell us then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
