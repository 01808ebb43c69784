"""A ``FakeReplica`` as a program: takes the flags of ``launch_server``, and serves until it is told to stop."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys

from tests.support.replicas import FakeReplica

PROGRAM = (sys.executable, "-m", "tests.support.stub_server")


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    args, _ = parser.parse_known_args()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    fake = FakeReplica()
    await fake.start(args.port, args.host, patience=30.0)
    await stop.wait()
    await fake.stop()


if __name__ == "__main__":
    asyncio.run(main())
