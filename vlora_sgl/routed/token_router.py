"""Learned routing: a small network votes for a member at every token, and the votes decide (MoLoRA, equations 8, 9).

A vote is the network's output on the token's input embedding; for an image token that is what the vision tower made of
its patch. With context ``"token"`` a token is routed by its own vote, as in the paper. With ``"prefix"``, the default,
by the mean of the votes up to and with it: the token that starts an answer is the same in every prompt, and only what
came before can say whose answer it is. Either way routing depends on the token's prefix alone, so KV may be reused.

Votes are summed as integers: a sum is then the same however a prompt was cut into chunks or found in the cache.
"""

from __future__ import annotations

import torch
from torch import nn

MAX_MEMBERS = 16
WIDTH = 64
CONTEXTS = ("prefix", "token")
LIMIT = 30.0
"""Bound of a vote's size; a softmax is long saturated there."""
UNIT = 1 << 12
"""Steps of a vote per 1.0. 2^63 / (30 * 2^12) tokens fit a sum: no overflow."""
_EPS = 1e-6


class Router(nn.Module):
    """``W2 GELU(W1 x / rms(x) + b1) + b2``: [..., hidden] to [..., members], float32, within ``LIMIT``.

    The root mean square makes it deaf to the scale of embeddings, which differs between text and images.
    """

    def __init__(self, hidden: int, members: int, context: str = "prefix") -> None:
        super().__init__()
        self.context = context
        self.w1 = nn.Parameter(torch.randn(WIDTH, hidden) * hidden**-0.5)
        self.b1 = nn.Parameter(torch.zeros(WIDTH))
        self.w2 = nn.Parameter(torch.randn(members, WIDTH) * 0.1 * WIDTH**-0.5)
        self.b2 = nn.Parameter(torch.zeros(members))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The votes of tokens with input embeddings ``x``."""
        x = x.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPS)
        return (nn.functional.gelu(x @ self.w1.T + self.b1) @ self.w2.T + self.b2).clamp(-LIMIT, LIMIT)


def quantised(votes: torch.Tensor) -> torch.Tensor:
    """Votes as integers of ``1 / UNIT``, int64."""
    return (votes * UNIT).round().to(torch.int64)


def prefix_totals(votes: torch.Tensor, first: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Per row, the sum of the votes from its sequence's start up to and with it.

    Args:
        votes: [n, K] int64, the rows of each sequence together and in order.
        first: [n] int64, the position among the rows of its sequence's first one.
        before: [n, K] int64, the total in front of its sequence's first row.
    """
    running = votes.cumsum(0)
    return running - running[first] + votes[first] + before


def top_weights(totals: torch.Tensor, count: torch.Tensor, top_k: int) -> torch.Tensor:
    """``softmax(TopK(totals / count))``: [n, K] float32, exactly ``top_k`` of each row not zero, ties to the first.

    Args:
        totals: [n, K] int64.
        count: [n] votes in each total.
    """
    mean = (totals.double() / (UNIT * count[:, None])).float()
    order = mean.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    return torch.zeros_like(mean).scatter(1, order, mean.gather(1, order).softmax(-1))
