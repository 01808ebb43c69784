"""Orders to load an adapter whose files come with them: ``multipart/form-data``, with a part for each file.

Each part has the name of the file that it stands for in an adapter's directory; the other parts are the order's
fields. Nothing but JSON and safetensors is taken.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, BinaryIO, TypeVar

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from vlora_sgl.errors import RequestError, WaitError, listed
from vlora_sgl.managers.uploads import Uploads, new_file, write
from vlora_sgl.server_args import VLoraArgs

logger = logging.getLogger(__name__)

Order = TypeVar("Order", bound=BaseModel)

PATHS = ("/load_lora_adapter", "/reload_lora_adapter")
KIND = "multipart/form-data"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
FILES = (WEIGHTS, CONFIG, "vlora_adapter.json", "vlora_heads.safetensors")
AT_ONCE = 4 << 20
"""Bytes that are handed to a thread to be written; so many more are received meanwhile."""


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
    parts = Parts(request, uploads)
    try:
        yield _order(kind, {**await parts.read(), "lora_path": parts.directory})
    except BaseException as error:
        if not isinstance(error, WaitError) or not error.begun:
            await parts.drop()
        raise


class Incoming(UploadFile):
    """A file of an adapter, which is written while it comes: on a thread, behind what is received meanwhile."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, size=0)
        self._come: list[bytes] = []
        self._held = 0
        self._writing: asyncio.Future[None] | None = None

    async def write(self, data: bytes) -> None:
        """Take some more of it.

        Raises:
            AdapterUnavailableError: there is no room for what came before.
        """
        self._come.append(data)
        self._held += len(data)
        if self._held >= AT_ONCE:
            await self._write_on()

    async def seek(self, offset: int) -> None:
        """All of it has come: it is written when this returns."""
        await self._write_on()
        await self.written()

    async def _write_on(self) -> None:
        await self.written()
        self._writing = asyncio.ensure_future(asyncio.to_thread(write, self.file, self._come))
        self._come, self._held = [], 0

    async def written(self) -> None:
        """Nothing is being written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing


class Parts(MultiPartParser):
    """Reads a body with an adapter's files, which go to a directory of their own as they come.

    Attributes:
        directory: that one.
    """

    spool_max_size = 0  # what is no adapter's stays in memory, until it is refused

    def __init__(self, request: Request, uploads: Uploads) -> None:
        super().__init__(request.headers, request.stream(), max_files=len(FILES), max_fields=16)
        self._uploads, self.directory = uploads, uploads.begin()
        self._incoming: dict[str, Incoming] = {}

    def on_headers_finished(self) -> None:
        """Starlette's, with a file of ours for each of an adapter's."""
        super().on_headers_finished()
        name = self._current_part.field_name
        if self._current_part.file is not None and name in FILES and name not in self._incoming:
            file = new_file(self.directory, name)
            self._files_to_close_on_error.append(file)  # type: ignore[arg-type]
            self._current_part.file = self._incoming[name] = Incoming(file)

    async def read(self) -> dict[str, str]:
        """The order's fields; the files are in their directory.

        Raises:
            RequestError: parts that are not what an adapter's are.
            AdapterUnavailableError: there is no room for the files.
        """
        begin = time.perf_counter()
        try:
            form = await self.parse()
        except MultiPartException as error:
            raise HTTPException(400, f"the body is not {KIND}: {error.message}") from None
        fields: dict[str, str] = {}
        files: set[str] = set()
        for name, part in form.multi_items():
            if name in files or name in fields:
                raise RequestError(f"the part {name!r} comes twice")
            if name in FILES:
                files.add(name)
                if isinstance(part, str):
                    await asyncio.to_thread(self._keep, name, part)
            elif isinstance(part, UploadFile) or name == "lora_path":
                raise RequestError(f"an adapter's parts are {listed(FILES)}; got {name[:80]!r}")
            else:
                fields[name] = part
        if missing := [name for name in (CONFIG, WEIGHTS) if name not in files]:
            raise RequestError(f"an adapter that comes in a body needs a part {missing[0]!r}")
        for incoming in self._incoming.values():
            incoming.file.close()
        logger.info("an adapter's files came in %.1f ms", 1e3 * (time.perf_counter() - begin))
        return fields

    def _keep(self, name: str, text: str) -> None:
        with new_file(self.directory, name) as file:
            write(file, [text.encode()])

    async def drop(self) -> None:
        """Remove what came."""
        await asyncio.gather(*(one.written() for one in self._incoming.values()), return_exceptions=True)
        for incoming in self._incoming.values():
            incoming.file.close()
        self._uploads.drop(self.directory)


def _order(kind: type[Order], fields: Any) -> Order:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None
