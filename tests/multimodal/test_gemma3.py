"""Images of Gemma 3: refused by name where SGLang would attend to them otherwise; rows of text beside them."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.models import gemma3_mm

from vlora_sgl.errors import RequestError
from vlora_sgl.multimodal.gemma3 import masks, processor_of


def server_args(attention: str) -> Any:
    return SimpleNamespace(get_attention_backends=lambda: (attention, attention))


@pytest.mark.parametrize("attention", ["torch_native", "fa3", "flashinfer"])
def test_images_are_refused_where_they_would_be_misread(attention: str) -> None:
    config = SimpleNamespace(architectures=["Gemma3ForConditionalGeneration"])
    processor = processor_of(SimpleNamespace(), config, server_args(attention))
    with pytest.raises(RequestError, match=f"--attention-backend triton: with {attention}"):
        asyncio.run(processor.process_mm_data_async(image_data=["x"], input_text="y", request_obj=None))


def test_triton_attention_reads_them_and_other_models_read_theirs() -> None:
    processor = SimpleNamespace(process_mm_data_async=len)
    for name, attention in (("Gemma3ForConditionalGeneration", "triton"), ("Qwen2VLForConditionalGeneration", "fa3")):
        config = SimpleNamespace(architectures=[name])
        assert processor_of(processor, config, server_args(attention)).process_mm_data_async is len


def test_a_text_beside_an_image_has_its_own_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own function: image tokens 1 and 2 of the second row see each other, all else is causal."""
    backend = object.__new__(gemma3_mm.TritonAttnBackend)
    backend.forward_metadata = SimpleNamespace()
    monkeypatch.setattr(gemma3_mm, "get_attn_backend", lambda: backend)
    model = object.__new__(gemma3_mm.Gemma3ForConditionalGeneration)
    torch.nn.Module.__init__(model)
    image = SimpleNamespace(mm_items=[SimpleNamespace(is_image=lambda: True, offsets=[(1, 2)])])
    batch = SimpleNamespace(
        forward_mode=gemma3_mm.ForwardMode.EXTEND, batch_size=2, mm_inputs=[None, image],
        extend_seq_lens=torch.tensor([2, 4]), extend_prefix_lens=torch.tensor([0, 0]),
    )  # fmt: skip
    (place,) = masks(SimpleNamespace(model=model))  # type: ignore[misc, arg-type]
    place.value(batch, input_ids=torch.zeros(6, dtype=torch.long), mask_dtype=torch.bool)
    text, seen = torch.ones(2, 2).tril(), torch.ones(4, 4).tril()
    seen[1, 2] = 1
    found = backend.forward_metadata.custom_mask
    assert torch.equal(found, torch.cat([text.flatten(), seen.flatten()]).bool())
    assert batch.mm_inputs == [None, image], "as it was"
