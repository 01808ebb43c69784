"""The table of what we replace of SGLang, transformers, torch and FastAPI, and what puts it in place.

One row a replacement: a new release of SGLang is checked against this page. Names that a target begins with are in
``_sgl.NAMES``; ``check_contract`` finds those that are gone. SGLang only logs a plugin's failure and then serves
without it, so nothing here relies on its loader: each process of ours calls ``install`` before SGLang builds
anything, and each stage is verified. The entry point ``register`` does nothing in processes that vlora_sgl did not
start: stock ``sglang serve`` stays stock.
"""

from __future__ import annotations

import os
import pkgutil
from functools import partial

from vlora_sgl import _sgl, seams
from vlora_sgl.errors import ContractError
from vlora_sgl.platforms.cpu import is_plain_cpu
from vlora_sgl.seams import How, Place, Seam, Stage
from vlora_sgl.server_args import ENVIRONMENT_VARIABLE

PROCESS, ENGINE, MODEL = Stage
CLASS, WRAP, BUILT, OWN, CALL = How

# fmt: off
TABLE = (
    # A process starts: before SGLang is imported, and while it is.
    Seam("sys.modules", "vlora_sgl.startup.imports:without_useless_packages", PROCESS, CALL,
         "On a plain CPU packages of kernels and metrics are imported in vain, for seconds in each process.",
         "a start on a CPU takes longer"),
    Seam("multimodal_processor.pkgutil", "vlora_sgl.startup.imports:import_needed_processors", PROCESS, CALL,
         "SGLang imports the processors of every model that it knows.",
         "a start takes longer"),
    Seam("import_processors", "vlora_sgl.startup.imports:import_needed_processors", PROCESS, WRAP,
         "Where it looks for processors, those of models that are not served are left out.",
         "a start takes longer"),
    Seam("set_envs_and_config", "vlora_sgl.startup.processes:use_start_method", PROCESS, WRAP,
         "SGLang sets the start method to spawn; on a CPU its processes are forked from one that has imported it.",
         "each process on a CPU imports the engine anew"),
    Seam("PortArgs.init_new", "vlora_sgl.managers.leftovers:remember", PROCESS, WRAP,
         "SGLang removes no file of its links, nor what it has in shared memory, when it ends.",
         "every server leaves files in the temporary directory and in /dev/shm"),
    Seam("logging.Filterer.filters", "vlora_sgl.startup.quiet:silence", PROCESS, OWN,
         "SGLang and transformers warn on every start of what nobody can act on.",
         "a start prints a page of warnings"),
    Seam("torch.Tensor.pin_memory", "vlora_sgl.platforms.torch_cpu:TorchCpuPlatform", PROCESS, OWN,
         "SGLang's LoRA layers pin host memory without asking, which torch refuses without a GPU.",
         "adapters cannot be loaded on a plain CPU"),
    Seam("torch.tensor", "vlora_sgl.platforms.torch_cpu:without_pinning", PROCESS, OWN,
         "So do tensors that are made with pin_memory=True, here and by four factories more.",
         "a plain CPU cannot serve"),
    Seam("argparse.ArgumentParser.error", "vlora_sgl.names:Parser", PROCESS, CALL,
         "SGLang's command line prints a page for one wrong flag.",
         "a wrong flag of SGLang's costs a page"),
    Seam("sys.meta_path", "vlora_sgl.lang._upstream:_Completer", PROCESS, CALL,
         "A client needs SGLang's language without torch and the engine, which its package would import.",
         "import vlora_sgl.lang takes tens of seconds"),

    # SGLang is imported: classes and functions, then what it looks up by name.
    Seam("Scheduler", "vlora_sgl.managers.scheduler:VLoraScheduler", ENGINE, CLASS,
         "Every batch is formed within a plan, which says how its adapters are applied.",
         "adapters are never merged, prefixes are not shared, heads do not answer"),
    Seam("TpModelWorker", "vlora_sgl.heads.worker:HeadWorker", ENGINE, CLASS,
         "Heads run on the hidden states of a prefill, behind the model.",
         "heads do not answer"),
    Seam("LoRAManager", "vlora_sgl.lora.manager:VLoraManager", ENGINE, CLASS,
         "It carries the plan out: merges, routes rows to slots, loads and describes adapters.",
         "every adapter runs unmerged, with SGLang's kernels"),
    Seam("TokenizerManager", "vlora_sgl.managers.tokenizer_manager:VLoraTokenizerManager", ENGINE, CLASS,
         "Names of adapters and heads are resolved, and refused, before a request enters the engine.",
         "no reload, no adapters from disk, no answers of heads"),
    Seam("FanOutCommunicator", "vlora_sgl.managers.waits:BoundedCommunicator", ENGINE, CLASS,
         "SGLang waits for a rank's answer for ever.",
         "a request that asks or changes the engine may never be answered"),
    Seam("ModelRunner", "vlora_sgl.model_executor.model_runner:VLoraModelRunner", ENGINE, CLASS,
         "It chooses our graphs, unmerges before weights are read or replaced, and starts the stage MODEL.",
         "decoding in two variants of graphs, and every row of MODEL"),
    Seam("PrefillCudaGraphRunner", "vlora_sgl.model_executor.graph_runner:VLoraPrefillCudaGraphRunner", ENGINE, CLASS,
         "SGLang captures a prefill without LoRA kernels only.",
         "prefills take as long as the host needs for their launches"),
    Seam("get_lora_layer", "vlora_sgl.lora.layers:wrap_layer", ENGINE, WRAP,
         "SGLang computes the base linear and then adds the adapters; ATMM does both at once.",
         "the backend atmm has no layers"),
    Seam("build_lora_hooks", "vlora_sgl.lora.expert_layers:build_hooks", ENGINE, WRAP,
         "SGLang's runner of experts calls hooks where adapters join; for our layers they are the operator's.",
         "adapters on experts"),
    Seam("OpenAIServingBase._resolve_lora_path", "vlora_sgl.managers.model_names:resolve_model_name",
         ENGINE, WRAP,
         "A model may be a bare adapter's name, as /v1/models lists them; an unknown one is a 404.",
         "adapters by name on OpenAI's routes"),
    Seam("OpenAIServingChat._apply_jinja_template", "vlora_sgl.multimodal.words:apply_template", ENGINE, WRAP,
         "A user's words that are spelled like a special token or a marker are told from the template's.",
         "a user's words end turns and take the places of images"),
    Seam("OpenAIServingChat._apply_conversation_template", "vlora_sgl.multimodal.words:apply_template", ENGINE, WRAP,
         "The same, for models whose template is SGLang's.",
         "a user's words end turns and take the places of images"),
    Seam("TokenizersBackend._encode_plus", "vlora_sgl.multimodal.words:encode_plus", ENGINE, WRAP,
         "Tokenizers find special tokens by their spelling; a user's words are spelled out here, in tokens of text.",
         "a user's words become special tokens"),
    Seam("OpenAIServingBase.create_error_response", "vlora_sgl.entrypoints.client_faults:openai_error", ENGINE, WRAP,
         "What a body holds that SGLang's readers do not foresee is a 500.",
         "400 instead of 500 for some bodies on OpenAI's routes"),
    Seam("AnthropicServing._error_response", "vlora_sgl.entrypoints.client_faults:anthropic_error", ENGINE, WRAP,
         "On Anthropic's routes every refusal but that of the schema is a 500.",
         "the status of refusals on Anthropic's routes"),
    Seam("BaseMultimodalProcessor.process_mm_data", "vlora_sgl.multimodal.image_requests:process_mm_data",
         ENGINE, WRAP,
         "transformers writes an image's placeholder into the text once per token before it tokenizes that.",
         "milliseconds of every image's TTFT"),
    Seam("BaseMultimodalProcessor._fast_image_processor_device", "vlora_sgl.multimodal.image_requests:fast_device",
         ENGINE, WRAP,
         "SGLang resizes every image on the GPU, where the tokenizer's process takes turns with the scheduler's.",
         "milliseconds of a small image's TTFT while requests run"),
    Seam("BaseMultimodalProcessor._wrap_tensor_for_cuda_ipc", "vlora_sgl.multimodal.image_requests:wrap_for_cuda_ipc",
         ENGINE, WRAP,
         "SGLang tells the scheduler of an image's features without waiting until they are there.",
         "a request that is soon on its way may read another's pixels"),
    Seam("get_model_architecture", "vlora_sgl.multimodal.architectures:get_model_architecture", ENGINE, WRAP,
         "SGLang has a LLaVA whose CLIP tower runs on CUDA only, and for transformers' layout none.",
         "LLaVA-1.5 on a CPU, and in transformers' layout"),
    Seam("get_mm_processor", "vlora_sgl.multimodal.architectures:get_mm_processor", ENGINE, WRAP,
         "The processor that goes with it; SGLang's leaves the places of images to the model.",
         "LLaVA-1.5 in transformers' layout; reuse of its images"),
    Seam("load_image", "vlora_sgl.multimodal.opening:load_image", ENGINE, WRAP,
         "SGLang opens images without their orientation, transparency and bounds.",
         "images lie on their side, and a small file may take all memory"),
    Seam("counted_path", "vlora_sgl.managers.metrics:counted_path", ENGINE, WRAP,
         "SGLang counts requests by path, those of paths that it does not have too.",
         "every path that somebody makes up stays in /metrics"),
    Seam("ProcessorMixin._check_special_mm_tokens", "vlora_sgl.multimodal.image_requests:check_special_tokens",
         ENGINE, WRAP,
         "transformers compares the elements of a tensor one by one.",
         "milliseconds of every image's TTFT"),
    Seam("get_token_ids_logprobs", "vlora_sgl.model_executor.logprobs:token_ids_logprobs", ENGINE, WRAP,
         "A batch where one row asks for chosen tokens' log-probabilities, and another for none, ends the scheduler.",
         "/v1/score, and token_ids_logprob, end the server when another request runs beside them"),
    Seam("get_rope_index", "vlora_sgl.multimodal.image_requests:get_rope_index", ENGINE, WRAP,
         "SGLang finds the positions of image tokens in a loop over tokens.",
         "milliseconds of every image's TTFT"),
    Seam("chunked_prefill_embedding", "vlora_sgl.multimodal.embedding_count:chunked_prefill_embedding", ENGINE, WRAP,
         "The embeddings are counted on the host, and features go back to host memory beside the encoder.",
         "the host waits for the encoder before it launches the decoder"),
    Seam("adjust_embedding_length", "vlora_sgl.multimodal.embedding_count:adjust_embedding_length", ENGINE, WRAP,
         "SGLang counts image tokens on the device; those that are counted need not be.",
         "the host waits for the encoder before it launches the decoder"),
    Seam("Req._stop_match_tail_len", "vlora_sgl.managers.stopping:stop_match_tail_len", ENGINE, WRAP,
         "SGLang looks for a stop in as many tokens as its tokenizer writes it in; an answer may take more.",
         "stops that an answer spells in other tokens are missed"),
    Seam("Req.update_finish_state", "vlora_sgl.managers.stopping:update_finish_state", ENGINE, WRAP,
         "SGLang does not look for stops at the last token that a request may have.",
         "an answer may end with a stop"),
    Seam("Req.check_match_stop_str_prefix", "vlora_sgl.managers.stopping:check_match_stop_str_prefix", ENGINE, WRAP,
         "What may begin a stop waits; SGLang does not see it before a character of which some bytes are there.",
         "streams with more text than the whole answer"),
    Seam("StreamAccumulator.accept", "vlora_sgl.managers.stopping:accept", ENGINE, WRAP,
         "Every 50 tokens SGLang sends on what there is of a whole answer, a stop's beginning too.",
         "whole answers with the beginning of a stop"),
    Seam("detokenizer_manager.DecodeStatus", "vlora_sgl.managers.decoding:install", ENGINE, OWN,
         "SGLang takes text back that it sent while a character's bytes were coming in, and sends it again.",
         "characters of several tokens may repeat what is before them"),
    Seam("FINISHED_MATCHED_REGEX.to_json", "vlora_sgl.managers.stopping:regex_to_json", ENGINE, WRAP,
         "The detokenizer cuts an answer where it finds the expression's own text.",
         "answers that end at an expression differ, whole and streamed"),
    Seam("SchedulerWeightUpdaterManager.release_memory_occupation",
         "vlora_sgl.model_executor.model_runner:unmerge_before_release", ENGINE, WRAP,
         "Weights that are freed, and saved before, must hold no adapter.",
         "an adapter stays in the weights for good"),
    Seam("LORA_BACKENDS", "vlora_sgl.plugin:_lora_backend", ENGINE, BUILT,
         "--lora-backend atmm is found here.", "--lora-backend atmm"),
    Seam("LORA_BACKEND_CHOICES", "vlora_sgl.plugin:_lora_backend_choice", ENGINE, BUILT,
         "The flag takes what is listed here.", "--lora-backend atmm"),
    Seam("RADIX_CACHES", "vlora_sgl.plugin:_radix_cache", ENGINE, BUILT,
         "--radix-cache-backend vlora is found here.", "the prefix cache across adapters and by whole image hashes"),
    Seam("GRAPHED_PREFILLS", "vlora_sgl.plugin:_graphed_prefills", ENGINE, BUILT,
         "Of models that see, SGLang captures the prefills of those listed; Qwen2.5-VL's replay rightly too.",
         "prefills of Qwen2.5-VL take as long as the host needs for their launches"),

    # What SGLang's objects keep, put there as soon as SGLang has made its own.
    Seam("Scheduler.policy", "vlora_sgl.managers.planning:PlannedOrder", ENGINE, OWN,
         "The waiting queue is put into the plan's order behind SGLang's.",
         "batches of requests that the plan does not want"),
    Seam("LoRAMemoryPool.eviction_policy", "vlora_sgl.lora.slot_residency:SlotResidency", ENGINE, OWN,
         "What loses its slot is what the plan and the queue need last.",
         "adapters that are about to run are put out"),
    Seam("LoRAManager.memory_pool", "vlora_sgl.lora.packed:PackedPool", ENGINE, OWN,
         "Adapters come to their slots in one copy; slots may have ranks of their own.",
         "a copy a weight for each load, and --vlora-slot-ranks"),
    Seam("LoRAManager.init_lora_modules.named_modules", "vlora_sgl.lora.manager:VLoraManager", ENGINE, CALL,
         "SGLang wraps whatever lies below a layers.N, parts of image encoders too.",
         "models with CLIP or SigLIP encoders do not load adapters"),
    Seam("ModelRunner.weight_updater", "vlora_sgl.model_executor.model_runner:_Guard", ENGINE, OWN,
         "Base weights are back before they are replaced.",
         "a weight update under a merged adapter spoils the weights"),
    Seam("ModelRunner.weight_exporter", "vlora_sgl.model_executor.model_runner:_Guard", ENGINE, OWN,
         "Base weights are back before they are read.",
         "saved weights may hold an adapter"),
    Seam("mm_utils.embedding_cache", "vlora_sgl.multimodal.encoder_cache:EncoderCache", ENGINE, OWN,
         "It counts, has a size of its own, and knows what was encoded ahead of a batch.",
         "encoding ahead, --vlora-encoder-cache-mb, the counts in /metrics"),
    Seam("TokenizerManager.lora_registry", "vlora_sgl.managers.adapter_registry:AdapterRegistry", ENGINE, OWN,
         "SGLang counts users by row and loses count of requests that are refused, aborted or asked for n > 1.",
         "an unload may wait for ever, and every load behind it"),
    Seam("TokenizerManager.rid_to_state", "vlora_sgl.managers.ended_requests:LingeringStates", ENGINE, OWN,
         "SGLang forgets a request that ends before its coroutine first runs.",
         "a batch of short requests may end with an internal error"),
    Seam("TokenizerManager.model_config", "vlora_sgl.multimodal.gemma3:why_blind", ENGINE, OWN,
         "SGLang begins a model that understands images by showing it one; where images are refused, it would end.",
         "Gemma 3 does not start where its images are refused"),
    Seam("http_server.app.router.routes", "vlora_sgl.entrypoints.adapters:mount", ENGINE, OWN,
         "Three routes of SGLang's know our adapters (/generate, /v1/models and one entry of that), others are new; "
         "those that cannot serve adapters, or end the scheduler, are refused by name.",
         "adapters that are on disk in /v1/models, /reload_lora_adapter, /pin_lora_adapter, /lora_adapters"),
    Seam("http_server.load_lora_adapter_from_tensors", "vlora_sgl.entrypoints.adapters:mount", ENGINE, OWN,
         "The one route that changes adapters which SGLang leaves open without the admin key.",
         "anybody is told that adapters from tensors are refused"),
    Seam("http_server.add_prometheus_middleware", "vlora_sgl.entrypoints.metrics:mount", ENGINE, OWN,
         "SGLang's gauges travel through files, which keep what was last set, and every adapter that ever was.",
         "the gauges under vlora: in /metrics"),
    Seam("http_server.app.routes", "vlora_sgl.entrypoints.own_routes:mount", ENGINE, OWN,
         "Questions about images have routes of their own, and so has the page.",
         "/v1/vision/classify, count, detect and ask; /ui"),
    Seam("decide_request_auth", "vlora_sgl.entrypoints.page:open_page", ENGINE, WRAP,
         "A browser that opens a page can send no key; the page's files hold nothing that needs one.",
         "/ui of a server with --api-key"),
    Seam("http_server.ORJSONRequest.json", "vlora_sgl.entrypoints.bodies:read", ENGINE, OWN,
         "SGLang reads JSON leniently, drops a field that it does not know (\"head\"), and lets the base model answer "
         "for any other on most routes.",
         "\"head\" in /generate and /v1/chat/completions; adapters, and the 404 of unknown ones, on other routes than "
         "OpenAI's"),
    Seam("http_server.app.user_middleware", "vlora_sgl.entrypoints.bodies:mount", ENGINE, OWN,
         "SGLang takes bodies of any size, sends 200 before it refuses a stream, and takes requests while it stops.",
         "--vlora-max-body-bytes; the status of a refused stream; 503 while it stops"),
    Seam("http_server.app.exception_handlers", "vlora_sgl.entrypoints.bodies:mount", ENGINE, OWN,
         "SGLang quotes a wrong body whole, twice, beside the place in its source; and it does not know our errors.",
         "refusals of wrong bodies in one line, and with the status that they should have"),

    # The model is built. Each function is given the model runner, and returns what goes where or why nothing does.
    Seam("extend_attention_kernel", "vlora_sgl.model_executor.fast_paths.attention_tiles:tiles", MODEL, BUILT,
         "On Hopper half the queries a program, and a pipeline, are faster; the bits are the same.",
         "up to half of a prefill's Triton attention"),
    Seam("TritonAttnBackend.decode_attention_fwd", "vlora_sgl.model_executor.fast_paths.decode_layers:attention",
         MODEL, BUILT,
         "Attention of a decoding step in one launch instead of two.",
         "a third of a decoding step's Triton attention"),
    Seam("Qwen2Attention.forward", "vlora_sgl.model_executor.fast_paths.decode_layers:rotations", MODEL, BUILT,
         "In decoding, rotary positions and the store to the KV cache in one launch.",
         "two launches a layer"),
    Seam("RMSNorm.forward", "vlora_sgl.model_executor.fast_paths.decode_layers:norms", MODEL, BUILT,
         "Norms of a decoding step let the linear behind them fetch its weights meanwhile.",
         "slower norms in a decoding step"),
    Seam("TritonAttnBackend.forward", "vlora_sgl.model_executor.fast_paths.prefill_attention:CapturedAttention",
         MODEL, CALL,
         "Attention of a short prefill is captured with the rest, where SGLang's graphs stop at each.",
         "most of a short prefill's time is the host's"),
    Seam("BaseCudaGraphBackend.capture_one", "vlora_sgl.model_executor.graph_runner:VLoraPrefillCudaGraphRunner",
         MODEL, CALL,
         "A prefill is captured once with LoRA kernels and once without.",
         "LoRA kernels in prefills of the base model"),
    Seam("BaseCudaGraphBackend.replay", "vlora_sgl.model_executor.graph_runner:VLoraPrefillCudaGraphRunner",
         MODEL, CALL,
         "Token routers read a prefill's input embeddings before its graph is replayed.",
         "graphs for prefills with routed adapters"),
    Seam("Qwen3LLMModel.forward", "vlora_sgl.model_executor.graph_runner:VLoraPrefillCudaGraphRunner", MODEL, CALL,
         "A replayed prefill reads what images add behind the first layers at a place of its own.",
         "graphs for prefills of Qwen3-VL"),
    Seam("Qwen2_5_VisionPatchEmbed.forward", "vlora_sgl.multimodal.vision_layers:patch_embeddings", MODEL, BUILT,
         "Patches do not overlap: their embedding is a matrix product, which a 3D convolution computes slowly.",
         "0.5 ms of an image's TTFT, with Qwen2.5-VL"),
    Seam("VisionAttention.forward", "vlora_sgl.multimodal.vision_layers:attentions", MODEL, BUILT,
         "q, k and v are rotated and read in place; SGLang copies them, and compiles a rotation when images come; "
         "torch's variable-length attention is faster than SGLang's Triton kernel.",
         "a third of the image encoder's attention, and seconds of the first images' TTFT"),
    Seam("Qwen2_5_VisionTransformer.forward", "vlora_sgl.multimodal.vision_graphs:of_patches", MODEL, BUILT,
         "An encoder is 600 launches; images of sizes that keep coming replay a graph. Of any Qwen model.",
         "the host sets the TTFT of small images; no encoding ahead"),
    Seam("InternVLChatModel.extract_feature", "vlora_sgl.multimodal.vision_graphs:of_tiles", MODEL, BUILT,
         "The same, of an encoder whose images are tiles; and of our LLaVA.",
         "the host sets the TTFT of few tiles; no encoding ahead"),
    Seam("Qwen2_5_VisionBlock.forward", "vlora_sgl.multimodal.vision_structures:parts_of", MODEL, CALL,
         "What an eager run gives the blocks, of whichever encoder, beside the pixels is a graph's constants.",
         "graphs of the image encoder"),
    Seam("VisionAttention.qkv_proj", "vlora_sgl.lora.tower:Tower", MODEL, OWN,
         "SGLang wraps no layer of an image encoder; ours are, while a loaded adapter has weights for them.",
         "adapters of the vision tower and the projector are not applied"),
    Seam("Qwen2_5_VLMLP.act", "vlora_sgl.lora.layers:AtmmSiluAndMul", MODEL, OWN,
         "The activation of an encoder's layer adds the adapters' part of gate_up, whose output it reads anyhow.",
         "one pass over the largest activations of an image that adapters apply to"),
    Seam("Qwen2VLForConditionalGeneration.get_image_feature", "vlora_sgl.lora.tower_routing:Feed", MODEL, OWN,
         "Which adapter an image is encoded with is told here, the last place that knows an image's request.",
         "adapters of the vision tower and the projector are not applied"),
    Seam("CLIPMLP.act", "vlora_sgl.multimodal.llava:activations", MODEL, BUILT,
         "SGLang computes every CLIP encoder with QuickGELU, whatever its configuration names.",
         "images of LLaVA with another activation are encoded wrongly"),
    Seam("Gemma3ForConditionalGeneration.prepare_attn_masks", "vlora_sgl.multimodal.gemma3:masks", MODEL, BUILT,
         "SGLang asks every row of a batch that has images for its own.",
         "a text beside an image ends the server"),
    Seam("Qwen2MLP.act_fn", "vlora_sgl.lora.layers:activations", MODEL, BUILT,
         "In a prefill the activation adds the adapters' part of gate_up, whose output it reads anyhow.",
         "one pass over the largest activations of a prefill"),
    Seam("fused_moe.silu_and_mul", "vlora_sgl.lora.expert_layers:activations", MODEL, BUILT,
         "The same between experts' gate_up and down, in SGLang's runner.",
         "one pass over the largest activations of a prefill of experts"),
    Seam("LogitsProcessor.forward", "vlora_sgl.heads.worker:hidden_states", MODEL, BUILT,
         "Heads read the hidden states that the LM head reads, which nothing of SGLang's hands on.",
         "heads do not answer"),
    Seam("Qwen2DecoderLayer.forward", "vlora_sgl.routed.rows:token_routing", MODEL, BUILT,
         "Before the first decoder layer, of whatever model, the router decides by the input embeddings.",
         "routed adapters answer as the base model"),
)
# fmt: on
seams.declare(TABLE)

