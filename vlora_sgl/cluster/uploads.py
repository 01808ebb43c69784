"""Adapters that came in requests, as the parts of a fleet hand them on; fronts keep them for the next directory."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from urllib.parse import quote

from aiohttp import web

from vlora_sgl.cluster.catalogue import Catalogue, Upload
from vlora_sgl.cluster.links import FLEET
from vlora_sgl.core import JsonDict

PATH = f"{FLEET}upload"


def path(key: str) -> str:
    """Where the files of an adapter are."""
    return f"{PATH}?key={quote(key, safe='')}"


def missing(state: JsonDict, catalogue: Catalogue) -> Iterator[str]:
    """Keys of the files that ``Catalogue.state`` names and another has not, or has others of."""
    held = {key: upload.tag for key, upload in catalogue.files.items()}
    return (key for key, tag in state["files"].items() if held.get(key) != tag)


def packed(upload: Upload) -> bytes:
    """Files by name, and their tag, in one piece."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.comment = upload.tag.encode()
        for name, content in upload.items():
            archive.writestr(name, content)
    return out.getvalue()


def unpacked(body: bytes) -> Upload:
    """What ``packed`` was given."""
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        return Upload({name: archive.read(name) for name in archive.namelist()}, archive.comment.decode())


def mount(app: web.Application, catalogue: Catalogue) -> None:
    """Give a catalogue's files, and take them."""

    async def give(request: web.Request) -> web.Response:
        return web.Response(body=packed(catalogue.files[request.query["key"]]))

    async def take(request: web.Request) -> web.Response:
        catalogue.files[request.query["key"]] = unpacked(await request.content.read())
        return web.Response()

    app.router.add_get(PATH, give)
    app.router.add_post(PATH, take)
