"""What routers are given of a forward, whatever the order in which a model's decoder layer takes its arguments."""

from types import SimpleNamespace
from typing import Any

import pytest

from vlora_sgl.routed.rows import token_routing


class Qwen:
    def forward(self, positions: Any, hidden_states: Any, forward_batch: Any, residual: Any) -> Any:
        return positions, hidden_states, forward_batch, residual


class Gemma:
    def forward(
        self, positions: Any, hidden_states: Any, angles: Any, forward_batch: Any, residual: Any = None
    ) -> Any:
        return positions, hidden_states, forward_batch, residual


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("kind", [Qwen, Gemma])
def test_routers_see_the_embeddings_and_the_batch(kind: Any, by_name: bool) -> None:
    seen: list[Any] = []
    routing = SimpleNamespace(route=lambda x, batch: seen.append((x, batch)))
    layer = kind()
    manager = SimpleNamespace(token_routing=routing, first_layer=lambda: layer)
    (place,) = token_routing(SimpleNamespace(lora_manager=manager))
    given = {"positions": 1, "hidden_states": "x", "angles": 2, "forward_batch": "batch", "residual": None}
    given = {name: value for name, value in given.items() if name != "angles" or kind is Gemma}
    forward: Any = place.value
    answer = forward(**dict(reversed(given.items()))) if by_name else forward(*given.values())
    assert seen == [("x", "batch")] and answer == (1, "x", "batch", None)
