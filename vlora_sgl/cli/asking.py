"""``vlora ask``: one question about an image, to the base model and to adapters; what heads find is drawn."""

from __future__ import annotations

import base64
import mimetypes
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vlora_sgl.cli.client import Client
from vlora_sgl.cli.result import CommandError, Result, table
from vlora_sgl.core import JsonDict
from vlora_sgl.names import DEFAULT

AT_A_TIME = 8


def ask(args: Namespace) -> Result:
    """A table of answers: what, in how many seconds, how much of the prompt was kept, in which mode.

    Raises:
        CommandError: no image, nothing to ask, or an adapter that there is not.
    """
    client, url = Client(args), _data_url(args.image)
    known = {row["name"]: row for row in client.get("/lora_adapters")["adapters"]}
    names = [*known] if args.all else args.adapter
    if missing := [name for name in names if name not in known]:
        raise CommandError(f"no adapter named {missing[0]!r}; loaded: {', '.join(known) or 'none'}")
    asked = [_words(None, args.question, url, args)] if args.question else []
    for name in names:
        question = args.question or known[name].get("prompt")
        asked += [_words(name, question, url, args)] if question else []
        asked += [_head(name, head, kind, url) for head, kind in (known[name].get("heads") or {}).items()]
    if not asked:
        raise CommandError('what is the question? vlora ask IMAGE "QUESTION"', 2)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        rows = list(pool.map(lambda one: _answer(client, *one), asked))
    drawn = _draw(rows, args)
    text = table(
        [[row["adapter"] or "(base)", row["head"], row["answer"], row["seconds"], row["cached"], row["mode"]]
         for row in rows],
        ["adapter", "head", "answer", "seconds", "cached", "mode"],
    )  # fmt: skip
    data = {"answers": rows, "boxes": None if drawn is None else str(drawn)}
    failed = any("error" in row for row in rows)
    return Result(data, text + (f"\nboxes: {drawn}" if drawn else ""), int(failed))


def _words(name: str | None, question: str, url: str, args: Namespace) -> tuple[str, JsonDict, JsonDict]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    body = {"model": name or DEFAULT, "input": parts, "max_tokens": args.max_tokens}
    return "/v1/vision/ask", body, {"adapter": name, "head": None}


def _head(name: str, head: str, kind: str, url: str) -> tuple[str, JsonDict, JsonDict]:
    body = {"model": name, "head": head, "input": [{"type": "image_url", "image_url": {"url": url}}]}
    return f"/v1/vision/{kind}", body, {"adapter": name, "head": head}


def _answer(client: Client, path: str, body: JsonDict, row: JsonDict) -> JsonDict:
    """A row of the table; what the server refuses of one question is that row's answer."""
    begin = time.monotonic()
    try:
        told = client.post(path, body)
    except CommandError as error:
        nothing = dict.fromkeys(("seconds", "cached", "mode"))
        return {**row, "answer": f"refused: {error}", "error": str(error), **nothing}
    modes = dict.fromkeys(told.get("modes", ()))
    return {
        **row,
        "answer": _shown(told),
        "seconds": round(time.monotonic() - begin, 3),
        "cached": told["usage"]["cached_tokens"],
        "mode": ", ".join(modes) or None,
        **({"boxes": told["boxes"]} if "boxes" in told else {}),
    }


def _shown(told: Any) -> str:
    if "boxes" in told:
        return f"{len(told['boxes'])} found"
    if "text" in told:
        return str(told["text"]).strip()
    sure = f" ({told['probability']:.0%})" if told.get("probability") is not None else ""
    return f"{told.get('label', told.get('count'))}{sure}"


def _draw(rows: list[JsonDict], args: Namespace) -> Path | None:
    """The image with all boxes in it, where a head has looked for some."""
    looked = [row for row in rows if "boxes" in row]
    if not looked:
        return None
    from vlora_sgl.lang.values import Box, Boxes

    def box_of(found: Any) -> Box:
        x0, y0, x1, y1 = found["box"]
        return Box(x0, y0, x1, y1, found["label"], found["score"])

    path: Path = args.out or Path(f"{args.image.stem}.boxes.png")
    Boxes(box_of(found) for row in looked for found in row["boxes"]).draw(args.image).save(path)
    return path


def _data_url(path: Path) -> str:
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    try:
        return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}", 2) from None
