"""``GET /metrics``: SGLang's, our gauges as they are at that moment, and what was counted by adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from vlora_sgl import _sgl, seams
from vlora_sgl.managers.meters import families, lora_requests_info
from vlora_sgl.managers.metrics import Sample, Scrape, samples_of
from vlora_sgl.seams import Place

if TYPE_CHECKING:
    from prometheus_client import Metric

PATIENCE_S = 5.0
"""How long a scrape waits for an engine that is in the middle of an iteration; Prometheus gives up after 10 s."""


async def metrics(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
    """The route, as an ASGI application: it asks the engine first, and then renders."""
    from prometheus_client import CollectorRegistry, make_asgi_app, multiprocess

    manager = scope["app"].state.openai_serving_chat.tokenizer_manager
    labels = {"model_name": manager.served_model_name, **(manager.server_args.extra_metric_labels or {})}
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    registry.register(Scrape(labels, *await _found(manager, labels)))
    await make_asgi_app(registry=registry)(scope, receive, send)


async def _found(manager: Any, labels: Mapping[str, str]) -> tuple[Iterable[Sample], Iterable[Metric]]:
    """The gauges, and what is counted by adapter."""
    loaded = {name: versions.numbers() for name, versions in manager.adapters.versions.items()}
    others = [*families(labels, manager.meters.of_loaded(loaded))]
    try:
        state, adapters = await asyncio.wait_for(manager.state_and_adapters(), PATIENCE_S)
    except TimeoutError:
        return [("engine_answers", 0, {})], others
    if state["plan"] is not None:
        others.append(lora_requests_info(state["plan"]["requests"], manager.server_args.max_loras_per_batch - 1))
    return samples_of(state, adapters), others


def mount() -> None:
    """Put ours in the place of SGLang's, which is mounted when a server starts with ``--enable-metrics``."""
    server: Any = _sgl.http_server
    original: Callable[[Any], None] = server.add_prometheus_middleware

    def add_prometheus_middleware(app: Any) -> None:
        original(app)
        app.routes[-1].app = metrics

    place = Place(server, "add_prometheus_middleware", add_prometheus_middleware)
    seams.place("http_server.add_prometheus_middleware", [place])
