"""Orders to load an adapter whose files come with them: ``multipart/form-data``, with a part for each file.

Each part has the name of the file that it stands for in an adapter's directory; the other parts are the order's
fields. Nothing but JSON and safetensors is taken.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, BinaryIO, TypeVar

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from vlora_sgl.errors import RequestError, WaitError, listed
from vlora_sgl.managers.uploads import Uploads
from vlora_sgl.server_args import VLoraArgs

Order = TypeVar("Order", bound=BaseModel)

PATHS = ("/load_lora_adapter", "/reload_lora_adapter")
KIND = "multipart/form-data"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
FILES = (WEIGHTS, CONFIG, "vlora_adapter.json", "vlora_heads.safetensors")


def most_bytes() -> dict[str, int]:
    """Of such bodies, by path, where they are taken."""
    most = VLoraArgs.from_environment().max_adapter_bytes
    return dict.fromkeys(PATHS, most) if most else {}


@asynccontextmanager
async def order_in(request: Request, kind: type[Order], uploads: Uploads) -> AsyncIterator[Order]:
    """The order in a request's body; the adapter that came with it is where its ``lora_path`` says, and stays there
    unless the block raises an error, or ``uploads`` drops it.

    Raises:
        RequestError: parts that are not what an adapter's are.
        AdapterUnavailableError: there is no room for the files.
        RequestValidationError: the fields are not what an order's are.
    """
    if not request.headers.get("content-type", "").startswith(KIND):
        yield _order(kind, await request.json())
        return
    fields, files = await _parts(request)
    path = await asyncio.to_thread(uploads.keep, files)
    files.clear()  # not held twice while it is loaded
    try:
        yield _order(kind, {**fields, "lora_path": path})
    except Exception as error:
        if not isinstance(error, WaitError) or not error.begun:
            uploads.drop(path)
        raise


async def _parts(request: Request) -> tuple[dict[str, str], dict[str, BinaryIO]]:
    """The fields and the files."""
    parser = MultiPartParser(request.headers, request.stream(), max_files=len(FILES), max_fields=16)
    parser.spool_max_size = VLoraArgs.from_environment().max_adapter_bytes  # what comes is in memory, never in a file
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise HTTPException(400, f"the body is not {KIND}: {error.message}") from None
    files: dict[str, BinaryIO] = {}
    fields: dict[str, str] = {}
    for name, part in form.multi_items():
        if name in files or name in fields:
            raise RequestError(f"the part {name!r} comes twice")
        if name in FILES:
            files[name] = part.file if isinstance(part, UploadFile) else io.BytesIO(part.encode())
        elif isinstance(part, UploadFile) or name == "lora_path":
            raise RequestError(f"an adapter's parts are {listed(FILES)}; got {name[:80]!r}")
        else:
            fields[name] = part
    if missing := [name for name in (CONFIG, WEIGHTS) if name not in files]:
        raise RequestError(f"an adapter that comes in a body needs a part {missing[0]!r}")
    return fields, files


def _order(kind: type[Order], fields: Any) -> Order:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None
