"""Routed adapters served: greedy answers equal transformers with the same members weighed token by token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import torch
from PIL import Image

from tests.conftest import Server
from tests.e2e.test_prefix_sharing import together
from tests.e2e.test_serving import encoded, picture, prompt
from tests.support.reference import Reference
from vlora_sgl.routed.peft import RoutedModel
from vlora_sgl.routed.spec import read_routed, write_routed
from vlora_sgl.routed.token_router import Router

pytestmark = pytest.mark.e2e

NAMES = ("by-modality", "by-prefix", "by-token-two")
TEXT, PICTURE = prompt("How many objects are there? Is there a cat?", image=True), picture(5)


class RoutedReference(Reference):
    """transformers + PEFT with every adapter, and a routed adapter of them."""

    def routed_answer(
        self, directory: Path, name: str, text: str, image: Image.Image
    ) -> tuple[list[int], RoutedModel]:
        """Greedy tokens, and the routed adapter after its last forward."""
        config = self.model.get_base_model().config.get_text_config()
        routed = RoutedModel(self.model, read_routed(directory, name, config.hidden_size, config.vocab_size))
        with routed.applied():
            return self.generate(text, None, image), routed


@pytest.fixture(scope="module")
def routed(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Directories of three routed adapters of A and B, loaded."""
    root = tmp_path_factory.mktemp("routed")
    hidden = json.loads((server.model.path / "config.json").read_text())["text_config"]["hidden_size"]
    by_modality = root / "by-modality"
    by_modality.mkdir()
    data = {"format": 1, "router": "vocabulary", "members": ["A", "B"], "modalities": {"image": "B", "text": "A"}}
    (by_modality / "vlora_routed.json").write_text(json.dumps(data))
    for name, context, top_k in (("by-prefix", "prefix", 1), ("by-token-two", "token", 2)):
        torch.manual_seed(11)
        router = Router(hidden, 2, context)
        with torch.no_grad():
            router.w2.mul_(20)
        write_routed(root / name, ["A", "B"], router, top_k)
    for name in NAMES:
        reply = requests.post(
            f"{server.url}/load_lora_adapter", json={"lora_name": name, "lora_path": str(root / name)}, timeout=60
        )
        assert reply.status_code == 200 and "a routed adapter of A, B" in reply.json()["report"], reply.text
    yield {name: root / name for name in NAMES}
    for name in NAMES:
        reply = requests.post(f"{server.url}/unload_lora_adapter", json={"lora_name": name}, timeout=60)
        assert reply.status_code == 200, reply.text


def test_a_routed_adapter_equals_transformers_alone_cached_and_in_company(
    server: Server, routed: dict[str, Path]
) -> None:
    reference = RoutedReference(server.model.path, server.model.adapters)
    expected = {name: reference.generate(TEXT, name, PICTURE) for name in (None, "A", "B")}
    for name, directory in routed.items():
        expected[name], model = reference.routed_answer(directory, name, TEXT, PICTURE)
        if name == "by-token-two":
            assert bool((model.weights > 0).all())
    used = reference.routed_answer(routed["by-prefix"], "by-prefix", TEXT, PICTURE)[1]
    assert expected["by-modality"] not in (expected["A"], expected["B"]) and used is not None
    assert len({tuple(ids) for ids in expected.values()}) >= 5, "routed adapters must differ from their members"

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
