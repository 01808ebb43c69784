"""``vlora serve`` with nothing else, and what a person then sees: the page in a real browser, and ``vlora ask``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import requests
from PIL import Image

from tests.conftest import START_TIMEOUT_S, free_port
from tests.support.browser import CONTROL, ENTER, LEFT, RELEASE, TAB, Browser, browser, missing, until
from tools.tiny.domains import ADAPTERS, DOMAINS
from vlora_sgl import page
from vlora_sgl.cli import main
from vlora_sgl.models import tiny

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
ADDRESS_S = 40
"""Until the address is printed, on two cores with nothing else to do. A start is serial, so there it takes the CPU
seconds of its processes, which are what can be held on a machine that has something else to do."""
MARKUP = ('<b>"bold"</b>', "<script>document.title='x'</script>".replace("=", "≈"), "'\"><i>&amp;")


@dataclass(frozen=True)
class Served:
    """The embedded model's server: its address, and the CPU seconds until it printed it."""

    url: str
    seconds: float


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    port = free_port()
    log = tmp_path_factory.mktemp("serve") / "log.txt"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "vlora_sgl.cli", "serve", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: f"on {url}" in log.read_text() or process.poll() is not None, patience=START_TIMEOUT_S)
        assert process.poll() is None, log.read_text()[-3000:]
        tree = [started := psutil.Process(process.pid), *started.children(recursive=True)]
        yield Served(url, sum(sum(one.cpu_times()[:2]) for one in tree))
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def photograph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A test image of the adapter ``counting``: three handwritten digits."""
    rows = DOMAINS[ADAPTERS["counting"][0]]()[2]
    path = tmp_path_factory.mktemp("images") / "photo.jpg"
    image: Image.Image = next(row[0][0] for row in rows if row[2] == "3")
    image.resize((448, 448)).save(path, quality=95)
    return path


@pytest.fixture(scope="module")
def chromium(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if why := missing():
        pytest.skip(why)
    with browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture
def opened(chromium: Browser, served: Served) -> Iterator[Browser]:
    """The page, live; nothing in the console at the end, and no request to anywhere else."""
    chromium.resize(1280, 900)
    chromium.open(f"{served.url}/ui")
    until(lambda: chromium.text("#link"), lambda text: text == "live")
    chromium.complaints(), chromium.requests()
    yield chromium
    assert [line for line in chromium.complaints() if "400" not in line] == []
    hosts = {urlsplit(url.removeprefix("blob:")).netloc for url in chromium.requests() if not url.startswith("data:")}
    assert hosts <= {urlsplit(served.url).netloc}


def answers(page_: Browser) -> dict[str, Any]:
    """What each card says: the words and the facts below them, by adapter."""
    script = """return Object.fromEntries([...document.querySelectorAll(".answer:not(.busy)")].map((card) => [
      card.dataset.name,
      {said: card.querySelector(".said").textContent, facts: Object.fromEntries(
        [...card.querySelectorAll("dt")].map((dt) => [dt.textContent, dt.nextSibling.textContent]))}]))"""
    return dict(page_.run(script))


def choose(page_: Browser, *names: str) -> None:
    """Leave only these to answer."""
    page_.click("#none")
    for name in names:
        page_.click(f"#who input[value={json.dumps(name)}]")


def test_serve_prints_its_address_soon(served: Served) -> None:
    assert 1 < served.seconds < ADDRESS_S


def test_ask_prints_a_table_and_draws_the_boxes(
    served: Served,
    photograph: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    question = "How many handwritten digits are there?"
    assert main(["ask", str(photograph), question, "--all", "--url", served.url]) == 0
    head, *rows, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["adapter", "head", "answer", "seconds", "cached", "mode"]
    cells = {tuple(row.split()[:2]): row.split()[2:] for row in rows}
    assert {name for name, _ in cells} == {"(base)", *tiny.adapters()}
    assert cells["counting", "-"][0] == "3" != cells["(base)", "-"][0], "the adapter must change the answer"
    assert cells["counting", "digits"][0] == "3" and cells["counting", "find"][:2] == ["3", "found"]
    assert last == "boxes: photo.boxes.png"
    with Image.open(tmp_path / "photo.boxes.png") as drawn, Image.open(photograph) as plain:
        assert drawn.size == plain.size and drawn.tobytes() != plain.convert("RGB").tobytes()

    assert main(["ask", str(photograph), "-a", "counting", "--json", "--url", served.url]) == 0
    told = json.loads(capsys.readouterr().out)  # without a question, what the adapter was trained to be asked
    assert [(row["adapter"], row["head"]) for row in told["answers"]] == [
        ("counting", None), ("counting", "digits"), ("counting", "find"),
    ]  # fmt: skip
    assert told["answers"][0]["answer"] == "3" and told["answers"][0]["mode"] in ("unmerged", "merged", "mixture")


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["missing.jpg", "x"], 2, "No such file"),
        (["PHOTO", "x", "-a", "nobody"], 1, "no adapter named 'nobody'"),
        (["PHOTO"], 2, "what is the question?"),
    ],
)
def test_ask_says_what_is_wrong(
    arguments: list[str], status: int, said: str, served: Served, photograph: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(photograph) if one == "PHOTO" else one for one in arguments]
    assert main(["ask", *given, "--url", served.url]) == status
    assert said in capsys.readouterr().err


def test_ask_tells_of_a_refused_image_in_its_row(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no.png").write_bytes(b"no image")
    assert main(["ask", str(tmp_path / "no.png"), "x", "--url", served.url]) == 1
    assert "refused" in capsys.readouterr().out


def test_the_page_is_small_and_its_policy_strict(served: Served) -> None:
    for path, (_, kind) in page.FILES.items():
        answer = requests.get(served.url + path, timeout=30)
        assert answer.status_code == 200 and answer.headers["content-type"] == kind
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert sum(len(page.content(path)) for path in page.FILES) <= 200 * 1024


def test_a_dropped_image_is_answered_by_the_base_and_three_adapters(opened: Browser, photograph: Path) -> None:
    opened.type("#file", str(photograph))
    opened.type("#question", "How many handwritten digits are there?")
    choose(opened, "", "counting", "digits", "digits-late")
    opened.click("#go")
    told = until(lambda: answers(opened), lambda found: len(found) == 4, patience=120)
    assert set(told) == {"", "counting", "digits", "digits-late"}
    assert told["counting"]["said"] == "3" != told[""]["said"]
    for one in told.values():
        assert {"first token", "whole", "kept", "mode"} <= set(one["facts"])
    assert told["counting"]["facts"]["digits"].startswith("3 (") and told["counting"]["facts"]["find"] == "3 found"
    boxes = opened.run("return [...document.querySelectorAll('.box b')].map((label) => label.textContent)")
    assert len(boxes) == 3 and all(label.startswith("digit ") for label in boxes)
    inside = opened.run(
        "const at = document.getElementById('drop').getBoundingClientRect();"
        "return [...document.querySelectorAll('.box')].every((box) => { const r = box.getBoundingClientRect();"
        "return r.left >= at.left - 1 && r.right <= at.right + 1 && r.top >= at.top - 1 && r.width > 5; })"
    )
    assert inside
    kept = until(lambda: opened.text("#kept"), lambda text: "digits-late" in text)
    assert "copies" in kept
    until(lambda: opened.run("return !!document.querySelector('#kept img')"))  # asked here, so it has a picture


def test_the_strip_shows_steps_and_each_can_be_read(opened: Browser) -> None:
    opened.type("#question", "What is this?")
    choose(opened, "", "photos")
    opened.click("#go")
    said = until(lambda: opened.text("#strips output"), lambda text: "unmerged" in text or "merged" in text)
    assert said.startswith("The last ") and "switches" in said
    painted = opened.run(
        "const c = document.querySelector('#strips canvas'); const d = c.getContext('2d').getImageData(0, 0, c.width,"
        "c.height).data; let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n"
    )
    assert painted > 100
    until(lambda: opened.text("#traffic"), lambda text: "tokens/s" in text)
    opened.run("document.querySelector('#strips canvas').focus()")
    opened.press(LEFT)
    assert opened.text("#strips output").startswith("Step ")


def test_adapters_are_loaded_pinned_reloaded_and_unloaded_by_their_names_as_text(
    opened: Browser, served: Served
) -> None:
    directory = tiny.adapters()["digits"]
    for name in MARKUP:
        opened.type("#load-name", name)
        opened.type("#load-path", str(directory))
        opened.click("#load button")
        until(lambda name=name: names_shown(opened), lambda shown, name=name: name in shown)
    assert opened.run("return document.title") == "vlora"
    assert opened.run("return document.querySelectorAll('main b b, main script, main i').length") == 0
    name = MARKUP[0]
    in_who = opened.run("return [...document.querySelectorAll('#who .chip')].map((chip) => chip.textContent)")
    assert name in in_who

    press(opened, name, "pin")
    until(lambda: row_of(opened, name), lambda row: "pinned" in row)
    press(opened, name, "reload")
    until(lambda: row_of(opened, name), lambda row: "pinned" in row)

    opened.type("#question", "Which handwritten digit is this?")
    choose(opened, name)
    opened.click("#go")
    assert set(until(lambda: answers(opened), len, patience=120)) == {name}

    opened.type("#load-name", "nobody")
    opened.type("#load-path", "/nowhere <b>")
    opened.click("#load button")
    assert "/nowhere <b>" in until(lambda: opened.text("#adapters-note"))
    for one in MARKUP:
        press(opened, one, "unload")
        assert one in names_shown(opened), "the first press only asks"
        press(opened, one, "unload")
        until(lambda one=one: names_shown(opened), lambda shown, one=one: one not in shown)
    listed = requests.get(f"{served.url}/lora_adapters", timeout=30).json()["adapters"]
    assert {row["name"] for row in listed} == set(tiny.adapters())


def names_shown(page_: Browser) -> list[str]:
    script = "return [...document.querySelectorAll('#rows td[data-label=Name]')].map((td) => td.textContent.trim())"
    return list(page_.run(script))


def row_of(page_: Browser, name: str) -> str:
    script = (
        "return [...document.querySelectorAll('#rows tr')].find((tr) =>"
        "tr.querySelector('td').textContent.trim() === arguments[0])?.textContent || ''"
    )
    return str(page_.run(script, name))


def press(page_: Browser, name: str, verb: str) -> None:
    """Press a button of an adapter's row, as soon as there is one."""
    script = (
        "const b = [...document.querySelectorAll('#rows button')].find((one) => one.dataset.adapter === arguments[0]"
        "&& one.dataset.verb === arguments[1] && !one.disabled); b?.click(); return !!b"
    )
    until(lambda: page_.run(script, name, verb))


