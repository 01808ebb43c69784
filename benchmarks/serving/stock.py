"""Stock SGLang, as it is but for two things: adapters load from files beside dummy base weights; iterations are timed
if asked.

    python -m benchmarks.serving.stock --model-path DIR --enable-lora --lora-backend csgmv …

SGLang reads adapters in the base's load format, and ``dummy`` reads no files. Nothing of ours is put in place: the
plugin stays out of processes that the launcher of ours did not start.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving.shape7b import run_stock_scheduler
from vlora_sgl.core import AdapterId, InferenceMode
from vlora_sgl.managers.policies.cost_table import shipped
from vlora_sgl.managers.policies.iteration_log import Iteration, IterationLog, IterationTimes

LOG_VARIABLE = "BENCHMARK_ITERATION_LOG"
"""Environment variable with the file for the iteration log; none is written without it."""


def iteration_of(batch: Any) -> Iteration:
    """A batch of stock SGLang, as cost tables see it."""
    prefill = batch.forward_mode.is_extend()
    groups: Counter[AdapterId] = Counter()
    context = 0.0
    for req, tokens in zip(batch.reqs, batch.extend_lens if prefill else [1] * len(batch.reqs), strict=True):
        groups[req.lora_id] += tokens
        context += tokens * tokens / 2 if prefill else len(req.origin_input_ids) + len(req.output_ids)
    return Iteration(prefill, groups, context, None, None, InferenceMode.UNMERGED, 0.0)


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """The scheduler process."""
    from vlora_sgl import _sgl

    path = os.environ.get(LOG_VARIABLE)
    if path is not None:
        log = IterationTimes([IterationLog(Path(path), shipped()["csgmv"])])
        scheduler = _sgl.Scheduler
        run, process = scheduler.run_batch, scheduler.process_batch_result

        def run_batch(self: Any, batch: Any, *rest: Any, **more: Any) -> Any:
            if not batch.forward_mode.is_idle():
                log.launched(self.forward_ct + 1, iteration_of(batch))
            return run(self, batch, *rest, **more)

        def process_batch_result(self: Any, batch: Any, result: Any) -> None:
            process(self, batch, result)
            log.done(batch.forward_iter)

        scheduler.run_batch, scheduler.process_batch_result = run_batch, process_batch_result
    run_stock_scheduler(*args, **kwargs)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until stopped."""
    from benchmarks.serving import stock
    from vlora_sgl import _sgl

    arguments = _sgl.prepare_server_args(list(sys.argv[1:] if argv is None else argv))
    try:
        _sgl.http_server.launch_server(arguments, run_scheduler_process_func=stock.run_scheduler)
    finally:
        _sgl.kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
