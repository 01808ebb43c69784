"""The policy in the running server: plans are made, nothing is lost, constraints are read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from tests.conftest import Server
from vlora_sgl.core import InferenceMode

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


def change(server: Server, **settings: float) -> bool:
    """POST /set_internal_state; whether it was taken."""
    response = requests.post(f"{server.url}/set_internal_state", json={"server_args": settings}, timeout=60)
    return all(response.json())


def test_policy_and_thresholds_change_on_a_running_server(server: Server) -> None:
    before = vlora_state(server)
    try:
        assert change(server, **{"vlora_policy:merged": 1, "vlora_theta": 0.25})
        server.generate(text="x", lora_path="B")
        after = vlora_state(server)
        assert after["policy"] == "merged"
        assert after["batches_by_mode"]["merged"] > before["batches_by_mode"]["merged"]
        assert not change(server, **{"vlora_policy:nosuch": 1})
        assert not change(server, vlora_wait_bound=-1.0)
        assert vlora_state(server)["policy"] == "merged"
    finally:
        assert change(server, **{f"vlora_policy:{before['policy']}": 1, "vlora_theta": 0.5})


def test_metrics_show_modes_slots_and_adapters(server: Server) -> None:
    for adapter in ("A", "B", None):
        server.generate(text="x", lora_path=adapter)
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    values: dict[str, list[tuple[str, float]]] = {}
    for line in text.splitlines():
        if line.startswith("vlora:"):
            name, _, rest = line.removeprefix("vlora:").partition("{")
            labels, _, value = rest.rpartition("} ")
            values.setdefault(name, []).append((labels, float(value)))
    shares = {mode: v for mode in InferenceMode for labels, v in values["mode_share"] if f'mode="{mode}"' in labels}
    assert set(shares) == set(InferenceMode)
    assert sum(shares.values()) == pytest.approx(1)
    total = {name: sum(value for _, value in rows) for name, rows in values.items()}
    for name in ("iterations", "switches", "switch_seconds", "slot_hits", "slot_ahead"):
        assert total[name] > 0, name
    assert total["slot_misses"] >= 0
    assert total["starving_requests"] == 0
    assert "slot_reloads" in total  # other tests of the session load more adapters than there are slots
    tiers = {tier: v for tier in ("device", "host") for labels, v in values["adapters"] if f'tier="{tier}"' in labels}
    assert tiers["device"] + tiers["host"] >= 2
    shown = {part for labels, _ in values["adapter_requests"] for part in labels.split(",")}
    assert {'adapter="A"', 'adapter="B"', 'adapter="base"', 'state="running"', 'state="waiting"'} <= shown


def test_the_cost_table_follows_the_iterations(server: Server) -> None:
    for _ in range(3):
        server.generate(text="x", lora_path="A", sampling_params={"max_new_tokens": 100, "ignore_eos": True})
    plan = vlora_state(server)["plan"]
    assert "Followed since" in plan["costs"] and 0 < plan["cost_error"]["decode"] < 100
