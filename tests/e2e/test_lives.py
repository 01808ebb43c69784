"""Adapters that come, change and go while requests run: nothing is lost, mixed up, stuck or left behind."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import Server
from tests.soak import phases
from tests.soak.phases import GREEDY, adapters, answer, load, longest_gap, post, question, reload, stream, unload
from tests.support.head_reference import data_url, make_image
from tests.support.reference import Reference
from tests.support.tiny_random import make_adapter
from vlora_sgl.lora.peft_config import PeftLoraConfig

pytestmark = pytest.mark.e2e

PROMPT = question(1)
SHORT = "<|im_start|>user\nHow many objects are there?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def reference(server: Server) -> Reference:
    return Reference(server.model.path, server.model.adapters)


@pytest.fixture(scope="module")
def more(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of more adapters: enough, with A and B, to need every slot and one more."""
    root = tmp_path_factory.mktemp("more")
    return {name: make_adapter(root / name, server.model.path, ord(name)) for name in "CDEFGXY"}


def server_state(server: Server) -> Any:
    return requests.get(f"{server.url}/server_info", timeout=60).json()["internal_states"][0]["vlora"]


# Acceptance 1


def test_two_rounds_with_alternating_adapters_equal_cold_runs(server: Server) -> None:
    order: list[str | None] = ["A", "B", None, "A"]
    image = data_url(make_image(4))
    first = PROMPT.replace("user\n", "user\n<|vision_start|><|image_pad|><|vision_end|>", 1)
    second = first + "yes<|im_end|>\n<|im_start|>user\nIs there a cat?<|im_end|>\n<|im_start|>assistant\n"
    cold: dict[tuple[str, str | None], list[int]] = {}
    for text in (first, second):
        for name in order:
            server.flush()
            reply = server.generate(text=text, image_data=image, lora_path=name, sampling_params=GREEDY)
            cold[text, name] = reply["output_ids"]
    assert len({tuple(cold[first, name]) for name in order}) == 3, "the adapters must change the answer"

    server.flush()
    seen: set[str | None] = set()
    for text in (first, second):
        for name in order:
            reply = server.generate(text=text, image_data=image, lora_path=name, sampling_params=GREEDY)
            assert reply["output_ids"] == cold[text, name]
            assert (
                reply["meta_info"]["cached_tokens"] > 256 if name in seen else not reply["meta_info"]["cached_tokens"]
            )
            seen.add(name)


# Ranks


def test_adapters_of_five_ranks_and_the_base_in_one_batch(server: Server, tmp_path: Path) -> None:
    ranks = (4, 8, 16, 32, 64)
    paths = {f"r{rank}": make_adapter(tmp_path / str(rank), server.model.path, rank, rank=rank) for rank in ranks}
    reference = Reference(server.model.path, paths)
    for name, path in paths.items():
        assert load(server, name, path).status_code == 200
    try:
        rows = [*paths, None, *reversed(paths)]
        expected = {name: reference.generate(SHORT, name, None)[: phases.TOKENS] for name in (None, *paths)}
        assert len({tuple(ids) for ids in expected.values()}) == 6, "the adapters must change the answer"
        assert {name: answer(server, SHORT, name) for name in expected} == expected
        before = server_state(server)["batches_by_mode"]
        replies = server.generate(text=[SHORT] * len(rows), lora_path=rows, sampling_params=GREEDY)
        assert [reply["output_ids"] for reply in replies] == [expected[name] for name in rows]
        after = server_state(server)["batches_by_mode"]
        steps = sum(after.values()) - sum(before.values())
        assert steps <= 2 * phases.TOKENS, f"the rows ran one after the other, in {steps} iterations"
        assert {name: adapters(server)[name]["rank"] for name in paths} == dict(zip(paths, ranks, strict=True))
    finally:
        for name in paths:
            unload(server, name)


def test_a_rank_that_no_slot_holds_is_refused(server: Server, tmp_path: Path) -> None:
    reply = load(server, "wide", make_adapter(tmp_path, server.model.path, 1, rank=65))
    assert reply.status_code == 400
    assert "rank 65 does not fit the slots of rank 64 (--max-lora-rank)" in reply.text


