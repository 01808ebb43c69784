"""A routed adapter as a directory: ``vlora_routed.json``, and ``vlora_router.safetensors`` if its router is learned.

::

    {"format": 1, "router": "vocabulary", "members": ["prose", "code", "seeing"],
     "ranges": [{"from": 0, "to": 32000, "member": "prose"}], "modalities": {"image": "seeing", "text": "code"},
     "positions": [{"from": 0, "to": 8, "member": "code"}]}

    {"format": 1, "router": "learned", "members": ["digits", "photos"], "top_k": 1, "context": "prefix"}

    {"format": 1, "router": "compositional",
     "adapters": {"acme": {"text": "acme-text", "image": "acme-image"}, "globex": {"text": "globex-text"}}}

Members are names of adapters that are loaded before the routed adapter. A token that no rule names runs on the base
model. A compositional routed adapter is loaded once per adapter of the request, under a name that ends in ``/acme``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from vlora_sgl.core import JsonDict
from vlora_sgl.errors import AdapterError
from vlora_sgl.files import check_regular, is_there, read_json
from vlora_sgl.routed.token_router import CONTEXTS, MAX_MEMBERS, Router

ROUTED_FILE, ROUTER_FILE = "vlora_routed.json", "vlora_router.safetensors"
MODALITIES = ("text", "image", "video")
FORMAT = 1
MAX_TOP_K = 4
MAX_POSITIONS = 16
"""Ranges of positions that a routed adapter may have."""
MOST_TOKENS = (1 << 31) - 1
_KEYS = {
    "vocabulary": {"members", "ranges", "modalities", "positions"},
    "learned": {"members", "top_k", "context"},
    "compositional": {"adapters"},
}


@dataclass(frozen=True)
class RoutedSpec:
    """One routed adapter, checked.

    Attributes:
        members: adapter names; what the router chooses from.
        ranges: ``(first, end, member)`` of token ids [first, end), later ones win; for text tokens.
        modalities: member of every token of a modality, where no range says otherwise; absent: the base model.
        positions: ``(first, end, member)`` of the tokens at [first, end) of a sequence, of any modality; they come
            before all other rules, later ones win.
        router: the learned router, or ``None``.
        top_k: members per token of a learned router.
    """

    members: tuple[str, ...]
    ranges: tuple[tuple[int, int, int], ...] = ()
    modalities: Mapping[str, int] = field(default_factory=dict)
    router: Router | None = None
    top_k: int = 1
    positions: tuple[tuple[int, int, int], ...] = ()

    def canonical(self) -> bytes:
        """All that decides which member a token gets, for the identity of its KV."""
        rules = [self.members, self.ranges, sorted(self.modalities.items()), self.top_k, self.positions]
        text = json.dumps(rules).encode()
        if self.router is None:
            return text
        weights = [p.detach().cpu().contiguous().numpy().tobytes() for p in self.router.parameters()]
        return b"".join([text, self.router.context.encode(), *weights])


def is_routed(directory: str | Path) -> bool:
    """Whether a directory holds a routed adapter rather than an adapter."""
    return is_there(Path(directory) / ROUTED_FILE)


def read_routed(directory: str | Path, name: str, hidden: int, vocabulary: int) -> RoutedSpec:
    """Read and check a routed adapter.

    Args:
        name: the name it is loaded under; its last part picks the adapter of a compositional routed adapter.
        hidden, vocabulary: of the base model.

    Raises:
        AdapterError: names the file and the key, what was expected and what came.
    """
    path = Path(directory) / ROUTED_FILE
    data = read_json(path)
    kind = data.get("router") if isinstance(data, dict) else None
    if kind not in tuple(_KEYS) or data.get("format") != FORMAT:
        raise AdapterError(f'{path}: expected "format": {FORMAT} and "router", one of {sorted(_KEYS)}, got {kind!r}')
    unknown = data.keys() - _KEYS[kind] - {"format", "router"}
    if unknown:
        raise AdapterError(
            f"{path}: unknown keys {sorted(unknown)}; a {kind} routed adapter has {sorted(_KEYS[kind])}"
        )
    if kind == "compositional":
        return _compositional(data.get("adapters"), name, path)
    members = data.get("members")
    if not isinstance(members, list) or not all(isinstance(m, str) for m in members):
        raise AdapterError(f"{path}: members must be a list of adapter names, got {members!r}")
    if not 1 <= len(members) <= MAX_MEMBERS or len(set(members)) != len(members):
        raise AdapterError(f"{path}: 1 to {MAX_MEMBERS} different members are supported, got {members}")
    if kind == "learned":
        top_k, context = data.get("top_k", 1), data.get("context", "prefix")
        if not isinstance(top_k, int) or not 1 <= top_k <= min(MAX_TOP_K, len(members)):
            raise AdapterError(f"{path}: top_k must be 1 to {min(MAX_TOP_K, len(members))}, got {top_k!r}")
        if context not in CONTEXTS:
            raise AdapterError(f"{path}: context must be one of {CONTEXTS}, got {context!r}")
        return RoutedSpec(tuple(members), router=_router(path, hidden, len(members), context), top_k=top_k)
    ranges = tuple(_range(entry, members, vocabulary, path) for entry in _list(data, "ranges", path))
    positions = tuple(_range(entry, members, MOST_TOKENS, path) for entry in _list(data, "positions", path))
    if len(positions) > MAX_POSITIONS:
        raise AdapterError(f"{path}: up to {MAX_POSITIONS} ranges of positions are supported, got {len(positions)}")
    modalities = _modalities(data.get("modalities", {}), members, path)
    return RoutedSpec(tuple(members), ranges, modalities, positions=positions)


def member_names(directory: str | Path, name: str) -> tuple[str, ...]:
    """The members of a routed adapter loaded under ``name``, for bookkeeping; ``read_routed`` checks it."""
    data = read_json(Path(directory) / ROUTED_FILE)
    if data["router"] == "compositional":
        return tuple(dict.fromkeys(data["adapters"][name.rpartition("/")[2]].values()))
    return tuple(data["members"])


def write_routed(directory: str | Path, members: list[str], router: Router, top_k: int = 1) -> None:
    """Write a learned routed adapter, as ``read_routed`` reads it."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    data = {"format": FORMAT, "router": "learned", "members": members, "top_k": top_k, "context": router.context}
    (directory / ROUTED_FILE).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    save_file({n: p.detach().cpu().contiguous() for n, p in router.named_parameters()}, directory / ROUTER_FILE)