CPU_PLATFORM = "TorchCpuPlatform"

_installed = False


def register() -> None:
    """Entry point of the group in which SGLang looks for plugins (pyproject.toml)."""
    if ENVIRONMENT_VARIABLE in os.environ:
        install()


def install() -> None:
    """Put the rows of PROCESS and ENGINE in place, and check them. Once per process; later calls do nothing.

    Raises:
        ContractError: SGLang is not the release we extend, or a row is not in place.
    """
    global _installed
    if _installed:
        return
    _installed = True
    _sgl.check_version()
    # Resolved first: SGLang finds the platform by entry point while it imports itself, and ours imports SGLang.
    platform = type(_sgl.platforms.current_platform).__name__
    if is_plain_cpu() and platform != CPU_PLATFORM:
        raise ContractError(
            f"SGLang's platform is {platform}, expected {CPU_PLATFORM}: is vlora_sgl installed, SGLANG_PLATFORM unset?"
        )
    kinds = {CLASS: _sgl.HookType.REPLACE, WRAP: _sgl.HookType.AROUND}
    hooked = [(row.target, _dotted(row.target), row) for row in TABLE if row.how in kinds]
    for _, path, row in hooked:
        _sgl.HookRegistry.register(path, pkgutil.resolve_name(row.ours), kinds[row.how])
    _sgl.HookRegistry.apply_hooks()
    for target, path, row in hooked:
        owner, _, name = path.rpartition(".")
        seams.record(target, [Place(pkgutil.resolve_name(owner), name, pkgutil.resolve_name(row.ours))])
    seams.install(PROCESS)
    seams.install(ENGINE)


