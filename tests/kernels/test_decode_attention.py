"""Attention of one new token a sequence, against float64: under Triton's interpreter, and on the GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.interpreter import CUDA, DEVICE, kernels, passed_interpreted, starter
from vlora_sgl.kernels import decode_attention as module
from vlora_sgl.kernels.decode_attention import CHUNK, decode_attention, decode_attention_reference

# heads of q, of keys, width of a head
HEADS = [(28, 4, 128), (4, 4, 64), (16, 1, 128), (3, 1, 32)]
# cached tokens of each sequence, its newest among them
LENGTHS = [[1], [CHUNK, CHUNK + 1, 1, 63, 65], [4 * CHUNK + 7, 9 * CHUNK + 5, 2]]
SPLITS = 8
DTYPES = [torch.float16, *([torch.bfloat16] if CUDA else [])]
POISON = float("nan")


class Case:
    """Sequences in a pool of which every slot that is not theirs is poisoned, with room on all sides."""

    def __init__(self, heads: tuple[int, int, int], lengths: list[int], dtype: torch.dtype, seed: int = 0) -> None:
        torch.manual_seed(seed)
        query_heads, kv_heads, width = heads
        total, tokens = sum(lengths), len(lengths)
        slots = 2 * total + 3
        self.places = torch.randperm(slots)[:total].to(DEVICE)
        self.starts = torch.tensor([0, *lengths, 0]).cumsum(0).to(torch.int32).to(DEVICE)
        pools = torch.full((2, slots, kv_heads, width + 16), POISON, dtype=dtype, device=DEVICE)
        for pool in pools:
            pool[self.places, :, :width] = torch.randn(total, kv_heads, width, device=DEVICE).to(dtype)
        self.k, self.v = pools[0, ..., :width], pools[1, ..., :width]
        self.q = torch.randn(tokens, query_heads, width, device=DEVICE).to(dtype)
        self.partials = torch.full((tokens, query_heads, SPLITS, width), POISON, device=DEVICE)
        self.weights = torch.full((tokens, query_heads, SPLITS), POISON, device=DEVICE)
        self.scale = width**-0.5
        self.room = torch.full((tokens + 1, query_heads + 1, width), POISON, dtype=dtype, device=DEVICE)
        self.out = self.room[:tokens, :query_heads]

    def run(self) -> torch.Tensor:
        decode_attention(
            self.q, self.k, self.v, self.out, self.starts, self.places, self.partials, self.weights, self.scale
        )
        return self.out

    def exact(self) -> torch.Tensor:
        return decode_attention_reference(self.q, self.k, self.v, self.starts, self.places, self.scale)

    def torchs(self) -> torch.Tensor:
        """torch's own attention, in the same dtype."""
        answers = []
        for t in range(len(self.q)):
            here = self.places[self.starts[t] : self.starts[t + 1]]
            k, v = (pool[here].transpose(0, 1)[None] for pool in (self.k, self.v))
            q = self.q[t][None, :, None]
            answers.append(
                torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=True)[0, :, 0]
            )
        return torch.stack(answers)


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_kernel_attends_to_every_cached_token(
    heads: tuple[int, int, int], lengths: list[int], dtype: torch.dtype
) -> None:
    case = Case(heads, lengths, dtype)
    exact, answer = case.exact(), case.run()
    floor = (case.torchs().double() - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max() / 2
    assert (answer.double() - exact).abs().max() <= 4 * floor
    assert case.room[-1].isnan().all() and case.room[:, -1].isnan().all(), "wrote outside its rows"
    assert not module.arrivals(case.q.device, "attention").any(), "counters must be zero for the next launch"


@kernels
def test_kernel_gives_a_token_the_same_bits_in_any_batch() -> None:
    case = Case((28, 4, 128), [3 * CHUNK + 9, 5, CHUNK], torch.float16)
    together = case.run().clone()
    for t in (0, 2):
        case.out.fill_(POISON)
        decode_attention(
            case.q[t : t + 1], case.k, case.v, case.out[t : t + 1], case.starts[t:], case.places,
            case.partials, case.weights, case.scale,
        )  # fmt: skip
        assert torch.equal(case.out[t], together[t])


@kernels
def test_kernel_scales_scores_and_values() -> None:
    case = Case((4, 2, 64), [17, 300], torch.float16)
    decode_attention(
        case.q, case.k, case.v, case.out, case.starts, case.places, case.partials, case.weights, 0.5, 0.25
    )
    exact = decode_attention_reference(case.q, case.k, case.v, case.starts, case.places, 0.5, 0.25)
    assert (case.out.double() - exact).abs().max() <= 2e-3 * exact.abs().max() + 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_on_a_gpu_a_replay_gives_the_same_bits_for_other_lengths() -> None:
    """A graph captured for one set of lengths serves another that its tables are changed to."""
    case, other = (Case((28, 4, 128), lengths, torch.bfloat16, 1) for lengths in ([9, 700], [650, 300]))
    eager = other.run().clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        case.run()
    torch.cuda.synchronize()
    places = torch.zeros(2048, dtype=torch.int64, device="cuda")
    case.k, case.v, case.places = other.k, other.v, places
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run()
    places[: len(other.places)] = other.places
    case.starts.copy_(other.starts)
    case.q.copy_(other.q)
    for _ in range(3):
        case.out.fill_(POISON)
        graph.replay()
        assert torch.equal(case.out, eager)


@starter
def test_attention_under_the_interpreter() -> None:
    assert passed_interpreted(__file__) == len(HEADS) * len(LENGTHS) + 2
