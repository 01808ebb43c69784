"""The table of replacements: nothing is replaced beside it, and what is not in place is noticed and named."""

from __future__ import annotations

import ast
import inspect
import json
import pkgutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vlora_sgl
from vlora_sgl import _sgl, plugin, seams
from vlora_sgl.errors import ContractError
from vlora_sgl.model_executor import fast_paths
from vlora_sgl.model_executor.fast_paths import attention_tiles, decode_layers, prefill_attention
from vlora_sgl.seams import How, Place, Seam, Stage
from vlora_sgl.server_args import ENVIRONMENT_VARIABLE

PACKAGE = Path(vlora_sgl.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
THE_TABLE = {"plugin.py", "seams.py"}
# Offline: they train or check a model of transformers' that they have loaded themselves.
OFFLINE = {"generate/heads.py", "generate/invocation.py", "generate/learner.py", "routed/peft.py"}

ALLOWED = {"setattr(slot, f'{side}_buffer', found)": "a copy of our own pool"}
HOOKS = {
    *("register_forward_hook", "register_forward_pre_hook", "register_module_forward_pre_hook"),
    *("addFilter", "add_api_route", "include_router", "add_middleware"),
}
CHANGES = {"append", "extend", "insert", "update", "setdefault", "register", "add"}
REPLACED = {row.target.rpartition(".")[2] for row in plugin.TABLE if "." in row.target} | {"__class__"}


def root(node: ast.expr) -> str | None:
    """The name that a chain of attributes and items begins with."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


class Violations(ast.NodeVisitor):
    """Finds what is put into something of other people's, in one module."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[str] = []
        self.foreign, self.ours = {"_sgl"}, {"self"}
        holders = [node for node in ast.walk(tree) if not isinstance(node, ast.ClassDef)]
        defined = [child for node in holders for child in ast.iter_child_nodes(node)]
        self.functions = {node.name for node in defined if isinstance(node, ast.FunctionDef)}
        self.extends = False
        self.visit(tree)

    def note(self, node: ast.AST) -> None:
        text = ast.unparse(node).splitlines()[0]
        if text not in ALLOWED:
            self.found.append(text)

    def visit_Import(self, node: ast.Import) -> None:
        self.ours |= {a.asname or a.name for a in node.names if "vlora_sgl" in a.name}
        self.foreign |= {(a.asname or a.name).partition(".")[0] for a in node.names if "vlora_sgl" not in a.name}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if not module.startswith("vlora_sgl") or module == "vlora_sgl._sgl":
            self.foreign |= {alias.asname or alias.name for alias in node.names}
        else:
            self.ours |= {alias.asname or alias.name for alias in node.names} - {"_sgl"}

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, self.extends = self.extends, any(root(base) in self.foreign for base in node.bases)
        self.generic_visit(node)
        self.extends = before

    def changes(self, target: ast.expr, value: ast.expr | None) -> bool:
        if isinstance(target, ast.Tuple | ast.List):
            return any(self.changes(one, None) for one in target.elts)
        if not isinstance(target, ast.Attribute | ast.Subscript):
            return False
        whose = root(target)
        if whose in self.foreign:
            return not ast.unparse(target).startswith("os.environ[")
        if not isinstance(target, ast.Attribute):
            return False
        own = isinstance(target.value, ast.Name) and whose == "self"
        code = isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in self.functions)
        return (target.attr in REPLACED and (not own or self.extends)) or (code and whose not in self.ours)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(self.changes(target, node.value) for target in node.targets):
            self.note(node)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and self.changes(node.target, node.value):
            self.note(node)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if self.changes(node.target, None):
            self.note(node)
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        if any(self.changes(target, None) for target in node.targets):
            self.note(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        if name in ("setattr", "delattr", "object.__setattr__") and root(node.args[0]) != "self":
            self.note(node)
        if isinstance(node.func, ast.Attribute):
            method, whose = node.func.attr, root(node.func)
            changes = method in CHANGES and whose in self.foreign and name.count(".") > 1
            if method in HOOKS or (changes and not name.startswith("os.environ.")):
                self.note(node)
        self.generic_visit(node)


def violations(source: str) -> list[str]:
    return Violations(ast.parse(source)).found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_replaced_beside_the_table(path: Path) -> None:
    where = str(path.relative_to(PACKAGE))
    if where not in THE_TABLE | OFFLINE:
        assert violations(path.read_text()) == []


@pytest.mark.parametrize(
    "code",
    [
        "layer.forward = Norm(layer)",
        "runner.model.visual.forward = graphs",
        "from vlora_sgl import _sgl\n_sgl.mm_utils.embedding_cache = cache",
        "from vlora_sgl._sgl import Scheduler\nScheduler.run_batch = ours",
        "import torch\ntorch.arange = ours",
        "import sys\nsys.modules['flashinfer'] = None",
        "import sys\nsys.modules.update(hidden)",
        "import sys\nsys.meta_path.insert(0, finder)",
        "from vlora_sgl import _sgl\n_sgl.LORA_BACKEND_CHOICES.append('atmm')",
        "setattr(module, name, kernel)",
        "module.register_forward_pre_hook(hook, with_kwargs=True)",
        "app.add_api_route('/x', x)",
        "def f(): pass\nbackend.capture = f",
        "backend.capture = lambda: None",
        "del model.named_modules",
        "from vlora_sgl import _sgl\nclass Ours(_sgl.Scheduler):\n def init(self): self.policy = Order(self.policy)",
        "a, layer.forward = 1, 2",
    ],
)
def test_an_assignment_beside_the_table_is_found(code: str) -> None:
    assert len(violations(code)) == 1, code


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.environ['A'] = 'b'",
        "class Ours:\n def __init__(self): self.policy = 1",
        "item.feature = tensor",
        "import numpy as np\nnew = np.zeros(3)\nnew[0] = 1",
        "setattr(self, name, 1)",
    ],
)
def test_what_is_ours_or_data_is_let_through(code: str) -> None:
    assert violations(code) == []


