"""What we read and write of SGLang's objects, as protocols: for type checkers only, nothing here runs.

SGLang's classes come lazily out of ``_sgl`` and are ``Any`` to a type checker. A parameter that takes such an object
is annotated with the protocol of the same name here: ``def identify(req: Req)``. A protocol lists what our code uses,
and no more; ``_sgl.NAMES`` says where SGLang keeps its class, and a contract test holds that the class has every name.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from vlora_sgl.core import AdapterId, InferenceMode, JsonDict
from vlora_sgl.request import RequestState

if TYPE_CHECKING:
    import torch

OURS: dict[str, frozenset[str]] = {
    "GenerationBatchResult": frozenset({"head_results", "vlora_mode"}),
    "LogitsProcessorOutput": frozenset({"vlora_bad_rows"}),
    "MultimodalDataItem": frozenset({"vlora_adapter", "vlora_content", "vlora_fault"}),
    "LoRAAdapter": frozenset(
        {"content", "form", "output_vectors", "packed", "report", "reserved", "tower", "unmergeable", "update_sizes"}
        | {"vectors", "weights_loss"}
    ),
    "Req": frozenset({"vlora"}),
    "ServerArgs": frozenset({"_vlora_chosen"}),
}
"""What we put on SGLang's objects; SGLang must have nothing of these names."""


# Requests on their way in


class GenerateReqInput(Protocol):
    """``managers/io_struct``: a request, or a batch of them, as the front of the engine gets it."""

    rid: str | list[str] | None
    text: object
    input_ids: object
    input_embeds: object
    lora_path: str | list[str | None] | None
    lora_id: str | list[str | None] | None
    sampling_params: JsonDict | list[JsonDict]
    image_data: object
    mm_hashes: object
    stream: bool
    is_single: bool
    batch_size: int

    def __getitem__(self, index: int, /) -> GenerateReqInput: ...


class TokenizedGenerateReqInput(Protocol):
    """``managers/io_struct``: what goes to the scheduler."""

    mm_inputs: MultimodalInputs | None


class LoRARef(Protocol):
    """``lora/lora_registry``: one load of an adapter. Immutable."""

    @property
    def lora_id(self) -> str: ...
    @property
    def lora_name(self) -> str: ...
    @property
    def lora_path(self) -> str: ...
    @property
    def pinned(self) -> bool | None: ...


class LoadLoRAAdapterReqInput(Protocol):
    """``managers/io_struct``: a client's wish to load an adapter."""

    lora_name: str
    lora_path: str
    pinned: bool


class UnloadLoRAAdapterReqInput(Protocol):
    """``managers/io_struct``: a client's wish to unload one, and the front's message to the engine."""

    lora_name: str
    lora_id: str | None


class LoadLoRAAdapterReqOutput(Protocol):
    """``managers/io_struct``: the reply to a load or an unload."""

    success: bool
    error_message: str | None
    loaded_adapters: Mapping[str, object] | None


# Requests in the scheduler


class SamplingParams(Protocol):
    """``sampling/sampling_params``: of one request."""

    max_new_tokens: int
    stop_strs: list[str]
    stop_regex_strs: list[str]
    custom_params: JsonDict | None


class Modality(Protocol):
    """``managers/schedule_batch``: what a multimodal item is, by ``name``: IMAGE, VIDEO, ..."""

    @property
    def name(self) -> str: ...


class MultimodalDataItem(Protocol):
    """``managers/schedule_batch``: an image, or a video. ``feature`` may be one of our ``Offload``."""

    hash: int
    pad_value: int | None
    offsets: list[tuple[int, int]] | None
    feature: object
    model_specific_data: Mapping[str, torch.Tensor]
    vlora_adapter: str | None
    vlora_content: int
    vlora_fault: Exception | None

    @property
    def modality(self) -> Modality: ...
    def is_image(self) -> bool: ...
    def set_pad_value(self) -> object: ...


class MultimodalInputs(Protocol):
    """``managers/schedule_batch``: all images of a request."""

    mm_items: list[MultimodalDataItem]


class Range(Protocol):
    """``utils/common``: the tokens that a request computes next."""

    @property
    def end(self) -> int: ...


