"""A real browser: chromium through chromedriver, whose protocol (WebDriver) is JSON over HTTP."""

from __future__ import annotations

import base64
import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import requests

from tests.conftest import free_port

T = TypeVar("T")

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars"),
    "--force-prefers-reduced-motion",  # nothing is still scrolling when it is clicked on
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The key of an element's reference, by the standard."""
ENTER, TAB, SPACE, LEFT, CONTROL, RELEASE = "\ue007", "\ue004", "\ue00d", "\ue012", "\ue009", "\ue000"
"""Keys that are no characters, by the standard."""
PATIENCE_S = 60.0


def missing() -> str | None:
    """Why there is no browser here, or ``None``."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"no {program} here: apt-get install chromium chromium-driver"
    return None


class Browser:
    """One session.

    Args:
        root: of the session, at the driver.
    """

    def __init__(self, root: str) -> None:
        self._root = root

    def _send(self, method: str, path: str, **body: Any) -> Any:
        answer = requests.request(method, f"{self._root}{path}", json=body if method == "POST" else None, timeout=120)
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value

    def open(self, url: str) -> None:
        """Go to an address."""
        self._send("POST", "/url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns, given arguments as JSON."""
        return self._send("POST", "/execute/sync", script=script, args=list(arguments))

    def find(self, selector: str) -> str:
        """The first element of a CSS selector."""
        return str(self._send("POST", "/element", using="css selector", value=selector)[ELEMENT])

    def click(self, selector: str) -> None:
        """Click on an element, as a pointer does: what is covered cannot be."""
        self._send("POST", f"/element/{self.find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        """Type into an element; a file's name into an input for files."""
        self._send("POST", f"/element/{self.find(selector)}/value", text=text)

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, wherever the focus is; all up to ``RELEASE`` together."""
        moves = [{"type": "keyDown", "value": key} for key in keys if key != RELEASE]
        moves += [{"type": "keyUp", "value": key} for key in keys if key != RELEASE]
        if RELEASE not in keys:
            moves = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._send("POST", "/actions", actions=[{"type": "key", "id": "keys", "actions": moves}])

    def text(self, selector: str) -> str:
        """The text of an element as it is shown."""
        return str(self._send("GET", f"/element/{self.find(selector)}/text"))

    def resize(self, width: int, height: int) -> None:
        """Give the page so many pixels, however small a window may be."""
        self._cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def scheme(self, name: str) -> None:
        """Prefer ``light`` or ``dark`` colours."""
        self._cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def screenshot(self, path: Path, whole: bool = True) -> Path:
        """A picture of the page, all of it or what is in sight."""
        shot = self._cdp("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def complaints(self) -> list[str]:
        """What the console has said since the last call: errors and refusals of the content-security policy."""
        return [f"{one['level']}: {one['message']}" for one in self._send("POST", "/se/log", type="browser")]

    def requests(self) -> list[str]:
        """Addresses that were asked for since the last call."""
        import json

        rows = [json.loads(one["message"])["message"] for one in self._send("POST", "/se/log", type="performance")]
        return [row["params"]["request"]["url"] for row in rows if row["method"] == "Network.requestWillBeSent"]

    def _cdp(self, command: str, **parameters: Any) -> Any:
        return self._send("POST", "/goog/cdp/execute", cmd=command, params=parameters)


def until(look: Callable[[], T], holds: Callable[[T], object] = bool, patience: float = PATIENCE_S) -> T:
    """What is seen once it holds.

    Raises:
        AssertionError: it did not in time; with what was seen last.
    """
    deadline = time.monotonic() + patience
    while not holds(seen := look()):
        assert time.monotonic() < deadline, f"after {patience:g} s: {seen!r}"
        time.sleep(0.1)
    return seen


@contextlib.contextmanager
def browser(scratch: Path) -> Iterator[Browser]:
    """A browser with a profile of its own, that ends with the block."""
    port = free_port()
    root = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        until(lambda: _ready(root))
        options = {"args": [*FLAGS, f"--user-data-dir={scratch}"], "perfLoggingPrefs": {"enableNetwork": True}}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        answer = requests.post(f"{root}/session", json={"capabilities": {"alwaysMatch": wanted}}, timeout=120).json()
        assert "sessionId" in answer["value"], answer
        session = f"{root}/session/{answer['value']['sessionId']}"
        try:
            yield Browser(session)
        finally:
            requests.delete(session, timeout=60)
    finally:
        process.terminate()
        process.wait(30)


def _ready(root: str) -> bool:
    try:
        return bool(requests.get(f"{root}/status", timeout=5).json()["value"]["ready"])
    except requests.RequestException:
        return False