def test_rslora_scales_by_the_root_of_the_rank(tmp_path: Path, server: Server) -> None:
    make_adapter(tmp_path, server.model.path, 1, rank=16, alpha=32, use_rslora=True)
    assert PeftLoraConfig.read(tmp_path).scale("model.layers.0.self_attn.q_proj", 16) == 8.0
    report = load(server, "root", tmp_path).json()["report"]
    unload(server, "root")
    assert "scale 8," in report


# Acceptance 5


def with_score(source: Path, directory: Path, labels: int) -> torch.Tensor:
    """A copy of an adapter that saves a head of so many labels, as PEFT writes it; the head's weight."""
    shutil.copytree(source, directory)
    config = directory / "adapter_config.json"
    text = config.read_text()
    assert '"modules_to_save": null' in text
    config.write_text(text.replace('"modules_to_save": null', '"modules_to_save": ["classifier", "score"]'))
    weight = torch.randn(labels, 128, generator=torch.Generator().manual_seed(labels))
    tensors = load_file(directory / phases.WEIGHTS)
    save_file({**tensors, "base_model.model.score.weight": weight}, directory / phases.WEIGHTS)
    return weight


def last_state(server: Server, adapter: Path) -> torch.Tensor:
    """Post-norm hidden state of the prompt's last token, by transformers + PEFT."""
    from peft import PeftModel
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

    base = Qwen2_5_VLForConditionalGeneration.from_pretrained(server.model.path, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(server.model.path)(SHORT, return_tensors="pt").input_ids
    with torch.no_grad():
        model = PeftModel.from_pretrained(base, adapter).eval()
        return model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, -1]


def test_saved_heads_of_three_and_five_labels_in_one_batch(server: Server, tmp_path: Path) -> None:
    expected = {}
    for name, labels in (("A", 3), ("B", 5)):
        weight = with_score(server.model.adapters[name], tmp_path / name, labels)
        expected[f"S{labels}"] = (weight @ last_state(server, server.model.adapters[name])).softmax(-1).tolist()
        assert load(server, f"S{labels}", tmp_path / name).status_code == 200
    try:
        head = {"max_new_tokens": 1, "custom_params": {"vlora_head": "score"}}
        replies = server.generate(
            text=[SHORT] * 3, lora_path=["S3", "S5", "A"], sampling_params=[head, head, {**GREEDY}]
        )
        for reply, name in zip(replies, ("S3", "S5"), strict=False):
            said = reply["meta_info"]["vlora"]["head"]
            np.testing.assert_allclose(said["probabilities"], expected[name], rtol=2e-3, atol=2e-4)
            assert said["label"] == f"LABEL_{np.argmax(expected[name])}"
        assert replies[2]["output_ids"] == answer(server, SHORT, "A")
    finally:
        unload(server, "S3")
        unload(server, "S5")


def test_a_saved_output_layer_is_refused(server: Server, reference: Reference, tmp_path: Path) -> None:
    shutil.copytree(server.model.adapters["A"], tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / phases.WEIGHTS)
    vocabulary = reference.vocabulary
    tensors["base_model.model.lm_head.weight"] = torch.zeros(vocabulary, 128)
    save_file(tensors, tmp_path / "adapter" / phases.WEIGHTS)
    reply = load(server, "output", tmp_path / "adapter")
    assert reply.status_code == 400 and "a saved lm_head would replace the base model's" in reply.text


# Replacing, pinning, listing


def test_a_running_request_keeps_the_adapter_that_is_replaced(server: Server, more: dict[str, Path]) -> None:
    for name, path in (("old", more["X"]), ("new", more["Y"]), ("hot", more["X"])):
        assert load(server, name, path).status_code == 200
    try:
        long = {"max_new_tokens": 120}
        wanted = {name: [*stream(server, SHORT, name, **long)][-1]["output_ids"] for name in ("old", "new")}
        assert wanted["old"] != wanted["new"]
        chunks = stream(server, SHORT, "hot", **long)
        first = next(chunks)
        reply = reload(server, "hot", more["Y"])
        assert reply.status_code == 200 and "matched all" in reply.json()["report"]
        changed = answer(server, SHORT, "hot")
        rest = [*chunks]
        assert rest[-1]["output_ids"] == wanted["old"][: len(rest[-1]["output_ids"])]
        assert len(rest[-1]["output_ids"]) == 120 > len(first["output_ids"])
        assert changed == wanted["new"][: len(changed)]
        assert answer(server, SHORT, "hot") == changed
    finally:
        for name in ("old", "new", "hot"):
            assert unload(server, name).status_code == 200


