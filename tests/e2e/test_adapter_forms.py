"""Every form of adapter that people have, loaded as PEFT wrote it: answers are transformers + PEFT's."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from tests.conftest import Server
from tests.e2e.test_reuse import load, reuse, unload
from tests.support.engine_runs import EngineProcess
from tests.support.head_reference import data_url, make_image, question
from tests.support.modes import HALF, TEXT, TOKENS, TWO, Expected, check_all, engine_options
from tests.support.reference import Reference
from tests.support.tiny_random import make_adapter
from vlora_sgl.platforms.cpu import is_plain_cpu

pytestmark = pytest.mark.e2e

Answers = dict[str | None, Expected]
FORMS = ("dora", "lora_bias", "bias", "activated")
MERGEABLE = {"dora", "bias", "lora_bias", "all"}
HEADER = "<|im_start|>assistant\n"
ROUND_TWO = "yes<|im_end|>\n<|im_start|>user\nIs there a cat?<|im_end|>\n"


@pytest.fixture(scope="module")
def activated(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Two activated LoRAs as PEFT saves them, started by the header of an answer."""
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(server.model.path)(HEADER)["input_ids"]
    root = tmp_path_factory.mktemp("activated")
    options = {"alora_invocation_tokens": tokens, "task_type": "CAUSAL_LM"}
    adapters = {
        name: make_adapter(root / name, server.model.path, seed, **options) for seed, name in enumerate("VW", 91)
    }
    assert json.loads((root / "V" / "adapter_config.json").read_text())["alora_invocation_tokens"] == tokens
    for name, path in adapters.items():
        load(server, name, path)
    yield adapters
    for name in adapters:
        unload(server, name)


@pytest.fixture(scope="module")
def engine(modes_engine: EngineProcess, form_adapters: dict[str, Path]) -> Iterator[EngineProcess]:
    for name, path in form_adapters.items():
        assert modes_engine.load(name, path) is None
    yield modes_engine
    for name in form_adapters:
        assert modes_engine.unload(name) is None


SCALED = {"dora": "DoRA's magnitudes", "lora_bias": "biases of B", "bias": "trained biases of the base model"}
GREEDY = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}


@pytest.mark.parametrize("mode", ["unmerged", "merged", "mixture"])
def test_forms_without_a_scale_are_in_no_combination_and_take_others_out(
    engine: EngineProcess, expected_combined: Answers, expected_of_forms: Answers, mode: str
) -> None:
    """At scale one it is the adapter; with any other scale, or company, it is refused by name."""
    engine.force_mode(mode)
    engine.flush()
    wanted = {**expected_combined, **expected_of_forms}
    asked = [text for name in SCALED for text in (f'{{"{name}": 0.5}}', f'{{"{name}": 1, "all": 1}}')]
    asked += [f'{{"mlp": 0.5, "{name}": 0.5}}' for name in SCALED]
    whole = [f'{{"{name}": 1}}' for name in SCALED] + [f'{{"{name}": 1, "all": 0}}' for name in SCALED]
    answers = engine.ask_each([{"prompt": TEXT, "lora_path": one, "sampling_params": GREEDY} for one in asked + whole])
    for text, answer in zip(asked, answers, strict=False):
        (name,) = (name for name in SCALED if f'"{name}"' in text)
        assert isinstance(answer, str) and f"'{name}'" in answer and f"{SCALED[name]} have no scale" in answer, answer
    for text, found in zip(whole, answers[len(asked) :], strict=True):
        (name,) = (name for name in SCALED if f'"{name}"' in text)
        assert isinstance(found, dict) and (not is_plain_cpu() or found["output_ids"] == wanted[name].ids), found
    check_all(engine, ["dora", "dora", TWO, "bias", HALF, None, "all"], wanted)


