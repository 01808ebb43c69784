"""What programs run on: a server reached over HTTP, or an engine in this process, behind one set of requests."""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeVar, cast

import requests

from vlora_sgl.core import JsonDict, RequestParams, ServiceClass
from vlora_sgl.errors import ConfigError, ProgramCancelled, RequestError
from vlora_sgl.lang import _upstream as up
from vlora_sgl.lang.interpreter import Executor
from vlora_sgl.lang.scoring import TokenLogprob
from vlora_sgl.lang.values import Box, Boxes, Count, Label

T = TypeVar("T")
Task = Literal["classify", "count", "detect"]
Request = JsonDict
Response = JsonDict

_FLUSH_TIMEOUT_S = 30

_TEMPLATES = {"qwen2_vl": "qwen2-vl", "qwen2_5_vl": "qwen2-vl", "qwen3_vl": "qwen2-vl"}
"""Model type -> chat template, because a directory's name says nothing about a model."""


class Endpoint(up.RuntimeEndpoint):
    """SGLang's endpoint with the adapter, several images, several answers and an identity in every request.

    How a request travels is left to :meth:`send` and :meth:`stream`, so that a program's requests, and with them its
    results, are the same on every backend.

    Args:
        model_info: ``model_path`` and ``model_type`` of what is served.
        chat_template: name of one of SGLang's chat templates; by default the model's type decides.

    Attributes:
        asks: the latency class and the deadline of every request.
    """

    asks = RequestParams()

    def __init__(self, model_info: JsonDict, chat_template: str | None = None) -> None:
        # Not the base constructor: it asks a server.
        up.BaseBackend.__init__(self)
        self.model_info = model_info
        name = chat_template or _TEMPLATES.get(str(model_info.get("model_type")))
        self.chat_template = (
            up.get_chat_template(name) if name else up.get_chat_template_by_model_path(model_info["model_path"])
        )

    @abstractmethod
    def send(self, data: Request) -> Response | list[Response]:
        """Send one generate request and wait; a list comes back for several prompts or several samples.

        Raises:
            RequestError: it was refused; the message is the server's.
        """

    @abstractmethod
    def stream(self, data: Request) -> Iterator[Response]:
        """Send one generate request and yield what has been generated so far, again and again."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Stop a request that is running; unknown ones are ignored."""

    # What the executor calls

    def generate(
        self, s: Executor, sampling_params: up.SglSamplingParams
    ) -> tuple[str | list[str], Response | list[Response]]:
        """Generate from the state's text; with ``n`` > 1 the text and the information are lists."""
        answer = self._request(s, self._generation(s, sampling_params))
        if isinstance(answer, list):
            return [one["text"] for one in answer], [one["meta_info"] for one in answer]
        return answer["text"], answer["meta_info"]

    def generate_stream(self, s: Executor, sampling_params: up.SglSamplingParams) -> Iterator[tuple[str, Response]]:
        """The same, piece by piece.

        Raises:
            RequestError: ``n`` > 1, which has no single text to stream.
        """
        if sampling_params.n != 1:
            raise RequestError(f"streaming yields one text, got n={sampling_params.n}")
        data = self._generation(s, sampling_params) | {"stream": True}
        position = 0
        with _in_flight(s, data):
            for answer in self.stream(self._complete(s, data)):
                text = answer["text"][position:]
                position += len(text)
                _check_finished(s, answer)
                yield text, answer["meta_info"]

    def select(
        self,
        s: Executor,
        choices: list[str],
        temperature: float,
        choices_method: up.ChoicesSamplingMethod,
    ) -> up.ChoicesDecision:
        """Score every choice as the continuation of the state's text and take the best.

        Not the base class's: it keeps tokens of the prompt among those it scores, and breaks where the first one,
        which never has a log-probability, happens to end the prompt's text.
        """
        fill = cast(Response, self._request(s, {"text": s.text_, "sampling_params": {"max_new_tokens": 0}}))
        last = fill["meta_info"]["prompt_tokens"] - 1
        sampling = {"max_new_tokens": 0, "temperature": 0}
        scoring = {"sampling_params": sampling, "return_logprob": True, "return_text_in_logprobs": True}
        texts = [s.text_ + choice for choice in choices]
        # From one token before the prompt's last: the first entry comes without its log-probability.
        answers = self._request(s, {"text": texts, "logprob_start_len": max(last - 1, 0), **scoring})
        meta_infos = [answer["meta_info"] for answer in cast(list[Response], answers)]
        scored = [_choice_tokens(s.text_, one["input_token_logprobs"]) for one in meta_infos]
        unconditional = None
        if choices_method.requires_unconditional_logprobs:
            ids = [[token[1] for token in tokens] for tokens in scored]
            answers = self._request(s, {"input_ids": ids, "logprob_start_len": 0, **scoring})
            unconditional = [one["meta_info"]["input_token_logprobs"] for one in cast(list[Response], answers)]
        decision = choices_method(
            choices=choices,
            normalized_prompt_logprobs=[sum(token[0] for token in tokens) / len(tokens) for tokens in scored],
            input_token_logprobs=scored,
            output_token_logprobs=[one["output_token_logprobs"] for one in meta_infos],
            unconditional_token_logprobs=unconditional,
        )
        counters = {"cached_tokens": fill["meta_info"]["cached_tokens"], "prompt_tokens": last + 1}
        return up.ChoicesDecision(decision.decision, {**(decision.meta_info or {}), **counters})

    def prefill(self, s: Executor, text: str, images: Sequence[tuple[object, str]]) -> None:
        """Compute a text with its images now, for the state's adapter, so that what follows finds it cached."""
        data: Request = {"text": text, "sampling_params": {"max_new_tokens": 0}}
        if images:
            data["image_data"] = [url for _, url in images]
        self._request(s, data)

    def commit_lazy_operations(self, s: Executor) -> None:
        """The same for the state's own text."""
        self.prefill(s, s.text_, s.images_)

    def fill_image(self, s: Executor) -> None:
        """The same; SGLang's executor asks for it after an image."""
        self.commit_lazy_operations(s)

    def head(self, s: Executor, head: str, task: Task) -> tuple[Label | Count | Boxes, Response]:
        """Ask a vision head about the state's text and images.

        Raises:
            RequestError: the answer carries nothing from the head.
        """
        sampling = RequestParams(head=head).added_to({"max_new_tokens": 1, "temperature": 0})
        answer = cast(Response, self._request(s, {"text": s.text_, "sampling_params": sampling}))
        return head_value(answer["meta_info"].get("vlora", {}).get("head"), task), answer["meta_info"]

    def _generation(self, s: Executor, sampling_params: up.SglSamplingParams) -> Request:
        self._handle_dtype_to_regex(sampling_params)
        data: Request = {
            "text": s.text_,
            "sampling_params": {
                "skip_special_tokens": up.global_config.skip_special_tokens_in_output,
                "spaces_between_special_tokens": up.global_config.spaces_between_special_tokens_in_out,
                **sampling_params.to_srt_kwargs(),
            },
        }
        for item in ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs"):
            value = getattr(sampling_params, item, None)
            if value is not None:
                data[item] = value
        return data

    def _request(self, s: Executor, data: Request) -> Response | list[Response]:
        with _in_flight(s, data):
            answer = self.send(self._complete(s, data))
        for one in answer if isinstance(answer, list) else [answer]:
            _check_finished(s, one)
        return answer

    def _complete(self, s: Executor, data: Request) -> Request:
        """Add the state's images (only where the text that refers to them goes along), its adapter, and ``asks``."""
        if self.asks != Endpoint.asks:
            data["sampling_params"] = self.asks.added_to(data["sampling_params"])
        urls = [url for _, url in s.images_]
        if urls and "text" in data and "image_data" not in data:
            data["image_data"] = [urls] * len(data["text"]) if isinstance(data["text"], list) else urls
        if s.adapter is not None:
            data["lora_path"] = s.adapter
        return data


