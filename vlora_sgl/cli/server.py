"""Commands about a running server or cluster: its adapters, and what it does now."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from vlora_sgl.cli.client import Client
from vlora_sgl.cli.result import Result, table
from vlora_sgl.core import JsonDict


def list_adapters(args: Namespace) -> Result:
    """Every adapter, and where its nearest copy is."""
    rows = Client(args).get("/lora_adapters")["adapters"]
    if not rows:
        return Result(rows, "no adapters are loaded; load one with: vlora add NAME DIR")
    heads = ["name", "version", "share", "tier", "slot", "rank", "MiB", "users", "heads", "directory"]
    shown = [
        [
            _marked(row), row.get("version"), row.get("share"), row["residency"], row.get("slot"), row.get("rank"),
            _mib(row.get("host_bytes")), row.get("users"), ", ".join(row.get("heads") or ()) or None, row["path"],
        ]
        for row in rows
    ]  # fmt: skip
    return Result(rows, table(shown, heads))


def show_state(args: Namespace) -> Result:
    """Of a server its mode, requests and slots; of a cluster its replicas."""
    client = Client(args)
    if client.has("/cluster"):
        return _cluster(client.get("/cluster"))
    state = client.get("/server_info")["internal_states"][0]["vlora"]
    rows = client.get("/lora_adapters")["adapters"]
    plan, pool = state["plan"] or {}, state["pool"] or {"ranks": [], "bytes": 0}
    requests = plan.get("requests", {"running": {}, "waiting": {}})
    steps = state["batches_by_mode"]
    data = {
        "policy": state["policy"], "mode": state["mode"], "merged": state.get("merged"), "steps": steps,
        "switches": plan.get("switches", 0), "requests": requests, "pool": pool, "adapters": rows,
        "faults": state["faults"],
    }  # fmt: skip
    merged = f", {data['merged']} is merged now" if data["merged"] else ""
    lines = [
        f"mode {data['mode']}{merged}; policy {data['policy']}",
        f"steps: {', '.join(f'{count} {mode}' for mode, count in steps.items())}; {data['switches']} switches",
        f"slots: {_filled(rows)} of {len(pool['ranks'])} filled, {_mib(pool['bytes']):.1f} MiB",
        "",
        table(_by_adapter(rows, requests), ["adapter", "tier", "slot", "users", "running", "waiting"]),
    ]
    return Result(data, "\n".join(lines))


def add(args: Namespace) -> Result:
    """Load an adapter; says what of it matched."""
    body = {"lora_name": args.name, "lora_path": str(args.directory.absolute()), "pinned": args.pin}
    answer = Client(args).post("/load_lora_adapter", body, admin=True)
    return Result(answer, f"{args.name} is loaded: {answer.get('report') or 'all matched'}")


def remove(args: Namespace) -> Result:
    """Unload an adapter."""
    answer = Client(args).post("/unload_lora_adapter", {"lora_name": args.name}, admin=True)
    return Result(answer, f"{args.name} is unloaded")


def reload(args: Namespace) -> Result:
    """Replace an adapter."""
    path = None if args.directory is None else str(args.directory.absolute())
    answer = Client(args).post("/reload_lora_adapter", {"lora_name": args.name, "lora_path": path}, admin=True)
    return Result(answer, f"{args.name} is replaced: {answer.get('report') or 'all matched'}")


def pin(args: Namespace) -> Result:
    """Pin an adapter, or no longer."""
    body = {"lora_name": args.name, "pinned": not args.off}
    answer = Client(args).post("/pin_lora_adapter", body, admin=True)
    return Result(answer, f"{args.name} {'may leave its slot' if args.off else 'keeps its slot'}")


def promote(args: Namespace) -> Result:
    """Let a name mean another of its versions."""
    body = {"lora_name": args.name, "share": args.share, "drop": args.drop}
    answer = Client(args).post("/promote_lora_adapter", body, admin=True)
    now = "is current" if args.share == 1 else f"answers {args.share:.0%} of the conversations"
    return Result(answer, f"{args.name} {now}")


def roll_back(args: Namespace) -> Result:
    """End the trial of a version, or let a name mean what it meant before."""
    answer = Client(args).post("/roll_back_lora_adapter", {"lora_name": args.name}, admin=True)
    return Result(answer, f"{args.name} is version {answer['version']}")


def _cluster(state: Any) -> Result:
    heads = ["replica", "serving", "running", "waiting", "served", "adapters", "address"]
    rows = [
        [
            one["number"], "yes" if one["serving"] else "no", one["running"], one["waiting"], one["served"],
            ", ".join(one["adapters"]) or None, one["url"],
        ]
        for one in state["replicas"]
    ]  # fmt: skip
    homes = ", ".join(f"{name} on {home}" for name, home in state["homes"].items())
    return Result(state, table(rows, heads) + (f"\nhomes: {homes}" if homes else ""))


def _by_adapter(rows: list[JsonDict], requests: JsonDict) -> list[list[object]]:
    running, waiting = requests["running"], requests["waiting"]
    base: list[object] = ["(base)", None, None, None, running.get("", 0), waiting.get("", 0)]
    return [base] + [
        [
            _marked(row), row["residency"], row.get("slot"), row.get("users"),
            running.get(row["name"], 0), waiting.get(row["name"], 0),
        ]
        for row in rows
    ]  # fmt: skip


def _filled(rows: list[JsonDict]) -> int:
    return sum(row.get("slot") is not None for row in rows)


def _marked(row: JsonDict) -> str:
    return row["name"] + (" (pinned)" if row.get("pinned") else "")


def _mib(size: int | None) -> float | None:
    return None if size is None else size / 2**20
