"""What a cluster says of itself: ``GET /cluster`` and ``GET /metrics``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from vlora_sgl.cluster.placement import Affinity, Routing
from vlora_sgl.cluster.replica import Replica
from vlora_sgl.core import JsonDict

PER_REPLICA = {
    "serving": ("gauge", "Whether the replica serves."),
    "running": ("gauge", "Requests that the replica has."),
    "waiting": ("gauge", "Requests that wait for the replica."),
    "served": ("counter", "Requests sent to the replica."),
    "loads": ("counter", "Adapters that the router loaded on the replica."),
    "starts": ("counter", "Times the replica began to serve."),
}
PER_CLUSTER = {
    "sent_again": "Requests sent to a second replica because the first ended.",
    "lost": "Requests answered by an error because replicas ended.",
}


def state(replicas: Sequence[Replica], routing: Routing, counts: Mapping[str, int]) -> JsonDict:
    """Replicas, homes of the adapters and requests by adapter; the last can be given to the next start.

    Args:
        replicas: all of them.
        routing: how requests are routed.
        counts: the router's own, by the names of PER_CLUSTER.
    """
    homes, shares = (routing.homes, routing.requests) if isinstance(routing, Affinity) else ({}, {})
    return {
        "replicas": [
            {
                "number": replica.number,
                "url": replica.url,
                **{name: getattr(replica, name) for name in PER_REPLICA},
                "adapters": sorted(replica.loaded),
            }
            for replica in replicas
        ],
        "homes": homes,
        "shares": {name: round(count, 3) for name, count in shares.items()},
        **counts,
    }


def metrics(replicas: Sequence[Replica], counts: Mapping[str, int]) -> str:
    """The same for Prometheus, in its text format; every replica has more at its own ``/metrics``."""
    lines = []
    for name, (kind, text) in PER_REPLICA.items():
        lines += [f"# HELP vlora_cluster:{name} {text}", f"# TYPE vlora_cluster:{name} {kind}"]
        lines += [f'vlora_cluster:{name}{{replica="{r.number}"}} {int(getattr(r, name))}' for r in replicas]
    for name, count in counts.items():
        lines += [f"# HELP vlora_cluster:{name} {PER_CLUSTER[name]}", f"# TYPE vlora_cluster:{name} counter"]
        lines.append(f"vlora_cluster:{name} {count}")
    return "\n".join([*lines, ""])


def joined(texts: Iterable[tuple[int, str]]) -> str:
    """Metrics of several replicas as one text: each sample with its replica's number, each name described once."""
    lines: dict[str, list[str]] = {}
    for number, text in texts:
        name = ""
        for line in text.splitlines():
            if line.startswith("# "):
                name = line.split()[2]
                described = lines.setdefault(name, [])
                if line not in described[:2]:
                    described.append(line)
            elif line:
                lines.setdefault(name, []).append(_labelled(line, number))
    return "".join(f"{line}\n" for group in lines.values() for line in group)


def _labelled(sample: str, number: int) -> str:
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f'{name}{{replica="{number}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{replica="{number}"}} {value}'
