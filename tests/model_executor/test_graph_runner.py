"""Prefill graphs of a decoder that images' features reach beside its embeddings: each replay reads its own batch's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vlora_sgl import _sgl
from vlora_sgl.model_executor.graph_runner import DEEPSTACK, VLoraPrefillCudaGraphRunner

TOKENS, HIDDEN, LAYERS = 6, 4, 2


class Decoder(nn.Module):
    """Adds what it is given, as Qwen3-VL's adds features behind each of its first layers."""

    deepstack_embed_to_decoder_layer = range(LAYERS)

    def forward(
        self,
        input_ids: object,
        positions: object,
        forward_batch: object,
        input_embeds: torch.Tensor,
        pp_proxy_tensors: object = None,
        input_deepstack_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert input_deepstack_embeds is not None and len(input_deepstack_embeds) == len(input_embeds)
        return input_embeds + input_deepstack_embeds.unflatten(1, (LAYERS, HIDDEN)).sum(1)


class Plain(nn.Module):
    """A decoder that sees by its embeddings alone."""

    def forward(self, input_ids: object, positions: object, batch: object, input_embeds: torch.Tensor) -> torch.Tensor:
        return input_embeds + 1


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ours on SGLang's whose graph is a closure over the tensors that it was captured with."""
    base, made = _sgl.PrefillCudaGraphRunner, object.__new__(VLoraPrefillCudaGraphRunner)
    made.layer_model, made._capture_lora, made.max_num_tokens = Decoder(), False, TOKENS
    config = SimpleNamespace(hidden_size=HIDDEN)
    made.model_runner = SimpleNamespace(model_config=config, dtype=torch.float32, device="cpu")
    embeds = torch.zeros(TOKENS, HIDDEN)

    def run_forward(self: Any, batch: Any, tokens: int) -> Any:
        return self.layer_model.forward(None, None, batch, embeds[:tokens])

    def capture(self: Any) -> None:
        self.graphs = {tokens: lambda tokens=tokens: self._run_forward(None, tokens) for tokens in (3, TOKENS)}
        self.eager = self.layer_model.forward

    def replay(self: Any, batch: Any, static: Any, tokens: int, raw: int, key: object, **_: object) -> Any:
        def forward(input_embeds: Any, **left: object) -> Any:
            assert not left
            embeds[:raw] = input_embeds
            self.layer_model.forward = self.eager
            return self.graphs[tokens]()[:raw]

        self.layer_model.forward = forward
        return self.layer_model(**batch)

    monkeypatch.setattr(base, "_run_forward", run_forward)
    monkeypatch.setattr(base, "capture", capture)
    monkeypatch.setattr(base, "_execute_body_capture", replay)
    made.capture()
    return made


def test_each_replay_adds_its_own_batchs_features_and_text_none(runner: Any) -> None:
    decoder = runner.layer_model
    for raw, tokens, sees in [(3, 3, True), (5, TOKENS, True), (2, 3, False), (TOKENS, TOKENS, False), (1, 3, True)]:
        embeds, features = torch.randn(raw, HIDDEN), torch.randn(raw, LAYERS * HIDDEN)
        padded = torch.cat([features, torch.zeros(tokens - raw, LAYERS * HIDDEN)])
        given = {"input_embeds": embeds} | ({DEEPSTACK: padded} if sees else {})
        found = runner._execute_body_capture(given, None, tokens, raw, SimpleNamespace(variant_label="lora"))
        wanted = embeds + features.unflatten(1, (LAYERS, HIDDEN)).sum(1) if sees else embeds
        torch.testing.assert_close(found, wanted)
    assert runner.layer_model is decoder and not decoder._forward_pre_hooks


def test_other_decoders_are_captured_as_sglang_captures_them(runner: Any) -> None:
    runner.layer_model, runner._deepstack = Plain(), None
    runner.capture()
    assert runner._deepstack is None
    assert (runner._run_forward(None, 3) == 1).all()
