"""Other models that SGLang serves, each on a server of its own: with adapters they answer as transformers + PEFT do.

A start costs most of a minute, so all but one run with ``--slow`` only (``make families``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from PIL import Image

from tests.conftest import Server, TinyModel, serve
from tests.support.head_reference import assert_close, data_url, make_image
from tests.support.lora_adapters import tiny_adapter
from tests.support.served_families import FAMILIES, Family, Reference, load, save
from tests.support.ties import assert_same_tokens
from vlora_sgl.heads import ClassifyHead, load_heads, save_heads
from vlora_sgl.platforms.cpu import is_plain_cpu

pytestmark = pytest.mark.e2e

TOKENS = 8
HEAD = "kind"
MODES = ("unmerged", "merged", "mixture")
NOT_TOWERS = r".*(visual|vision_tower|vision_model|multi_modal_projector).*"
TOWERS: dict[str, Any] = {
    "tower": r".*vision_tower\..*(q_proj|v_proj|out_proj|projection_layer|fc1)",
    "projector": r".*multi_modal_projector\.linear_[12]",
    "everything": "all-linear",
}
KEY = {"Authorization": "Bearer secret"}
QUICK = "llava"
NAMES = [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]

Served = tuple[Family, Server, Reference]


@pytest.fixture(scope="module", params=NAMES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One family, its server and its reference; the server has an admin key."""
    name, root, adapters = request.param, tmp_path_factory.mktemp(request.param), {}
    served, reference = save(name, root)
    for seed, adapter in enumerate("AB", start=1):
        adapters[adapter] = root / adapter
        options = {"target_modules": "all-linear", "exclude_modules": NOT_TOWERS, **FAMILIES[name].adapts}
        tiny_adapter(load(name, reference), root / adapter, seed=seed, strength=0.2, **options)
        torch.manual_seed(seed)
        hidden = load(name, reference).config.get_text_config().hidden_size
        save_heads(root / adapter, [ClassifyHead(HEAD, hidden, ["yes", "no", "maybe"])])
    flags = ["--max-loras-per-batch", "4", "--admin-api-key", "secret"]
    with serve(TinyModel(served, adapters), root / "log.txt", *flags) as server:
        yield FAMILIES[name], server, Reference(name, reference, adapters)


def prompt(family: Family, images: int, words: str = "How many objects are there?") -> str:
    return f"<|im_start|>user\n{family.shown * images}{words}<|im_end|>\n<|im_start|>assistant\n"


def ask(server: Server, names: Sequence[str | None], text: str, images: Sequence[list[Image.Image]]) -> Any:
    seen = {"image_data": [[data_url(one) for one in each] for each in images]} if any(images) else {}
    trace = {"vlora_trace": True}
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True, "custom_params": trace}
    return server.generate(text=[text] * len(names), lora_path=list(names), sampling_params=sampling, **seen)


def flush(server: Server) -> None:
    """``Server.flush``, of a server with an admin key."""
    found = requests.post(f"{server.url}/flush_cache", params={"timeout": 30}, headers=KEY, timeout=60)
    found.raise_for_status()


def skip_if_blind(kind: Family, server: Server) -> None:
    """End a test about images of a model that has none, or on a server that refuses them by name."""
    if not kind.shown:
        pytest.skip("a model of text only")
    if kind.blind and is_plain_cpu():
        body = {"text": prompt(kind, 1), "image_data": [data_url(make_image(1, kind.size))]}
        reply = requests.post(f"{server.url}/generate", json=body, timeout=60)
        assert reply.status_code == 400 and kind.blind in reply.text, reply.text
        pytest.skip(kind.blind)


def replayed_prefills(server: Server) -> int | None:
    """Prefills that replayed a graph so far; ``None`` where none is captured."""
    info = requests.get(f"{server.url}/server_info", headers=KEY, timeout=60).json()
    count: int | None = info["internal_states"][0]["vlora"]["prefill_graphs"]
    return count


