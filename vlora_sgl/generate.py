"""``python -m vlora_sgl.generate CONFIG.yaml``: from data sets and small models to the fewest adapters that hold."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vlora_sgl.errors import ConfigError, MissingDependencyError


def main(argv: Sequence[str] | None = None) -> int:
    """Run, or finish a run that was interrupted. 0: every floor holds on test data; 1: some do not; 2: faults."""
    parser = argparse.ArgumentParser(prog="python -m vlora_sgl.generate", description=__doc__)
    parser.add_argument("config", type=Path, help="YAML file (docs/generation.md)")
    parser.add_argument("--check", action="store_true", help="read and check configuration and data, then stop")
    args = parser.parse_args(argv)
    from vlora_sgl.generation.devices import processes_of
    from vlora_sgl.generation.run import run
    from vlora_sgl.generation.sources import load_run

    try:
        config, datasets = load_run(args.config)
        if args.check:
            print(f"{args.config}: {len(config.datasets)} data sets, no faults")
            return 0
        report = run(config, datasets)
    except (ConfigError, MissingDependencyError) as error:
        print(error, file=sys.stderr)
        return 2
    status = 1 if report["floors_broken"] else 0
    if not processes_of(config).is_main_process:
        return status
    for row in report["datasets"]:
        verdict = "holds" if row["accuracy"] >= row["floor"] else "BROKEN"
        print(
            f"{row['name']}: {row['adapter']}, {row['accuracy']:.3f} (base {row['base']:.3f}, "
            f"floor {row['floor']:.3f}: {verdict})"
        )
    print(f"{len(report['adapters'])} adapters (bound {report['bound']}): {config.output / 'report.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