def verify() -> None:
    """Check that what SGLang will use is ours.

    Raises:
        ContractError: names the first row that is not in place.
    """
    for stage in (PROCESS, ENGINE):
        seams.verify(stage)


def check_contract() -> None:
    """``_sgl.check_contract``, and that there is what every row replaces.

    Raises:
        ContractError: the first difference found.
    """
    _sgl.check_contract(*(row.target for row in TABLE))


def _dotted(target: str) -> str:
    name, dot, attribute = target.partition(".")
    return _sgl.NAMES[name].replace(":", ".") + dot + attribute


def _lora_backend(_: None) -> list[Place]:
    return [Place(_sgl.LORA_BACKENDS, "atmm", partial(pkgutil.resolve_name, "vlora_sgl.lora.backend:AtmmBackend"))]


def _lora_backend_choice(_: None) -> list[Place]:
    return [Place(_sgl.LORA_BACKEND_CHOICES, None, "atmm")]


def _radix_cache(_: None) -> list[Place]:
    factory = pkgutil.resolve_name("vlora_sgl.mem_cache.radix_cache:create_radix_cache")
    return [Place(_sgl.RADIX_CACHES, "vlora", factory)]


def _graphed_prefills(_: None) -> list[Place]:
    architecture = _sgl.NAMES["Qwen2_5_VLForConditionalGeneration"].partition(":")[2]
    return [Place(_sgl.GRAPHED_PREFILLS, None, architecture)]
