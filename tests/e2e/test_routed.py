"""Routed adapters served: greedy answers equal transformers with the same members weighed token by token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import torch
from PIL import Image

from tests.conftest import Server, TinyModel
from tests.e2e.test_prefix_sharing import together
from tests.e2e.test_reuse import load, unload
from tests.e2e.test_serving import encoded, picture, prompt
from tests.support.engine_runs import EngineProcess
from tests.support.modes import CHUNK, TOKENS, ask
from tests.support.modes import TEXT as LONG
from tests.support.reference import Reference
from tests.support.tiny_random import make_adapter
from vlora_sgl.routed.peft import RoutedModel
from vlora_sgl.routed.spec import read_routed, write_routed
from vlora_sgl.routed.token_router import Router

pytestmark = pytest.mark.e2e

NAMES = ("by-modality", "by-position", "by-prefix", "four-of-six", "by-token-two")
MORE = "CDEF"
TEXT, PICTURE = prompt("How many objects are there? Is there a cat?", image=True), picture(5)


class RoutedReference(Reference):
    """transformers + PEFT with every adapter, and a routed adapter of them."""

    def routed_answer(
        self, directory: Path, name: str, text: str, image: Image.Image | None = None, tokens: int = 16
    ) -> tuple[list[int], RoutedModel]:
        """Greedy tokens, and the routed adapter after its last forward."""
        config = self.model.get_base_model().config.get_text_config()
        routed = RoutedModel(self.model, read_routed(directory, name, config.hidden_size, config.vocab_size))
        with routed.applied():
            return self.generate(text, None, image, tokens), routed


@pytest.fixture(scope="module")
def routed(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Directories of routed adapters of A and B, and of six adapters, loaded."""
    root = tmp_path_factory.mktemp("routed")
    for seed, name in enumerate(MORE, start=3):
        load(server, name, make_adapter(root / name, server.model.path, seed))
    hidden = json.loads((server.model.path / "config.json").read_text())["text_config"]["hidden_size"]
    rules: dict[str, object] = {"members": ["A", "B"], "modalities": {"image": "B", "text": "A"}}
    write_rules(root / "by-modality", **rules)
    places = [{"from": 0, "to": 8, "member": "B"}, {"from": 30, "to": 34, "member": "B"}]
    write_rules(root / "by-position", members=["A", "B"], modalities={"image": "A"}, positions=places)
    for name, members, context, top_k in (
        ("by-prefix", "AB", "prefix", 1),
        ("by-token-two", "AB", "token", 2),
        ("four-of-six", "AB" + MORE, "token", 4),
    ):
        torch.manual_seed(11)
        router = Router(hidden, len(members), context)
        with torch.no_grad():
            router.w2.mul_(20)
        write_routed(root / name, list(members), router, top_k)
    for name in NAMES:
        reply = requests.post(
            f"{server.url}/load_lora_adapter", json={"lora_name": name, "lora_path": str(root / name)}, timeout=60
        )
        assert reply.status_code == 200 and "a routed adapter of A, B" in reply.json()["report"], reply.text
    yield {name: root / name for name in NAMES}
    for name in (*NAMES, *MORE):
        unload(server, name)


def write_rules(directory: Path, **rules: object) -> None:
    """A routed adapter that decides by rules."""
    directory.mkdir()
    (directory / "vlora_routed.json").write_text(json.dumps({"format": 1, "router": "vocabulary", **rules}))


def test_a_routed_adapter_equals_transformers_alone_cached_and_in_company(
    server: Server, routed: dict[str, Path]
) -> None:
    more = {name: routed["by-prefix"].parent / name for name in MORE}
    reference = RoutedReference(server.model.path, {**server.model.adapters, **more})
    expected = {name: reference.generate(TEXT, name, PICTURE) for name in (None, "A", "B")}
    for name, directory in routed.items():
        expected[name], model = reference.routed_answer(directory, name, TEXT, PICTURE)
        if name == "by-token-two":
            assert bool((model.weights > 0).all())
        if name == "four-of-six":
            assert bool(((model.weights > 0).sum(-1) == 4).all())
    used = reference.routed_answer(routed["by-prefix"], "by-prefix", TEXT, PICTURE)[1]
    assert expected["by-modality"] not in (expected["A"], expected["B"]) and used is not None
    assert len({tuple(ids) for ids in expected.values()}) >= 7, "routed adapters must differ from their members"

    server.flush()
    shown = {"image_data": encoded(PICTURE)}
    for name in routed:
        cold = server.generate(text=TEXT, lora_path=name, **shown)
        warm = server.generate(text=TEXT, lora_path=name, **shown)
        assert cold["output_ids"] == expected[name] and cold["meta_info"]["cached_tokens"] == 0
        assert warm["output_ids"] == expected[name] and warm["meta_info"]["cached_tokens"] > 0
    second = prompt("How many objects are there? Is there a cat?", cold["text"], "Is there a dog?", image=True)
    again = server.generate(text=second, lora_path=name, **shown)
    assert again["output_ids"] == reference.routed_answer(routed[name], name, second, PICTURE)[0]

    server.flush()
    company = [None, "A", *routed, "B", "by-prefix"]
    rows = server.generate(
        text=[TEXT] * len(company), lora_path=company, image_data=[shown["image_data"]] * len(company)
    )
    assert [row["output_ids"] for row in rows] == [expected[name] for name in company]


