"""Starts an engine on an exported model and prints, as JSON, the tokens it answers with for each name, for a test.

::

    python -m tests.export.serve_exported {ours,stock} DIR NAMES PROMPT IMAGE [SERVER ARGUMENTS AS JSON]

``ours`` is ``vlora_sgl.Engine``, told nothing but the directory; ``stock`` is SGLang's with the adapters as arguments.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    kind, directory, names, prompt, image, *more = sys.argv[1:]
    options: dict[str, Any] = {"model_path": directory, **(json.loads(more[0]) if more else {})}
    engine: Any
    if kind == "ours":
        from vlora_sgl import Engine

        engine = Engine(**options)
    else:
        import sglang

        engine = sglang.Engine(enable_lora=True, enable_multimodal=True, log_level="error", **options)
    try:
        answers = {}
        for name in json.loads(names):
            sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
            answer = engine.generate(prompt, sampling, image_data=[image], lora_path=name)
            answers[str(name)] = answer["output_ids"]
            if kind == "ours":
                assert answer["meta_info"]["vlora"]["adapter"] == name
        print(json.dumps(answers))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