class Req(Protocol):
    """``managers/schedule_batch``: a request in the scheduler's process."""

    rid: str
    lora_id: AdapterId
    extra_key: str | None
    origin_input_ids: array[int]
    output_ids: array[int]
    sampling_params: SamplingParams
    multimodal_inputs: MultimodalInputs | None
    to_finish: object
    finished_reason: object
    stream: bool
    vocab_size: int
    last_node: TreeNode
    prefix_indices: torch.Tensor
    req_pool_idx: int
    cache_protected_len: int
    extend_range: Range
    is_retracted: bool
    inflight_middle_chunks: int
    skip_radix_cache_insert: bool
    vlora: RequestState

    def finished(self) -> bool: ...
    def set_finish_with_abort(self, error_msg: str) -> None: ...
    def tail_str(self, new_accepted_len: int = 1) -> str: ...
    def check_match_stop_str_prefix(self) -> bool: ...
    def _check_str_based_finish(self, new_accepted_len: int = 1) -> bool: ...


class ForwardMode(Protocol):
    """``model_executor/forward_batch_info``: prefill (extend), decode, idle."""

    def is_extend(self) -> bool: ...
    def is_decode(self) -> bool: ...
    def is_idle(self) -> bool: ...
    def is_cuda_graph(self) -> bool: ...


class ScheduleBatch(Protocol):
    """``managers/schedule_batch``: a batch as the scheduler forms it."""

    reqs: list[Req]
    forward_mode: ForwardMode
    forward_iter: int
    prefix_lens: list[int]
    extend_lens: list[int]
    chunked_req: Req | None
    batch_is_full: bool

    def is_empty(self) -> bool: ...
    def filter_batch(self, *, keep_indices: list[int]) -> None: ...


class LogitsProcessorOutput(Protocol):
    """``layers/logits_processor``: of one step."""

    customized_info: dict[str, list[object]] | None
    next_token_logits: torch.Tensor | None
    vlora_bad_rows: torch.Tensor


class GenerationBatchResult(Protocol):
    """``managers/utils``: of one step."""

    logits_output: LogitsProcessorOutput | None
    copy_done: torch.cuda.Event | None
    head_results: object
    vlora_mode: InferenceMode


# The model's side of a step


class ForwardBatch(Protocol):
    """``model_executor/forward_batch_info``: a batch as the model runs it. Lists ``_cpu`` are the host's copies."""

    forward_mode: ForwardMode
    batch_size: int
    input_ids: torch.Tensor
    lora_ids: list[AdapterId]
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    out_cache_loc: torch.Tensor
    extend_seq_lens: torch.Tensor
    extend_seq_lens_cpu: list[int]
    extend_prefix_lens_cpu: list[int]
    mm_inputs: list[MultimodalInputs | None] | None


class ServerArgs(Protocol):
    """``server_args``: SGLang's settings."""

    model_path: str
    served_model_name: str
    tp_size: int
    dp_size: int
    attn_cp_size: int
    enable_lora: bool
    enable_lora_overlap_loading: bool | None
    lora_paths: list[LoRARef] | None
    max_loaded_loras: int | None
    chunked_prefill_size: int | None
    max_prefill_tokens: int
    disable_cuda_graph: bool
    enable_deterministic_inference: bool
    cuda_graph_backend_prefill: str | None
    cuda_graph_config: CudaGraphConfig
    _vlora_chosen: JsonDict

    def url(self) -> str: ...
    def override(self, source: str, **fields: object) -> None: ...


class CudaGraphConfig(Protocol):
    """``model_executor/cuda_graph_config``: which graphs are captured."""

    prefill: PhaseConfig


class PhaseConfig(Protocol):
    """``model_executor/cuda_graph_config``: of prefills, or of decoding."""

    backend: str
    bs: list[int] | None


class ModelRunner(Protocol):
    """``model_executor/model_runner``: one per rank."""

    server_args: ServerArgs
    model: torch.nn.Module
    device: str
    dtype: torch.dtype
    attn_backend: Any  # one of many
    use_mla_backend: bool
    token_to_kv_pool: MHATokenToKVPool


# Layers, whose forwards our fast paths take


class MHATokenToKVPool(Protocol):
    """``mem_cache/memory_pool``: keys and values [slots, heads, width], layer by layer."""

    dtype: torch.dtype
    store_dtype: torch.dtype
    device: str
    kv_cache_layout: str

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]: ...


class MRotaryEmbedding(Protocol):
    """``layers/rotary_embedding/mrope``: rotary positions with three axes."""

    cos_sin_cache: torch.Tensor
    rotary_dim: int
    is_neox_style: bool
    mrope_section: Any  # three sizes, in a list
    mrope_interleaved: bool
    mrope_interleaved_glm: bool

    def _match_cos_sin_cache_dtype(self, query: torch.Tensor) -> None: ...


class RadixAttention(Protocol):
    """``layers/radix_attention``: attention over the KV cache."""

    layer_id: int
    k_scale: object

    @property
    def forward(self) -> Callable[..., torch.Tensor]: ...
    @property
    def __call__(self) -> Callable[..., torch.Tensor]: ...


