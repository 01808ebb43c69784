"""Programs on the running server, and the same programs on an engine in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import requests

import vlora_sgl as vlora
from tests.conftest import Server
from tests.support import programs
from tests.support.tiny_random import make_adapter
from vlora_sgl.errors import ProgramCancelled, ProgramError
from vlora_sgl.heads import save_heads

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def runtime(server: Server) -> vlora.Runtime:
    return vlora.Runtime(server.url)


def test_rounds_adapters_and_the_prefix_cache(runtime: vlora.Runtime) -> None:
    """The second round finds the image's tokens cached; another adapter's first call does not."""
    runtime.flush_cache()
    image = programs.photograph(1)
    first = programs.conversation.run(image, ["A", "A", "B", None], backend=runtime)
    cached = [first.cached_tokens(f"round{i}") for i in range(4)]
    assert cached[0] < programs.IMAGE_TOKENS, "nothing about this image can be known yet"
    assert cached[1] >= programs.IMAGE_TOKENS, "the same adapter's second round"
    assert max(cached[2:]) < programs.IMAGE_TOKENS, "another adapter's first call must not reuse it"
    answers = {name: programs.conversation.run(image, [name], backend=runtime)["round0"] for name in ("A", "B", None)}
    assert len(set(answers.values())) == 3, "the adapters must change the answer for this test to mean anything"
    assert answers["A"] == first["round0"]


def test_forks_answer_as_single_runs_do(runtime: vlora.Runtime) -> None:
    image = programs.photograph(2)
    adapters = [None, "A", "B", "A"]
    state = programs.branches.run(image, adapters, backend=runtime)
    alone = [programs.conversation.run(image, [name], backend=runtime)["round0"] for name in adapters]
    assert state["answer"] == alone
    assert len(set(alone)) == 3


@pytest.mark.parametrize(("kind", "invocation", "computed"), [("ordinary", None, 8), ("activated", "after_image", 1)])
def test_eight_forks_over_eight_adapters_compute_one_image(
    kind: str, invocation: str | None, computed: int, server: Server, runtime: vlora.Runtime, tmp_path: Path
) -> None:
    """Once per ordinary adapter, once in all for activated ones: so say the server's own counters."""
    image = programs.photograph(21).resize((224, 224))
    names = [f"{kind}{number}" for number in range(8)]
    for number, name in enumerate(names):
        path = make_adapter(tmp_path / name, server.model.path, 60 + number)
        save_heads(path, [], invocation=invocation)
        control(server, "load_lora_adapter", lora_name=name, lora_path=str(path))
    runtime.flush_cache()
    before = reuse_totals(runtime)
    answers = programs.branches.run(image, names, backend=runtime)["answer"]
    after = reuse_totals(runtime)
    grown = {key: after[key] - before[key] for key in after}
    tokens = (224 // 28) ** 2
    assert grown["prompt_image_tokens"] == 8 * tokens, "eight requests that show the image"
    assert grown["prompt_image_tokens"] - grown["cached_image_tokens"] == computed * tokens
    assert (grown["shared_tokens"] > 0) == (invocation is not None)
    alone = []
    for name in names:
        runtime.flush_cache()
        alone.append(programs.conversation.run(image, [name], backend=runtime)["round0"])
    assert answers == alone and len(set(alone)) > 4, "sharing must not change an answer, and adapters must differ"
    for name in names:
        control(server, "unload_lora_adapter", lora_name=name)


def reuse_totals(runtime: vlora.Runtime) -> dict[str, int]:
    """The prefix cache's counters, over all requests so far."""
    return dict(runtime.get_server_info()["internal_states"][0]["vlora"]["reuse"])


def control(server: Server, route: str, **body: str) -> None:
    reply = requests.post(f"{server.url}/{route}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text


def test_constrained_answers(runtime: vlora.Runtime) -> None:
    state = programs.constrained.run(programs.photograph(3), backend=runtime)
    assert state["word"] in ("red", "green", "blue")
    assert isinstance(state["number"], vlora.Count) and 0 <= state["number"] <= 99999
    assert state["json"] in ("left", "right")
    assert state["choice"] in ("yes", "no")
    label = state.get("label", vlora.Label)
    assert sum(label.probabilities.values()) == pytest.approx(1) and label.probability == max(
        label.probabilities.values()
    )
    boxes = state.get("boxes", vlora.Boxes)
    assert boxes and all(box.label == "cup" for box in boxes)
    assert len(state["samples"]) == 2


def test_streaming_equals_waiting(runtime: vlora.Runtime) -> None:
    image = programs.photograph(4)
    pieces = list(programs.conversation.run(image, ["A"], backend=runtime, stream=True).text_iter("round0"))
    assert "".join(pieces) == programs.conversation.run(image, ["A"], backend=runtime)["round0"]
    assert len(pieces) > 1


def test_video_is_shown_as_frames(runtime: vlora.Runtime) -> None:
    frames = [programs.photograph(i) for i in range(6)]
    state = programs.watch.run(frames, 4, backend=runtime)
    assert state["action"] != ""
    four = state.get_meta_info("action")["prompt_tokens"]
    two = programs.watch.run(frames, 2, backend=runtime).get_meta_info("action")["prompt_tokens"]
    assert four - two == 2 * (programs.IMAGE_TOKENS + 2), "each frame has its tokens between a begin and an end"


def test_bad_input_names_the_line_and_the_server_goes_on(runtime: vlora.Runtime) -> None:
    image = programs.photograph(5)
    with pytest.raises(ProgramError, match=r"programs\.py:\d+ \(in conversation\): .*'Z'.*A.*B") as caught:
        programs.conversation.run(image, ["Z"], backend=runtime)["round0"]
    assert caught.value.location.file.endswith("programs.py")
    with pytest.raises(ProgramError, match="HTTP 4"):
        programs.conversation.run(b"no image", [None], backend=runtime)["round0"]
    assert programs.conversation.run(image, ["A"], backend=runtime)["round0"]


def test_unknown_head_is_refused(runtime: vlora.Runtime) -> None:
    with pytest.raises(ProgramError, match="head"):
        programs.ask_head.run(programs.photograph(0), "nowhere", backend=runtime)["label"]


def test_batch_of_200_loses_nothing_while_a_tenth_is_cancelled(runtime: vlora.Runtime) -> None:
    images = [programs.photograph(i) for i in range(4)]
    arguments = [
        {"image": images[i % 4], "name": ("A", "B", None)[i % 3], "question": f"How many {i % 5}?"} for i in range(200)
    ]
    # 4 images, 3 adapters, 5 questions: the first 60 runs are all there are, and the others repeat them.
    alone = programs.short.run_batch(arguments[:60], backend=runtime, num_threads=4)
    expected = [state["answer"] for state in alone]
    assert len(set(expected)) > 3, "the runs must differ for this test to mean anything"
    batch = programs.short.start_batch(arguments, backend=runtime, num_threads=16)
    cancelled = set(range(0, 200, 10))

    def cancel() -> None:
        for index in sorted(cancelled):
            # Wait for its turn, so that most are cancelled while their request is out.
            while (
                not batch.states[index].stream_executor.in_flight
                and not batch.states[index].stream_executor.is_finished
            ):
                time.sleep(0.001)
            batch.cancel(index)

    canceller = threading.Thread(target=cancel)
    canceller.start()
    states = batch.results()
    canceller.join()
    lost = [index for index, state in enumerate(states) if index not in cancelled and state.error()]
    assert not lost
    for index, state in enumerate(states):
        if index in cancelled and state.error():
            assert isinstance(state.error(), ProgramCancelled)
        else:
            assert state["answer"] == expected[index % 60], index
    assert sum(isinstance(state.error(), ProgramCancelled) for state in states) >= 15


@pytest.mark.slow
def test_engine_in_process_gives_the_servers_results(server: Server, runtime: vlora.Runtime) -> None:
    """The one test that starts an engine of its own: the in-process backend has no other."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.support.programs", str(server.model.path)]
    command += [f"{name}={path}" for name, path in server.model.adapters.items()]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    run = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, timeout=240)
    assert run.returncode == 0, run.stderr[-4000:]
    assert json.loads(run.stdout.splitlines()[-1]) == json.loads(programs.as_json(programs.all_results(runtime)))
