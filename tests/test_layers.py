"""Imports point one way: CONTRIBUTING draws the arrows, this holds them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import vlora_sgl

PACKAGE = Path(vlora_sgl.__file__).parent

# A room may import rooms to its left, and these, which import no room.
SHARED = (
    *("errors", "combined", "core", "names", "files", "strict_json", "images", "request", "seams", "_sgl"),
    *("_sgl_types", "platforms", "server_args", "sources", "versions", "page", "scaled"),
)
ENGINE = (
    *("kernels", "multimodal", "mem_cache", "heads", "routed", "lora", "model_executor", "managers", "entrypoints"),
    *("plugin", "startup", "defaults", "engine", "launch_server"),
)
# What stands beside the engine -> the rooms it may import. The engine imports none of it.
COMPANIONS: Mapping[str, tuple[str, ...]] = {
    "lang": (),
    "models": (),
    "cluster": ("routed",),
    "launch_cluster": ("cluster",),
    "export": ("heads", "lora"),
    "generate": ("heads", "routed", "models", "lang"),
    "cli": ("lora", "lang", "models", "generate", "export"),
    "measure_costs": ("managers", "plugin", "engine"),
}


def room_of(module: str) -> str:
    """The room of ``vlora_sgl.room.module``; of the package itself, the empty string."""
    return [*module.split("."), ""][1]


def imports(module: str, source: str) -> Iterator[str]:
    """What ``module`` imports of this package, anywhere in its source: modules, or names in modules."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith("vlora_sgl."))
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(module.split(".")[: -node.level]) + "." * bool(node.module) if node.level else ""
            origin = f"{start}{node.module or ''}"
            if origin == "vlora_sgl" or origin.startswith("vlora_sgl."):
                yield from (f"{origin}.{name.name}" for name in node.names)


def allowed(room: str) -> frozenset[str]:
    """The rooms that a room may import."""
    own = {room, "__version__"}
    if room in SHARED:
        return frozenset({*own, *SHARED})
    if room in ENGINE:
        return frozenset({*own, *SHARED, *ENGINE[: ENGINE.index(room)]})
    return frozenset({*own, *SHARED, *COMPANIONS[room]})


def forbidden(sources: Mapping[str, str]) -> list[str]:
    """Every import of a room that its importer may not know, as ``module -> imported``."""
    return [
        f"{module} -> {imported}"
        for module, source in sources.items()
        if (room := room_of(module))
        for imported in imports(module, source)
        if room_of(imported) not in allowed(room)
    ]


def rings(sources: Mapping[str, str]) -> list[str]:
    """Modules that import each other, directly or not."""
    arrows = {
        module: {i if i in sources else i.rpartition(".")[0] for i in imports(module, source)}
        & set(sources) - {module}
        for module, source in sources.items()
    }

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = list(arrows[start])
        while waiting:
            module = waiting.pop()
            if module not in found:
                found.add(module)
                waiting += arrows[module]
        return found

    return sorted(module for module in arrows if module in reached(module))


def package() -> dict[str, str]:
    """Module -> source of the whole package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def test_imports_point_one_way() -> None:
    assert forbidden(package()) == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    # The package's front names everything lazily, and ``lang`` is one language in several files.
    sources = {module: source for module, source in package().items() if module != "vlora_sgl"}
    assert rings(sources) == []


def test_every_room_has_its_place() -> None:
    known = {*SHARED, *ENGINE, *COMPANIONS}
    assert {room for module in package() if (room := room_of(module))} - known == set()


def added(module: str, line: str) -> Mapping[str, str]:
    sources = package()
    sources[module] += f"\n{line}\n"
    return sources


def test_an_arrow_up_or_a_ring_is_found() -> None:
    cases: Iterable[tuple[str, str]] = (
        ("vlora_sgl.kernels.norm", "from vlora_sgl.lora import backend"),
        ("vlora_sgl.lora.manager", "def late():\n    import vlora_sgl.managers.scheduler"),
        ("vlora_sgl.managers.scheduler", "from vlora_sgl.generate.config import load"),
        ("vlora_sgl.lang.ir", "from ..managers.scheduler import VLoraScheduler"),
    )
    for module, line in cases:
        assert len(forbidden(added(module, line))) == 1, (module, line)
    ring = added("vlora_sgl.lora.layout", "from vlora_sgl.lora.checkpoint import read_adapter")
    assert {"vlora_sgl.lora.layout", "vlora_sgl.lora.checkpoint"} <= set(rings(ring))