def test_the_page_is_used_by_keyboard_alone(opened: Browser) -> None:
    opened.press(TAB)
    assert opened.run("return document.activeElement.className") == "skip"
    reached = set()
    for _ in range(30):
        opened.press(TAB)
        reached.add(opened.run("return document.activeElement.id || document.activeElement.value"))
    assert {"keys-open", "file", "question", "heads", "go"} <= reached
    opened.run("document.getElementById('question').focus()")
    choose(opened, "")
    opened.type("#question", "What is this?")
    opened.press(CONTROL, ENTER, RELEASE)
    assert set(until(lambda: answers(opened), len, patience=120)) == {""}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_every_width_in_the_light_and_in_the_dark(
    opened: Browser, width: int, scheme: str, photograph: Path, tmp_path: Path
) -> None:
    opened.scheme(scheme)
    opened.resize(width, 800)
    opened.type("#file", str(photograph))
    assert opened.run("return document.documentElement.scrollWidth") <= width
    ground, text = opened.run("const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]")
    assert (brightness(ground) > brightness(text)) == (scheme == "light")
    folder = Path(os.environ.get("VLORA_TEST_SCREENSHOTS", tmp_path))  # to look at
    assert opened.screenshot(folder / f"{scheme}-{width}.png").stat().st_size > 10_000


