"""A fleet on Ray Serve: three deployments, which Ray places on hosts, watches and starts again.

``Directory`` is one, ``Front`` one or more on every host, ``Server`` a replica with its GPUs. Ray starts and ends
them; requests go from a front to a replica's server by HTTP, and never through Ray.

Here is all that the project knows of Ray. ``build`` is what a Serve configuration names (``deploy/ray/serve.yaml``).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ray
from aiohttp import web
from ray import serve
from ray.serve.config import AutoscalingContext
from ray.serve.handle import DeploymentHandle

from vlora_sgl.cluster.adapters import AdapterRoutes
from vlora_sgl.cluster.arguments import LAST_WORDS_S, ClusterArgs, make_routing, parse
from vlora_sgl.cluster.directory import Directory
from vlora_sgl.cluster.directory_link import BEAT_S, SYNC_S, DirectoryLink
from vlora_sgl.cluster.front import Front
from vlora_sgl.cluster.links import Keys, Links, NotSent, new_session
from vlora_sgl.cluster.live import PageRoutes
from vlora_sgl.cluster.member import Member
from vlora_sgl.cluster.placement import Shared
from vlora_sgl.cluster.replica_router import Router, Settings
from vlora_sgl.cluster.supervisor import STOP_S, Supervisor, say
from vlora_sgl.core import JsonDict
from vlora_sgl.errors import ConfigError

APP = "vlora"
PROGRAM = (sys.executable, "-m", "vlora_sgl.launch_server")
FIND_S = 5.0
HEALTH_S, HEALTH_TIMEOUT_S = 1.0, 10.0
"""How often Ray asks whether an actor is well, and how long it waits for the answer."""
NODES_S = 2.0
"""How old the count of hosts may be."""
NOTICED_S = 2 * SYNC_S + BEAT_S
"""After so long, no front sends requests to a replica that has left."""


def links_of(args: ClusterArgs) -> Links:
    """To a fleet's replicas and its directory."""
    return Links(new_session(), Keys(args.value_of("--api-key"), args.value_of("--admin-api-key")))


def finder(directory: DeploymentHandle) -> Callable[[], Awaitable[str]]:
    """Asks Ray where the directory is."""

    async def find() -> str:
        try:
            return str(await asyncio.wait_for(directory.url.remote(), FIND_S))
        except Exception as error:  # Ray has many; whichever it is, there is no directory now
            raise NotSent() from error

    return find


async def serve_http(
    router: Router, host: str, port: int, last_words: float, *mounts: Any
) -> tuple[web.AppRunner, int]:
    """Listen, together with others on the same port; what to close at the end, and the port."""
    app = router.application(*mounts)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=last_words)
    await runner.setup()
    await web.TCPSite(runner, host, port, reuse_port=port != 0).start()
    return runner, int(runner.addresses[0][1])


class _Watched:
    """An actor that is well while its task runs."""

    task: asyncio.Task[None]

    async def check_health(self) -> None:
        """Ray's question."""
        if self.task.done():
            self.task.result()
            raise RuntimeError("its task has ended")


class DirectoryActor(_Watched):
    """One ``Directory``, with a port of its own."""

    async def __init__(self, argv: Sequence[str]) -> None:  # type: ignore[misc]  # Ray waits for it
        args = parse(argv)
        settings = Settings(args.queue_size, args.patience, args.ours.max_body_bytes, args.ours.max_adapter_bytes)
        router = Directory(make_routing(args), links_of(args), settings, args.known, sources=args.ours.sources)
        host = ray.util.get_node_ip_address()
        mounts = (AdapterRoutes(router).mount, PageRoutes(router).mount)
        self.runner, port = await serve_http(router, host, 0, LAST_WORDS_S, *mounts)
        self.address = f"http://{host}:{port}"
        self.task = asyncio.create_task(router.watch())

    async def url(self) -> str:
        """Where it is."""
        return self.address

    async def __del__(self) -> None:
        self.task.cancel()
        await self.runner.cleanup()


class FrontActor(_Watched):
    """One ``Front``, on the port of the fleet.

    Args:
        servers: not asked; a deployment of the same application.
    """

    async def __init__(self, argv: Sequence[str], directory: DeploymentHandle, servers: DeploymentHandle) -> None:  # type: ignore[misc]  # Ray waits for it
        args = parse(argv)
        settings = Settings(args.queue_size, args.patience, args.ours.max_body_bytes, args.ours.max_adapter_bytes)
        routing = Shared() if args.routing == "affinity" else make_routing(args)
        url = f"http://{ray.util.get_node_ip_address()}:{args.port}"
        find = finder(directory)
        self.router = Front(routing, links_of(args), settings, args.replica_limit, find, url, args.ours.sources)
        self.runner, _ = await serve_http(self.router, args.host, args.port, args.drain)
        self.task = asyncio.create_task(self.router.run())

    async def __del__(self) -> None:
        await self.runner.cleanup()  # which first ends its requests
        with contextlib.suppress(Exception):
            await self.router.sync()
        self.task.cancel()


