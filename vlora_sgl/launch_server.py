"""``python -m vlora_sgl.launch_server``: SGLang's HTTP server, running ours.

Every SGLang flag works unchanged; ours are in a group of their own in ``--help``.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from vlora_sgl import names
from vlora_sgl._sgl_types import ServerArgs
from vlora_sgl.errors import ConfigError, VLoraError
from vlora_sgl.platforms.cpu import has_accelerator
from vlora_sgl.server_args import VLoraArgs, fields_in, refuse_on_a_cpu, split_argv
from vlora_sgl.startup import imports, measured, processes

KEEP_ALIVE = "SGLANG_TIMEOUT_KEEP_ALIVE", "75"
"""Seconds that an idle connection stays open: longer than clients and proxies keep theirs (aiohttp 15, nginx 60), so
that none sends a request into a connection that is being closed. SGLang's own are five."""


def prepare(argv: Sequence[str]) -> ServerArgs:
    """Turn a command line into SGLang's ``ServerArgs``, with our settings handed to all processes.

    Raises:
        ConfigError: a setting we do not support, or one of ours that is wrong.
        ContractError: the installed SGLang is not the one we extend.
    """
    ours, rest = split_argv(argv)
    given = names.given_names(rest)
    names.check_names(**given)
    names.check_directories(given["adapters"])
    _ = ours.sources
    if not has_accelerator():
        refuse_on_a_cpu(fields_in(rest))
    ours.to_environment()
    os.environ.setdefault(*KEEP_ALIVE)
    imports.disable_other_models(imports.model_path_of(rest))
    if not has_accelerator():
        processes.fork_from_here()
    processes.import_engine()
    from vlora_sgl import _sgl, plugin, seams
    from vlora_sgl.defaults import command_line_defaults, given_fields, refuse_unsupported, settle

    plugin.verify()
    flags = [*command_line_defaults(rest, ours.slot_ranks), *rest]
    try:
        with seams.swapped("argparse.ArgumentParser.error", argparse.ArgumentParser, "error", names.Parser.error):
            server_args = settle(_sgl.prepare_server_args(flags), given_fields(rest))
    except (AssertionError, ValueError) as error:  # SGLang's refusals; ours are of these classes, too
        raise error if isinstance(error, VLoraError) else ConfigError(" ".join(str(error).split())) from None
    refuse_unsupported(server_args)
    if server_args._vlora_chosen["gpu"] is not None:  # elsewhere there is nothing to choose
        print(f"vlora_sgl: {measured.line(server_args._vlora_chosen)}", flush=True)
    return server_args


def print_help() -> None:
    """SGLang's help, with our flags in a group of their own."""
    from vlora_sgl import _sgl, plugin

    plugin.install()
    parser = argparse.ArgumentParser(prog="python -m vlora_sgl.launch_server")
    _sgl.ServerArgs.add_cli_args(parser)
    VLoraArgs.add_cli_args(parser)
    parser.print_help()


def announce(server_args: ServerArgs) -> None:
    """Say, in one line, that requests are welcome, where, and where a person may look; the collector leaves out what
    there is by now.
    """
    gc.freeze()
    loaded = ", ".join(ref.lora_name for ref in server_args.lora_paths or ())
    adapters = f"adapters: {loaded}" if loaded else "no adapters yet"
    url = server_args.url()
    print(f"vlora_sgl: serving {server_args.served_model_name} on {url} ({adapters}); a page: {url}/ui", flush=True)


def stop_quietly(number: int, _: object) -> None:
    """A signal before requests are served: end in order. Once they are, ``managers.shutdown`` has it."""
    raise SystemExit(0)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until stopped. Returns the process's exit status; a mistake in the settings costs one line."""
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print_help()
        return 0
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop_quietly)
    from vlora_sgl import _sgl, seams
    from vlora_sgl.seams import Stage

    try:
        server_args = prepare(argv)
        from vlora_sgl.entrypoints import adapters, bodies, metrics, own_routes

        for part in (own_routes, adapters, bodies):
            part.mount(_sgl.http_server.app)
        metrics.mount()
        seams.verify(Stage.ENGINE, "http_server")
        _sgl.http_server.launch_server(
            server_args,
            init_tokenizer_manager_func=processes.init_serving_tokenizer_manager,
            run_scheduler_process_func=processes.WithEnvironment(processes.run_scheduler),
            run_detokenizer_process_func=processes.WithEnvironment(processes.run_detokenizer),
            launch_callback=lambda: announce(server_args),
        )
    except VLoraError as error:
        print(f"vlora_sgl: {error}", file=sys.stderr)
        return 2
    finally:
        if "sglang" in sys.modules:
            from vlora_sgl.managers import leftovers, shutdown

            shutdown.end_processes()
            leftovers.remove()
    return 0


def run() -> NoReturn:
    """``main``, and the end of this process, which nothing that hangs can keep."""
    try:
        status = main()
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        status = end.code
    if "sglang" in sys.modules:
        from vlora_sgl.managers.shutdown import leave

        leave(status)
    sys.exit(status)


if __name__ == "__main__":
    run()
