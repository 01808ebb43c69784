"""The policy in the running server: plans are made, nothing is lost, constraints are read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from tests.conftest import Server

pytestmark = pytest.mark.e2e

NAMES = [None, "A", "B", "A", "A", "B", None, "A"]


def vlora_state(server: Server) -> dict[str, Any]:
    """What the first scheduler says about itself."""
    info = requests.get(f"{server.url}/server_info", timeout=60).json()
    return info["internal_states"][0]["vlora"]


def test_staggered_traffic_is_served_whole_and_as_alone(server: Server) -> None:
    def ask(i: int) -> list[int]:
        params = {"temperature": 0, "max_new_tokens": 4 + 3 * (i % 5), "ignore_eos": True}
        if i % 3 == 0:
            params["custom_params"] = {"vlora_class": "realtime", "vlora_deadline_ms": 2000}
        text = f"<|im_start|>user\nWhat is in picture {i % 8}?<|im_end|>\n<|im_start|>assistant\n"
        ids = server.generate(text=text, lora_path=NAMES[i % 8], sampling_params=params)["output_ids"]
        assert len(ids) == params["max_new_tokens"]
        return ids

    alone = [ask(i) for i in range(40)]
    before = vlora_state(server)
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, range(40)))
    assert together == alone
    after = vlora_state(server)
    assert after["plan"]["planned_seconds"] > before["plan"]["planned_seconds"]
    assert after["plan"]["starving"] == 0


@pytest.mark.parametrize(
    ("constraint", "said"),
    [({"vlora_class": "soon"}, "realtime, interactive, batch"), ({"vlora_deadline_ms": -5}, "positive number")],
)
def test_a_wrong_constraint_is_a_400_that_says_so(server: Server, constraint: dict[str, Any], said: str) -> None:
    request = {"text": "x", "sampling_params": {"max_new_tokens": 1, "custom_params": constraint}}
    response = requests.post(f"{server.url}/generate", json=request, timeout=60)
    assert response.status_code == 400
    assert said in response.text


def test_metrics_show_modes_slots_and_adapters(server: Server) -> None:
    server.generate(text="x", lora_path="A")
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    lines = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    names = {
        "mode_share",
        "switches",
        "switch_seconds",
        "starving_requests",
        "adapters",
        "slot_hits",
        "adapter_requests",
    }
    assert {f"vlora:{name}" for name in names} <= lines
    assert 'adapter="A"' in text
    hits = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("vlora:slot_hits{")]
    assert sum(hits) > 0
