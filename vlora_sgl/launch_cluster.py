"""``python -m vlora_sgl.launch_cluster --replicas N FLAGS``: N servers with the same FLAGS behind one address.

Flags of its own are in ``--help``; all others go to ``vlora_sgl.launch_server`` as they are, but ``--host`` and
``--port``, which are the cluster's address.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from vlora_sgl import names
from vlora_sgl.errors import ConfigError, VLoraError
from vlora_sgl.platforms.cpu import has_accelerator
from vlora_sgl.server_args import VLoraArgs, split_argv

ROUTINGS = ("affinity", "round_robin", "random")
LAST_WORDS_S = 2.0
"""When the replicas have ended: how long connections may take to close."""
BASE_SLOTS, DEFAULT_SLOTS = 1, 8
"""Of the slots that SGLang counts (``--max-loras-per-batch``, 8 by default), one is the base model's."""


class ClusterArgs(argparse.Namespace):
    """A cluster's settings: its own flags, as ``--help`` tells them, and in ``server`` those of every replica."""

    host: str
    port: int
    replicas: int
    devices: list[str] | None
    join: list[str]
    routing: str
    replica_limit: int
    queue_size: int
    patience: float
    health_interval: float
    known: dict[str, str]
    shares: dict[str, float]
    shares_file: Path | None
    log_dir: Path | None
    server: tuple[str, ...]
    ours: VLoraArgs

    def value_of(self, *flags: str) -> str | None:
        """What the replicas' flags give for any of these names of one flag."""
        for position, argument in enumerate(self.server):
            name, separator, value = argument.partition("=")
            if name in flags:
                return value if separator else next(iter(self.server[position + 1 : position + 2]), None)
        return None

    @property
    def slots(self) -> int:
        """Device slots for adapters on each replica."""
        return int(self.value_of("--max-loras-per-batch") or DEFAULT_SLOTS) - BASE_SLOTS

    @property
    def drain(self) -> float:
        """Seconds that each replica has to end when it is told to stop."""
        return float(self.value_of("--vlora-drain-seconds") or VLoraArgs.drain_seconds)

    @property
    def ranks(self) -> int:
        """Devices of each replica."""
        return int(self.value_of("--tp", "--tp-size", "--tensor-parallel-size") or 1)


def make_parser() -> argparse.ArgumentParser:
    """The cluster's own flags."""
    parser = names.Parser(
        prog="python -m vlora_sgl.launch_cluster", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000)
    add("--replicas", type=int, default=2, metavar="N", help="servers to start")
    dealt = "CUDA_VISIBLE_DEVICES of each; by default dealt out in order"
    add("--replica-devices", nargs="+", metavar="IDS", dest="devices", help=dealt)
    add("--join", nargs="+", default=[], metavar="URL", help="servers that somebody else starts, on other hosts say")
    add("--routing", choices=ROUTINGS, default="affinity", help="how a replica is chosen")
    add("--replica-limit", type=int, default=256, metavar="N", help="most requests that a replica gets at a time")
    add("--queue-size", type=int, default=4096, metavar="N", help="most requests that wait; more get a 503")
    add("--patience", type=float, default=60.0, metavar="SECONDS", help="how long a request waits while none serves")
    add("--health-interval", type=float, default=10.0, metavar="SECONDS")
    add("--on-demand", nargs="+", default=[], metavar="NAME=DIR", help="adapters that are loaded when asked for")
    add(
        "--shares",
        type=Path,
        dest="shares_file",
        metavar="FILE",
        help='expected requests by adapter, JSON: "shares" of GET /cluster',
    )
    add("--log-dir", type=Path, metavar="DIR", help="where the output of replicas goes, a file each")
    return parser


def parse(argv: Sequence[str]) -> ClusterArgs:
    """Read a command line.

    Raises:
        ConfigError: a setting that cannot work.
    """
    args, server = make_parser().parse_known_args(argv, ClusterArgs())
    args.server = tuple(server)
    args.ours, _ = split_argv(server)
    if args.replicas < 0 or args.replicas + len(args.join) < 1:
        raise ConfigError(f"a cluster needs a replica; got --replicas {args.replicas} and no --join")
    if args.replica_limit < 1:
        raise ConfigError(f"--replica-limit must be at least 1; got {args.replica_limit}")
    wrong = [pair for pair in args.on_demand if not all(pair.partition("="))]
    if wrong:
        raise ConfigError(f"--on-demand takes NAME=DIR; got {wrong[0]!r}")
    on_demand = names.adapters_of(args.on_demand)
    given = names.given_names(args.server)
    both = [*given["adapters"], *on_demand]
    names.check_names(both, given["served"], given["model"], "--lora-paths and --on-demand")
    args.known = {str(name): str(directory) for name, directory in on_demand}
    file = args.shares_file
    try:
        shares = json.loads(file.read_text()) if file else {}
        args.shares = {str(name): float(share) for name, share in shares.get("shares", shares).items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"--shares {file}: expected a JSON object of numbers by adapter: {error}") from error
    args.join = [url.rstrip("/") for url in args.join]
    return args