def test_every_replacement_in_the_code_has_its_row() -> None:
    """And every row that the table does not put in place itself is put in place somewhere."""
    named = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named |= {node.value} & {row.target for row in plugin.TABLE if path.name not in THE_TABLE}
    byhand = {row.target for row in plugin.TABLE if row.how in (How.OWN, How.CALL)}
    assert byhand <= named
    assert len({row.target for row in plugin.TABLE}) == len(plugin.TABLE)


@pytest.mark.parametrize("row", plugin.TABLE, ids=lambda row: row.target)
def test_a_row_says_what_why_and_without(row: Seam) -> None:
    assert _sgl.platforms.current_platform  # of ours, on a CPU: SGLang has to import it first
    assert callable(pkgutil.resolve_name(row.ours))
    assert row.why.endswith(".") and row.without and not row.without.endswith(".")


# What puts rows in place, on a table of its own


class Layer:
    def forward(self) -> str:
        return "SGLang's"


def built(given: Any) -> seams.Places:
    return given if isinstance(given, str) else [Place(given, "forward", print)]


def seam(target: str, how: How, ours: str = f"{__name__}:built", stage: Stage = Stage.MODEL) -> Seam:
    return Seam(target, ours, stage, how, "Because.", "speed")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [seam("Layer.forward", How.BUILT), seam("Layer.call", How.CALL), seam("Owner.part", How.OWN)]
    monkeypatch.setattr(seams, "_rows", {row.target: row for row in rows})
    monkeypatch.setattr(seams, "_found", {})


@pytest.mark.usefixtures("table")
def test_a_row_that_is_undone_is_noticed_and_named() -> None:
    layer = Layer()
    seams.install(Stage.MODEL, layer)
    assert layer.forward is print and seams.report()["Layer.forward"] == {"state": "in place", "places": 1}
    del layer.forward
    with pytest.raises(ContractError, match=f"Layer.forward is not replaced by {__name__}:built.* without it: speed"):
        seams.verify(Stage.MODEL)
    seams.verify(Stage.ENGINE)


@pytest.mark.usefixtures("table")
def test_a_row_that_is_not_for_this_model_says_why() -> None:
    seams.install(Stage.MODEL, "the GPU is no Hopper")
    assert seams.report()["Layer.forward"] == {"state": "not for this model", "why": "the GPU is no Hopper"}
    seams.place("Layer.forward", [])
    assert seams.report()["Layer.forward"]["why"] == "this model has none"


@pytest.mark.usefixtures("table")
def test_what_is_put_in_place_by_hand_is_due_once_its_owner_is_made() -> None:
    seams.install(Stage.MODEL, Layer())
    with pytest.raises(ContractError, match=r"Owner\.part is not replaced"):
        seams.verify(Stage.MODEL, "Owner")
    owner = SimpleNamespace(part=1)
    seams.own("Owner.part", owner, 2)
    seams.verify(Stage.MODEL, "Owner")
    owner.part = 1
    with pytest.raises(ContractError, match=r"Owner\.part is not replaced"):
        seams.verify(Stage.MODEL)
    owner.part = 2
    seams.verify(Stage.MODEL, "Layer", otherwise="no graphs")
    assert seams.report()["Layer.call"] == {"state": "not for this model", "why": "no graphs"}


@pytest.mark.usefixtures("table")
def test_what_nobody_would_look_at_is_refused() -> None:
    with pytest.raises(ContractError, match="SimpleNamespace has no attribute part"):
        seams.own("Owner.part", SimpleNamespace(), 2)
    with pytest.raises(ContractError, match=r"plugin.TABLE has no row for it"):
        seams.own("Owner.other", SimpleNamespace(other=1), 2)


def test_without_a_table_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "_rows", {})
    with pytest.raises(ContractError, match="has not been declared"):
        seams.install(Stage.MODEL)


