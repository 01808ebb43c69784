"""Trains the token router of a routed adapter, alone or with its members (MoLoRA, sections 4.3 and E).

The loss is that of the answers, plus the load balancing loss of Switch Transformer (Fedus et al., 2022, equation 4),
which keeps every member in use; and where tokens are labelled with their member, that of the router's votes. The base
stays as it is. At first all members are weighed, by a softmax that
grows sharper from step to step; then each token gets what serving gives it, the best members only, and the softmax
only says in which direction to change the votes (straight-through; Bengio et al., 2013). Without that second phase a
router is trained for blends that it will not be served with.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from vlora_sgl.core import JsonDict
from vlora_sgl.generate.datasets import Example
from vlora_sgl.generate.trainer import IGNORE, Prepared, base_of, exact_match, prepared, save_adapter, shuffled
from vlora_sgl.routed.peft import RoutedModel
from vlora_sgl.routed.spec import RoutedSpec, write_routed
from vlora_sgl.routed.token_router import Router

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, ProcessorMixin

REPORT_FILE = "vlora_routed_report.json"
MEMBERS = "members"
"""Where members that learnt along go, each in a directory of its name."""


@dataclass(frozen=True)
class RouterSettings:
    """How a router is trained.

    Attributes:
        soft_share: of the steps, in (0, 1], with all members weighed; in the others the best ``top_k`` of a token are.
        sharpest: temperature of the softmax at the end of the soft steps; it starts at 1 and falls geometrically.
        balance: weight of the load balancing loss.
        per_domain: training examples drawn from each domain, at most: a router is small and needs few.
        adapter_rate: learning rate of the members, which learn along; 0 leaves them as they are.
        labels: weight of the cross-entropy of the votes of tokens whose member is known.
    """

    steps: int = 400
    batch_size: int = 16
    soft_share: float = 0.5
    sharpest: float = 0.2
    learning_rate: float = 5e-3
    balance: float = 0.01
    top_k: int = 1
    context: str = "prefix"
    seed: int = 0
    per_domain: int = 200
    adapter_rate: float = 0.0
    labels: float = 0.0


def joint(settings: RouterSettings) -> RouterSettings:
    """These settings, with members that learn along and votes that follow labels, so with fewer soft steps."""
    return replace(settings, adapter_rate=3e-4, labels=0.5, soft_share=0.2, balance=1e-3, per_domain=800)


def load_members(model: PreTrainedModel, adapters: Mapping[str, Path]) -> PeftModel:
    """The base model with every adapter loaded under its name, all frozen."""
    from peft import PeftModel

    (first, path), *others = adapters.items()
    peft_model = PeftModel.from_pretrained(model, path, adapter_name=first)
    for name, path in others:
        peft_model.load_adapter(path, adapter_name=name)
    return peft_model.requires_grad_(False).eval()


def train_router(
    peft_model: PeftModel,
    processor: ProcessorMixin,
    members: Sequence[str],
    examples: Sequence[Example] | Prepared,
    settings: RouterSettings,
    labels: Sequence[torch.Tensor] | None = None,
) -> RoutedSpec:
    """Train a router over ``members``, adapters loaded in ``peft_model``, on ``examples`` of any mixture of domains.

    Args:
        labels: of every example, [T] int64, the member that each of its tokens is for, ``IGNORE`` where nobody knows.
    Returns:
        The routed adapter, as it is to be served.

    Raises:
        FloatingPointError: the loss became infinite or NaN.
    """
    torch.manual_seed(settings.seed)
    hidden = base_of(peft_model).config.get_text_config().hidden_size
    router = Router(hidden, len(members), settings.context).to(next(peft_model.parameters()).device)
    spec = RoutedSpec(tuple(members), router=router, top_k=settings.top_k)
    train_routed(peft_model, processor, spec, examples, settings, labels)
    router.requires_grad_(False).eval()
    return spec


def train_routed(
    peft_model: PeftModel,
    processor: ProcessorMixin,
    spec: RoutedSpec,
    examples: Sequence[Example] | Prepared,
    settings: RouterSettings,
    labels: Sequence[torch.Tensor] | None = None,
) -> None:
    """Train what a routed adapter has to learn, in place: its router, if any, and with ``adapter_rate`` its members.

    Raises:
        FloatingPointError: the loss became infinite or NaN.
    """
    routed, data = RoutedModel(peft_model, spec), prepared(peft_model, processor, examples)
    device = next(peft_model.parameters()).device
    groups: list[dict[str, Any]] = []
    if spec.router is not None:
        groups.append({"params": list(spec.router.parameters()), "lr": settings.learning_rate})
    adapters = [p for name, p in peft_model.named_parameters() if "lora_" in name] if settings.adapter_rate else []
    if adapters:
        groups.append({"params": adapters, "lr": settings.adapter_rate})
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    rates = [group["lr"] for group in groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=settings.steps + 1)
    batches = shuffled(len(data), settings.batch_size, settings.steps, settings.seed)
    bar = tqdm(batches, desc="routed", total=settings.steps, mininterval=5)
    with routed.applied():
        for parameter in adapters:
            parameter.requires_grad_(True)
        for step, chosen in enumerate(bar):
            softened = step / (settings.soft_share * settings.steps)
            routed.straight = softened >= 1
            routed.temperature = 1.0 if routed.straight else settings.sharpest**softened
            inputs, wanted = data.batch(chosen, device)
            with data.seen(chosen):
                logits = peft_model(**inputs, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), wanted[:, 1:].flatten(), ignore_index=IGNORE
            )
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            if spec.router is not None:
                balance = balance_loss(routed.probabilities[inputs["attention_mask"].bool()])
                loss = loss + settings.balance * balance
                if labels is not None and settings.labels:
                    loss = loss + settings.labels * label_loss(routed.means, [labels[i] for i in chosen])
            optimizer.zero_grad()
            loss.backward()
            for group in groups:
                torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
            optimizer.step()
            schedule.step()
    if not torch.isfinite(loss):
        raise FloatingPointError("the training loss is not finite")


def balance_loss(weights: torch.Tensor) -> torch.Tensor:
    """``K sum_j f_j P_j``: f the share of tokens that j is best for, P its mean weight; 1 where all are used alike.

    Args:
        weights: [n, K].
    """
    members = weights.shape[1]
    best = torch.nn.functional.one_hot(weights.argmax(-1), members).float().mean(0)
    return members * (best * weights.mean(0)).sum()


def label_loss(votes: torch.Tensor, labels: Sequence[torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of the votes [B, T, K] of tokens whose member is known; rows are padded on the right."""
    wanted = torch.nn.utils.rnn.pad_sequence(list(labels), batch_first=True, padding_value=IGNORE).to(votes.device)
    wrong = torch.nn.functional.cross_entropy(votes.flatten(0, 1), wanted.flatten(), reduction="sum")
    return wrong / (wanted != IGNORE).sum().clamp(min=1)


