"""The routes that SGLang's application has none of: questions about images, the page, what it watches."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from vlora_sgl import seams
from vlora_sgl.entrypoints import page, vision
from vlora_sgl.seams import Place


def mount(app: FastAPI) -> None:
    """Add the routes to SGLang's application, once, before it starts; they read their bodies as its routes do."""
    kind = app.router.route_class
    ours: list[Any] = [*vision.router.routes, *page.router.routes]
    routes = [
        kind(one.path, one.endpoint, methods=one.methods, tags=one.tags, include_in_schema=one.include_in_schema)
        for one in ours
    ]
    seams.place("http_server.app.routes", [Place(app.router.routes, None, route) for route in routes])
