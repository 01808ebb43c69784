"""``python -m vlora_sgl.generate CONFIG.yaml``: from data sets and small models to the fewest adapters that hold."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlora_sgl.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from vlora_sgl.generate.config import RunConfig
    from vlora_sgl.generate.sources import LoadedSet


def main(argv: Sequence[str] | None = None) -> int:
    """Run, or finish a run that was interrupted. 0: every floor holds on test data; 1: some do not; 2: faults."""
    parser = argparse.ArgumentParser(prog="python -m vlora_sgl.generate", description=__doc__)
    parser.add_argument("config", type=Path, help="YAML file (docs/generate.md)")
    parser.add_argument("--check", action="store_true", help="read and check configuration and data, then stop")
    parser.add_argument(
        "--router",
        type=Path,
        metavar="DIR",
        help="train no adapters, but a token router over those of --members: a routed adapter",
    )
    parser.add_argument(
        "--members",
        nargs="+",
        metavar="NAME=DIR",
        help="of the routed adapter; by default what an earlier run of CONFIG wrote",
    )
    parser.add_argument(
        "--joint", action="store_true", help="with --router: train the members too, and tell data sets of their names"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args(argv)
    from vlora_sgl.generate.processes import processes_of
    from vlora_sgl.generate.run import run
    from vlora_sgl.generate.sources import load_run

    try:
        config, datasets = load_run(args.config)
        if args.check:
            print(f"{args.config}: {len(config.datasets)} data sets, no faults")
            return 0
        if args.router is not None:
            return _route(config, datasets, args.members, args.router, args.joint)
        report = run(config, datasets)
    except (ConfigError, MissingDependencyError) as error:
        print(error, file=sys.stderr)
        return 2
    status = 1 if report["floors_broken"] else 0
    if not processes_of(config).is_main_process:
        return status
    if args.json:
        print(json.dumps(report, indent=2, default=str))
        return status
    for row in report["datasets"]:
        verdict = "holds" if row["accuracy"] >= row["floor"] else "BROKEN"
        print(
            f"{row['name']}: {row['adapter']}, {row['accuracy']:.3f} (base {row['base']:.3f}, "
            f"floor {row['floor']:.3f}: {verdict})"
        )
    print(f"{len(report['adapters'])} adapters (bound {report['bound']}): {config.output / 'report.html'}")
    return status


def _route(
    config: RunConfig, datasets: Sequence[LoadedSet], members: Sequence[str] | None, out: Path, together: bool
) -> int:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from vlora_sgl.generate.learner import base_directory
    from vlora_sgl.generate.processes import device_of
    from vlora_sgl.generate.token_router import RouterSettings, joint, make_routed

    pairs = [one.partition("=") for one in members or ()]
    adapters = {name: Path(directory) for name, _, directory in pairs}
    if members is None:
        found = sorted(config.output.glob("adapters/*/adapter_config.json"))
        adapters = {path.parent.name: path.parent for path in found}
    missing = [f"{name}={path}" for name, path in adapters.items() if not (path / "adapter_config.json").is_file()]
    if len(adapters) < 2 or missing:
        raise ConfigError(
            f"a routed adapter needs two adapters or more, as NAME=DIR; got {sorted(adapters)}, not found: {missing}"
        )
    base = base_directory(config.base)
    model: Any = AutoModelForImageTextToText.from_pretrained(base)
    model.to(device_of(config))
    train, test = ({one.spec.name: one.splits[s] for one in datasets} for s in ("train", "test"))
    settings = RouterSettings(seed=config.seed)
    settings = joint(settings) if together else settings
    report = make_routed(model, AutoProcessor.from_pretrained(base), adapters, train, test, out, settings)
    for name in report["routed"]:
        print(f"{name}: {report['routed'][name]:.3f} (best single adapter {report['oracle'][name]:.3f}, "
              f"base {report['base'][name]:.3f})")  # fmt: skip
    print(f"used {report['usage']}, agreement with the data sets {report['adjusted_rand']:.2f}: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