@dataclass(frozen=True)
class RoutedReport:
    """How a routed adapter does on held-out examples of known domains.

    Attributes:
        accuracy: exact match by domain.
        usage: share of all tokens that each member gets, by weight.
        entropy: of the usage, in nats; ``log(members)`` where all are used alike.
        adjusted_rand, mutual_information: of the member chosen where the answer starts, against the domain.
    """

    accuracy: dict[str, float]
    usage: dict[str, float]
    entropy: float
    adjusted_rand: float
    mutual_information: float


@torch.no_grad()
def evaluate_routed(
    peft_model: PeftModel,
    processor: ProcessorMixin,
    spec: RoutedSpec,
    examples: Mapping[str, Sequence[Example] | Prepared],
    batch_size: int = 64,
) -> RoutedReport:
    """Exact match per domain, and which members the routed adapter uses; it is never shown the domains."""
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    routed = RoutedModel(peft_model, spec)
    device = next(peft_model.parameters()).device
    accuracy: dict[str, float] = {}
    used = torch.zeros(len(spec.members), dtype=torch.float64)
    domains: list[str] = []
    chosen: list[int] = []
    with routed.applied():
        for domain, rows in examples.items():
            data = prepared(peft_model, processor, rows)
            hits = exact_match(peft_model, processor, data, batch_size)
            accuracy[domain] = sum(hits) / len(hits)
            for start in range(0, len(data), batch_size):
                indices = range(start, min(start + batch_size, len(data)))
                inputs, _ = data.batch(indices, device)
                with data.seen(indices):
                    peft_model(**inputs, use_cache=False)
                used += routed.weights[inputs["attention_mask"].bool()].double().sum(0).cpu()
                last = torch.tensor([data.data.prompt_lengths[i] - 1 for i in indices], device=device)
                chosen += routed.weights[torch.arange(len(indices), device=device), last].argmax(-1).tolist()
                domains += [domain] * len(indices)
    share = used / used.sum()
    return RoutedReport(
        accuracy=accuracy,
        usage={name: round(float(s), 4) for name, s in zip(spec.members, share, strict=True)},
        entropy=float(-(share * share.clamp(min=1e-12).log()).sum()),
        adjusted_rand=float(adjusted_rand_score(domains, chosen)),
        mutual_information=float(normalized_mutual_info_score(domains, chosen)),
    )


