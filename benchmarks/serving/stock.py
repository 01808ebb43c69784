"""Stock SGLang's server, as it is but for one thing: adapters load from files beside dummy base weights.

    python -m benchmarks.serving.stock --model-path DIR --enable-lora --lora-backend csgmv …

SGLang reads adapters in the base's load format, and ``dummy`` reads no files. Nothing of ours is put in place: the
plugin stays out of processes that the launcher of ours did not start.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.serving.shape7b import plain_adapter_loading


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """The scheduler process."""
    from vlora_sgl import _sgl

    plain_adapter_loading()
    _sgl.run_scheduler_process(*args, **kwargs)


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
