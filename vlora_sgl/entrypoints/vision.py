"""HTTP for vision heads: ``/v1/vision/{classify,count,detect}``.

The vision routes take OpenAI's content parts and answer with the head's value. Images are ``data:`` URLs, or URLs of
hosts that ``--vlora-image-host`` allows: a server that fetches any URL a client names is a way into its network.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Literal
from urllib.parse import urlsplit

from fastapi import APIRouter, FastAPI, HTTPException, Request
from pydantic import BaseModel, Field

from vlora_sgl import _sgl, seams
from vlora_sgl.core import JsonDict, RequestParams
from vlora_sgl.errors import HeadError, RequestError, VLoraError
from vlora_sgl.heads.requests import describe
from vlora_sgl.images import image_size
from vlora_sgl.seams import Place
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


async def _answer(task: Task, body: VisionRequest, request: Request) -> JsonDict:
    serving = request.app.state.openai_serving_chat
    manager = serving.tokenizer_manager
    try:
        adapter = serving._resolve_lora_path(body.model, None)
        if adapter is None:
            raise HeadError(f"{body.model!r} is the base model, which has no heads; name an adapter that has")
        description = describe(manager.lora_ref_cache[adapter].lora_path)
        head = description.head_named(body.head, task, adapter)
        parts = [part.model_dump(exclude_none=True) for part in body.input]
        urls = [part.image_url.url for part in body.input if part.type == "image_url" and part.image_url]
        check_image_urls(urls, VLoraArgs.from_environment().image_host)
        if not urls:
            raise RequestError(f"{task} needs an image part")
        if description.prompt is not None and not any(part.type == "text" for part in body.input):
            parts.append({"type": "text", "text": description.prompt})
        chat = _sgl.ChatCompletionRequest(
            model=body.model, messages=[{"role": "user", "content": parts}], max_tokens=1, temperature=0
        )
        generate, _ = serving._convert_to_internal_request(chat, request)
        generate.sampling_params = RequestParams(head=head).added_to(generate.sampling_params)
        async for out in manager.generate_request(generate, request):
            meta_info = out["meta_info"]
        if "head" not in meta_info["vlora"]:
            raise RequestError(f"the engine did not answer: {meta_info.get('finish_reason')}")
    except HTTPException:
        raise
    except VLoraError as error:
        raise HTTPException(error.http_status, str(error)) from error
    except ValueError as error:
        raise HTTPException(400, str(error)) from error
    answer = dict(meta_info["vlora"]["head"])
    if task == "detect":
        answer = in_pixels_sent(answer, urls)
    usage = {"prompt_tokens": meta_info["prompt_tokens"], "cached_tokens": meta_info["cached_tokens"]}
    return {"object": f"vision.{task}", "model": adapter, "head": head, "usage": usage, **answer}


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


def mount(app: FastAPI) -> None:
    """Add the routes to SGLang's application, once, before it starts; they read their bodies as its routes do."""
    kind = app.router.route_class
    routes = [kind(one.path, one.endpoint, methods=one.methods, tags=one.tags) for one in router.routes]  # type: ignore[attr-defined]
    seams.place("http_server.app.routes", [Place(app.router.routes, None, route) for route in routes])
