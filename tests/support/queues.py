"""Queue states for tests of policies: requests and queues by hand, and random ones."""

from __future__ import annotations

from hypothesis import strategies as st

from vlora_sgl.core import ServiceClass, adapters_in
from vlora_sgl.managers.policies import Limits, QueueState, RequestState
from vlora_sgl.managers.policies.cost_table import shipped

COSTS = shipped()["atmm"]
LIMITS = Limits(theta=0.5, wait_bound=2.0)


def waiting(adapter: str | None, arrival: int, **more: object) -> RequestState:
    """A request that has not started."""
    return RequestState(f"r{arrival}", adapter, arrival, **{"prompt": 256, **more})  # type: ignore[arg-type]


def running(adapter: str | None, arrival: int, **more: object) -> RequestState:
    """A request that decodes."""
    return RequestState(f"r{arrival}", adapter, arrival, **{"context": 300, **more})  # type: ignore[arg-type]


def queue(*groups: tuple[str | None, int], progress: float = 0.0) -> list[RequestState]:
    """Running requests: ``(adapter, how many)``."""
    rows = [a for a, n in groups for _ in range(n)]
    return [running(a, i, progress=progress) for i, a in enumerate(rows)]


PLAIN = [None, "a", "b", "c", "d", "e"]
ADAPTERS = st.sampled_from([*PLAIN, '{"a": 0.5, "b": 2.0}', '{"c": 0.1, "d": 1.0, "e": -1.0}'])


@st.composite
def states(draw: st.DrawFn) -> QueueState:
    """Any state an engine can be in."""
    max_batch = draw(st.integers(1, 8))
    max_adapters = draw(st.integers(1, 4))
    can_merge = draw(st.booleans())
    clock = draw(st.floats(0, 20))
    size = draw(st.integers(0, max_batch))
    rows: list[RequestState] = []
    used: set[str] = set()
    for i in range(size):
        adapter = draw(ADAPTERS)
        if len(used | adapters_in([adapter], None)) > max_adapters:
            adapter = None
        used |= adapters_in([adapter], None)
        rows.append(running(adapter, i, progress=draw(st.floats(0, clock)), remaining=draw(st.integers(1, 50))))
    ever = ADAPTERS.filter(lambda adapter: len(adapters_in([adapter], None)) <= max_adapters)
    late = [
        waiting(
            draw(ever),
            size + i,
            progress=draw(st.floats(0, clock)),
            service=draw(st.sampled_from(ServiceClass)),
            deadline=draw(st.sampled_from([None, 0.1, 5.0])),
        )
        for i in range(draw(st.integers(0, 10)))
    ]
    merged = draw(st.sampled_from(PLAIN)) if can_merge else None
    memory = draw(st.dictionaries(st.sampled_from(PLAIN), st.floats(0, 1)))
    return QueueState(clock, late, rows, merged, max_batch, max_adapters, can_merge, memory=memory)