def test_a_replacement_that_is_refused_leaves_the_old_one(
    server: Server, more: dict[str, Path], tmp_path: Path
) -> None:
    assert load(server, "kept", more["X"]).status_code == 200
    before = answer(server, SHORT, "kept")
    reply = reload(server, "kept", tmp_path)
    assert reply.status_code == 400 and "adapter_config.json" in reply.text
    assert answer(server, SHORT, "kept") == before
    assert reload(server, "kept").status_code == 200  # the same directory, read again
    assert answer(server, SHORT, "kept") == before
    again = load(server, "kept", more["Y"])
    assert again.status_code == 400 and "/reload_lora_adapter puts another in its place" in again.text
    assert unload(server, "kept").status_code == 200
    assert reload(server, "kept").status_code == 404


def test_the_list_says_where_an_adapter_is_and_pins_keep_it_there(server: Server, more: dict[str, Path]) -> None:
    for name in "CDEFG":
        assert load(server, name, more[name]).status_code == 200
    try:
        assert adapters(server)["C"]["residency"] == "host"
        assert answer(server, SHORT, "C")
        assert adapters(server)["C"]["residency"] == "device"
        assert post(server, "pin_lora_adapter", lora_name="C").status_code == 200
        for name in ("A", "B", *"DEFG"):
            answer(server, SHORT, name)
        here = adapters(server)
        assert here["C"]["pinned"] and here["C"]["residency"] == "device"
        assert {row["residency"] for row in here.values()} == {"device", "host"}, "there are more adapters than slots"
        replies = [post(server, "pin_lora_adapter", lora_name=name) for name in ("A", "B", *"DEFG")]
        refused = [reply for reply in replies if reply.status_code != 200]
        assert refused and all("so that a slot stays for the others" in reply.text for reply in refused)
        assert answer(server, SHORT, None) and answer(server, SHORT, "G")
    finally:
        for name in ("A", "B"):
            post(server, "pin_lora_adapter", lora_name=name, pinned=False)
        for name in "CDEFG":
            assert unload(server, name).status_code == 200
    assert post(server, "pin_lora_adapter", lora_name="C").status_code == 404


# Acceptance 7, second half; 8; 9. `make soak` does the same for ten minutes.


