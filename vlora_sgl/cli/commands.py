"""Every command of ``vlora``: its name, an example, its arguments, and where it is carried out."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DEFAULT_URL = "http://127.0.0.1:30000"
URL, KEY, ADMIN_KEY = "VLORA_URL", "VLORA_API_KEY", "VLORA_ADMIN_KEY"
"""Environment variables that stand in for flags."""

Arguments = Callable[[argparse.ArgumentParser], object]


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        run: ``module:function`` that carries it out: given the parsed arguments it returns a ``Result``; of one that
            ``forwards`` it is given the arguments as they are, and returns the exit status.
        forwards: whether the arguments are another program's.
    """

    name: str
    help: str
    example: str
    run: str
    arguments: Arguments = lambda parser: None
    more: str = ""
    forwards: bool = False

    @property
    def description(self) -> str:
        """What ``--help`` begins with."""
        return f"{self.help[0].upper()}{self.help[1:]}.{' ' if self.more else ''}{self.more}"


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="answer in JSON")


def _server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help=f"the server's or cluster's address (or ${URL}; by default {DEFAULT_URL})")
    parser.add_argument("--api-key", help=f"the server's key (or ${KEY})")
    _json(parser)


def _operator(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the adapter")
    _server(parser)
    parser.add_argument("--admin-key", help=f"the operator's key, where there is one (or ${ADMIN_KEY})")


def _ask(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("image", type=Path, help="a file")
    parser.add_argument("question", nargs="?", help="left out: each adapter is asked what it was trained to be asked")
    parser.add_argument("-a", "--adapter", action="append", default=[], metavar="NAME", help="ask this one, too")
    parser.add_argument("--all", action="store_true", help="ask all adapters, and the heads that they have")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="most tokens of an answer")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where boxes go; by default IMAGE.boxes.png, here")
    _server(parser)


def _add(parser: argparse.ArgumentParser) -> None:
    _operator(parser)
    parser.add_argument("directory", type=Path, help="a PEFT adapter directory on the server's machine")
    parser.add_argument("--pin", action="store_true", help="let it keep its device slot")


def _reload(parser: argparse.ArgumentParser) -> None:
    _operator(parser)
    parser.add_argument("directory", nargs="?", type=Path, help="left out: the one it was loaded from, read again")


def _pin(parser: argparse.ArgumentParser) -> None:
    _operator(parser)
    parser.add_argument("--off", action="store_true", help="let it go again")


def _promote(parser: argparse.ArgumentParser) -> None:
    _operator(parser)
    parser.add_argument("--share", type=float, default=1.0, metavar="S", help="of the conversations, from 0 to 1")
    parser.add_argument("--drop", action="store_true", help="unload the version that was current")


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="a PEFT adapter directory")
    parser.add_argument("--model", type=Path, help="directory of the base model, to check shapes and depth against")
    _json(parser)


def _convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trained", type=Path, help="the adapter")
    parser.add_argument("initial", type=Path, help="the adapter as it was saved before training")
    parser.add_argument("output", type=Path, help="where the plain adapter goes; must not be there")
    _json(parser)


def _bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-path", type=Path, help="by default the embedded model, with its adapters")
    parser.add_argument("--lora-paths", nargs="+", default=[], metavar="NAME=DIR", help="adapters that are asked")
    parser.add_argument("--requests", type=int, default=48, metavar="N", help="in each round")
    parser.add_argument("--concurrency", type=int, default=8, metavar="N", help="at a time")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="of each answer")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measured, after one that is not")
    parser.add_argument("--skip-stock", action="store_true", help="measure ours alone")
    _json(parser)


def _completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh"))


def default_url(given: str | None) -> str:
    """The address that a command means."""
    return (given or os.environ.get(URL) or DEFAULT_URL).rstrip("/")