class Runtime(Endpoint):
    """A running server.

    Args:
        url: its address, as in ``http://127.0.0.1:30000``.
        api_key: sent as a bearer token.
        chat_template: name of one of SGLang's chat templates; by default the model's type decides.
        timeout: seconds to wait for one answer; None waits for ever.
        service: latency class of every request: ``realtime``, ``interactive``, ``batch``.
        deadline: seconds in which every request should be answered; the server counts those that are not.

    Raises:
        ValueError: there is no such class.
        ConfigError: nothing answers there, or not as a server of ours does.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        chat_template: str | None = None,
        timeout: float | None = None,
        service: str = ServiceClass.INTERACTIVE,
        deadline: float | None = None,
    ) -> None:
        self.asks = RequestParams(service=ServiceClass(service), deadline=deadline)
        self.url = url.rstrip("/")
        self.timeout = timeout
        # A session per thread: connections are reused, and never shared between programs that run at a time.
        self._sessions = threading.local()
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            info = self._get("/model_info")
        except (requests.RequestException, RequestError) as error:
            raise ConfigError(f"no vlora_sgl or SGLang server answers at {self.url}: {error}") from error
        super().__init__(info, chat_template)

    def send(self, data: Request) -> Response | list[Response]:
        """Post to ``/generate``."""
        with self._post("/generate", data) as response:
            return cast("Response | list[Response]", response.json())

    def stream(self, data: Request) -> Iterator[Response]:
        """Post to ``/generate`` and read its server-sent events."""
        with self._post("/generate", data, stream=True) as response:
            for line in response.iter_lines():
                if not line.startswith(b"data:"):
                    continue
                if line == b"data: [DONE]":
                    return
                event = json.loads(line[5:])
                if "error" in event:
                    raise RequestError(_message(event))
                yield event

    def abort(self, request_id: str) -> None:
        """Post to ``/abort_request``."""
        self._post("/abort_request", {"rid": request_id}).close()

    def adapters(self) -> list[str]:
        """Names of the adapters that are loaded."""
        return [card["id"] for card in self._get("/v1/models")["data"] if card.get("parent")]

    def flush_cache(self) -> None:
        """Forget every cached prefix, once the requests that run are done.

        Raises:
            RequestError: some still ran after half a minute.
        """
        self._post(f"/flush_cache?timeout={_FLUSH_TIMEOUT_S}", None).close()

    def get_server_info(self) -> JsonDict:
        """The server's settings and state."""
        return self._get("/server_info")

    def _session(self) -> requests.Session:
        if not hasattr(self._sessions, "session"):
            self._sessions.session = requests.Session()
            self._sessions.session.headers.update(self._headers)
        return cast(requests.Session, self._sessions.session)

    def _get(self, path: str) -> JsonDict:
        response = self._session().get(self.url + path, timeout=self.timeout)
        _raise_for_status(response)
        return cast(JsonDict, response.json())

    def _post(self, path: str, data: Request | None, stream: bool = False) -> requests.Response:
        response = self._session().post(self.url + path, json=data, stream=stream, timeout=self.timeout)
        _raise_for_status(response)
        return response


