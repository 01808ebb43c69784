"""HTTP for questions about images: ``/v1/vision/{classify,count,detect,ask}``.

The vision routes take OpenAI's content parts and answer with a head's value, or (``ask``) in words. Images are
``data:`` URLs, or URLs of hosts that ``--vlora-image-host`` allows: a server that fetches any URL a client names is a
way into its network.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Literal
from urllib.parse import urlsplit

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from vlora_sgl import _sgl
from vlora_sgl.core import JsonDict, RequestParams
from vlora_sgl.errors import HeadError, RequestError, VLoraError
from vlora_sgl.heads.requests import describe
from vlora_sgl.heads.store import AdapterDescription
from vlora_sgl.images import image_size
from vlora_sgl.server_args import MOST_IMAGE_PIXELS, VLoraArgs

router = APIRouter(prefix="/v1/vision", tags=["vision"])

Task = Literal["classify", "count", "detect"]


class ImageUrl(BaseModel):
    """Where an image is."""

    url: str = Field(description="data:image/...;base64,... or an http(s) URL of an allowed host")


class Part(BaseModel):
    """One of OpenAI's content parts."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageUrl | None = None


class VisionRequest(BaseModel):
    """One question about one or several images (the frames of a clip, say)."""

    model: str = Field(description="adapter, or base:adapter")
    head: str | None = Field(None, description="left out: the adapter's only head for this task")
    input: list[Part] = Field(description="images, and the question unless the adapter comes with one")


class AskRequest(VisionRequest):
    """One question that is answered in words."""

    max_tokens: int = Field(64, ge=1, description="most tokens of the answer")
    stream: bool = Field(False, description="send the answer while it is generated")


@router.post("/classify")
async def classify(body: VisionRequest, request: Request) -> JsonDict:
    """One of the head's labels, with the probabilities of all."""
    return await _answer("classify", body, request)


@router.post("/count")
async def count(body: VisionRequest, request: Request) -> JsonDict:
    """How many: the likeliest count and the expectation."""
    return await _answer("count", body, request)


@router.post("/detect")
async def detect(body: VisionRequest, request: Request) -> JsonDict:
    """Labelled boxes, as fractions of the image and in its pixels as they were sent."""
    return await _answer("detect", body, request)


@router.post("/ask")
async def ask(body: AskRequest, request: Request) -> Any:
    """The base model's answer in words, or an adapter's, and how it came about; with ``stream`` as events, each with
    the text so far."""
    serving = request.app.state.openai_serving_chat
    manager = serving.tokenizer_manager
    begin = time.monotonic()
    with _refusing():
        adapter = serving._resolve_lora_path(body.model, None)
        description = AdapterDescription() if adapter is None else describe(manager.adapters.directory_of(adapter))
        sent = {"max_tokens": body.max_tokens, "stream": body.stream}
        generate = _generation(body, request, RequestParams(trace=True), description, **sent)
        answers = manager.generate_request(generate, request)
        first = _whole(await anext(answers))
    if not body.stream:
        await answers.aclose()
        return _told(adapter, first, begin)
    left = manager.create_abort_task(generate)
    return StreamingResponse(_events(adapter, first, answers, begin), media_type="text/event-stream", background=left)


async def _events(
    adapter: str | None, first: JsonDict, rest: AsyncGenerator[Any], begin: float
) -> AsyncIterator[bytes]:
    """An answer as it grows; what goes wrong once it has begun is an event, too."""
    async with aclosing(rest):
        try:
            yield _event(_told(adapter, first, begin))
            async for out in rest:
                yield _event(_told(adapter, _whole(out), begin))
        except HTTPException as error:
            yield _event({"error": {"message": str(error.detail), "code": error.status_code}})
        except ValueError as error:
            yield _event({"error": {"message": str(error), "code": 400}})
    yield b"data: [DONE]\n\n"


def _whole(out: JsonDict) -> JsonDict:
    """An answer, or what there is of one.

    Raises:
        HTTPException: the engine ended it; in a stream SGLang only says so.
    """
    reason = out["meta_info"].get("finish_reason") or {}
    if reason.get("type") == "abort" and reason.get("status_code"):
        raise HTTPException(reason["status_code"], reason.get("message"))
    return out


