"""Two real servers behind the replica router: answers, adapters, a killed replica, its return."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.conftest import TinyModel, free_port
from tests.support.browser import browser, missing, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ADMIN = {"Authorization": "Bearer sesame"}
START_S = 300


class RunningCluster:
    """The launcher's process and its address."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process, self.url = process, url

    def state(self) -> Any:
        return requests.get(f"{self.url}/cluster", timeout=30).json()

    def generate(self, adapter: str | None, text: str = "one two three", url: str | None = None) -> requests.Response:
        body = {"text": text, "lora_path": adapter}
        body["sampling_params"] = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        return requests.post(f"{url or self.url}/generate", json=body, timeout=120)

    def wait(self, serving: int) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if sum(replica["serving"] for replica in self.state()["replicas"]) == serving:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.2)
        pytest.fail(f"{serving} replicas did not serve within {START_S} s (exit status {self.process.poll()})")


@pytest.fixture(scope="module")
def cluster(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    port, root = free_port(), Path(__file__).parents[2]
    a, b = (f"{name}={path}" for name, path in tiny_model.adapters.items())
    command = [sys.executable, "-m", "vlora_sgl.launch_cluster", "--port", str(port), "--replicas", "2"]
    command += ["--on-demand", b, "--log-dir", str(tmp_path_factory.mktemp("cluster"))]
    command += ["--model-path", str(tiny_model.path), "--enable-lora", "--lora-paths", a, "--max-lora-rank", "64"]
    command += ["--admin-api-key", "sesame", "--skip-server-warmup"]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(command, cwd=root, env={**os.environ, "PYTHONPATH": path})
    made = RunningCluster(process, f"http://127.0.0.1:{port}")
    try:
        made.wait(2)
        yield made
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.timeout(600)
def test_answers_are_a_single_servers_and_adapters_come_when_asked_for(cluster: RunningCluster) -> None:
    replicas = [replica["url"] for replica in cluster.state()["replicas"]]
    direct = {adapter: cluster.generate(adapter, url=replicas[0]).json()["text"] for adapter in (None, "A")}
    assert direct["A"] != direct[None]
    for adapter, text in direct.items():
        assert cluster.generate(adapter).json()["text"] == text

    assert [replica["adapters"] for replica in cluster.state()["replicas"]] == [["A"], ["A"]]
    with_b = cluster.generate("B").json()
    assert with_b["text"] not in direct.values()
    assert with_b["meta_info"]["vlora"]["adapter"] == "B"
    held = [replica["adapters"] for replica in cluster.state()["replicas"]]
    assert sorted(held) == [["A"], ["A", "B"]]
    unknown = cluster.generate("C")
    assert unknown.status_code == 404 and "loaded: A, B" in unknown.text

    order = {"lora_name": "A"}
    assert requests.post(f"{cluster.url}/unload_lora_adapter", json=order, timeout=60).status_code == 401
    assert cluster.generate("A").status_code == 200
    models = requests.get(f"{cluster.url}/v1/models", timeout=60).json()["data"]
    assert {card["id"] for card in models if card["parent"]} == {"A", "B"}


@pytest.mark.timeout(600)
def test_a_killed_replica_takes_no_request_with_it_and_comes_back(cluster: RunningCluster) -> None:
    answers: list[requests.Response] = []
    expected = {adapter: cluster.generate(adapter).json()["text"] for adapter in (None, "A", "B")}
    (holder,) = (r for r in cluster.state()["replicas"] if "B" in r["adapters"])
    port = holder["url"].rpartition(":")[2]
    asked = [(None, "A", "B")[number % 3] for number in range(24)]

    def ask(adapters: list[str | None]) -> None:
        answers.extend(cluster.generate(adapter) for adapter in adapters)

    threads = [threading.Thread(target=ask, args=(asked[n::8],)) for n in range(8)]
    for thread in threads:
        thread.start()
    (launcher,) = (p for p in psutil.Process(cluster.process.pid).children() if port in p.cmdline())
    os.killpg(launcher.pid, signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * len(asked)
    assert {answer.json()["text"] for answer in answers} == set(expected.values())

    requests.post(f"{cluster.url}/unload_lora_adapter", json={"lora_name": "A"}, headers=ADMIN, timeout=60)
    cluster.wait(2)
    after = cluster.state()
    assert after["replicas"][holder["number"]]["starts"] == 2
    assert all("A" not in replica["adapters"] for replica in after["replicas"])
    assert cluster.generate("A").status_code == 404
    # On the replica that came back, too: A is in its flags.
    assert cluster.generate("A", url=holder["url"]).status_code == 404
    assert cluster.generate("B").json()["text"] == expected["B"]


@pytest.mark.timeout(600)
def test_the_page_shows_every_replica_and_changes_adapters_with_the_operator_s_key(
    cluster: RunningCluster, tiny_model: TinyModel, tmp_path: Path
) -> None:
    if why := missing():
        pytest.skip(why)
    with browser(tmp_path / "profile") as page:
        page.open(f"{cluster.url}/ui")
        until(lambda: page.run("return document.querySelectorAll('#replica-rows tr').length"), lambda rows: rows == 2)
        until(lambda: page.run("return document.querySelectorAll('.strip').length"), lambda strips: strips == 2)
        for adapter in (None, "B"):
            cluster.generate(adapter)
        until(lambda: page.text("#strips"), lambda text: "unmerged" in text or "merged" in text)

        def load() -> None:
            page.run("document.getElementById('load').reset()")
            page.type("#load-name", "D")
            page.type("#load-path", str(tiny_model.adapters["A"]))
            page.click("#load button")

        load()
        assert "operator's key" in until(lambda: page.text("#keys-why"))
        page.type("#admin", "sesame")
        page.click("#keys button")
        until(lambda: page.text("#link"), lambda text: text == "live")
        load()
        until(lambda: page.text("#rows"), lambda text: "D" in text.split())
        assert any("D" in replica["adapters"] for replica in cluster.state()["replicas"])
        until(lambda: page.text("#replica-rows"), lambda text: "D" in text.replace(",", " ").split())
        requests.post(f"{cluster.url}/unload_lora_adapter", json={"lora_name": "D"}, headers=ADMIN, timeout=60)
        until(lambda: page.text("#rows"), lambda text: "D" not in text.split())
        assert [line for line in page.complaints() if "401" not in line] == []


@pytest.mark.timeout(120)
def test_a_cluster_that_is_told_to_stop_lets_requests_end(cluster: RunningCluster) -> None:
    """The last test: nothing serves after it."""
    processes = psutil.Process(cluster.process.pid).children(recursive=True)
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(cluster.generate, None, "one " * n) for n in range(1, 5)]
        time.sleep(0.1)
        cluster.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        late = requests.post(f"{cluster.url}/generate", json={"text": "x"}, timeout=10)
        assert (late.status_code, late.json()["error"]["type"]) == (503, "StoppingError")
        assert {one.result().status_code for one in running} == {200}
    assert cluster.process.wait(60) == 0
    time.sleep(0.5)
    assert not [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
