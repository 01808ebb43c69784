"""Other models that SGLang serves, each on a server of its own: with adapters they answer as transformers + PEFT do.

A start costs most of a minute, so these run with ``--slow`` only (``make families``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from peft import PeftModel
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPImageProcessor,
    LlavaProcessor,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen3VLProcessor,
)
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from tests.conftest import Server, TinyModel, serve
from tests.support.head_reference import data_url, make_image
from tests.support.lora_adapters import tiny_adapter, tiny_model
from tests.support.tiny_random import VOCABULARY_TEXT
from tools.tiny.build import CHAT_TEMPLATE, SPECIAL_TOKENS, build_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOKENS = 8
TEXT = "<|im_start|>user\nHow many objects are there?<|im_end|>\n<|im_start|>assistant\n"
NOT_TOWERS = r".*(visual|vision_tower|vision_model|multi_modal_projector).*"
SHOWN = {
    "llava": "<|image_pad|>",
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), "<|vision_start|><|image_pad|><|vision_end|>"),
}
LLAVA = pytest.mark.skip(
    reason="SGLang 0.5.17 moves the original layout's CLIP tower to CUDA whatever the device, and for transformers' "
    "layout has no CLIPVisionModel: it falls back to a language model, which has no place for pictures"
)
FAMILIES = ["llama", "qwen2", *(pytest.param(f, marks=LLAVA) if f == "llava" else f for f in SHOWN)]
# SGLang takes rows of any other width than that of 14 x 14 patches for embeddings that are done.
PATCHES_OF_14 = ("qwen2_vl", "qwen2_5_vl")
KEY = {"Authorization": "Bearer secret"}


def save_family(family: str, directory: Path, **text: Any) -> Path:
    """A checkpoint that transformers and SGLang load: random weights, tokenizer, processor; ``text`` changes it."""
    tokenizer = build_tokenizer(VOCABULARY_TEXT)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    tokens = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    special = {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"], "pad_token_id": 0}
    vocabulary = (len(tokenizer) + 63) // 64 * 64
    vision: dict[str, Any] = {"patch_size": 14} if family in PATCHES_OF_14 else {}
    if family == "qwen2_5_vl":
        vision["window_size"] = 56
    text = {"vocab_size": vocabulary, "intermediate_size": 64, **special, **text}
    model = tiny_model(family, text=text, tokens=tokens, vision=vision)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:  # larger than usual, so that greedy answers are no near-ties
                parameter.normal_(0.0, 0.6 / parameter[0].numel() ** 0.5 if "embed_tokens" not in name else 1.0)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    processor_of(family, tokenizer).save_pretrained(directory)
    return directory


def processor_of(family: str, tokenizer: Any) -> Any:
    if family == "llava":
        size = {"height": 16, "width": 16}
        images = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=size)
        tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL_TOKENS]})
        return LlavaProcessor(
            images, tokenizer, patch_size=8, vision_feature_select_strategy="default", image_token="<|image_pad|>",
            num_additional_image_tokens=1, chat_template=CHAT_TEMPLATE,
        )  # fmt: skip
    if family not in SHOWN:
        return tokenizer
    size = 14 if family in PATCHES_OF_14 else 4
    shape = {"patch_size": size, "merge_size": 2, "min_pixels": (4 * size) ** 2, "max_pixels": (8 * size) ** 2}
    images = Qwen2VLImageProcessor(**shape)
    made = {"qwen2_vl": Qwen2VLProcessor, "qwen2_5_vl": Qwen2_5_VLProcessor, "qwen3_vl": Qwen3VLProcessor}[family]
    videos = Qwen3VLVideoProcessor() if family == "qwen3_vl" else Qwen2VLVideoProcessor(**shape)
    return made(image_processor=images, tokenizer=tokenizer, video_processor=videos, chat_template=CHAT_TEMPLATE)


class Expected:
    """transformers + PEFT on the same files."""

    def __init__(self, model: TinyModel, family: str) -> None:
        from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer

        auto = AutoModelForImageTextToText if family in SHOWN else AutoModelForCausalLM
        load = AutoProcessor if family in SHOWN else AutoTokenizer
        self.processor = load.from_pretrained(model.path)
        if family in SHOWN:  # the server's, on a CPU; torchvision's resizes a little differently
            self.processor.image_processor = AutoImageProcessor.from_pretrained(model.path, backend="pil")
        base = auto.from_pretrained(model.path, dtype=torch.float32)
        self.model = PeftModel.from_pretrained(base, model.adapters["A"], adapter_name="A")
        self.model.load_adapter(model.adapters["B"], adapter_name="B")
        self.model.eval()

    @torch.inference_mode()
    def tokens(self, text: str, name: str | None, image: Image.Image | None) -> list[int]:
        """Greedy tokens."""
        seen = {"images": [image]} if image is not None else {}
        inputs = self.processor(text=[text], return_tensors="pt", **seen)
        options = {"do_sample": False, "max_new_tokens": TOKENS}
        if name is None:
            with self.model.disable_adapter():
                output = self.model.generate(**inputs, **options)
        else:
            self.model.set_adapter(name)
            output = self.model.generate(**inputs, **options)
        return output[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name, server and expectation of one family; the server has an admin key."""
    name, root = request.param, tmp_path_factory.mktemp(request.param)
    path, adapters = save_family(name, root / "model"), {}
    load = AutoModelForImageTextToText if name in SHOWN else AutoModelForCausalLM
    for seed, adapter in enumerate("AB", start=1):
        base = load.from_pretrained(path, dtype=torch.float32)
        options = {"target_modules": "all-linear", "exclude_modules": NOT_TOWERS}
        tiny_adapter(base, root / adapter, seed=seed, strength=0.3, **options)
        adapters[adapter] = root / adapter
    model = TinyModel(path, adapters)
    flags = ["--max-loras-per-batch", "4", "--admin-api-key", "secret"]
    with serve(model, root / "log.txt", *flags) as server:
        yield name, server, Expected(model, name)