def _event(data: JsonDict) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _told(adapter: str | None, out: JsonDict, begin: float) -> JsonDict:
    """What the client is told of an answer.

    ``seconds`` since the request came; ``modes`` in which its tokens were computed, in order; ``reuse`` of its prompt;
    ``images`` by their numbers in the prefix cache.
    """
    meta_info = out["meta_info"]
    usage = {name: meta_info.get(name, 0) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")}
    told = {name: meta_info["vlora"][name] for name in ("modes", "reuse", "images") if name in meta_info["vlora"]}
    finish = (meta_info.get("finish_reason") or {}).get("type")
    answer = {"model": adapter, "text": out.get("text", ""), "finish_reason": finish, "usage": usage}
    return {"object": "vision.ask", **answer, "seconds": round(time.monotonic() - begin, 4), **told}


async def _answer(task: Task, body: VisionRequest, request: Request) -> JsonDict:
    serving = request.app.state.openai_serving_chat
    with _refusing():
        adapter = serving._resolve_lora_path(body.model, None)
        if adapter is None:
            raise HeadError(f"{body.model!r} is the base model, which has no heads; name an adapter that has")
        description = describe(serving.tokenizer_manager.adapters.directory_of(adapter))
        head = description.head_named(body.head, task, adapter)
        if not _urls(body):
            raise RequestError(f"{task} needs an image part")
        generate = _generation(body, request, RequestParams(head=head), description, max_tokens=1)
        async for out in serving.tokenizer_manager.generate_request(generate, request):
            meta_info = out["meta_info"]
        if "head" not in meta_info["vlora"]:
            raise RequestError(f"the engine did not answer: {meta_info.get('finish_reason')}")
    answer = dict(meta_info["vlora"]["head"])
    if task == "detect":
        answer = in_pixels_sent(answer, _urls(body))
    usage = {"prompt_tokens": meta_info["prompt_tokens"], "cached_tokens": meta_info["cached_tokens"]}
    return {"object": f"vision.{task}", "model": adapter, "head": head, "usage": usage, **answer}


def _generation(
    body: VisionRequest, request: Request, asked: RequestParams, description: AdapterDescription, **chat: Any
) -> Any:
    """SGLang's request to the engine for what a body asks, in the model's own chat template.

    Raises:
        RequestError: an image's URL that is not allowed, or nothing to ask.
    """
    parts = [part.model_dump(exclude_none=True) for part in body.input]
    check_image_urls(_urls(body), VLoraArgs.from_environment().image_host)
    if description.prompt is not None and not any(part.type == "text" for part in body.input):
        parts.append({"type": "text", "text": description.prompt})
    if not parts:
        raise RequestError("input needs a question or an image")
    message = {"role": "user", "content": parts}
    question = _sgl.ChatCompletionRequest(model=body.model, messages=[message], temperature=0, **chat)
    generate, _ = request.app.state.openai_serving_chat._convert_to_internal_request(question, request)
    generate.sampling_params = asked.added_to(generate.sampling_params)
    return generate


def _urls(body: VisionRequest) -> list[str]:
    return [part.image_url.url for part in body.input if part.type == "image_url" and part.image_url]


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except HTTPException:
        raise
    except VLoraError as error:
        raise HTTPException(error.http_status, str(error)) from error
    except ValueError as error:
        raise HTTPException(400, str(error)) from error


def check_image_urls(urls: Iterable[str], hosts: Iterable[str]) -> None:
    """Allow data URLs, and http(s) URLs of these hosts.

    Raises:
        RequestError: another URL; names the allowed hosts.
    """
    allowed = tuple(hosts)
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme == "data" or (parts.scheme in ("http", "https") and parts.hostname in allowed):
            continue
        shown = url if len(url) < 80 else url[:77] + "..."
        known = ", ".join(allowed) or "none is allowed"
        raise RequestError(f"image {shown!r} is neither a data: URL nor on an allowed host ({known})")


def in_pixels_sent(answer: JsonDict, urls: list[str]) -> JsonDict:
    """The answer with ``pixels`` in the images as they were sent (upright), where those came with the request."""
    sizes = list(answer["image_sizes"])
    for index, url in enumerate(urls[: len(sizes)]):
        if url.startswith("data:"):
            sizes[index] = list(image_size(base64.b64decode(url.partition(",")[2]), MOST_IMAGE_PIXELS))
    boxes = [
        {**box, "pixels": [edge * side for edge, side in zip(box["box"], sizes[box["image"]] * 2, strict=True)]}
        for box in answer["boxes"]
    ]
    return {**answer, "image_sizes": sizes, "boxes": boxes}