class ServerActor(_Watched):
    """One replica: a server of its own process, watched as on one host.

    Args:
        program: what the server's flags are given to.
    """

    async def __init__(self, argv: Sequence[str], directory: DeploymentHandle, program: Sequence[str]) -> None:  # type: ignore[misc]  # Ray waits for it
        args = parse(argv)
        host, port = ray.util.get_node_ip_address(), free_port()
        self.session = new_session()
        self.member = Member(f"http://{host}:{port}", DirectoryLink(links_of(args), finder(directory)))
        command = [*program, *args.server, "--host", host, "--port", str(port)]
        log = args.log_dir / f"replica-{host}-{port}.log" if args.log_dir else None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        supervisor = Supervisor(
            self.member, self.session, self.member.ready, args.health_interval, command, dict(os.environ), log,
            args.drain, orphaned=signal.SIGKILL,  # the next replica may have its GPUs at once
        )  # fmt: skip
        self.task = asyncio.create_task(supervisor.run())
        while not self.member.serving and not self.task.done():
            await asyncio.sleep(BEAT_S)
        await self.check_health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What ``ByLoad`` adds up."""
        return {"requests": float(self.member.requests)}

    async def __del__(self) -> None:
        await self.member.leave(for_good=True)
        await asyncio.sleep(NOTICED_S)
        self.task.cancel()  # the server ends its requests first
        await asyncio.gather(self.task, return_exceptions=True)


class ByLoad:
    """As many replicas as the fleet's requests need.

    Args:
        target: requests for each.
    """

    def __init__(self, target: int) -> None:
        self.target = target

    def __call__(self, context: AutoscalingContext) -> tuple[int, JsonDict]:
        """Ray applies bounds and delays."""
        requests = sum((context.aggregated_metrics or {}).get("requests", {}).values())
        return max(1, math.ceil(requests / self.target)), {}


class ByHosts:
    """As many as there are hosts.

    Args:
        each: on every host.
    """

    def __init__(self, each: int) -> None:
        self.each, self.count, self.counted = each, 1, 0.0

    def __call__(self, context: AutoscalingContext) -> tuple[int, JsonDict]:
        """Ray applies bounds."""
        if time.monotonic() - self.counted > NODES_S:
            self.count, self.counted = sum(node["Alive"] for node in ray.nodes()), time.monotonic()
        return self.each * self.count, {}


def free_port() -> int:
    """A port that nobody listens on, on any address of this host."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def scaling(policy: type, argument: JsonDict, fewest: int, most: int, up_s: float, down_s: float) -> JsonDict:
    """Ray's settings for a deployment whose size changes."""
    return {
        "min_replicas": fewest, "initial_replicas": fewest, "max_replicas": most, "metrics_interval_s": 1.0,
        "look_back_period_s": 2.0, "upscale_delay_s": up_s, "downscale_delay_s": down_s,
        "policy": {"policy_function": f"{policy.__module__}:{policy.__name__}", "policy_kwargs": argument},
    }  # fmt: skip


UP_S, DOWN_S = 10.0, 120.0
"""How long load must ask for more replicas, or for fewer."""
MOST_FRONTS = 1000


def application(
    argv: Sequence[str], program: Sequence[str] = PROGRAM, up_s: float = UP_S, down_s: float = DOWN_S
) -> Any:
    """The Serve application of a command line of ``launch_cluster``.

    Raises:
        ConfigError: a setting that cannot work.
    """
    args, argv = parse([*argv, "--ray"]), [*argv, "--ray"]
    common: JsonDict = {"health_check_period_s": HEALTH_S, "health_check_timeout_s": HEALTH_TIMEOUT_S}
    gpus = args.replica_gpus
    if gpus is None:
        gpus = args.ranks if ray.cluster_resources().get("GPU") else 0
    directory = serve.deployment(DirectoryActor).options(
        name="Directory", max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0}, **common
    )
    servers = serve.deployment(ServerActor).options(
        name="Server",
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus},
        graceful_shutdown_timeout_s=NOTICED_S + args.drain + STOP_S + LAST_WORDS_S,
        **({"num_replicas": args.replicas} if args.max_replicas is None else {
            "autoscaling_config": scaling(
                ByLoad, {"target": args.target_load}, args.replicas, args.max_replicas, up_s, down_s
            )
        }),
        **common,
    )  # fmt: skip
    fronts = serve.deployment(FrontActor).options(
        name="Front",
        ray_actor_options={"num_cpus": 0},
        max_replicas_per_node=args.fronts,
        graceful_shutdown_timeout_s=args.drain + LAST_WORDS_S,
        autoscaling_config=scaling(ByHosts, {"each": args.fronts}, 1, MOST_FRONTS, 0.0, 0.0),
        **common,
    )
    told = directory.bind(argv)
    return fronts.bind(argv, told, servers.bind(argv, told, [*program]))


def build(settings: JsonDict) -> Any:
    """The application of a Serve configuration, whose ``args`` are ``{"flags": "--model-path …"}``.

    Raises:
        ConfigError: a setting that cannot work.
    """
    flags = settings.get("flags")
    if not isinstance(flags, str) or set(settings) != {"flags"}:
        raise ConfigError(f'args must be {{"flags": "--model-path DIR …"}}; got {settings}')
    return application([os.path.expandvars(flag) for flag in shlex.split(flags)])


def run(args: ClusterArgs, argv: Sequence[str]) -> None:
    """Serve until told to stop; then have requests end, and the fleet."""

    def told_to_stop(*_: object) -> None:
        raise SystemExit(0)

    own = args.ray == "local"
    ray.init(address=args.ray, include_dashboard=False) if own else ray.init(address=args.ray)
    signal.signal(signal.SIGTERM, told_to_stop)  # Ray has set its own
    try:
        serve.start(proxy_location="Disabled")
        serve.run(application(argv), name=APP, route_prefix=None)
        print(
            f"vlora_sgl: fleet on port {args.port} of every host; a page: http://{args.host}:{args.port}/ui",
            flush=True,
        )
        while True:
            time.sleep(3600)
    except (KeyboardInterrupt, SystemExit):
        say("the fleet ends its requests")
    finally:
        serve.delete(APP)
        if own:
            serve.shutdown()
        ray.shutdown()
