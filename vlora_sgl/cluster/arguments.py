"""The command line of a cluster, on one host or on several."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from vlora_sgl import names
from vlora_sgl.cluster import placement
from vlora_sgl.errors import ConfigError
from vlora_sgl.server_args import VLoraArgs, split_argv

ROUTINGS = ("affinity", "round_robin", "random")
DESCRIPTION = """``python -m vlora_sgl.launch_cluster --replicas N FLAGS``: N servers with the same FLAGS, one address.

Flags of its own are in ``--help``; all others go to ``vlora_sgl.launch_server`` as they are, but ``--host`` and
``--port``, which are the cluster's address.
"""
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
    ray: str | None
    max_replicas: int | None
    target_load: int
    fronts: int
    replica_gpus: int | None
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
        prog="python -m vlora_sgl.launch_cluster", description=DESCRIPTION, allow_abbrev=False,
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
    fleet = parser.add_argument_group("several hosts (docs/design/fleet.md)")
    add = fleet.add_argument
    add(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="run on the Ray cluster there; by default, a new one",
    )
    add("--max-replicas", type=int, metavar="N", help="start up to N as load asks for them; --replicas are the fewest")
    add("--target-load", type=int, default=64, metavar="N", help="requests of a replica above which more are started")
    add("--fronts", type=int, default=1, metavar="N", help="processes on every host that take requests")
    add("--replica-gpus", type=int, metavar="N", help="GPUs of a replica; by default --tp, if the cluster has any")
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
    check_fleet(args)
    return args


def check_fleet(args: ClusterArgs) -> None:
    """Check the flags that several hosts take, and those that they do not.

    Raises:
        ConfigError: one cannot work.
    """
    if args.ray is None:
        given = [flag for flag in ("max_replicas", "replica_gpus") if getattr(args, flag) is not None]
        if given or args.fronts != 1:
            flag = (given or ["fronts"])[0].replace("_", "-")
            raise ConfigError(f"--{flag} is for several hosts: it needs --ray")
        return
    if args.join or args.devices:
        raise ConfigError(
            f"--ray places replicas itself: it does not go with {'--join' if args.join else '--replica-devices'}"
        )
    if args.replicas < 1 or (args.max_replicas or args.replicas) < args.replicas:
        raise ConfigError(
            f"--max-replicas {args.max_replicas} must not be less than --replicas {args.replicas}, nor that than 1"
        )
    if min(args.fronts, args.target_load) < 1:
        raise ConfigError(f"--fronts and --target-load must be at least 1; got {args.fronts} and {args.target_load}")


def make_routing(args: ClusterArgs) -> placement.Routing:
    """How replicas are chosen, as ``--routing`` says."""
    if args.routing == "affinity":
        return placement.Affinity(args.slots, args.shares)
    return placement.RoundRobin() if args.routing == "round_robin" else placement.Random()