class EngineEndpoint(Endpoint):
    """An engine in this process.

    The engine belongs to one event loop and its blocking calls run that loop. Programs wait from many threads: whoever
    comes first runs the loop until its own answer is there, then hands it on. With no program waiting the loop rests,
    so the engine's own blocking calls work between programs (not while one runs).

    Args:
        engine: a :class:`vlora_sgl.Engine`, or SGLang's.
    """

    def __init__(self, engine: Any, chat_template: str | None = None) -> None:
        config = engine.tokenizer_manager.model_config
        super().__init__(
            {
                "model_path": engine.server_args.model_path,
                "model_type": getattr(config.hf_config, "model_type", None),
            },
            chat_template,
        )
        self.engine = engine
        self._loop: asyncio.AbstractEventLoop = engine.loop
        self._turn = threading.Condition()
        self._led = False

    def send(self, data: Request) -> Response | list[Response]:
        """What ``/generate`` does with the same body."""
        answers = self._answers(data)
        return self._wait(lambda: anext(answers))

    def stream(self, data: Request) -> Iterator[Response]:
        """What ``/generate`` does with the same body, stream for stream."""
        answers = self._answers(data)
        end: Response = {}
        while (answer := self._wait(lambda: anext(answers, end))) is not end:
            yield answer

    def _answers(self, data: Request) -> AsyncIterator[Response]:
        from vlora_sgl._sgl import GenerateReqInput

        # Not Engine.async_generate: it lacks fields of the request that ``select`` needs.
        return cast(
            AsyncIterator[Response], self.engine.tokenizer_manager.generate_request(GenerateReqInput(**data), None)
        )

    def abort(self, request_id: str) -> None:
        """Abort on the engine's loop."""
        self._loop.call_soon_threadsafe(self.engine.tokenizer_manager.abort_request, request_id)

    def flush_cache(self) -> None:
        """Forget every cached prefix, once the requests that run are done.

        Raises:
            RequestError: some still ran after half a minute.
        """
        result = self._wait(lambda: self.engine.tokenizer_manager.flush_cache(timeout_s=_FLUSH_TIMEOUT_S))
        if not result.success:
            raise RequestError(result.message or "the cache was not flushed: requests are running")

    def get_server_info(self) -> JsonDict:
        """The engine's settings and state."""
        return cast(JsonDict, self.engine.get_server_info())

    def _wait(self, start: Callable[[], Awaitable[T]]) -> T:
        async def run() -> T:
            return await start()

        answer = asyncio.run_coroutine_threadsafe(run(), self._loop)
        answer.add_done_callback(lambda _: self._wake())
        while True:
            with self._turn:
                self._turn.wait_for(lambda: answer.done() or not self._led)
                if answer.done():
                    break
                self._led = True
            try:
                self._loop.run_until_complete(asyncio.wait({asyncio.wrap_future(answer, loop=self._loop)}))
            finally:
                with self._turn:
                    self._led = False
                self._wake()
        try:
            return answer.result()
        except ValueError as error:
            # What the server answers with status 400.
            raise RequestError(str(error)) from error

    def _wake(self) -> None:
        with self._turn:
            self._turn.notify_all()