@pytest.mark.usefixtures("table")
def test_what_is_swapped_comes_back() -> None:
    layer, module, modules = Layer(), SimpleNamespace(forward=1), {"b": 2}
    with (
        pytest.raises(KeyError),
        seams.swapped("Layer.call", layer, "forward", print),
        seams.swapped("Layer.call", module, "forward", print),
        seams.swapped("Layer.call", modules, "a", None),
        seams.swapped("Layer.call", modules, "b", None),
    ):
        assert layer.forward is module.forward is print and modules == {"a": None, "b": None}
        raise KeyError
    assert "forward" not in vars(layer) and module.forward == 1 and modules == {"b": 2}
    assert seams.report()["Layer.call"]["state"] == "in place"


@pytest.mark.usefixtures("table")
def test_lists_and_dicts() -> None:
    routes, registry = ["a", "b"], {"x": 1}
    places = [Place(routes, 1, "B"), Place(routes, None, "c"), Place(registry, "y", 2)]
    seams.place("Layer.forward", places)
    assert routes == ["a", "B", "c"] and registry == {"x": 1, "y": 2} and all(place.holds() for place in places)
    routes.remove("c")
    assert not places[1].holds()


@pytest.mark.usefixtures("table")
def test_the_report_of_a_scheduler_is_joined_with_the_main_processes() -> None:
    elsewhere = json.loads(json.dumps(seams.report()))
    seams.own("Owner.part", SimpleNamespace(part=1), 2)
    assert {state["state"] for state in elsewhere.values()} == {"not in this process"}
    elsewhere["Layer.forward"] = {"state": "not for this model", "why": "no"}
    joined = seams.report(elsewhere)
    assert joined["Owner.part"]["state"] == "in place" and joined["Layer.forward"]["why"] == "no"


# The switch of the fast paths


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """On a Hopper GPU, with SGLang's Triton attention."""
    from tests.support.stand_in import passing_for

    monkeypatch.setattr(fast_paths, "on_hopper", lambda: True)
    monkeypatch.setattr(seams, "_found", {})
    backend = passing_for("TritonAttnBackend", SimpleNamespace)(
        dcp_size=1,
        decode_attention_fwd=print,
        enable_deterministic=False,
        use_sliding_window_kv_pool=False,
        sliding_window_size=None,
        _translate_kv_loc=None,
    )
    model = SimpleNamespace(modules=list)
    args = SimpleNamespace(enable_deterministic_inference=False)
    return SimpleNamespace(
        attn_backend=backend, model=model, server_args=args, token_to_kv_pool=None, dtype=None, device="cpu"
    )


PATHS = (attention_tiles.tiles, decode_layers.attention, decode_layers.norms, decode_layers.rotations)


def test_fast_paths_are_taken_on_hopper(runner: Any) -> None:
    assert not any(isinstance(path(runner), str) for path in PATHS)
    assert prefill_attention.captured_attention(runner) is not None


def test_one_switch_turns_all_fast_paths_off(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, '{"fast_paths": "off"}')
    assert {path(runner) for path in PATHS} == {"--vlora-fast-paths off"}
    assert prefill_attention.captured_attention(runner) is None
    assert seams.report()["TritonAttnBackend.forward"]["why"] == "--vlora-fast-paths off"
    found = {row.ours.partition(":")[0] for row in plugin.TABLE if row.ours.startswith(fast_paths.__name__)}
    assert found == {inspect.getmodule(path).__name__ for path in (*PATHS, prefill_attention.captured_attention)}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda runner: vars(runner.server_args).update(enable_deterministic_inference=True),
            "--enable-deterministic-inference",
        ),
        (lambda runner: vars(runner.attn_backend).update(dcp_size=2), "decode context parallelism"),
    ],
)
def test_decoding_says_why_it_is_left_to_sglang(runner: Any, change: Any, why: str) -> None:
    change(runner)
    assert {path(runner) for path in PATHS[1:]} == {why}


def test_another_attention_backend_keeps_its_own_attention_and_nothing_else(runner: Any) -> None:
    """In a prefill's graphs Triton's attention takes its place, if that reads its cache."""
    runner.attn_backend, runner.token_to_kv_pool = SimpleNamespace(), SimpleNamespace()
    assert decode_layers.attention(runner) == "its attention backend is SimpleNamespace"
    assert not any(isinstance(path(runner), str) for path in (decode_layers.norms, decode_layers.rotations))
    assert prefill_attention.captured_attention(runner) is None
    assert seams.report()["TritonAttnBackend.forward"]["why"] == "SimpleNamespace keeps a cache of another kind"


def test_a_backend_of_decoding_alone_is_found(runner: Any) -> None:
    triton = runner.attn_backend
    runner.attn_backend = SimpleNamespace(decode_backend=triton)
    (place,) = decode_layers.attention(runner)
    assert place.owner is triton  # type: ignore[union-attr]


def test_other_gpus_keep_sglangs_kernels(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_paths, "on_hopper", lambda: False)
    assert {path(runner) for path in PATHS} == {"the GPU is no Hopper"}
    assert prefill_attention.captured_attention(runner) is not None, "measured anywhere"