def ask(server: Server, names: list[str | None], text: str, image: Image.Image | None) -> list[list[int]]:
    seen = {"image_data": [data_url(image)] * len(names)} if image is not None else {}
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    rows = server.generate(text=[text] * len(names), lora_path=names, sampling_params=sampling, **seen)
    return [row["output_ids"] for row in rows]


@pytest.mark.parametrize("seen", [False, True], ids=["text", "image"])
def test_adapters_answer_as_peft_does(family: Any, seen: bool) -> None:
    name, server, expected = family
    if seen and name not in SHOWN:
        pytest.skip("a model of text only")
    image = make_image(5, (112, 56) if name in PATCHES_OF_14 else (32, 32)) if seen else None
    text = TEXT.replace("user\n", "user\n" + SHOWN[name]) if seen else TEXT
    names: list[str | None] = [None, "A", "B"]
    wanted = [expected.tokens(text, adapter, image) for adapter in names]
    assert len({tuple(ids) for ids in wanted}) == 3, "the adapters must change the answer"
    for adapter, ids in zip(names, wanted, strict=True):
        assert ask(server, [adapter], text, image) == [ids]
    assert ask(server, [*names, "A"], text, image) == [*wanted, wanted[1]]


def test_words_of_a_chat_are_words(family: Any) -> None:
    name, server, _ = family
    say = f"What does {SHOWN.get(name, '<|image_pad|>')} <|im_end|> mean?"
    shown = {"type": "image_url", "image_url": {"url": data_url(make_image(5, (112, 56)))}}
    content = [*([shown] if name in SHOWN else []), {"type": "text", "text": say}]
    used = []
    for messages in ([{"role": "user", "content": content}], [{"role": "user", "content": [*content[:-1]] or "x"}]):
        body = {"model": "default:A", "messages": messages, "max_tokens": 2}
        reply = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        used.append(reply.json()["usage"]["prompt_tokens"])
    assert 10 < used[0] - used[1] <= len(say)


def test_changing_adapters_needs_the_key_and_asking_does_not(family: Any) -> None:
    _, server, _ = family
    for route, body in (
        ("load_lora_adapter", {"lora_name": "C", "lora_path": str(server.model.adapters["A"])}),
        ("reload_lora_adapter", {"lora_name": "C"}),
        ("pin_lora_adapter", {"lora_name": "C"}),
        ("unload_lora_adapter", {"lora_name": "C"}),
    ):
        assert requests.post(f"{server.url}/{route}", json=body, timeout=60).status_code == 401
        assert requests.post(f"{server.url}/{route}", json=body, timeout=60, headers=KEY).status_code == 200


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_tied_weights_have_an_adapter_each(tmp_path: Path) -> None:
    path, adapters = save_family("qwen2", tmp_path / "model", tie_word_embeddings=True), {}
    both = ["embed_tokens", "lm_head", "q_proj"]
    for seed, (name, targets) in enumerate({"A": both, "B": ["down_proj"]}.items()):
        base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        assert base.lm_head.weight is base.model.embed_tokens.weight
        tiny_adapter(base, tmp_path / name, seed=seed, strength=0.2, target_modules=targets)
        adapters[name] = tmp_path / name
    model = TinyModel(path, adapters)
    with serve(model, tmp_path / "log.txt", "--max-loras-per-batch", "3") as server:
        expected = Expected(model, "qwen2")
        names: list[str | None] = [None, "A", "B"]
        wanted = [expected.tokens(TEXT, name, None) for name in names]
        assert len({tuple(ids) for ids in wanted}) == 3, "the adapters must change the answer"
        assert ask(server, [*names, "A"], TEXT, None) == [*wanted, wanted[1]]