def test_who_shares_a_routed_adapters_prefix_runs_behind_it(server: Server, routed: dict[str, Path]) -> None:
    """The token router adds to what the prefix's tokens voted, which no row of the same batch can know."""
    shown = {"image_data": encoded(PICTURE.resize((224, 224))), "lora_path": "by-prefix"}  # a prefix worth waiting for
    texts = [TEXT, prompt("Is there a dog?", image=True)]
    answers, batches, _ = together(server, {text: {"text": text, **shown} for text in texts}, send=Server.generate)
    found = [answers[text] for text in texts]
    assert batches == 16 + 1, "two prefills, and a decode step for each further token"
    reuse = [answer["meta_info"]["vlora"]["reuse"] for answer in found]
    assert sorted(one["cached_image_tokens"] > 0 for one in reuse) == [False, True]
    for text, answer in zip(texts, found, strict=True):  # afterwards, so that no slot held the right votes before
        server.flush()
        assert server.generate(text=text, **shown)["output_ids"] == answer["output_ids"]


def test_a_hot_member_may_be_merged_meanwhile(server: Server, routed: dict[str, Path]) -> None:
    """Six rows of A beside a routed one: the batch runs with A merged, and the routed row takes it out again."""
    alone = server.generate(text=TEXT, lora_path="by-prefix", image_data=encoded(PICTURE))["output_ids"]
    company = ["A"] * 6 + ["by-prefix"]
    parameters = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True, "custom_params": {"vlora_trace": True}}
    rows = server.generate(
        text=[TEXT] * 7, lora_path=company, image_data=[encoded(PICTURE)] * 7, sampling_params=parameters
    )
    assert rows[-1]["output_ids"] == alone
    assert rows[-1]["meta_info"]["vlora"]["adapter"] == "by-prefix"
    assert len(rows[-1]["meta_info"]["vlora"]["modes"]) == 16


def test_a_routed_adapter_is_loaded_after_its_members_and_keeps_them(server: Server, routed: dict[str, Path]) -> None:
    kept = requests.post(f"{server.url}/unload_lora_adapter", json={"lora_name": "A"}, timeout=60)
    assert kept.status_code == 400 and "by-modality" in kept.text
    assert server.generate(text=TEXT, lora_path="A", image_data=encoded(PICTURE))["output_ids"]
    data = {"format": 1, "router": "vocabulary", "members": ["A", "nobody"], "modalities": {"text": "nobody"}}
    stranger = routed["by-modality"].parent / "stranger"
    stranger.mkdir()
    (stranger / "vlora_routed.json").write_text(json.dumps(data))
    refused = requests.post(
        f"{server.url}/load_lora_adapter", json={"lora_name": "stranger", "lora_path": str(stranger)}, timeout=60
    )
    assert refused.status_code == 400 and "nobody" in refused.text


@pytest.mark.parametrize("context", ["prefix", "token"])
def test_chunks_modes_and_plain_neighbours_leave_a_routed_adapters_answer_alone(
    modes_engine: EngineProcess, tiny_model: TinyModel, mode_adapters: dict[str, Path], tmp_path: Path, context: str
) -> None:
    """Three members a token, cold and from the prefix cache, while any of them may be merged."""
    members = {name: mode_adapters[name] for name in ("all", "attention", "mlp")}
    reference = RoutedReference(tiny_model.path, members)
    hidden = reference.model.get_base_model().config.get_text_config().hidden_size
    torch.manual_seed(5)
    router = Router(hidden, 3, context)
    with torch.no_grad():
        router.w2.mul_(5)
    write_routed(tmp_path / "routed", list(members), router, 3)
    expected = reference.routed_answer(tmp_path / "routed", "routed", LONG, tokens=TOKENS)[0]
    plain = {name: reference.generate(LONG, name, tokens=TOKENS) for name in (None, "all")}
    assert expected not in plain.values()
    assert modes_engine.load("routed", tmp_path / "routed") is None
    names = ["routed", "all", None, "all", "routed"]
    wanted = [{"routed": expected, **plain}[name] for name in names]
    for mode in ("unmerged", "merged", "mixture"):
        modes_engine.force_mode(mode)
        modes_engine.flush()
        for cached in (False, True):
            run = ask(modes_engine, names)
            assert [answer["output_ids"] for answer in run.answers] == wanted, (mode, cached)
            assert all((answer["meta_info"]["cached_tokens"] > CHUNK) == cached for answer in run.answers[:1])
        assert any(step.kind == "prefill" and step.tokens <= CHUNK for step in run.steps)
    assert modes_engine.unload("routed") is None
