"""The command line of ``vlora``: its parser, and what it answers with.

Exit status: 0, all is well; 1, it was refused, or something is missing; 2, a mistake in the command; 3, no server
answers.
"""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import sys
from collections.abc import Sequence

from vlora_sgl import __version__
from vlora_sgl.cli.commands import COMMANDS, Command
from vlora_sgl.cli.result import CommandError, Result
from vlora_sgl.errors import VLoraError

WRONG_USE = 2


def make_parser() -> argparse.ArgumentParser:
    """All of it."""
    parser = argparse.ArgumentParser(
        prog="vlora",
        description="One large multimodal model, many LoRA adapters, served together.",
        epilog="Begin with: vlora serve",
    )
    parser.add_argument("--version", action="version", version=f"vlora_sgl {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        one = commands.add_parser(
            command.name,
            help=command.help,
            description=command.description,
            epilog=f"example:\n  {command.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=not command.forwards,
            usage=f"vlora {command.name} [ARGUMENTS]" if command.forwards else None,
        )
        command.arguments(one)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line. Returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    known = {command.name: command for command in COMMANDS}
    parser = make_parser()
    command = known.get(argv[0]) if argv else None
    if command is not None and command.forwards and not {"-h", "--help"} & set(argv[1:2]):
        return int(pkgutil.resolve_name(command.run)(argv[1:]))
    if command is not None and command.forwards:
        return show_help(parser, command)
    args = parser.parse_args(argv)
    return answer(known[args.command], args)


def answer(command: Command, args: argparse.Namespace) -> int:
    """Carry out a command and print its result, as JSON if asked."""
    try:
        result: Result = pkgutil.resolve_name(command.run)(args)
    except CommandError as error:
        print(f"vlora {command.name}: {error}", file=sys.stderr)
        return error.status
    except VLoraError as error:
        print(f"vlora {command.name}: refused: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    try:
        print(json.dumps(result.data, indent=2) if getattr(args, "json", False) else result.text, flush=True)
    except BrokenPipeError:  # who reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return result.status


def show_help(parser: argparse.ArgumentParser, command: Command) -> int:
    """What the command is for, and an example; its flags are its module's."""
    (subparsers,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    print(subparsers.choices[command.name].format_help())
    return 0