class Qwen2Attention(Protocol):
    """``models/qwen2``: an attention layer."""

    q_size: int
    kv_size: int
    head_dim: int
    qkv_proj: Callable[[torch.Tensor], tuple[torch.Tensor, object]]
    o_proj: Callable[[torch.Tensor], tuple[torch.Tensor, object]]
    rotary_emb: MRotaryEmbedding
    attn: RadixAttention

    @property
    def forward(self) -> Callable[..., torch.Tensor]: ...


class RMSNorm(Protocol):
    """``layers/layernorm``: a norm."""

    weight: torch.Tensor
    variance_epsilon: float
    has_weight: bool
    variance_size_override: int | None
    cast_x_before_out_mul: bool
    fp32_residual: bool

    @property
    def forward(self) -> Callable[..., object]: ...


class VisionAttention(Protocol):
    """``layers/attention/vision``: attention of an image encoder."""

    head_size: int
    num_attention_heads_per_partition: int
    num_attention_kv_heads_per_partition: int
    use_qkv_parallel: bool
    qk_normalization: bool
    qk_normalization_by_head_size: bool
    customized_position_embedding_applier: Callable[..., object] | None
    sinks: torch.Tensor | None
    softmax_scale: float | None
    qkv_backend_name: str
    qkv_backend: Callable[..., torch.Tensor]
    qkv_proj: Callable[[torch.Tensor], tuple[torch.Tensor, object]]
    proj: Callable[[torch.Tensor], tuple[torch.Tensor, object]]


class TritonAttnBackend(Protocol):
    """``layers/attention/triton_backend``: attention by Triton kernels. Its metadata are the latest batch's."""

    decode_attention_fwd: Callable[..., None]
    forward_metadata: Any  # a dataclass, copied with other tables
    dcp_size: int
    enable_deterministic: bool
    use_sliding_window_kv_pool: bool
    sliding_window_size: int | None
    _translate_kv_loc: object
    forward: Callable[..., torch.Tensor]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None: ...


# Adapters in the engine


class LoRAConfig(Protocol):
    """``lora/lora_config``: an adapter's rank, and what it adapts."""

    r: int
    target_modules: Sequence[str]
    hf_config: JsonDict


class LoRALayer(Protocol):
    """``lora/lora``: an adapter's matrices of one decoder layer, by name."""

    weights: MutableMapping[str, torch.Tensor]


class LoRAAdapter(Protocol):
    """``lora/lora``: an adapter in host memory."""

    uid: str
    config: LoRAConfig
    scaling: float
    layers: Sequence[LoRALayer]
    embedding_layers: MutableMapping[str, torch.Tensor]
    added_tokens_embeddings: MutableMapping[str, torch.Tensor]
    packed: Any
    reserved: Any
    report: Any
    content: str
    tower: Any
    update_sizes: Mapping[str, Any]
    form: str | None
    output_vectors: Mapping[str, Any]
    vectors: torch.Tensor | None
    unmergeable: str | None
    weights_loss: float | None

    def pin_weights_in_cpu(self) -> None: ...


# The prefix cache


class RadixKey(Protocol):
    """``mem_cache/radix_cache``: tokens, and the namespace that they are looked up in."""

    token_ids: array[int]
    extra_key: object
    limit: int | None

    def __len__(self) -> int: ...


class TreeNode(Protocol):
    """``mem_cache/radix_cache``: some tokens and their KV slots, behind those of ``parent``."""

    parent: TreeNode
    children: dict[Any, TreeNode]
    key: RadixKey
    value: torch.Tensor


class CacheInitParams(Protocol):
    """``mem_cache/cache_init_params``: what a prefix cache is built from."""

    is_eagle: bool
    enable_kv_cache_events: bool


class TreeCacheBuildContext(Protocol):
    """``mem_cache/registry``: what a prefix cache's factory is told."""

    params: CacheInitParams
    is_hybrid_swa: bool
    is_hybrid_ssm: bool
    enable_hierarchical_cache: bool
    disable_radix_cache: bool


class MatchPrefixParams(Protocol):
    """``mem_cache/base_prefix_cache``: what is looked up, and for whom."""

    key: RadixKey
    req: Req | None


class MatchResult(Protocol):
    """``mem_cache/base_prefix_cache``: what a look-up found."""

    @property
    def device_indices(self) -> torch.Tensor: ...


class InsertParams(Protocol):
    """``mem_cache/base_prefix_cache``: what is put in the tree."""

    key: RadixKey
    value: torch.Tensor


class InsertResult(Protocol):
    """``mem_cache/base_prefix_cache``: where it went."""

    last_device_node: TreeNode | None
