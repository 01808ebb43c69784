"""New rows of tokens: as LoRA on the engine's layers they are what PEFT puts in the rows' place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.lora_adapters import TEXT, tiny_adapter, tiny_model
from vlora_sgl import _sgl
from vlora_sgl.errors import AdapterError
from vlora_sgl.lora.checkpoint import read_adapter
from vlora_sgl.lora.layout import BaseLayout
from vlora_sgl.lora.vocabulary import as_lora

ROWS: dict[str, Any] = {"a list": [3, 90, 5], "a table": {"embed_tokens": [7, 3], "lm_head": [1]}}


class Engine(nn.Module):
    """A model as SGLang serves it, as far as its vocabulary goes."""

    def __init__(self, base: nn.Module, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        layers = {"embed": (_sgl.VocabParallelEmbedding, base.model.embed_tokens.weight)}
        if not tied:
            layers["head"] = (_sgl.ParallelLMHead, base.lm_head.weight)
        for name, (kind, weight) in layers.items():
            layer = kind.__new__(kind)
            nn.Module.__init__(layer)
            layer.weight = weight
            setattr(self, name, layer)
        monkeypatch.setattr(_sgl.VocabParallelEmbedding, "forward", lambda layer, ids: layer.weight[ids])


# PEFT cannot merge rows of two tied layers that differ, which is what these are compared with.
@pytest.mark.parametrize(("form", "tied"), [("a list", False), ("a list", True), ("a table", False)])
def test_the_change_of_rows_is_lora_of_one_rank_a_token(
    form: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = {"tie_word_embeddings": tied}
    base = tiny_model("qwen2", text=text)
    peft = tiny_adapter(
        tiny_model("qwen2", text=text), tmp_path, target_modules=["q_proj"], trainable_token_indices=ROWS[form]
    )
    torch.manual_seed(5)
    for name, parameter in peft.named_parameters():
        if "trainable_tokens" in name:
            parameter.data += torch.randn_like(parameter)
    peft.save_pretrained(tmp_path)
    layout = BaseLayout.from_config(base.config)
    read = read_adapter(tmp_path, layout)
    assert any("trainable_token_indices" in note for note in read.report.notes)
    pairs = as_lora(read.token_rows, read.modules, Engine(base, tied, monkeypatch), layout)
    merged = peft.merge_and_unload()
    for name, weight, new in (
        ("embed_tokens", base.model.embed_tokens.weight, merged.model.embed_tokens.weight),
        ("lm_head", base.lm_head.weight, merged.lm_head.weight),
    ):
        change = torch.zeros_like(weight)
        if name in pairs:
            delta = pairs[name].delta().float()
            change = delta.T if name == "embed_tokens" else delta
        torch.testing.assert_close(weight + change, new, atol=1e-6, rtol=1e-6)
        assert bool(change.any()) == (name == "embed_tokens" or tied or form == "a table")
    with pytest.raises(AdapterError, match="has both LoRA and new rows"):
        as_lora(read.token_rows, {"embed_tokens": next(iter(pairs.values()))}, Engine(base, tied, monkeypatch), layout)


@pytest.mark.parametrize("wrong", [[3, 3], [TEXT["vocab_size"]], [-1], [True], ["3"], {"embed_tokens": 3}])
def test_tokens_that_are_none_are_refused(wrong: Any, tmp_path: Path) -> None:
    from tests.lora.test_convert import set_option

    base = tiny_model("qwen2")
    tiny_adapter(base, tmp_path, target_modules=["q_proj"], trainable_token_indices=[3])
    set_option(tmp_path, trainable_token_indices=wrong)
    with pytest.raises(AdapterError, match="must list different tokens below 128"):
        read_adapter(tmp_path, BaseLayout.from_config(base.config))