def brightness(colour: str) -> float:
    return sum(float(part) for part in colour.strip("rgba()").split(",")[:3])


def test_nothing_loaded_says_what_to_do(opened: Browser, served: Served) -> None:
    unload = [main(["rm", name, "--url", served.url]) for name in tiny.adapters()]
    try:
        assert set(unload) == {0}
        told = until(lambda: opened.text("#nothing"), lambda text: "No adapter is loaded" in text)
        assert "vlora add NAME DIRECTORY" in told
    finally:
        loaded = [main(["add", name, str(path), "--url", served.url]) for name, path in tiny.adapters().items()]
    assert set(loaded) == {0}
    until(lambda: names_shown(opened), lambda shown: set(shown) == set(tiny.adapters()))


def test_only_so_many_may_watch_and_who_leaves_makes_room(served: Served) -> None:
    from vlora_sgl.entrypoints.page import MOST_WATCHERS

    watching: list[requests.Response] = []
    events = []  # one that is dropped closes its connection
    try:
        for _ in range(MOST_WATCHERS + 1):  # a page of another test may still be counted
            one = requests.get(f"{served.url}/vlora/live", stream=True, timeout=30)
            if one.status_code == 503:
                assert "watch" in one.text
                break
            watching.append(one)
            events.append(one.iter_lines())
            assert next(events[-1]).startswith(b"data: ")
        assert 0 < len(watching) <= MOST_WATCHERS and one.status_code == 503
    finally:
        for one in watching:
            one.close()

    def room() -> bool:
        with requests.get(f"{served.url}/vlora/live", stream=True, timeout=30) as one:
            return one.status_code == 200

    until(room)