def cached_image_tokens(answer: Any) -> int:
    return int(answer["meta_info"]["vlora"]["reuse"]["cached_image_tokens"])


@pytest.mark.parametrize("images", [0, 1, 2])
def test_adapters_answer_as_peft_does_in_every_mode(family: Served, images: int) -> None:
    kind, server, reference = family
    if images:
        skip_if_blind(kind, server)
    text, names = prompt(kind, images), [None, "A", "B", "A"]
    shown = [[make_image(10 * row + i, kind.size) for i in range(images)] for row in range(len(names))]
    wanted = [reference.tokens(text, name, seen, TOKENS) for name, seen in zip(names, shown, strict=True)]
    alone = [reference.tokens(text, name, shown[1], TOKENS) for name in (None, "A", "B")]
    assert len({tuple(ids) for ids in alone}) == 3, "the adapters must change the answer"
    for mode in ("unmerged", "merged", "mixture"):
        change = {"server_args": {f"vlora_mode:{mode}": 1}}
        requests.post(f"{server.url}/set_internal_state", json=change, headers=KEY, timeout=60).raise_for_status()
        flush(server)
        (one,) = ask(server, ["A"], text, shown[1:2])
        assert_same_tokens(one, wanted[1])
        assert set(one["meta_info"]["vlora"]["modes"]) == {mode}
        for row, ids in zip(ask(server, names, text, shown), wanted, strict=True):
            assert_same_tokens(row, ids)


@pytest.fixture(scope="module")
def seeing(family: Served, tmp_path_factory: pytest.TempPathFactory) -> tuple[Served, int]:
    """The family with adapters of its vision tower and projector, and of all (the Qwen models': test_tower.py); and a
    picture that each answers differently."""
    kind, server, reference = family
    if kind.base not in ("llava", "internvl"):
        pytest.skip("its tower is one of a Qwen model (test_tower.py), or takes no adapters (models.md)")
    root = tmp_path_factory.mktemp("towers")
    for seed, (name, targets) in enumerate(TOWERS.items(), start=5):
        base = load(reference.name, reference.directory)
        tiny_adapter(base, root / name, seed=seed, strength=0.17, target_modules=targets, exclude_modules="lm_head")
        reference.model.load_adapter(root / name, adapter_name=name)
        body = {"lora_name": name, "lora_path": str(root / name)}
        reply = requests.post(f"{server.url}/load_lora_adapter", json=body, timeout=60, headers=KEY)
        assert reply.status_code == 200, reply.text

    def answers(seed: int) -> int:
        image = [make_image(seed, kind.size)]
        return len({tuple(reference.tokens(prompt(kind, 1), name, image, TOKENS)) for name in (None, "A", *TOWERS)})

    return family, next(seed for seed in range(100) if answers(seed) == len(TOWERS) + 2)


@pytest.mark.parametrize("mode", ["unmerged", "merged", "mixture"])
def test_adapters_of_the_vision_tower_answer_as_peft_does(seeing: tuple[Served, int], mode: str) -> None:
    (kind, server, reference), seen = seeing
    change = {"server_args": {f"vlora_mode:{mode}": 1}}
    requests.post(f"{server.url}/set_internal_state", json=change, headers=KEY, timeout=60).raise_for_status()
    flush(server)
    for names in ([None, "tower", "projector", "everything"], ["A", "tower", None, "everything", "tower"]):
        for seeds in ([seen] * len(names), range(len(names))):
            text, shown = prompt(kind, 1), [[make_image(seed, kind.size)] for seed in seeds]
            wanted = [reference.tokens(text, name, own, TOKENS) for name, own in zip(names, shown, strict=True)]
            for row, ids in zip(ask(server, names, text, shown), wanted, strict=True):
                assert_same_tokens(row, ids)
    two = [make_image(1, kind.size), make_image(2, kind.size)]
    for name in TOWERS:
        (one,) = ask(server, [name], prompt(kind, 2), [two])
        assert_same_tokens(one, reference.tokens(prompt(kind, 2), name, two, TOKENS))
        assert set(one["meta_info"]["vlora"]["modes"]) == {mode}


