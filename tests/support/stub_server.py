"""A ``FakeReplica`` as a program: takes the flags of ``launch_server``, and serves until it is told to stop.

It counts what a server with ``--max-loras-per-batch`` slots would bring to its device, were each request a batch.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections import OrderedDict

from aiohttp import web

from tests.support.replicas import FakeReplica

PROGRAM = (sys.executable, "-m", "tests.support.stub_server")


class Stub(FakeReplica):
    """A fake replica with device slots."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.slots, self.slot_loads = slots, 0
        self.held: OrderedDict[str, None] = OrderedDict()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        adapter = (await request.json()).get("lora_path")
        if adapter is not None:
            self.slot_loads += adapter not in self.held
            self.held[adapter] = None
            self.held.move_to_end(adapter)
            if len(self.held) > self.slots:
                self.held.popitem(last=False)
        return await super()._serve(request)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=f"stub:slot_loads {self.slot_loads}\n")


async def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-loras-per-batch", type=int, default=8)
    args, _ = parser.parse_known_args()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    fake = Stub(args.max_loras_per_batch - 1)
    await fake.start(args.port, args.host, patience=30.0)
    await stop.wait()
    await fake.stop()


if __name__ == "__main__":
    asyncio.run(main())