@pytest.mark.parametrize("mode", ["unmerged", "merged", "mixture"])
@pytest.mark.parametrize("names", [*([form] * 2 for form in FORMS), ["dora", None, "dora", "dora"], ["bias", "all"]])
def test_each_form_answers_as_peft_in_every_mode(
    engine: EngineProcess, expected: Answers, expected_of_forms: Answers, mode: str, names: list[str | None]
) -> None:
    engine.force_mode(mode)
    engine.flush()
    run = check_all(engine, names, {**expected, **expected_of_forms})
    if mode != "unmerged" and set(names) <= {*MERGEABLE, None}:
        alone = mode == "merged" and len(set(names)) == 1
        assert {step.plan[1] for step in run.steps if step.rows == len(names)} == {"merged" if alone else "mixture"}


@pytest.mark.parametrize("mode", ["unmerged", "merged", "mixture"])
@pytest.mark.parametrize("hot", ["dora", "bias", "lora_bias", "all", "mlp"])
def test_all_forms_in_one_batch_with_plain_lora_and_base_rows(
    engine: EngineProcess, expected: Answers, expected_of_forms: Answers, mode: str, hot: str
) -> None:
    """Whichever is merged, the others' rows take it out."""
    engine.force_mode(mode)
    engine.flush()
    names = [*FORMS, "all", "mlp", None, hot, hot, hot]
    run = check_all(engine, names, {**expected, **expected_of_forms})
    if mode != "unmerged":
        merged = {step.plan[1] for step in run.steps if step.rows == len(names)}
        assert merged == {"mixture"}


def test_switches_between_forms_leave_the_base_as_it_was(
    engine: EngineProcess, expected: Answers, expected_of_forms: Answers
) -> None:
    wanted = {**expected, **expected_of_forms}
    for mode, name in (("merged", "bias"), ("merged", "all"), ("merged", "dora"), ("merged", "lora_bias")):
        engine.force_mode(mode)
        check_all(engine, [name, name], wanted)
    engine.force_mode("unmerged")
    engine.flush()
    before = check_all(engine, [None], wanted).answers[0]["meta_info"]["output_token_logprobs"]
    engine.force_mode("merged")
    check_all(engine, ["bias"], wanted)
    engine.force_mode("unmerged")
    engine.flush()
    assert check_all(engine, [None], wanted).answers[0]["meta_info"]["output_token_logprobs"] == before


LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OF_TEXT: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": LINEARS},
    "dora": {"target_modules": LINEARS, "use_dora": True},
    "lora_bias": {"target_modules": ["q_proj", "v_proj"], "lora_bias": True},
    "bias": {"target_modules": ["q_proj", "down_proj"], "bias": "all"},
    "activated": {"target_modules": LINEARS, "task_type": "CAUSAL_LM"},
}