def test_more_adapters_than_slots_while_clients_hang_up(server: Server, more: dict[str, Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(more["X"], bad)
    save_file({k: t * float("nan") for k, t in load_file(bad / phases.WEIGHTS).items()}, bad / phases.WEIGHTS)
    for name in "CDEFG":
        assert load(server, name, more[name]).status_code == 200
    prompts = [question(number) for number in range(2)]
    contents = {name: more[name] for name in "XY"}
    ahead = server_state(server)["plan"]["slots"]["ahead"]
    try:
        expected = phases.quiet_answers(server, prompts, contents, "ABCDEFG")
        outcomes: Counter[str] = Counter()
        for seed in range(8):  # a slow machine may not come to everything the first time
            churn = phases.Churn(server, expected, prompts, "coming", contents, bad)
            tally = churn.run(seconds=6, clients=4, seed=seed)
            assert tally.faults == []
            assert phases.users_left(server) == {}
            outcomes.update(tally.outcomes)
            if outcomes["hung up"] and outcomes["in a batch"] and outcomes["operated"] > 3:
                break
        else:
            pytest.fail(f"not everything happened: {outcomes}")
    finally:
        if "coming" in adapters(server):
            assert unload(server, "coming").status_code == 200
        for name in "CDEFG":
            assert unload(server, name).status_code == 200
    assert requests.get(f"{server.url}/health", timeout=30).status_code == 200
    slots = server_state(server)["plan"]["slots"]
    assert slots["ahead"] > ahead and slots["coming"] == 0, "adapters came to slots while others ran"


def test_adapters_that_came_and_went_leave_nothing(server: Server, tmp_path: Path) -> None:
    source = server.model.adapters["A"]
    phases.load_use_unload(server, source, tmp_path, cycles=5, sample_every=5)
    state, names = server_state(server), adapters(server).keys()
    samples = phases.load_use_unload(server, source, tmp_path, cycles=20, sample_every=10)
    assert adapters(server).keys() == names
    after = server_state(server)
    assert after["adapters"].keys() == state["adapters"].keys()
    assert after["plan"]["slots"]["resident"] <= state["plan"]["slots"]["resident"]
    # A leaked copy of the weights alone would be 0.5 MB a cycle.
    assert samples[-1] - samples[0] < 12, samples


def test_a_stream_goes_on_while_the_mode_switches(server: Server) -> None:
    found: list[tuple[int, float]] = []

    def listen() -> None:
        found.append(longest_gap(stream(server, SHORT, None, max_new_tokens=100)))

    before = server_state(server)["plan"]
    thread = threading.Thread(target=listen)
    thread.start()
    for number in range(6):
        for name in ("A", "B"):
            answer(server, question(number, words=20), name)
    thread.join(timeout=120)
    assert found[0][0] > 10
    assert found[0][1] < 4, f"{found[0][1]:.1f} s between two tokens"
    assert server_state(server)["plan"] != before


# Acceptance 11, and what a client can get wrong


def test_models_are_listed_one_by_one(server: Server) -> None:
    listed = requests.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    names = [card["id"] for card in listed]
    assert names[0] == server.model.path.as_posix() and {"A", "B"} < set(names)
    for card in listed:
        one = requests.get(f"{server.url}/v1/models/{card['id']}", timeout=60)
        assert one.status_code == 200
        assert {key: one.json()[key] for key in ("id", "root", "parent")} == {
            key: card[key] for key in ("id", "root", "parent")
        }
    assert requests.get(f"{server.url}/v1/models/C", timeout=60).status_code == 404


def test_a_stream_of_an_unknown_adapter_is_a_404(server: Server) -> None:
    reply = requests.post(f"{server.url}/generate", json={"text": SHORT, "lora_path": "C", "stream": True}, timeout=60)
    assert reply.status_code == 404 and "no adapter named 'C'; loaded: A, B" in reply.text
    body = {"model": "C", "prompt": SHORT, "stream": True}
    assert requests.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 404


def test_a_wrong_base_before_the_colon_is_named(server: Server) -> None:
    reply = post(server, "v1/completions", model="other:A", prompt=SHORT)
    assert reply.status_code == 404
    assert f"no model named 'other'; the base model is '{server.model.path}'" in reply.text


def test_the_base_models_name_is_taken(server: Server, more: dict[str, Path]) -> None:
    reply = load(server, str(server.model.path), more["X"])
    assert reply.status_code == 400 and "is the base model's name" in reply.text
    assert load(server, "", more["X"]).status_code == 400


def test_an_id_in_a_request_reaches_no_adapter(server: Server) -> None:
    reply = post(server, "generate", text=SHORT, lora_id="0" * 32, sampling_params=GREEDY)
    assert reply.status_code == 200 and reply.json()["output_ids"] == answer(server, SHORT, None)
    reply = post(server, "generate", text=[SHORT] * 2, lora_id=["x", "y"], sampling_params=GREEDY)
    assert reply.status_code == 200 and reply.json()[0]["output_ids"] == answer(server, SHORT, None)


def test_refused_and_parallel_requests_do_not_hold_an_adapter(server: Server, more: dict[str, Path]) -> None:
    assert load(server, "held", more["X"]).status_code == 200
    reply = post(server, "generate", text="cat " * 4000, lora_path="held")
    assert reply.status_code == 400 and "context length" in reply.text
    reply = post(server, "generate", text=SHORT, lora_path="held", sampling_params={**GREEDY, "n": 3})
    assert len(reply.json()) == 3
    with pytest.raises(requests.Timeout):
        body = {"text": SHORT, "lora_path": "held", "sampling_params": {**GREEDY, "max_new_tokens": 1500}}
        requests.post(f"{server.url}/generate", json=body, timeout=0.3)
    start = time.monotonic()
    assert unload(server, "held").status_code == 200
    assert time.monotonic() - start < 20, "the request whose client hung up was served to its end"
    assert phases.users_left(server) == {}
