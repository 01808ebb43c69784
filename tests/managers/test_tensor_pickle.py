"""Messages to the scheduler: what comes out is what went in."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

from vlora_sgl import _sgl
from vlora_sgl.managers import tensor_pickle
from vlora_sgl.managers.tokenizer_manager import VLoraTokenizerManager

DTYPES = [*tensor_pickle.WITH_ARRAYS, torch.bfloat16, torch.complex64]
TENSORS = {
    "a matrix": torch.arange(12).reshape(3, 4),
    "a view": torch.arange(1000).reshape(10, 100)[3:5, ::7],
    "its transpose": torch.arange(12).reshape(3, 4).T,
    "expanded": torch.arange(3).expand(4, 3),
    "a number": torch.tensor(7),
    "nothing": torch.empty(0, 5),
    "with a gradient": torch.ones(3, requires_grad=True),
    "a parameter": torch.nn.Parameter(torch.ones(3)),
    "sparse": torch.eye(3).to_sparse(),
}


def through(message: Any) -> Any:
    return pickle.loads(tensor_pickle.dumps(message))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kind_of_element(dtype: torch.dtype) -> None:
    sent = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype)
    assert through(sent).dtype == dtype and torch.equal(through(sent), sent)


@pytest.mark.parametrize("name", TENSORS)
def test_every_kind_of_tensor(name: str) -> None:
    sent = TENSORS[name]
    got = through(sent)
    assert (type(got), got.shape, got.layout, got.requires_grad) == (
        *(type(sent), sent.shape, sent.layout, sent.requires_grad),
    )
    assert torch.equal(got.to_dense(), sent.to_dense())


def test_what_comes_out_can_be_written_to(recwarn: pytest.WarningsRecorder) -> None:
    got = through(torch.zeros(3))
    got += 1
    assert got.tolist() == [1, 1, 1] and not recwarn.list


def test_the_dispatch_is_sglangs_format_in_fewer_bytes() -> None:
    sent: list[bytes] = []
    manager: Any = SimpleNamespace(tokenizer_ipc_name=None, send_to_scheduler=SimpleNamespace(send=sent.append))
    item = MultimodalDataItem(
        modality=Modality.IMAGE, offsets=[(1, 4)], model_specific_data={"grid": torch.ones(1, 3)}
    )
    assert _sgl.USE_PICKLE_IPC
    VLoraTokenizerManager._dispatch_to_scheduler(manager, item)
    got = pickle.loads(sent[0])
    assert (got.modality, got.offsets, got.grid.tolist()) == (Modality.IMAGE, [(1, 4)], [[1, 1, 1]])
    assert len(sent[0]) < len(pickle.dumps(item, pickle.HIGHEST_PROTOCOL))
