"""``python -m vlora_sgl.launch_cluster --replicas N FLAGS``: see ``cluster.arguments``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence

from vlora_sgl import names
from vlora_sgl.cluster.arguments import LAST_WORDS_S, ClusterArgs, make_routing, parse
from vlora_sgl.errors import ConfigError, VLoraError
from vlora_sgl.platforms.cpu import has_accelerator


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
    session = new_session()
    links = Links(session, Keys(args.value_of("--api-key"), args.value_of("--admin-api-key")))
    supervisors: list[Supervisor] = []
    router = Router(
        replicas,
        make_routing(args),
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


def run_on_ray(args: ClusterArgs, argv: Sequence[str]) -> None:
    """Serve from a Ray cluster until told to stop.

    Raises:
        ConfigError: Ray is not installed.
    """
    try:
        from vlora_sgl.cluster import on_ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError("--ray needs Ray: pip install 'vlora-sgl[cluster]'") from None
    on_ray.run(args, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until stopped. Returns the exit status; a mistake in the settings costs one line."""
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        if args.ray is None or args.ray == "local":  # elsewhere, only the hosts can tell
            check_adapters(args)
        if args.ray is None:
            asyncio.run(run(args))
        else:
            run_on_ray(args, sys.argv[1:] if argv is None else argv)
    except VLoraError as error:
        print(f"vlora_sgl: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"vlora_sgl: cannot listen: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
