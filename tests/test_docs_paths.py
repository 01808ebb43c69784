"""What the documents point at exists: links, files, modules and names in them, tests, make's targets, our flags."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from vlora_sgl.server_args import VLoraArgs, option_string

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile")]
GENERATED = ("figures.md", "evaluation.md")
"""Written by programs; tests/benchmarks has them."""
PAGES += sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.yaml")])
PAGES = [page for page in PAGES if page.name not in GENERATED]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
FLAGS = {option_string(item) for item in dataclasses.fields(VLoraArgs)}
BASES = (ROOT, ROOT / "vlora_sgl", ROOT / "tests", ROOT / "docs")
"""Where a path in the documents may begin."""
OURS = ["benchmarks", "docs", "examples", "tests", "tools", "vlora_sgl"]


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def bad_link(target: str, page: Path) -> bool:
    name, _, anchor = target.partition("#")
    file = (page.parent / name).resolve() if name else page
    return not file.exists() or (bool(anchor) and anchor not in anchors(file.read_text()))


def bad_name(dotted: str, runnable: bool = False) -> bool:
    """Whether no module of ours has this name, or the module has not the name behind it."""
    parts, folder = dotted.split("."), ROOT
    while parts and (folder / parts[0]).is_dir():
        folder /= parts.pop(0)
    file = folder / f"{parts.pop(0)}.py" if parts and (folder / f"{parts[0]}.py").exists() else folder / "__init__.py"
    if runnable:
        file = file if file.name != "__init__.py" else folder / "__main__.py"
        return bool(parts) or not file.exists() or "__main__" not in file.read_text()
    return bool(parts) and re.search(rf"\b{parts[0]}\b", file.read_text()) is None


def bad_path(path: str) -> bool:
    return not any(any(base.glob(path.rstrip("/"))) for base in BASES)


def bad_words(file: str, expression: str) -> bool:
    """Whether a word of ``pytest FILE -k EXPRESSION`` is not in that file."""
    text = (ROOT / "tests" / file).read_text().lower()
    return any(word not in text for word in re.findall(r"\w+", expression.lower()) if word not in ("and", "or", "not"))


def bad_flags(command: str) -> list[str]:
    """The flags of a benchmark's command that no file beside the benchmark knows; the benchmark, if there is none."""
    found: list[str] = []
    for name in re.findall(r"\bbench_\w+", command):
        folders = {file.parent for file in (ROOT / "benchmarks").rglob(f"{name}.py")}
        known = "".join(file.read_text() for folder in folders for file in folder.glob("*.py"))
        found += [flag for flag in re.findall(r"--[a-z][a-z-]*", command) if folders and f'"{flag}"' not in known]
        found += [] if folders else [name]
    return found


def faults(text: str, page: Path) -> list[str]:
    """Everything that ``text``, as a page at ``page``, says exists and that does not."""
    found = [target for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text) if bad_link(target, page)]
    found += [flag for flag in re.findall(r"--vlora-[a-z][a-z-]*", text) if flag not in FLAGS]
    ours = "|".join(OURS)
    found += [name for name in re.findall(rf"python -m ((?:{ours})[\w.]*\w)", text) if bad_name(name, runnable=True)]
    found += [name for name in re.findall(rf"(?<![\w./:-])(?:{ours})(?:\.\w+)+", text) if bad_name(name)]
    found += [
        ".".join(names)
        for names in re.findall(rf"from ((?:{ours})[\w.]*) import (\w+)", text)
        if bad_name(".".join(names))
    ]
    found += [
        f"make {target}" for target in re.findall(r"\bmake ([a-z]+(?:-[a-z]+)*)`", text) if target not in TARGETS
    ]
    fenced = re.compile(r"^```.*?^```$|^    .*?$", re.MULTILINE | re.DOTALL)
    quoted = re.findall(r"`([^`]+)`", fenced.sub("", text))
    lines = [line for block in fenced.findall(text) for line in block.split("\n")]
    found += [fault for command in [*quoted, *lines] for fault in bad_flags(command.partition("  #")[0])]
    paths = [word for code in quoted for word in code.split() if re.fullmatch(r"[\w*{}./-]+", word) and "/" in word]
    is_ours = re.compile(rf"(?:{ours})/.*|[a-z_]+/.*\.(?:py|md)")
    found += [path for path in paths if is_ours.fullmatch(path) and bad_path(path)]
    for file, expression in re.findall(r'`([\w/]+\.py) -k ("[^"]+"|\w+)', text):
        found += [f"{file} -k {expression}"] if bad_path(f"tests/{file}") or bad_words(file, expression) else []
    return found


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_what_a_page_points_at_exists(page: Path) -> None:
    assert faults(page.read_text(), page) == []


WRONG = [
    "[a page](mixes.md)",
    "[a heading](modes.md#no-such-heading)",
    "--vlora-lora-slot-ranks",
    "python -m vlora_sgl.profile",
    "python -m vlora_sgl.core",
    "`vlora_sgl.heads.bake_heads`",
    "`vlora_sgl/mixes/spec.py`",
    "`managers/cost_table.py`",
    "`benchmarks/results/serving/nothing-*.jsonl`",
    "`e2e/test_lives.py -k no_such_test`",
    "from vlora_sgl.models.tiny import domains",
    "`make mix-demo`",
    "`bench_bake --tiny`",
    "`bench_e2e --rates 8\n--no-such-flag`",
    "    python -m benchmarks.serving.bench_e2e --no-such-flag",
]


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_name_is_found(text: str) -> None:
    assert faults(text, ROOT / "docs" / "page.md")


def test_right_names_are_not_faults() -> None:
    text = "[x](design/modes.md#the-mode-switch) "
    text += "--vlora-mode python -m vlora_sgl.export `vlora_sgl.errors` `e2e/test_*.py`"
    assert faults(text, ROOT / "docs" / "page.md") == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.suffix == ".md"], ids=lambda page: page.name)
def test_lines_wrap(page: Path) -> None:
    lines = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL).splitlines()
    assert [line for line in lines if len(line) > 119 and not line.startswith(("|", "!")) and "](" not in line] == []