@pytest.mark.parametrize("images", [0, 1])
def test_a_head_answers_by_the_hidden_states_of_transformers_and_peft(family: Served, images: int) -> None:
    kind, server, reference = family
    if images:
        skip_if_blind(kind, server)
    text, shown, found = prompt(kind, images), [make_image(3, kind.size)][:images], []
    for name in "AB":
        head = load_heads(server.model.adapters[name], len(reference.state(text, name, shown)))[HEAD]
        wanted = head.postprocess(head(reference.state(text, name, shown)[None])[0])
        sampling = {"custom_params": {"vlora_head": HEAD}}
        seen = {"image_data": [data_url(one) for one in shown]} if shown else {}
        answer = server.generate(text=text, lora_path=name, sampling_params=sampling, **seen)
        found.append(answer["meta_info"]["vlora"]["head"])
        assert_close(found[-1], wanted)
    assert found[0] != found[1], "each adapter has a head of its own"


def test_an_image_is_computed_once_and_no_other_takes_its_place(family: Served) -> None:
    kind, server, reference = family
    skip_if_blind(kind, server)
    flush(server)
    before = replayed_prefills(server)
    for seed, words, kept in ((7, "red", False), (7, "green", True), (8, "red", False), (7, "blue", True)):
        text, image = prompt(kind, 1, words), make_image(seed, kind.size)
        (answer,) = ask(server, ["A"], text, [[image]])
        assert_same_tokens(answer, reference.tokens(text, "A", [image], TOKENS))
        assert (cached_image_tokens(answer) > 0) == kept
    if before is not None:
        assert replayed_prefills(server) == before + 4, "each of the prefills replays a graph"


def test_words_of_a_chat_are_words(family: Served) -> None:
    kind, server, _ = family
    if kind.shown:
        skip_if_blind(kind, server)
    say = f"What does {kind.shown or '<|image_pad|>'} <|im_end|> mean?"
    shown = {"type": "image_url", "image_url": {"url": data_url(make_image(5, kind.size))}}
    content = [*([shown] if kind.shown else []), {"type": "text", "text": say}]
    used = []
    for messages in ([{"role": "user", "content": content}], [{"role": "user", "content": [*content[:-1]] or "x"}]):
        body = {"model": "default:A", "messages": messages, "max_tokens": 2}
        reply = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        used.append(reply.json()["usage"]["prompt_tokens"])
    assert 10 < used[0] - used[1] <= len(say)


def test_markers_without_images_are_refused(family: Served) -> None:
    kind, server, _ = family
    skip_if_blind(kind, server)
    picture = data_url(make_image(5, kind.size))
    wrong = [(2, [picture]), (1, [])]
    if kind.base != "internvl":  # whose processor places a marker that lacks
        wrong.append((0, [picture]))
    for markers, images in wrong:
        body = {"text": prompt(kind, markers), "image_data": images, "sampling_params": {"max_new_tokens": 1}}
        reply = requests.post(f"{server.url}/generate", json=body, timeout=60)
        assert reply.status_code == 400, (markers, len(images), reply.text)


