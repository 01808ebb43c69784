"""All figures of a GPU machine in one command: the benchmarks in lanes, one a card, within a time.

    python -m benchmarks.campaign --minutes 9 --out runs/gpu          # what fits
    python -m benchmarks.campaign --only smoke reuse scale --minutes 9 --out runs/gpu
    python -m benchmarks.campaign --list

A job that ended well in a folder is not run there again, so the same command goes on where it was cut off. What
docs/evaluation.md still lacks, `python -m benchmarks.evaluation` says.

Times of eager prefills and of HTTP are the host's: such jobs run first and alone, the others beside each other. Every
job runs in a process group of its own, which is ended at the job's limit. A job writes ``OUT/NAME.log``; all figures
go to ``OUT/summary.json``, which ``python -m benchmarks.summary --merge OUT/summary.json`` takes over.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serving.systems import end_group
from benchmarks.summary import merge


@dataclass(frozen=True)
class Job:
    """A benchmark.

    Attributes:
        name: what ``--only`` calls it.
        command: what Python runs, after ``-m``; ``{out}`` is the output folder. ``--summary`` is added.
        seconds: after which it is killed; about twice what it takes with compiled kernels.
        cards: how many it needs.
        alone: whether others would disturb it.
        records: whether it takes ``--summary``.
        figures: how those that it writes begin.
    """

    name: str
    command: str
    seconds: float
    cards: int = 1
    alone: bool = False
    records: bool = True
    figures: tuple[str, ...] = ()


PATIENCE = 30.0
"""Seconds that a job gets to stop its servers and record what it has."""

SERVING, KERNELS = "benchmarks.serving", "benchmarks.kernels"
STAGE = 480.0
"""Seconds that a job may take at most: a machine may be lent for little more."""

E2E = f"{SERVING}.bench_e2e --rates 8 --together 2 --out {{out}}"
JOBS = (
    Job("smoke", f"{SERVING}.smoke_gpu", 240, records=False),
    Job("families", "benchmarks.families", 480, figures=("families.",)),
    Job(
        "reuse",
        f"{SERVING}.bench_reuse --heads --seconds 1 --systems ours --adapters 8 --limit 230",
        250,
        alone=True,
        figures=("reuse.", "heads.latency"),
    ),
    Job("heads", f"{SERVING}.bench_heads", 400, alone=True, figures=("heads.",)),
    Job("video", f"{SERVING}.bench_video", 400, alone=True, figures=("video.",)),
    Job(
        "e2e",
        f"{E2E} --workload retrieval video --heads --skews .6 .1 .9 --seconds 10 --attention triton",
        400,
        alone=True,
        figures=("e2e.",),
    ),
    Job("default-retrieval", f"{E2E} --workload retrieval --skews .6 --seconds 60", 480, alone=True),
    Job("default-video", f"{E2E} --workload video --heads --skews .6 --seconds 60", 480, alone=True),
    Job("default-skews", f"{E2E} --workload retrieval --skews .1 .9 --seconds 60", 480, alone=True),
    Job(
        "llava-retrieval",
        f"{E2E} --shape llava-7b --workload retrieval --skews .6 --seconds 30",
        480,
        alone=True,
        figures=("e2e.llava.retrieval",),
    ),
    Job(
        "llava-video",
        f"{E2E} --shape llava-7b --workload video --heads --skews .6 --seconds 30",
        480,
        alone=True,
        figures=("e2e.llava.video",),
    ),
    Job(
        "qwen3vl-retrieval",
        f"{E2E} --shape qwen3vl-8b --workload retrieval --skews .6 --seconds 30",
        480,
        alone=True,
        figures=("e2e.qwen3vl.retrieval",),
    ),
    Job(
        "qwen3vl-video",
        f"{E2E} --shape qwen3vl-8b --workload video --heads --skews .6 --seconds 30",
        480,
        alone=True,
        figures=("e2e.qwen3vl.video",),
    ),
    Job(
        "llava-uniform",
        f"{E2E} --shape llava-7b --systems cost off --skews .6 --seconds 12 --uniform",
        300,
        alone=True,
        figures=("e2e.llava.uniform8",),
    ),
    Job(
        "uniform",
        f"{SERVING}.bench_e2e --systems cost unmerged dlora merged off --skews .6 --rates 8 --seconds 12 --together 2 "
        "--attention triton --uniform --out {out}/uniform",
        350,
        alone=True,
        figures=("e2e.uniform8", "e2e.vs_"),
    ),
    Job("residency", f"{SERVING}.bench_residency --out {{out}}", 480, alone=True, figures=("residency.",)),
    Job(
        "scale",
        f"{SERVING}.bench_scale throughput loss --out {{out}}/scale",
        270,
        cards=2,
        alone=True,
        figures=("scale.dp2", "scale.requests"),
    ),
    Job(
        "scale4",
        f"{SERVING}.bench_scale throughput --out {{out}}/scale",
        400,
        cards=4,
        alone=True,
        figures=("scale.dp4",),
    ),
    Job("tp", f"{SERVING}.bench_tp --switches --rounds 3", 200, cards=2, figures=("scale.tp2", "switch.tp2")),
    Job(
        "tp-step",
        f"{KERNELS}.bench_step --tp 2 --skip off_triton ours16 slots64 each16 e4m3 --limit 290 "
        "--rows {out}/tp2.json",
        300,
        cards=2,
        figures=("scale.tp2.",),
    ),
    Job(
        "fp8-step",
        f"{KERNELS}.bench_step --quantization fp8 --skip off_triton stock slots64 each16 --limit 290 "
        "--rows {out}/fp8.json",
        300,
        figures=("fp8.",),
    ),
    Job("step", f"{KERNELS}.bench_step --attention triton --limit 290", 300, figures=("atmm.model.",)),
    Job("default-step", f"{KERNELS}.bench_step --limit 290", 300, figures=("default.",)),
    Job("default-long", f"{KERNELS}.bench_step --input 3072 --limit 470", 480, figures=("default.long.",)),
    Job(
        "forms",
        f"{KERNELS}.bench_step --forms --attention triton --limit 290 --rows {{out}}/forms.json",
        300,
        figures=("formats.",),
    ),
    Job("tower", f"{SERVING}.bench_tower --rows {{out}}/tower.json", 320, figures=("tower.",)),
    Job("moe", f"{KERNELS}.bench_moe --limit 440 --rows {{out}}/moe.json", 480, figures=("moe.",)),
    Job("modes", f"{SERVING}.bench_modes --rank 64 --rounds 2", 240, figures=("modes.",)),
    Job("batching", f"{SERVING}.bench_batching --rows {{out}}/batching.json", 480, figures=("batching.",)),
    Job(
        "export",
        f"{SERVING}.bench_export --shares 0 .4 .8 1 --rows {{out}}/export.jsonl",
        480,
        alone=True,
        figures=("bake.hot1_latency_vs_sglang",),
    ),
    Job("atmm", f"{KERNELS}.bench_atmm --quick --workers 8", 180, figures=("atmm.",)),
    Job("routing", f"{KERNELS}.bench_token_routing", 420, figures=("routing.",)),
    Job("switch", f"{KERNELS}.bench_switch", 60, figures=("switch.",)),
    Job("load", f"{KERNELS}.bench_load", 30, figures=("load.",)),
    Job("page", f"{SERVING}.bench_page --step", 420, alone=True, figures=("page.",)),
    Job("stages", f"{SERVING}.bench_stages --rows {{out}}/stages.jsonl", 240, alone=True, records=False),
    Job(
        "qwen3vl-stages",
        f"{SERVING}.bench_stages --shape qwen3vl-8b --rows {{out}}/stages.jsonl",
        300,
        alone=True,
        records=False,
    ),
    Job(
        "vision-search",
        "vlora_sgl.kernels.tiling_search --model qwen2.5-vl-vision --ranks 16 --rows 8192 "
        "--ops grouped_shrink grouped_write grouped_expand grouped_silu --budget 120 --output {out}/vision.json",
        160,
        records=False,
    ),
    Job(
        "scaled-search",
        "vlora_sgl.kernels.tiling_search --model qwen2.5-vl-7b --ranks 16 64 --rows 32 --ops scaled_shrink scaled "
        "--budget 240 --output {out}/scaled.json",
        280,
        records=False,
    ),
    Job("search", f"{KERNELS}.bench_search --budget 420 --out {{out}}/tiles.json", 480, figures=("atmm.search",)),
)


class Campaign:
    """Runs jobs until the time is up.

    Args:
        out: folder of logs and figures.
        cards: the CUDA devices, as ``CUDA_VISIBLE_DEVICES`` names them.
        until: ``time.monotonic()`` at which everything ends.
    """

    LEAST = 20.0
    """Seconds that must be left for a job to begin."""

    def __init__(self, out: Path, cards: Sequence[str], until: float) -> None:
        self.out, self.cards, self.until = out, list(cards), until
        self.results: dict[str, str] = {}
        self._lock = threading.Lock()

    def run(self, jobs: Sequence[Job]) -> None:
        """The jobs that run alone first, in their order; then the others, a lane for each card."""
        self.out.mkdir(parents=True, exist_ok=True)
        for job in jobs:
            if job.cards > len(self.cards):
                self._say(job, f"left out: needs {job.cards} cards")
        left = [job for job in jobs if job.cards <= len(self.cards)]
        left = [job for job in left if not self._has_run(job)]
        for job in [job for job in left if job.alone or job.cards > 1]:
            self._run_one(job, self.cards[: job.cards])
        shared = iter([job for job in left if not job.alone and job.cards == 1])

        def lane(card: str) -> None:
            while True:
                with self._lock:
                    job = next(shared, None)
                if job is None:
                    return
                self._run_one(job, [card])

        lanes = [threading.Thread(target=lane, args=(card,)) for card in self.cards]
        for thread in lanes:
            thread.start()
        for thread in lanes:
            thread.join()

    def _has_run(self, job: Job) -> bool:
        if not self._mark(job).exists():
            return False
        self._say(job, "status 0, before")
        return True

    def _mark(self, job: Job) -> Path:
        """Says that a job has ended well."""
        return self.out / f"{job.name}.done"

    def _run_one(self, job: Job, cards: Sequence[str]) -> None:
        limit = min(job.seconds, self.until - time.monotonic())
        if limit < self.LEAST:
            self._say(job, "left out: no time")
            return
        summary = self.out / f"{job.name}.summary.json"
        command = [sys.executable, "-m", *shlex.split(job.command.format(out=self.out))]
        command += ["--summary", str(summary)] if job.records else []
        threads = max(1, (os.cpu_count() or 1) // (2 * len(self.cards)))
        env = {"OMP_NUM_THREADS": str(threads), **os.environ, "CUDA_VISIBLE_DEVICES": ",".join(cards)}
        began = time.monotonic()
        with (self.out / f"{job.name}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
            try:
                ended = f"status {process.wait(limit)}"
            except subprocess.TimeoutExpired:
                ended = "stopped"
                end_group(process, PATIENCE)
        if summary.exists():
            with self._lock:
                merge(summary, self.out / "summary.json")
            summary.unlink()
        if ended == "status 0":
            self._mark(job).touch()
        self._say(job, f"{ended} after {time.monotonic() - began:.0f} s")

    def _say(self, job: Job, text: str) -> None:
        self.results[job.name] = text
        print(f"{job.name}: {text}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run them. Returns 1 if a job failed or there was no time for one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[job.name for job in JOBS], help="these, in this order")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--list", action="store_true", help="what there is")
    args = parser.parse_args(argv)
    if args.list:
        for job in JOBS:
            needs = f"{job.cards} card{'s' * (job.cards > 1)}{', alone' * job.alone}"
            print(f"{job.name:10s} at most {job.seconds:.0f} s, {needs}: {job.command}")
        return 0
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 2
    by_name = {job.name: job for job in JOBS}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    cards = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    campaign = Campaign(args.out, cards, time.monotonic() + 60 * args.minutes)
    campaign.run([by_name[name] for name in args.only] if args.only else JOBS)
    return int(any(not result.startswith("status 0") for result in campaign.results.values()))


if __name__ == "__main__":
    sys.exit(main())
