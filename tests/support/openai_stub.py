"""A server with the routes of vLLM's, which answers any prompt with as many empty tokens as are asked for.

    python tests/support/openai_stub.py [--blind] -m vllm.entrypoints.cli.main serve MODEL --port N …

It is called as a Python is that has vLLM. With ``--blind`` it does not start with a model that has a vision tower.
What it is asked is written to ``requests.jsonl`` in the directory that ``STUB_LOG`` names.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

LOG = "STUB_LOG"
CACHED = 3
MODELS = web.AppKey("models", list[str])


def note(what: Any) -> None:
    with (Path(os.environ[LOG]) / "requests.jsonl").open("a") as file:
        file.write(json.dumps(what) + "\n")


async def complete(request: web.Request) -> web.StreamResponse:
    """Either of the two routes that generate."""
    body = await request.json()
    note({"route": request.path, **body})
    if body["model"] not in request.app[MODELS]:
        return web.json_response({"error": {"message": f"no model {body['model']}"}}, status=404)
    chat, count = "messages" in body, body["max_tokens"]
    usage = {"prompt_tokens": 10, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": CACHED}}
    if not body.get("stream"):
        return web.json_response({"choices": [{"text": "" * count}], "usage": usage})
    assert body["stream_options"] == {"include_usage": True}
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await stream.prepare(request)

    async def send(chunk: Any) -> None:
        await stream.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    if chat:
        await send({"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": None})
    for _ in range(count):
        await send({"choices": [{"delta": {"content": ""}} if chat else {"text": ""}], "usage": None})
        await asyncio.sleep(0.001)
    if body["model"] == "breaks":
        await send({"error": {"message": "it broke"}})
    else:
        await send({"choices": [], "usage": usage})
    await stream.write(b"data: [DONE]\n\n")
    return stream


async def fine(request: web.Request) -> web.Response:
    if request.method == "POST":
        note({"route": request.path})
    return web.Response()


def application(models: list[str]) -> web.Application:
    """Serves these models by name."""
    app = web.Application()
    app[MODELS] = models
    app.router.add_get("/health", fine)
    app.router.add_post("/reset_prefix_cache", fine)
    for route in ("/v1/completions", "/v1/chat/completions"):
        app.router.add_post(route, complete)
    return app


def main() -> None:
    argv = sys.argv[1:]
    blind = argv[0] == "--blind"
    assert argv[blind : blind + 3] == ["-m", "vllm.entrypoints.cli.main", "serve"], argv
    model = Path(argv[blind + 3])
    config = json.loads((model / "config.json").read_text())
    note({"route": "start", "argv": argv[blind + 3 :], "development": os.environ.get("VLLM_SERVER_DEV_MODE")})
    if blind and "vision_config" in config:
        sys.exit("no vision tower here")
    first = argv.index("--lora-modules") + 1
    named = [word.partition("=")[0] for word in argv[first:] if "=" in word]
    port = int(argv[argv.index("--port") + 1])
    web.run_app(application([argv[argv.index("--served-model-name") + 1], *named]), port=port, print=None)


if __name__ == "__main__":
    main()
