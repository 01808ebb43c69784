"""Stock SGLang's server, as it is but for one thing: adapters load from files beside dummy base weights.

    python -m benchmarks.serving.stock --model-path DIR --enable-lora --lora-backend csgmv …

SGLang reads adapters in the base's load format, and ``dummy`` reads no files. Nothing of ours is put in place: the
plugin stays out of processes that the launcher of ours did not start.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from benchmarks.serving.shape7b import run_stock_scheduler


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until stopped."""
    from vlora_sgl import _sgl

    arguments = _sgl.prepare_server_args(list(sys.argv[1:] if argv is None else argv))
    try:
        _sgl.http_server.launch_server(arguments, run_scheduler_process_func=run_stock_scheduler)
    finally:
        _sgl.kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
