"""Images of Gemma 3, whose tokens attend to one another in both directions.

SGLang 0.5.17 does so in its Triton attention alone, elsewhere each token sees those before it, without a word, and the
answer is another one. So images are refused there. In Triton attention SGLang looks for the images of every row of a
batch that has any, and ends at a row of text.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vlora_sgl import _sgl
from vlora_sgl._sgl_types import ModelRunner
from vlora_sgl.errors import RequestError
from vlora_sgl.seams import Place, Places

ARCHITECTURE = "Gemma3ForConditionalGeneration"
TEXT = SimpleNamespace(mm_items=())
"""Stands for the images of a row that has none."""


def why_blind(hf_config: Any, server_args: Any) -> str | None:
    """Why images are refused, if the model is Gemma 3 and prefills have another attention than Triton's."""
    attention, _ = server_args.get_attention_backends()
    if ARCHITECTURE not in (hf_config.architectures or ()) or attention == "triton":
        return None
    return (
        f"images of Gemma 3 need --attention-backend triton: with {attention}, SGLang would answer as if their tokens "
        "did not see one another"
    )


def processor_of(found: Any, hf_config: Any, server_args: Any) -> Any:
    """SGLang's processor ``found``; its ``process_mm_data_async`` raises ``RequestError`` where images are refused."""
    why = why_blind(hf_config, server_args)
    if why is None:
        return found

    async def refuse(*args: object, **kwargs: object) -> Any:
        raise RequestError(why)

    found.process_mm_data_async = refuse
    return found


def masks(runner: ModelRunner) -> Places:
    """What stands in the place of ``prepare_attn_masks``: SGLang's, given no images for rows of text."""
    model: Any = runner.model
    if not _sgl.is_a(model, ARCHITECTURE):
        return f"the model is no {ARCHITECTURE}"
    own = model.prepare_attn_masks

    def prepare(forward_batch: Any, *args: object, **kwargs: object) -> None:
        rows = forward_batch.mm_inputs
        forward_batch.mm_inputs = [TEXT if row is None else row for row in rows]
        try:
            own(forward_batch, *args, **kwargs)
        finally:
            forward_batch.mm_inputs = rows

    return [Place(model, "prepare_attn_masks", prepare)]
