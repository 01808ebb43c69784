"""``python -m vlora_sgl.measure_costs``: measures the costs of an iteration on this machine.

    python -m vlora_sgl.measure_costs --model-path MODEL --lora-paths a=DIR b=DIR … [launcher's flags] --save FILE
    python -m vlora_sgl.measure_costs --iterations LOG … --save FILE        # fit to a log of real traffic instead

Runs an engine through batches of every mode, size and choice of adapters with the iteration log on, and fits the table
to the log; ``--json`` says in JSON what came of it. Without ``--save`` the file goes to where the server looks for it:
beside the shipped tables.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from vlora_sgl.core import JsonDict
from vlora_sgl.errors import ConfigError, VLoraError
from vlora_sgl.managers.policies.cost_fit import describe, fit
from vlora_sgl.managers.policies.cost_table import MEASURED, TABLES, CostTable, load_tables, save_tables
from vlora_sgl.managers.policies.iteration_log import read_log
from vlora_sgl.server_args import VLoraArgs, split_argv

if TYPE_CHECKING:
    from vlora_sgl.engine import Engine

PROMPTS = (64, 256)
"""Prompt lengths, in tokens."""

STEPS = 24
"""Output tokens of each batch: its decode iterations."""


def batches(adapters: Sequence[str], most: int) -> Iterator[tuple[str, list[str | None]]]:
    """The schedule: a mode, and the adapter of every row.

    Args:
        adapters: names, the first one is merged where the mode merges.
        most: rows of the largest batch.
    """
    hot, spread = adapters[0], [n for n in (2, 4, 8, 16) if n < len(adapters)] + [len(adapters)]
    sizes = sorted({1, max(1, most // 8), max(1, most // 2), most})
    for rows in sizes:
        yield "unmerged", [None] * rows
        yield "unmerged", [hot] * rows
        yield "merged", [hot] * rows
        for count in spread:
            if count <= rows:
                yield "unmerged", [adapters[n % count] for n in range(rows)]
                yield "mixture", [hot if 2 * n < rows else adapters[n % count] for n in range(rows)]
        if rows > 1:
            yield "unmerged", [hot if n % 2 else None for n in range(rows)]
            yield "mixture", [hot if 2 * n <= rows else None for n in range(rows)]


def drive(engine: Engine, adapters: Sequence[str], most: int, vocabulary: int, rounds: int) -> None:
    """Run the schedule ``rounds`` times, and once before that to compile what it needs."""
    rng = random.Random(0)
    for _ in range(rounds + 1):
        for mode, rows in batches(adapters, most):
            engine.set_internal_state({f"vlora_mode:{mode}": 1})
            for prompt in PROMPTS:
                engine.generate(
                    input_ids=[rng.choices(range(min(100, vocabulary // 2), vocabulary), k=prompt) for _ in rows],
                    lora_path=rows,
                    sampling_params={"temperature": 0, "ignore_eos": True, "max_new_tokens": STEPS},
                )


def engine_settings(argv: Sequence[str]) -> JsonDict:
    """SGLang's flags as ``Engine`` arguments, those that were given."""
    from vlora_sgl import _sgl, plugin

    plugin.install()
    parser = argparse.ArgumentParser(prog="python -m vlora_sgl.measure_costs")
    _sgl.ServerArgs.add_cli_args(parser)
    found = vars(parser.parse_args(list(argv)))
    return {name: value for name, value in found.items() if value != parser.get_default(name)}


def measure(ours: VLoraArgs, settings: JsonDict, rounds: int) -> tuple[CostTable, list[JsonDict]]:
    """Run an engine through the schedule.

    Returns:
        The table it planned by, and its iteration log without the warm-up.

    Raises:
        ConfigError: fewer than two adapters.
    """
    from vlora_sgl.engine import Engine

    named = settings.get("lora_paths") or ()
    names = [entry["lora_name"] if isinstance(entry, dict) else entry.partition("=")[0] for entry in named]
    if len(names) < 2:
        raise ConfigError(f"--lora-paths must name at least two adapters, to measure mixtures; got {names}")
    settings = {"enable_lora": True, "max_loras_per_batch": len(names) + 1, "max_running_requests": 32, **settings}
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "iterations.jsonl"
        engine = Engine(vlora=replace(ours, iteration_log=str(log)), **settings)
        try:
            vocabulary = engine.tokenizer_manager.model_config.vocab_size
            drive(engine, names, settings["max_running_requests"], vocabulary, rounds)
        finally:
            engine.shutdown()
        costs, rows = read_log(log)
    return costs, rows[len(rows) // (rounds + 1) :]


def save(table: CostTable, path: Path | None) -> Path:
    """Put the table into its file, beside tables of other operators; return the file."""
    if path is None:
        path = TABLES / f"{MEASURED}{re.sub(r'[^a-z0-9]+', '-', f'{table.device} {table.model}'.lower())}.json"
    save_tables(path, {**(load_tables(path) if path.exists() else {}), table.operator: table})
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, fit, save. Returns the process's exit status; a mistake in the settings costs one line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--iterations", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    own, rest = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(rest):
        print(__doc__)
        return 0
    try:
        ours, flags = split_argv(rest)
        if own.iterations:
            logs = [read_log(path) for path in own.iterations]
            costs, rows = logs[0][0], [row for _, found in logs for row in found]
            source = "an iteration log of real traffic"
        else:
            costs, rows = measure(ours, engine_settings(flags), own.rounds)
            source = "batches of every mode, size and choice of adapters"
        fitted = fit(rows, costs, "")
        error = ", ".join(f"{phase} {value:.1%}" for phase, value in fitted.error.items())
        provenance = (
            f"fitted by vlora_sgl.measure_costs, {datetime.now(UTC):%Y-%m-%d}, to {len(rows)} iterations ({source}); "
            f"mean error {error}. Loads are not measured: {costs.provenance}"
        )
        path = save(replace(fitted.table, provenance=provenance), own.save)
    except (VLoraError, OSError) as error:
        print(f"vlora_sgl.measure_costs: {error}", file=sys.stderr)
        return 2
    if own.json:
        print(json.dumps({"saved": str(path), "provenance": provenance, "error": fitted.error}, indent=2))
        return 0
    print(describe(fitted))
    print(f"saved to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