class EngineLike(Protocol):
    """An engine in this process: a :class:`vlora_sgl.Engine`, or SGLang's."""

    @property
    def async_generate(self) -> Callable[..., object]: ...


Backend = Endpoint | EngineLike | str

_engines: weakref.WeakKeyDictionary[object, EngineEndpoint] = weakref.WeakKeyDictionary()


def as_endpoint(backend: Backend | None) -> Endpoint:
    """The endpoint behind anything a program may run on.

    Args:
        backend: a :class:`Runtime`, an ``Engine``, the address of a server, or None for the default backend.

    Raises:
        ConfigError: none of these, or no default has been set.
    """
    if backend is None:
        backend = up.global_config.default_backend
        if backend is None:
            raise ConfigError("no backend: pass backend=vlora.Runtime(url) or call vlora.set_default_backend(...)")
    if isinstance(backend, Endpoint):
        return backend
    if isinstance(backend, str):
        return Runtime(backend)
    if hasattr(backend, "async_generate"):
        if backend not in _engines:
            _engines[backend] = EngineEndpoint(backend)
        return _engines[backend]
    raise ConfigError(f"a program runs on a vlora.Runtime or a vlora.Engine, got {type(backend).__name__}")


def head_value(answer: object, task: Task) -> Label | Count | Boxes:
    """The typed value of what a head answered.

    Raises:
        RequestError: there is no answer, or it is one of another task.
    """
    if not isinstance(answer, dict):
        raise RequestError(f"the model answered without a vision head (meta_info['vlora']['head'] is {answer!r})")
    try:
        if task == "classify":
            labels: Sequence[str] = answer["labels"]
            probabilities = dict(zip(labels, answer["probabilities"], strict=True))
            return Label(max(probabilities, key=lambda label: probabilities[label]), probabilities)
        if task == "count":
            return Count(answer["count"], answer.get("probability"))
        boxes = []
        for box in answer["boxes"]:
            x0, y0, x1, y1 = (min(max(float(edge), 0.0), 1.0) for edge in box["box"])
            boxes.append(Box(x0, y0, x1, y1, box.get("label", ""), box.get("score")))
        return Boxes(boxes)
    except KeyError as error:
        raise RequestError(f"a {task} head answers with {error}, got {sorted(answer)}") from error


def _choice_tokens(prompt: str, tokens: list[TokenLogprob]) -> list[TokenLogprob]:
    """The entries (log-probability, id, text) of a choice's own tokens, of entries from the prompt's last but one on.

    Where the prompt's last token and the choice's first merged into one, that one counts as the choice's.
    """
    tokens = tokens[1:]
    return tokens[1:] if len(tokens) > 1 and prompt.endswith(tokens[0][2]) else tokens


@contextmanager
def _in_flight(s: Executor, data: Request) -> Iterator[None]:
    """Gives a request its identity and registers it, so that the run can be cancelled while it is out."""
    s.requests += 1
    s.in_flight = data["rid"] = f"{s.sid}-{s.requests}"
    try:
        if s.is_cancelled():
            raise ProgramCancelled("the run was cancelled")
        yield
    finally:
        s.in_flight = None
        if s.is_cancelled():
            raise ProgramCancelled("the run was cancelled")


def _check_finished(s: Executor, answer: Response) -> None:
    reason = answer["meta_info"].get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise RequestError(f"the server gave the request up: {reason.get('message', 'aborted')}")


def _raise_for_status(response: requests.Response) -> None:
    if response.status_code == 200:
        return
    try:
        message = _message(response.json())
    except ValueError:
        message = response.text.strip() or str(response.reason)
    raise RequestError(f"{message} (HTTP {response.status_code})")


def _message(body: object) -> str:
    """The text of an error in any of the forms SGLang gives it."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