def _compositional(adapters: object, name: str, path: Path) -> RoutedSpec:
    if not isinstance(adapters, dict) or not adapters:
        raise AdapterError(f"{path}: adapters must map names to their adapters by modality, got {adapters!r}")
    entry = name.rpartition("/")[2]
    if entry not in adapters:
        raise AdapterError(
            f"{path}: load it under a name that ends in /ADAPTER, one of {sorted(adapters)}, got {name!r}"
        )
    table = adapters[entry]
    if not isinstance(table, dict):
        raise AdapterError(f"{path}: adapters[{entry!r}] must map modalities to adapter names, got {table!r}")
    members = list(dict.fromkeys(table.values()))
    return RoutedSpec(tuple(members), modalities=_modalities(table, members, path))


def _modalities(table: object, members: list[str], path: Path) -> dict[str, int]:
    if not isinstance(table, dict) or not table.keys() <= set(MODALITIES):
        raise AdapterError(f"{path}: modalities are {MODALITIES}, got {table!r}")
    return {modality: _member(member, members, path) for modality, member in table.items()}


def _list(data: JsonDict, key: str, path: Path) -> list[object]:
    found = data.get(key, [])
    if not isinstance(found, list):
        raise AdapterError(f"{path}: {key} must be a list of ranges, got {found!r}")
    return found


def _range(entry: object, members: list[str], most: int, path: Path) -> tuple[int, int, int]:
    if not isinstance(entry, dict) or entry.keys() != {"from", "to", "member"}:
        raise AdapterError(f'{path}: a range is {{"from": id, "to": id, "member": name}}, got {entry!r}')
    first, end = entry["from"], entry["to"]
    if not (isinstance(first, int) and isinstance(end, int) and 0 <= first < end <= most):
        what = "most tokens of a sequence" if most == MOST_TOKENS else "the vocabulary"
        raise AdapterError(f"{path}: a range lies within 0 and {most}, {what}; got {entry!r}")
    return first, end, _member(entry["member"], members, path)


def _member(name: object, members: list[str], path: Path) -> int:
    if name not in members:
        raise AdapterError(f"{path}: {name!r} is no member; members are {members}")
    return members.index(name)


def _router(path: Path, hidden: int, members: int, context: str) -> Router:
    file = path.with_name(ROUTER_FILE)
    router = Router(hidden, members, context)
    wanted = {name: tuple(tensor.shape) for name, tensor in router.named_parameters()}
    check_regular(file)
    try:
        found = load_file(file)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{file} cannot be read: {error}") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    if shapes != wanted:
        raise AdapterError(f"{file}: expected {wanted} for this base model and {members} members, got {shapes}")
    found = {name: tensor.float() for name, tensor in found.items()}
    if not all(bool(torch.isfinite(tensor).all()) for tensor in found.values()):
        raise AdapterError(f"{file}: holds values that are not finite in float32")
    router.load_state_dict(found)
    return router.requires_grad_(False).eval()