@pytest.mark.slow  # an engine of its own
def test_a_text_model_with_biases_answers_as_peft_in_every_mode(tmp_path: Path) -> None:
    """Slots get the room because adapters of the command line need it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.support.lora_adapters import tiny_adapter
    from tests.support.served_families import save

    path, _ = save("qwen2", tmp_path)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    base.save_pretrained(path)
    prompt = AutoTokenizer.from_pretrained(path)(TEXT)["input_ids"]

    def model() -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def answer(of: Any) -> list[int]:
        ids = of.generate(input_ids=torch.tensor([prompt]), do_sample=False, max_new_tokens=8)
        return list(ids[0, len(prompt) :].tolist())

    wanted: dict[str | None, list[int]] = {None: answer(model())}
    for seed, (name, options) in enumerate(OF_TEXT.items()):
        start = {"alora_invocation_tokens": prompt[4:6]} if name == "activated" else {}
        tiny_adapter(model(), tmp_path / name, seed=seed, strength=0.2, **options, **start)
        wanted[name] = answer(PeftModel.from_pretrained(model(), tmp_path / name).eval())
    assert len({tuple(ids) for ids in wanted.values()}) == len(wanted)
    options = engine_options(path, {name: tmp_path / name for name in OF_TEXT})
    with EngineProcess(options) as engine:
        engine.ready()
        refusals = {row["never_merged"] for row in engine.state()["adapters"].values()}
        assert refusals == {None}
        for mode, hot in itertools.product(("unmerged", "merged", "mixture"), ("dora", "bias", "lora_bias", "plain")):
            engine.force_mode(mode)
            for names in ([*wanted, hot, hot, hot], [hot]):
                sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
                run = engine.generate(prompt=[TEXT] * len(names), lora_path=names, sampling_params=sampling)
                assert [one["output_ids"] for one in run.answers] == [wanted[name] for name in names], (mode, hot)
                if mode == "merged" and names == [hot]:
                    assert {step.plan[1] for step in run.steps} == {"merged"}


PROMPTS = {
    "once": question("Describe the image in one word."),
    "the last of two": question("Describe the image in one word.") + ROUND_TWO + HEADER,
    "never": question("Describe the image in one word.").removesuffix(HEADER),
}


@pytest.mark.skipif(not is_plain_cpu(), reason="exact to the token; the modes' test compares within rounding")
def test_pefts_activated_adapters_start_where_peft_starts_them(server: Server, activated: dict[str, Path]) -> None:
    reference = Reference(server.model.path, {**activated, "A": server.model.adapters["A"]})
    image = make_image(5)
    cases = list(itertools.product(PROMPTS.values(), ("V", "W", "A", None)))
    wanted = {case: reference.generate(*case, image) for case in cases}
    for prompt in (PROMPTS["once"], PROMPTS["the last of two"]):
        assert len({tuple(wanted[prompt, name]) for name in ("V", "W", "A", None)}) == 4
    never = PROMPTS["never"]
    assert wanted[never, "V"] == wanted[never, None], "PEFT leaves an adapter out that nothing invokes"

    def ask(case: tuple[str, str | None]) -> list[int]:
        answer = server.generate(text=case[0], image_data=[data_url(image)], lora_path=case[1])
        return list(answer["output_ids"])

    server.flush()
    assert {case: ask(case) for case in cases} == wanted, "one after the other, what is cached shared"
    server.flush()
    with ThreadPoolExecutor(len(cases)) as pool:
        together = dict(zip(cases, pool.map(ask, cases), strict=True))
    assert together == wanted, "in batches of all"


def test_what_comes_before_an_invocation_is_shared_with_the_base(server: Server, activated: dict[str, Path]) -> None:
    server.flush()
    prompt, picture = PROMPTS["once"], [data_url(make_image(6, (224, 168)))]
    first = reuse(server.generate(text=prompt, image_data=picture))
    assert first["cached_tokens"] == 0
    for name in activated:
        found = reuse(server.generate(text=prompt, image_data=picture, lora_path=name))
        assert found["cached_image_tokens"] == found["prompt_image_tokens"] == 48
        assert found["shared_tokens"] == found["cached_tokens"]


@pytest.mark.parametrize(
    ("options", "form"),
    [({"use_dora": True}, "DoRA"), ({"lora_bias": True}, "biases of B"), ({"bias": "lora_only"}, "trained biases")],
    ids=["dora", "lora_bias", "bias"],
)
def test_slots_without_room_for_more_say_how_to_make_it(
    server: Server, options: Any, form: str, tmp_path: Path
) -> None:
    path = make_adapter(tmp_path / "X", server.model.path, 3, targets=["q_proj"], **options)
    reply = requests.post(
        f"{server.url}/load_lora_adapter", json={"lora_name": "X", "lora_path": str(path)}, timeout=60
    )
    assert reply.status_code == 400 and form in reply.text and "--vlora-dora" in reply.text


def test_an_invocation_of_no_tokens_is_refused(server: Server, activated: dict[str, Path], tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "X", server.model.path, 3, targets=["q_proj"])
    settings = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**settings, "alora_invocation_tokens": "assistant"}))
    body = {"lora_name": "X", "lora_path": str(path)}
    reply = requests.post(f"{server.url}/load_lora_adapter", json=body, timeout=60)
    assert reply.status_code == 400 and "alora_invocation_tokens must be a list of token ids" in reply.text