def deal_devices(args: ClusterArgs) -> list[str | None]:
    """``CUDA_VISIBLE_DEVICES`` of every replica; None on a plain CPU.

    Raises:
        ConfigError: there are fewer devices than the replicas need.
    """
    if args.devices is not None:
        if len(args.devices) != args.replicas:
            raise ConfigError(f"--replica-devices names {len(args.devices)} replicas' devices for {args.replicas}")
        return [*args.devices]
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given == "" or not has_accelerator():
        return [None] * args.replicas
    if given is None:
        import torch

        given = ",".join(str(index) for index in range(torch.cuda.device_count()))
    visible, ranks = [one for one in given.split(",") if one], args.ranks
    if len(visible) < args.replicas * ranks:
        raise ConfigError(
            f"{args.replicas} replicas of {ranks} devices each need {args.replicas * ranks}; visible: {len(visible)} "
            "(--replica-devices shares them)"
        )
    return [",".join(visible[i * ranks : (i + 1) * ranks]) for i in range(args.replicas)]


def environment_of(devices: str | None, replicas: int) -> dict[str, str]:
    """A replica's environment: its devices, or its part of the cores."""
    environment = dict(os.environ)
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = devices
    else:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // max(1, replicas))))
    return environment


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody listens on, all different."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def check_adapters(args: ClusterArgs) -> None:
    """Check that there are the adapters that servers of this machine are to load.

    Raises:
        ConfigError: one is not there.
    """
    _ = args.ours.sources
    if args.replicas:
        names.check_directories(names.given_names(args.server)["adapters"])
    if not args.join:
        names.check_directories(args.known.items(), "--on-demand")


async def run(args: ClusterArgs) -> None:
    """Serve until told to stop."""
    from aiohttp import web

    from vlora_sgl.cluster import placement
    from vlora_sgl.cluster.adapters import AdapterRoutes
    from vlora_sgl.cluster.links import Keys, Links, new_session
    from vlora_sgl.cluster.live import PageRoutes
    from vlora_sgl.cluster.replica import Replica
    from vlora_sgl.cluster.replica_router import Router, Settings
    from vlora_sgl.cluster.supervisor import Supervisor

    devices = deal_devices(args)
    ports = free_ports(args.replicas)
    urls = [*(f"http://127.0.0.1:{port}" for port in ports), *args.join]
    replicas = [Replica(number, url, args.replica_limit) for number, url in enumerate(urls)]
    routing: placement.Routing = (
        placement.Affinity(args.slots, args.shares) if args.routing == "affinity"
        else placement.RoundRobin() if args.routing == "round_robin" else placement.Random()
    )  # fmt: skip
    session = new_session()
    links = Links(session, Keys(args.value_of("--api-key"), args.value_of("--admin-api-key")))
    supervisors: list[Supervisor] = []
    router = Router(
        replicas,
        routing,
        links,
        Settings(args.queue_size, args.patience, args.ours.max_body_bytes, args.ours.max_adapter_bytes),
        args.known,
        on_trouble=lambda replica: supervisors[replica.number].suspect(),
        sources=args.ours.sources,
    )
    if args.log_dir:
        args.log_dir.mkdir(parents=True, exist_ok=True)
    for replica in replicas:
        command = environment = log = None
        if replica.number < args.replicas:
            port = str(ports[replica.number])
            command = [sys.executable, "-m", "vlora_sgl.launch_server", *args.server, "--port", port]
            environment = environment_of(devices[replica.number], args.replicas)
            log = args.log_dir / f"replica-{replica.number}.log" if args.log_dir else None
        watched = (replica, session, router.ready, args.health_interval)
        supervisors.append(Supervisor(*watched, command, environment, log, args.drain))
    stop = asyncio.Event()

    def told_to_stop() -> None:
        """The first time, end in order; then have the replicas abort what still runs."""
        for supervisor in supervisors if stop.is_set() else ():
            supervisor.hurry()
        router.stop()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, told_to_stop)
    runner = web.AppRunner(
        router.application(AdapterRoutes(router).mount, PageRoutes(router).mount),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=LAST_WORDS_S,
    )
    await runner.setup()
    watches = [asyncio.create_task(supervisor.run()) for supervisor in supervisors]
    try:
        await web.TCPSite(runner, args.host, args.port).start()
        url = f"http://{args.host}:{args.port}"
        print(f"vlora_sgl: cluster of {len(replicas)} replicas on {url}; a page: {url}/ui", flush=True)
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([stopped, *watches], return_when=asyncio.FIRST_COMPLETED)
        for watch in watches:
            if watch.done():
                watch.result()  # a supervisor ends only by an error
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        await runner.cleanup()
        await session.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until stopped. Returns the exit status; a mistake in the settings costs one line."""
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        check_adapters(args)
        asyncio.run(run(args))
    except VLoraError as error:
        print(f"vlora_sgl: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"vlora_sgl: cannot listen: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
