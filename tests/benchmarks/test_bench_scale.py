"""What the cluster's benchmark counts, without a cluster."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from benchmarks.serving.bench_scale import Outcome, Size, closed_loop, tokens_per_second

SIZE = Size(max_batch=8, workers=2, prompt=8.0, output=8.0, warm=1.0, seconds=2.0)


def test_only_answers_that_end_in_the_time_that_counts_count() -> None:
    outcomes = [Outcome(0.0, end, tokens=10) for end in (0.5, 1.0, 2.0, 2.99, 3.0)]
    assert tokens_per_second(outcomes, SIZE) == 15.0
    with pytest.raises(RuntimeError, match="1 requests failed, the first with 503 busy"):
        tokens_per_second([*outcomes, Outcome(0.0, 1.5, error="503 busy")], SIZE)


def test_a_closed_loop_sends_every_body_once_and_reads_errors_from_streams() -> None:
    got: list[int] = []

    async def serve(request: web.Request) -> web.Response:
        body = json.loads(await request.text())
        got.append(body["n"])
        await asyncio.sleep(0.01)
        reply = {"error": {"message": "broke off"}} if body["n"] == 3 else {"meta_info": {"completion_tokens": 5}}
        text = json.dumps(reply)
        if body["stream"]:
            text = f'data: {{"meta_info": {{"completion_tokens": 1}}}}\n\ndata: {text}\n\ndata: [DONE]\n\n'
        return web.Response(text=text, headers={"X-VLora-Replica": "1"})

    async def run() -> list[Outcome]:
        app = web.Application()
        app.router.add_post("/generate", serve)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            return await closed_loop(url, [{"n": n, "stream": n % 2 == 1} for n in range(6)], 2, None)
        finally:
            await runner.cleanup()

    outcomes = asyncio.run(run())
    assert sorted(got) == list(range(6))
    assert sorted(o.tokens for o in outcomes) == [0, 5, 5, 5, 5, 5]
    assert [o.error for o in outcomes if o.error] == ["200 {'message': 'broke off'}"]
    assert {o.replica for o in outcomes} == {1}
