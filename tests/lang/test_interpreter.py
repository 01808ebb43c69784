"""What programs do, statement by statement, on a backend that only records."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from typing import Any

import pytest

import vlora_sgl as vlora
from tests.lang.conftest import Recorder
from vlora_sgl.errors import ConfigError, ProgramCancelled, ProgramError, RequestError
from vlora_sgl.lang import _upstream as up


def line_of(program: Any, text: str) -> int:
    """Line number of the first source line of a program that contains ``text``."""
    lines, first = inspect.getsourcelines(program.func)
    return first + next(i for i, line in enumerate(lines) if text in line)


@vlora.function
def two_rounds(s: vlora.ProgramState, question: str) -> None:
    s += vlora.user(question)
    s += vlora.assistant(vlora.gen("first"))
    s += vlora.user("again")
    s += vlora.assistant(vlora.gen("second", max_tokens=3))


def test_roles_and_variables(recorder: Recorder) -> None:
    state = two_rounds.run("hello", backend=recorder)
    assert (state["first"], state["second"]) == ("yes", "yes")
    assert state.text() == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
        "<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    )
    sampling = [request["sampling_params"] for request in recorder.requests]
    assert [one["max_new_tokens"] for one in sampling] == [128, 3]
    assert all(one["temperature"] == 0 for one in sampling), "greedy unless asked otherwise"


def test_adapter_in_every_way(recorder: Recorder) -> None:
    @vlora.function
    def program(s: vlora.ProgramState) -> None:
        s += "0" + vlora.gen("base")
        s += vlora.adapter("A")
        s += "1" + vlora.gen("a")
        s += "2" + vlora.gen("b", adapter="B")
        with vlora.adapter("C"):
            s += "3" + vlora.gen("c")
            with vlora.adapter(None):
                s += "4" + vlora.gen("none")
            s += "5" + vlora.gen("d", adapter="D")
        s += "6" + vlora.gen("a_again")

    state = program.run(backend=recorder)
    state.sync()
    assert [adapter for adapter, _ in recorder.asked()] == [None, "A", "B", "C", None, "D", "A"]
    assert state.current_adapter == "A"


def test_several_adapters_as_one_are_an_adapter(recorder: Recorder) -> None:
    @vlora.function
    def program(s: vlora.ProgramState) -> None:
        with vlora.adapter({"A": 0.7, "B": 0.3}):
            s += "1" + vlora.gen("both")
        s += vlora.adapter({"A": 1})
        s += "2" + vlora.gen("a")

    program.run(backend=recorder).sync()
    assert [request.get("lora_path") for request in recorder.requests] == ['{"A": 0.7, "B": 0.3}', "A"]
    with pytest.raises(RequestError, match="adapters must be an object of 1 to 4"):
        vlora.adapter({"A": float("nan")})


def test_run_takes_the_first_adapter(recorder: Recorder) -> None:
    two_rounds.run("x", backend=recorder, adapter="A").sync()
    with vlora.adapter("B"):
        two_rounds.run("x", backend=recorder).sync()

    @vlora.function
    def switches(s: vlora.ProgramState) -> None:
        s += "q" + vlora.gen("b")
        s += vlora.adapter("C") + vlora.gen("c")

    with vlora.adapter("B"):
        switches.run(backend=recorder).sync()
    assert [adapter for adapter, _ in recorder.asked()] == ["A", "A", "B", "B", "B", "C"]


def test_adapter_survives_fork_and_branches_are_independent(recorder: Recorder) -> None:
    @vlora.function
    def program(s: vlora.ProgramState) -> None:
        s += vlora.adapter("A")
        s += "prefix "
        branches = s.fork(3)
        branches[1] += vlora.adapter("B")
        with vlora.adapter("C"):
            branches[2] += "two" + vlora.gen("x")
        for i in (0, 1):
            branches[i] += f"{i}" + vlora.gen("x")
        branches.join()
        s += "after" + vlora.gen("y")
        with vlora.adapter("D"):
            inside = s.fork(2)
        inside[0] += "inside" + vlora.gen("z")
        inside.join()

    state = program.run(backend=recorder)
    assert state["x"] == ["yes"] * 3
    assert state["z"] == ["yes"]
    by_text = {text: adapter for adapter, text in recorder.asked()}
    assert by_text == {
        "prefix 0": "A",
        "prefix 1": "B",
        "prefix two": "C",
        "prefix after": "A",
        "prefix afteryesinside": "D",
    }
    fills = [request for request in recorder.requests if not request["sampling_params"]["max_new_tokens"]]
    assert [fill["lora_path"] for fill in fills] == ["A", "D"], "the branches' adapter computes their prefix"


def test_join_can_append_the_branches_texts(recorder: Recorder) -> None:
    @vlora.function
    def program(s: vlora.ProgramState) -> None:
        s += "start "
        branches = s.fork(2)
        for i, branch in enumerate(branches):
            branch += f"[{i} " + vlora.gen("x") + "]"
        branches.join("concate_and_append")

    assert program.run(backend=recorder).text() == "start [0 yes][1 yes]"


@pytest.mark.parametrize("turn", [False, True], ids=["outside turns", "in a turn"])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("shown", [(1, 1), (0, 2), (2, 0)])
def test_branches_that_are_appended_bring_their_images(
    recorder: Recorder, before: int, shown: tuple[int, int], turn: bool
) -> None:
    """In the order of the text, behind those from before the fork and from meanwhile."""

    def picture(name: str) -> Any:
        return vlora.image(f"http://example.org/{name}.png")

    @vlora.function
    def program(s: vlora.ProgramState) -> None:
        with s.user() if turn else contextlib.nullcontext():
            for number in range(before):
                s += picture(f"parent{number}")
            branches = s.fork(2)
            s += "meanwhile" + picture("meanwhile")
            for i, branch in enumerate(branches):
                for number in range(shown[i]):
                    branch += f"[{i}]" + picture(f"branch{i}{number}")
                branch += vlora.gen("x", max_tokens=1)
            branches.join("concate_and_append")
        s += "?" + vlora.gen("y", max_tokens=1)

    state = program.run(backend=recorder)
    assert state["y"] == "yes"
    last = recorder.requests[-1]
    expected = [f"parent{n}" for n in range(before)] + ["meanwhile"]
    expected += [f"branch{i}{n}" for i in range(2) for n in range(shown[i])]
    assert last["image_data"] == [f"http://example.org/{name}.png" for name in expected]
    assert last["text"].count("<|image_pad|>") == len(expected)


def test_a_branch_that_ends_in_another_turn_is_not_appended(recorder: Recorder) -> None:
    @vlora.function
    def program(s: vlora.ProgramState) -> None:
        branches = s.fork(1)
        branches[0] += up.SglRoleBegin("user")
        branches.join("concate_and_append")

    with pytest.raises(ProgramError, match="turn it is appended to: none; it is in user"):
        program.run(backend=recorder).sync()


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ("a <|vision_start|><|image_pad|><|vision_end|>", "append vlora.image"),
        (vlora.user("<|vision_start|><|image_pad|><|vision_end|>"), "append vlora.image"),
        (up.SglVideo("x.mp4", 3), "vlora.video"),
        (vlora.user(up.SglVideo("x.mp4", 3)), "vlora.video"),
    ],
)
def test_what_no_request_carries_is_refused_where_it_is_written(recorder: Recorder, node: Any, said: str) -> None:
    @vlora.function
    def program(s: vlora.ProgramState) -> None:
        s += node

    with pytest.raises(ProgramError, match=said) as caught:
        program.run(backend=recorder)
    assert caught.value.location is not None and caught.value.location.line == line_of(program, "s += node")


CHOICES: dict[str, Any] = {
    "none": [],
    "a text": "yes",
    "bytes": b"yes",
    "a set": {"a", "b"},
    "a number": 3,
    "empty": ["a", ""],
    "equal": ["a", "b", "a"],
    "numbers": [1, 2],
    "nothing": ["a", None],
    "lists": [["a"]],
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices_that_cannot_be_told_apart_are_refused(name: str) -> None:
    choices = CHOICES[name]
    for ask in (
        lambda: vlora.select("x", choices),
        lambda: vlora.gen("x", choices=choices),
        *([lambda: vlora.classify("x", choices)] if choices else []),
    ):
        with pytest.raises(RequestError, match="choice"):
            ask()


def test_every_request_carries_all_images(recorder: Recorder) -> None:
    import numpy as np

    pixels = np.zeros((2, 2, 3), np.uint8)

    @vlora.function
    def program(s: vlora.ProgramState) -> None:
        s += vlora.image(pixels) + vlora.image("http://example.org/x.png") + "?"
        s += vlora.gen("a", max_tokens=1)

    state = program.run(backend=recorder)
    assert state["a"] == "yes"
    first, second = recorder.requests[-1]["image_data"]
    assert first.startswith("data:image/png;base64,") and second == "http://example.org/x.png"
    assert state.text().count("<|image_pad|>") == 2


def test_select_repeats_the_images_for_every_choice_but_not_with_token_ids() -> None:
    import numpy as np

    def rule(request: dict[str, Any]) -> Any:
        if isinstance(request.get("text"), str):
            return {}
        scores = {"cat": -1.0, "dog": -0.5}
        texts = request.get("text") or [" cat", " dog"]
        return [
            {
                "input_token_logprobs": [[None, 6, "t"], [-0.1, 7, "?"], [scores[text[-3:]], 8, text[-3:]]],
                "output_token_logprobs": [],
            }
            for text in texts
        ]

    recorder = Recorder(rule)

    @vlora.function
    def program(s: vlora.ProgramState) -> None:
        s += vlora.image(np.zeros((2, 2, 3), np.uint8)) + "what?"
        s += vlora.select("plain", ["cat", "dog"], adapter="A")

    state = program.run(backend=recorder)
    assert state["plain"] == "dog"
    _, scored = recorder.requests
    assert [len(images) for images in scored["image_data"]] == [1, 1]
    assert all(request["lora_path"] == "A" for request in recorder.requests)

    @vlora.function
    def unconditional(s: vlora.ProgramState) -> None:
        from sglang.lang.choices import unconditional_likelihood_normalized

        s += vlora.image(np.zeros((2, 2, 3), np.uint8)) + "what?"
        s += vlora.select("x", ["cat", "dog"], choices_method=unconditional_likelihood_normalized)

    unconditional.run(backend=recorder).sync()
    assert "image_data" not in recorder.requests[-1], "token ids do not refer to any image"


def test_classify_by_the_language_model_gives_probabilities() -> None:
    def rule(request: dict[str, Any]) -> Any:
        if isinstance(request["text"], str):
            return {}
        return [
            {"input_token_logprobs": [[None, 0, "?"], [-9.0, 1, "?"], [score, 2, "x"]], "output_token_logprobs": []}
            for score in (-1.0, -2.0)
        ]

    @vlora.function
    def program(s: vlora.ProgramState) -> None:
        s += "which?" + vlora.classify("label", ["a", "b"])

    label = program.run(backend=Recorder(rule)).get("label", vlora.Label)
    assert label == "a"
    assert label.probability == pytest.approx(0.7310585786300049)  # 1 / (1 + exp(-1))
    assert sum(label.probabilities.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("node", "answer", "kind", "value"),
    [
        (vlora.gen("x", dtype=int), "42", int, 42),
        (vlora.gen("x", dtype=float), "0.5", float, 0.5),
        (vlora.gen("x", dtype=bool), "True", bool, True),
        (vlora.gen("x", json_schema={"type": "object"}), '{"n": 1}', dict, {"n": 1}),
        (vlora.count("x"), "7", vlora.Count, 7),
        (vlora.caption("x"), " a cat ", str, "a cat"),
        (
            vlora.ground("x", "cup"),
            "<ref>cup</ref><box>(100,200),(300,400)</box>",
            vlora.Boxes,
            (vlora.Box(0.1, 0.2, 0.3, 0.4, "cup"),),
        ),
    ],
    ids=["int", "float", "bool", "json", "count", "caption", "ground"],
)
def test_values_are_typed(node: Any, answer: str, kind: type, value: object) -> None:
    recorder = Recorder(lambda request: answer)

    @vlora.function
    def program(s: vlora.ProgramState) -> None:
        s += "q" + node

    state = program.run(backend=recorder)
    assert state.get("x", kind) == value
    assert state.text() == "q" + answer, "the text keeps what was generated"
    sampling = recorder.requests[-1]["sampling_params"]
    assert sampling["regex"] or sampling["json_schema"] or kind is str


def test_several_samples_make_a_list() -> None:
    @vlora.function
    def program(s: vlora.ProgramState) -> None:
        s += "q" + vlora.gen("x", n=2, dtype=int)

    state = program.run(backend=Recorder(lambda request: ["1", "2"]))
    assert state["x"] == [1, 2]
    assert state.text() == "q1"


def test_heads() -> None:
    answers = {
        "kind": {"labels": ["ok", "torn"], "probabilities": [0.2, 0.8]},
        "cells": {"count": 3, "probability": 0.6},
        "trees": {"boxes": [{"box": [0, 0, 0.5, 0.5], "label": "tree", "score": 0.4}]},
    }

    def rule(request: dict[str, Any]) -> Any:
        return {"vlora": {"head": answers.get(request["sampling_params"]["custom_params"]["vlora_head"])}}

    @vlora.function
    def program(s: vlora.ProgramState, head: str) -> None:
        s += "q"
        with vlora.adapter("T"):
            s += vlora.classify("label", head=head)
        s += vlora.count("n", head="cells", adapter="C") + " "
        s += vlora.detect("boxes", head="trees")

    recorder = Recorder(rule)
    state = program.run("kind", backend=recorder)
    label, boxes = state.get("label", vlora.Label), state.get("boxes", vlora.Boxes)
    assert (label, label.probability) == ("torn", 0.8)
    assert (state["n"], state.get("n", vlora.Count).probability) == (3, 0.6)
    assert boxes[0].label == "tree" and boxes[0].score == 0.4
    assert [request.get("lora_path") for request in recorder.requests] == ["T", "C", None]
    assert state.text() == "qtorn3 <ref>tree</ref><box>(0,0),(500,500)</box>"

    with pytest.raises(ProgramError, match="without a vision head") as caught:
        program.run("missing", backend=recorder)["label"]
    assert caught.value.location.line == line_of(program, "classify(")


def test_error_names_the_programs_line_and_does_not_hang(recorder: Recorder) -> None:
    @vlora.function
    def program(s: vlora.ProgramState) -> None:
        s += "q" + vlora.gen("before")
        s += vlora.image("/nowhere.png")
        s += vlora.gen("after")

    for use_thread in (True, False):
        with pytest.raises(ProgramError, match=r"cannot read the image /nowhere.png") as caught:
            program.run(backend=recorder, use_thread=use_thread)["after"]
        assert caught.value.location.file == __file__
        assert caught.value.location.line == line_of(program, "nowhere")
        assert str(caught.value).startswith(f"{__file__}:{caught.value.location.line} (in program): ")
    state = program.run(backend=recorder)
    assert state["before"] == "yes", "what came before the failure is kept"
    assert isinstance(state.error(), ProgramError)
    with pytest.raises(ProgramError, match="nowhere"):
        state.text()
    # A finished state's queue is fully accounted for: a statement after the failure does not block the reader.
    state.sync()


def test_unknown_variable_and_wrong_type(recorder: Recorder) -> None:
    state = two_rounds.run("x", backend=recorder)
    with pytest.raises(ProgramError, match="sets no variable 'third'; it sets first, second"):
        state["third"]
    with pytest.raises(ProgramError, match="is a str, not a Count"):
        state.get("first", vlora.Count)


def test_text_that_does_not_convert_names_the_line_of_its_gen() -> None:
    @vlora.function
    def program(s: vlora.ProgramState) -> None:
        s += "q"
        s += vlora.gen("n", dtype=int)

    with pytest.raises(ProgramError, match="'yes' of 'n' does not convert") as caught:
        program.run(backend=Recorder())["n"]
    assert caught.value.location.line == line_of(program, "dtype=int")


def test_refusal_of_the_server_reaches_the_program() -> None:
    def rule(request: dict[str, Any]) -> Any:
        raise RequestError("no adapter named 'Z'; loaded: A, B (HTTP 404)")

    with pytest.raises(ProgramError, match="loaded: A, B") as caught:
        two_rounds.run("x", backend=Recorder(rule), adapter="Z")["first"]
    assert isinstance(caught.value.__cause__, RequestError)
    assert caught.value.location.line == line_of(two_rounds, '"first"')


def test_appending_an_adapter_inside_a_with_block_is_refused(recorder: Recorder) -> None:
    @vlora.function
    def program(s: vlora.ProgramState) -> None:
        with vlora.adapter("A"):
            s += vlora.adapter("B")

    with pytest.raises(ProgramError, match="nest a `with`"):
        program.run(backend=recorder).text()


def test_streaming_yields_pieces_then_the_typed_value() -> None:
    @vlora.function
    def program(s: vlora.ProgramState) -> None:
        s += "q: " + vlora.gen("n", dtype=int)

    recorder = Recorder(lambda request: "123")
    state = program.run(backend=recorder, stream=True, adapter="A")
    assert "".join(state.text_iter("n")) == "123"
    assert recorder.asked() == [("A", "q: ")], "a streamed request carries the adapter too"
    assert state["n"] == 123
    state = program.run(backend=Recorder(lambda request: "123"), stream=True)
    assert "".join(state.text_iter()) == "q: 123"


def test_streaming_raises_what_went_wrong() -> None:
    @vlora.function
    def program(s: vlora.ProgramState) -> None:
        s += "q: " + vlora.image("/nowhere.png") + vlora.gen("n")

    @vlora.function
    def raises(s: vlora.ProgramState) -> None:
        s += "q: "
        raise ZeroDivisionError

    for name in (None, "n"):
        with pytest.raises(ProgramError, match="nowhere"):
            list(program.run(backend=Recorder(), stream=True).text_iter(name))
    with pytest.raises(ZeroDivisionError):
        list(raises.run(backend=Recorder(), stream=True).text_iter())


def test_batch_keeps_order_and_loses_nothing_to_a_failure() -> None:
    def rule(request: dict[str, Any]) -> str:
        if "user\n13<" in request["text"]:
            raise RequestError("unlucky")
        return "a" + request["text"].split("user\n")[1].split("<")[0]

    states = two_rounds.run_batch([(str(i),) for i in range(40)], backend=Recorder(rule), num_threads=8)
    assert len(states) == 40
    assert [state["first"] for i, state in enumerate(states) if i != 13] == [f"a{i}" for i in range(40) if i != 13]
    assert "unlucky" in str(states[13].error())
    with pytest.raises(ProgramError, match="unlucky"):
        states[13]["first"]


def test_batch_cancels_single_runs() -> None:
    started, release = threading.Semaphore(0), threading.Event()

    def rule(request: dict[str, Any]) -> str:
        started.release()
        release.wait(10)
        return "done"

    recorder = Recorder(rule)
    batch = two_rounds.start_batch([{"question": str(i)} for i in range(6)], backend=recorder, num_threads=3)
    for _ in range(3):
        started.acquire()
    batch.cancel(0)  # in flight
    batch.cancel(5)  # still waiting for a thread
    release.set()
    assert sorted(batch.as_completed()) == list(range(6))
    states = batch.results()
    assert [state["second"] for state in states[1:5]] == ["done"] * 4
    for index in (0, 5):
        with pytest.raises(ProgramCancelled):
            states[index]["first"]
    assert len(recorder.aborted) == 1 and recorder.aborted[0].startswith(states[0].stream_executor.sid)
    assert not any("user\n5<" in request["text"] for request in recorder.requests), "a waiting run never starts"


def test_batch_arguments_are_checked(recorder: Recorder) -> None:
    with pytest.raises(TypeError, match=r"two_rounds\(question\) cannot be run with"):
        two_rounds.run_batch([("a", "b")], backend=recorder)
    with pytest.raises(TypeError, match="cannot be run with"):
        two_rounds.run_batch([{"questoin": "a"}], backend=recorder)
    with pytest.raises(TypeError, match="no parameter questoin"):
        two_rounds.bind(questoin="a")
    assert two_rounds.bind(question="bound").run_batch([{}], backend=recorder)[0]["first"] == "yes"
    assert two_rounds.run_batch([], backend=recorder) == []


def test_generator_style_yields_in_order() -> None:
    def rule(request: dict[str, Any]) -> str:
        time.sleep(0.02 if "user\n0<" in request["text"] else 0)
        return request["text"].split("user\n")[1][0]

    states = two_rounds.run_batch([(str(i),) for i in range(5)], backend=Recorder(rule), generator_style=True)
    assert [state["first"] for state in states] == list("01234")


def test_async_run_and_cancel() -> None:
    entered, release = threading.Event(), threading.Event()

    def rule(request: dict[str, Any]) -> str:
        if "slow" in request["text"]:
            entered.set()
            release.wait(10)
        return "yes"

    recorder = Recorder(rule)

    async def main() -> list[Any]:
        states = await asyncio.gather(*(two_rounds.arun(str(i), backend=recorder) for i in range(4)))
        task = asyncio.create_task(two_rounds.arun("slow", backend=recorder))
        await asyncio.to_thread(entered.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        release.set()
        return [state["second"] for state in states]

    assert asyncio.run(main()) == ["yes"] * 4
    assert len(recorder.aborted) == 1


def test_no_backend_is_a_clear_error() -> None:
    vlora.set_default_backend(None)
    with pytest.raises(ConfigError, match="set_default_backend"):
        two_rounds.run("x")
    with pytest.raises(ConfigError, match="got int"):
        two_rounds.run("x", backend=3)
    with pytest.raises(ConfigError, match="no vlora_sgl or SGLang server answers"):
        vlora.Runtime("http://127.0.0.1:9")


def test_default_backend(recorder: Recorder) -> None:
    vlora.set_default_backend(recorder)
    try:
        assert two_rounds("x")["first"] == "yes"
    finally:
        vlora.set_default_backend(None)


def test_trace_shows_our_nodes_and_who_answers() -> None:
    @vlora.function
    def program(s: vlora.ProgramState, path: str) -> None:
        s += vlora.user(vlora.image(path) + "what?")
        s += vlora.adapter("A")
        with s.assistant():
            s += vlora.gen("x")
        branches = s.fork(2)
        with vlora.adapter("B"):
            branches[0] += vlora.classify("kind", head="h")
        branches[1] += vlora.select("y", ["a", "b"], adapter=None)
        branches.join()

    trace = program.trace()
    assert set(trace.variables) == {"x", "kind", "y"}
    graph = trace.graph()
    for part in (
        "Gen('x') by A",
        "Head('kind', classify by 'h') by B",
        "choices_method",
        "by the base model",
        "Adapter('A')",
    ):
        assert part in graph
    assert graph.index("branch 0:") < graph.index("Head(") < graph.index("branch 1:")


def test_parameter_that_would_hide_an_option_is_refused() -> None:
    with pytest.raises(TypeError, match="adapter would hide an option of run"):

        @vlora.function
        def program(s: vlora.ProgramState, adapter: str) -> None: ...


def test_branches_compute_their_common_prefix_once_and_only_for_the_adapter_that_can_use_it() -> None:
    """Four branches of the adapter in force compute it once between them; another adapter's branch does not."""

    @vlora.function
    def program(s: vlora.ProgramState) -> None:
        s += vlora.adapter("A")
        s += "prefix "
        branches = s.fork(5)
        for i, branch in enumerate(branches):
            with vlora.adapter("B" if i == 4 else "A"):
                branch += f"{i}" + vlora.gen("x") + vlora.gen("y")
        branches.join()

    def rule(request: dict[str, Any]) -> str:
        time.sleep(0 if request["sampling_params"]["max_new_tokens"] else 0.05)
        return "yes"

    recorder = Recorder(rule)
    assert program.run(backend=recorder)["x"] == ["yes"] * 5
    of_a = [request for request in recorder.requests if request["lora_path"] == "A"]
    fills = [request["text"] for request in recorder.requests if not request["sampling_params"]["max_new_tokens"]]
    assert fills == ["prefix "] and of_a[0]["text"] == "prefix ", "once, and before any of its branches"
    assert len(recorder.asked()) == 10


def test_a_branch_whose_prefix_fails_tells_its_line_and_the_others_try_again() -> None:
    failures = iter([RequestError("unlucky")])

    def rule(request: dict[str, Any]) -> str:
        if not request["sampling_params"]["max_new_tokens"]:
            for failure in failures:
                raise failure
        return "yes"

    @vlora.function
    def program(s: vlora.ProgramState) -> list[vlora.ProgramState]:
        s += "prefix "
        branches = list(s.fork(3))
        for branch in branches:
            branch += vlora.gen("x")
        for branch in branches:
            branch.sync()
        return branches

    errors = [branch.error() for branch in program.run(backend=Recorder(rule)).ret_value]
    assert sum(error is not None for error in errors) == 1
    assert str(next(filter(None, errors))).startswith(f"{__file__}:{line_of(program, 'gen(')} (in program): unlucky")