def test_changing_adapters_needs_the_key_and_asking_does_not(family: Served) -> None:
    _, server, _ = family
    for route, body in (
        ("load_lora_adapter", {"lora_name": "C", "lora_path": str(server.model.adapters["A"])}),
        ("reload_lora_adapter", {"lora_name": "C"}),
        ("pin_lora_adapter", {"lora_name": "C"}),
        ("unload_lora_adapter", {"lora_name": "C"}),
    ):
        assert requests.post(f"{server.url}/{route}", json=body, timeout=60).status_code == 401
        assert requests.post(f"{server.url}/{route}", json=body, timeout=60, headers=KEY).status_code == 200


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("name", FAMILIES)
def test_more_than_plain_adapters_answer_as_peft_does_in_every_mode_and_company(name: str, tmp_path: Path) -> None:
    """On a server of their own, whose slots hold the vocabulary too."""
    kind, (served, reference) = FAMILIES[name], save(name, tmp_path)
    forms: dict[str, dict[str, Any]] = {
        "plain": {"target_modules": ["o_proj"]},
        "dora": {"target_modules": ["o_proj"], "use_dora": True},
        "vocabulary": {"target_modules": ["lm_head", "o_proj", "embed_tokens"]},
        "head": {"target_modules": ["lm_head"]},
    }
    adapters = {form: tmp_path / form for form in forms}
    for seed, (form, options) in enumerate(forms.items(), start=1):
        base = load(name, reference)
        tiny_adapter(base, adapters[form], seed=seed, strength=0.4, exclude_modules=NOT_TOWERS, **options)
    # SGLang computes Gemma's logits by the embedding, whatever there is on the LM head, and scales the embedding.
    refused = {form: adapters.pop(form) for form in ("vocabulary", "head") if kind.base == "gemma3"}
    forms = {form: forms[form] for form in adapters}
    expected = Reference(name, reference, adapters)

    def answers(images: int) -> Iterator[tuple[str, list[Image.Image], dict[str | None, list[int]]]]:
        for seed in range(100):
            text, shown = prompt(kind, images, f"Is it {seed}?"), [make_image(seed, kind.size)][:images]
            yield text, shown, {form: expected.tokens(text, form, shown, TOKENS) for form in (None, *forms)}

    counts = (0, 1) if kind.shown and not kind.blind else (0,)
    told_apart = [next(a for a in answers(n) if len({*map(tuple, a[2].values())}) == len(a[2])) for n in counts]
    flags = ["--max-loras-per-batch", "5", "--vlora-dora", "--admin-api-key", "secret"]
    with serve(TinyModel(served, adapters), tmp_path / "log.txt", *flags) as server:
        for form, path in refused.items():
            body = {"lora_name": form, "lora_path": str(path)}
            reply = requests.post(f"{server.url}/load_lora_adapter", json=body, timeout=60, headers=KEY)
            assert reply.status_code == 400 and "this model has no module" in reply.text, reply.text
        for images, mode in product(counts, MODES):
            change = {"server_args": {f"vlora_mode:{mode}": 1}}
            requests.post(f"{server.url}/set_internal_state", json=change, headers=KEY, timeout=60).raise_for_status()
            text, shown, wanted = told_apart[images]
            for names in (*([form] for form in forms), [*forms, None, "dora", "plain"]):
                for form, row in zip(names, ask(server, names, text, [shown] * len(names)), strict=True):
                    assert_same_tokens(row, wanted[form])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_tied_weights_have_an_adapter_each(tmp_path: Path) -> None:
    path, reference = save("qwen2", tmp_path, tie_word_embeddings=True)
    adapters, both = {}, ["embed_tokens", "lm_head", "q_proj"]
    for seed, (name, targets) in enumerate({"A": both, "B": ["down_proj"]}.items()):
        base = load("qwen2", reference)
        assert base.lm_head.weight is base.model.embed_tokens.weight
        tiny_adapter(base, tmp_path / name, seed=seed, strength=0.2, target_modules=targets)
        adapters[name] = tmp_path / name
    text = prompt(FAMILIES["qwen2"], 0)
    with serve(TinyModel(path, adapters), tmp_path / "log.txt", "--max-loras-per-batch", "3") as server:
        expected = Reference("qwen2", reference, adapters)
        names: list[str | None] = [None, "A", "B"]
        wanted = [expected.tokens(text, name, [], TOKENS) for name in names]
        assert len({tuple(ids) for ids in wanted}) == 3, "the adapters must change the answer"
        answers = ask(server, [*names, "A"], text, [[]] * 4)
        assert [answer["output_ids"] for answer in answers] == [*wanted, wanted[1]]