COMMANDS = (
    Command(
        "serve", "serve a model with its adapters; without one, the embedded model",
        "vlora serve Qwen/Qwen2.5-VL-7B-Instruct --lora-paths fire=DIR signs=DIR",
        "vlora_sgl.cli.modules:serve", forwards=True,
        more="vlora serve [MODEL] [FLAGS]. FLAGS are those of python -m vlora_sgl.launch_server, whose --help lists "
        "them;\nwith --replicas those of python -m vlora_sgl.launch_cluster, too.",
    ),
    Command(
        "ask", "ask about an image: the base model beside its adapters",
        'vlora ask photo.jpg "What is in this picture?" --all', "vlora_sgl.cli.asking:ask", _ask,
    ),
    Command("ls", "list the adapters of a server", "vlora ls --json", "vlora_sgl.cli.server:list_adapters", _server),
    Command(
        "ps", "show what a server does now: mode, requests, slots, tiers", "vlora ps",
        "vlora_sgl.cli.server:show_state", _server,
    ),
    Command("add", "load an adapter", "vlora add fire runs/fire --pin", "vlora_sgl.cli.server:add", _add),
    Command("rm", "unload an adapter", "vlora rm fire", "vlora_sgl.cli.server:remove", _operator),
    Command(
        "reload", "put another content behind a name, at once for all requests to come",
        "vlora reload fire runs/fire-2", "vlora_sgl.cli.server:reload", _reload,
    ),
    Command("pin", "let an adapter keep its device slot", "vlora pin fire", "vlora_sgl.cli.server:pin", _pin),
    Command(
        "promote", "let a name mean another of its versions, for everybody or a share of the conversations",
        "vlora promote fire@2 --share 0.1", "vlora_sgl.cli.server:promote", _promote,
    ),
    Command(
        "rollback", "end the trial of a version, or let a name mean what it meant before", "vlora rollback fire",
        "vlora_sgl.cli.server:roll_back", _operator,
    ),
    Command(
        "inspect", "say what an adapter holds, whether it would load, and what it costs",
        "vlora inspect runs/fire --model MODEL_DIR", "vlora_sgl.cli.inspecting:inspect", _inspect,
    ),
    Command(
        "convert", "make plain LoRA of an adapter of PiSSA, OLoRA, CorDA or LoRA-GA",
        "vlora convert runs/trained runs/initial runs/plain", "vlora_sgl.cli.inspecting:convert", _convert,
    ),
    Command(
        "generate", "make adapters from data sets: as few as keep every accuracy floor",
        "vlora generate examples/generate-small.yaml --check", "vlora_sgl.cli.modules:generate", forwards=True,
        more="vlora generate CONFIG.yaml [FLAGS].\nFLAGS are those of python -m vlora_sgl.generate, whose --help "
        "lists them.",
    ),
    Command(
        "export", "merge an adapter into its base model, for any engine",
        "vlora export --model MODEL_DIR --hot runs/fire --cold runs/signs --out merged",
        "vlora_sgl.cli.modules:export", forwards=True,
        more="vlora export FLAGS.\nFLAGS are those of python -m vlora_sgl.export, whose --help lists them.",
    ),
    Command(
        "profile", "measure what steps cost on this machine, for the policy that plans by it",
        "vlora profile --model-path MODEL_DIR --lora-paths a=DIR b=DIR --save costs.json",
        "vlora_sgl.cli.modules:profile", forwards=True,
        more="vlora profile FLAGS.\nFLAGS are those of python -m vlora_sgl.measure_costs, whose --help lists them.",
    ),
    Command(
        "bench", "measure this machine: this server beside stock SGLang, one after the other, same requests",
        "vlora bench --requests 48 --concurrency 8", "vlora_sgl.cli.benching:bench", _bench,
    ),
    Command(
        "doctor", "say what this machine has, what will be used, what is missing, and how to get it",
        "vlora doctor", "vlora_sgl.cli.doctor:doctor", _json,
    ),
    Command(
        "completion", "print what a shell needs to complete these commands",
        'eval "$(vlora completion bash)"', "vlora_sgl.cli.completion:completion", _completion,
    ),
)  # fmt: skip