@torch.no_grad()
def single_accuracies(
    peft_model: PeftModel, processor: ProcessorMixin, members: Iterable[str | None], examples: Mapping[str, Prepared]
) -> dict[str | None, dict[str, float]]:
    """Exact match of every member alone (``None``: the base) on every domain."""
    found: dict[str | None, dict[str, float]] = {}
    for member in members:
        if member is not None:
            peft_model.set_adapter(member)
        with peft_model.disable_adapter() if member is None else nullcontext():
            hits = {domain: exact_match(peft_model, processor, rows) for domain, rows in examples.items()}
        found[member] = {domain: sum(one) / len(one) for domain, one in hits.items()}
    return found


def make_routed(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    adapters: Mapping[str, Path],
    train: Mapping[str, Sequence[Example]],
    test: Mapping[str, Sequence[Example]],
    out: Path,
    settings: RouterSettings,
) -> JsonDict:
    """Train a router over ``adapters``, write the routed adapter to ``out``, and measure it.

    Members that learn along (``adapter_rate``) go to ``out/members``; what they are measured against, the adapters
    alone, is as they were given. A domain of a member's name labels its tokens for that member.

    Args:
        model: the base model; adapters: PEFT directories by the names they will be served under.
        train: examples by domain; the router sees them shuffled together, without the domain.
        test: examples by domain, to measure with.

    Returns:
        The report, also in ``out/vlora_routed_report.json``: accuracy by domain of the routed adapter, of the best
        single adapter (the oracle), of every single adapter and of the base; use of the members; agreement with the
        domains.
    """
    peft_model = load_members(model, adapters)
    members = list(adapters)
    rows = {domain: prepared(peft_model, processor, examples) for domain, examples in test.items()}
    single = single_accuracies(peft_model, processor, [None, *members], rows)
    rng = random.Random(settings.seed)
    drawn = {d: rng.sample(list(every), min(settings.per_domain, len(every))) for d, every in train.items()}
    data = prepared(peft_model, processor, [example for some in drawn.values() for example in some])
    owners = [members.index(d) if d in members else IGNORE for d, some in drawn.items() for _ in some]
    labels = [torch.full_like(row["input_ids"][0], k) for row, k in zip(data.data.rows, owners, strict=True)]
    spec = train_router(peft_model, processor, members, data, settings, labels)
    assert spec.router is not None
    write_routed(out, members, spec.router, spec.top_k)
    if settings.adapter_rate:
        save_adapter(peft_model, out / MEMBERS)
    routed = evaluate_routed(peft_model, processor, spec, rows)
    oracle = {domain: max(single[m][domain] for m in members) for domain in rows}
    report = {
        "settings": asdict(settings),
        "examples": {domain: len(examples) for domain, examples in rows.items()},
        "routed": routed.accuracy,
        "oracle": oracle,
        "base": single[None],
        "members": {m: single[m] for m in members},
        "routed_minus_oracle_points": 100 * mean(routed.accuracy[d] - oracle[d] for d in rows),
        "usage": routed.usage,
        "entropy": routed.entropy,
        "adjusted_rand": routed.adjusted_rand,
        "mutual_information": routed.mutual_information,
    }
    (out / REPORT_FILE).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report
