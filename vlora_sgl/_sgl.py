"""The one place that names SGLang's private parts, and checks that they are what we extend.

Every other module writes ``from vlora_sgl._sgl import Scheduler``. A name is imported when it is first asked for, so a
process pays only for what it uses. ``check_contract`` compares the installed release, the names and the signatures we
override with the tables below; a new SGLang release breaks there, with a message, and nowhere else.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vlora_sgl.errors import ContractError

SGLANG_VERSION = "0.5.17"

# Our name for it -> where SGLang 0.5.17 keeps it.
NAMES: dict[str, str] = {
    # plugins and platforms
    "HookRegistry": "sglang.srt.plugins.hook_registry:HookRegistry",
    "HookType": "sglang.srt.plugins.hook_registry:HookType",
    "platforms": "sglang.srt.platforms",
    "CpuSRTPlatform": "sglang.srt.platforms.cpu:CpuSRTPlatform",
    "PlatformEnum": "sglang.srt.platforms.device_mixin:PlatformEnum",
    "MHATokenToKVPool": "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool",
    "PagedTokenToKVPoolAllocator": "sglang.srt.mem_cache.allocator:PagedTokenToKVPoolAllocator",
    # processes
    "Engine": "sglang.srt.entrypoints.engine:Engine",
    "envs": "sglang.srt.environ:envs",
    "set_envs_and_config": "sglang.srt.entrypoints.engine:_set_envs_and_config",
    "http_server": "sglang.srt.entrypoints.http_server",
    "counted_path": "sglang.srt.utils.common:_get_fastapi_request_path",
    "init_tokenizer_manager": "sglang.srt.entrypoints.engine:init_tokenizer_manager",
    "run_scheduler_process": "sglang.srt.managers.scheduler:run_scheduler_process",
    "run_detokenizer_process": "sglang.srt.managers.detokenizer_manager:run_detokenizer_process",
    "kill_process_tree": "sglang.srt.utils:kill_process_tree",
    "PortArgs": "sglang.srt.server_args:PortArgs",
    "ShutdownReq": "sglang.srt.managers.io_struct:ShutdownReq",
    "shm_path_for": "sglang.srt.managers.load_snapshot:shm_path_for",
    "SHM_PREFIX": "sglang.srt.utils.stale_shm_cleanup:_SGL_SHM_PREFIX",
    "import_processors": "sglang.srt.managers.multimodal_processor:import_processors",
    "multimodal_processor": "sglang.srt.managers.multimodal_processor",
    "get_mm_processor": "sglang.srt.managers.multimodal_processor:get_mm_processor",
    "get_model_architecture": "sglang.srt.model_loader.utils:get_model_architecture",
    "BaseMultimodalProcessor": "sglang.srt.multimodal.processors.base_processor:BaseMultimodalProcessor",
    "MultimodalSpecialTokens": "sglang.srt.multimodal.processors.base_processor:MultimodalSpecialTokens",
    "MultimodalProcessorOutput": "sglang.srt.managers.schedule_batch:MultimodalProcessorOutput",
    "expand2square": "sglang.srt.multimodal.mm_utils:expand2square",
    "load_image": "sglang.srt.utils.common:load_image",
    "VIDEO_DECODER": "sglang.srt.utils.video_decoder:_BACKEND",
    "get_image_bytes": "sglang.srt.utils.common:get_image_bytes",
    "get_mm_http_session": "sglang.srt.utils.common:get_mm_http_session",
    "TokenizersBackend": "transformers.tokenization_utils_tokenizers:TokenizersBackend",
    "ProcessorMixin": "transformers.processing_utils:ProcessorMixin",
    "get_rope_index": "sglang.srt.layers.rotary_embedding.mrope_rope_index:get_rope_index",
    "USE_PICKLE_IPC": "sglang.srt.managers.io_struct:_USE_PICKLE_IPC",
    "ModelRegistry": "sglang.srt.models.registry:ModelRegistry",
    # settings
    "ServerArgs": "sglang.srt.server_args:ServerArgs",
    "prepare_server_args": "sglang.srt.server_args:prepare_server_args",
    "LORA_BACKEND_CHOICES": "sglang.srt.server_args:LORA_BACKEND_CHOICES",
    "GRAPHED_PREFILLS": "sglang.srt.configs.model_config:multimodal_breakable_cuda_graph_supported_model_archs",
    # managers
    "Scheduler": "sglang.srt.managers.scheduler:Scheduler",
    "GetInternalStateReq": "sglang.srt.managers.io_struct:GetInternalStateReq",
    "GetInternalStateReqOutput": "sglang.srt.managers.io_struct:GetInternalStateReqOutput",
    "SetInternalStateReq": "sglang.srt.managers.io_struct:SetInternalStateReq",
    "SetInternalStateReqOutput": "sglang.srt.managers.io_struct:SetInternalStateReqOutput",
    "GenerateReqInput": "sglang.srt.managers.io_struct:GenerateReqInput",
    "EmbeddingReqInput": "sglang.srt.managers.io_struct:EmbeddingReqInput",
    "SamplingParams": "sglang.srt.sampling.sampling_params:SamplingParams",
    "AbortReq": "sglang.srt.managers.io_struct:AbortReq",
    "FINISH_ABORT": "sglang.srt.managers.schedule_batch:FINISH_ABORT",
    "get_max_seq_length": "sglang.srt.sampling.sampling_params:get_max_seq_length",
    "MOST_STOP_TOKENS": "sglang.srt.sampling.sampling_params:MAX_LEN",
    "StreamAccumulator": "sglang.srt.managers.scheduler_components.output_streamer:_GenerationStreamAccumulator",
    "detokenizer_manager": "sglang.srt.managers.detokenizer_manager",
    "DecodeStatus": "sglang.srt.managers.detokenizer_manager:DecodeStatus",
    "DetokenizerManager": "sglang.srt.managers.detokenizer_manager:DetokenizerManager",
    "SpeculativeAlgorithm": "sglang.srt.speculative.spec_info:SpeculativeAlgorithm",
    "FINISHED_MATCHED_REGEX": "sglang.srt.managers.schedule_batch:FINISHED_MATCHED_REGEX",
    "PauseGenerationReqInput": "sglang.srt.managers.io_struct:PauseGenerationReqInput",
    "ContinueGenerationReqInput": "sglang.srt.managers.io_struct:ContinueGenerationReqInput",
    "SchedulePolicy": "sglang.srt.managers.schedule_policy:SchedulePolicy",
    "TokenizerManager": "sglang.srt.managers.tokenizer_manager:TokenizerManager",
    "FanOutCommunicator": "sglang.srt.managers.communicator:FanOutCommunicator",
    "OpenAIServingBase": "sglang.srt.entrypoints.openai.serving_base:OpenAIServingBase",
    "AnthropicServing": "sglang.srt.entrypoints.anthropic.serving:AnthropicServing",
    "LoadLoRAAdapterReqInput": "sglang.srt.managers.io_struct:LoadLoRAAdapterReqInput",
    "LoadLoRAAdapterReqOutput": "sglang.srt.managers.io_struct:LoadLoRAAdapterReqOutput",
    "UnloadLoRAAdapterReqInput": "sglang.srt.managers.io_struct:UnloadLoRAAdapterReqInput",
    "LoRARef": "sglang.srt.lora.lora_registry:LoRARef",
    "LoRARegistry": "sglang.srt.lora.lora_registry:LoRARegistry",
    "auth_level": "sglang.srt.utils.auth:auth_level",
    "AuthLevel": "sglang.srt.utils.auth:AuthLevel",
    "AuthDecision": "sglang.srt.utils.auth:AuthDecision",
    "decide_request_auth": "sglang.srt.utils.auth:decide_request_auth",
    "OpenAIServingChat": "sglang.srt.entrypoints.openai.serving_chat:OpenAIServingChat",
    "ChatCompletionRequest": "sglang.srt.entrypoints.openai.protocol:ChatCompletionRequest",
    "TpModelWorker": "sglang.srt.managers.tp_worker:TpModelWorker",
    "ModelRunner": "sglang.srt.model_executor.model_runner:ModelRunner",
    "SchedulerWeightUpdaterManager": "sglang.srt.managers.scheduler_components.weight_updater"
    ":SchedulerWeightUpdaterManager",
    "DecodeCudaGraphRunner": "sglang.srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner",
    # where it is constructed, which is where its replacement has to be
    "PrefillCudaGraphRunner": "sglang.srt.model_executor.model_runner_components.cuda_graph_setup"
    ":PrefillCudaGraphRunner",
    "BaseCudaGraphBackend": "sglang.srt.model_executor.runner_backend.base_cuda_graph_backend:BaseCudaGraphBackend",
    "breakable_capture": "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"
    ":_current_capture_var",
    "FlashAttentionBackend": "sglang.srt.layers.attention.flashattention_backend:FlashAttentionBackend",
    "TorchNativeAttnBackend": "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend",
    "TritonAttnBackend": "sglang.srt.layers.attention.triton_backend:TritonAttnBackend",
    "capture_mode": "sglang.srt.model_executor.runner_utils.capture_mode",
    # prefix cache
    "RadixCache": "sglang.srt.mem_cache.radix_cache:RadixCache",
    "RadixKey": "sglang.srt.mem_cache.radix_cache:RadixKey",
    "MatchPrefixParams": "sglang.srt.mem_cache.base_prefix_cache:MatchPrefixParams",
    "InsertParams": "sglang.srt.mem_cache.base_prefix_cache:InsertParams",
    "EvictParams": "sglang.srt.mem_cache.base_prefix_cache:EvictParams",
    "CacheInitParams": "sglang.srt.mem_cache.cache_init_params:CacheInitParams",
    "RADIX_CACHES": "sglang.srt.mem_cache.registry:_RADIX_CACHE_REGISTRY",
    "default_radix_cache_factory": "sglang.srt.mem_cache.registry:default_radix_cache_factory",
    "maybe_cache_unfinished_req": "sglang.srt.mem_cache.common:maybe_cache_unfinished_req",
    "extend_attention": "sglang.kernels.ops.attention.extend_attention",
    "decode_attention": "sglang.kernels.ops.attention.decode_attention",
    "extend_attention_kernel": "sglang.kernels.ops.attention.extend_attention:_fwd_kernel",
    "mm_utils": "sglang.srt.managers.mm_utils",
    "MultimodalPaddingPattern": "sglang.srt.managers.mm_utils:MultiModalityDataPaddingPatternMultimodalTokens",
    "chunked_prefill_embedding": "sglang.srt.managers.mm_utils:_get_chunked_prefill_embedding",
    "adjust_embedding_length": "sglang.srt.managers.mm_utils:_adjust_embedding_length",
    "EmbeddingResult": "sglang.srt.mem_cache.multimodal_cache:EmbeddingResult",
    "MultiModalStaticCache": "sglang.srt.mem_cache.multimodal_cache:MultiModalStaticCache",
    # models
    "Qwen2Attention": "sglang.srt.models.qwen2:Qwen2Attention",
    "Qwen2DecoderLayer": "sglang.srt.models.qwen2:Qwen2DecoderLayer",
    "MRotaryEmbedding": "sglang.srt.layers.rotary_embedding.mrope:MRotaryEmbedding",
    "get_token_ids_logprobs": "sglang.srt.layers.logprob_processor:get_token_ids_logprobs",
    "LogitsProcessor": "sglang.srt.layers.logits_processor:LogitsProcessor",
    "LlavaForConditionalGeneration": "sglang.srt.models.llava:LlavaForConditionalGeneration",
    "LlavaLlamaForCausalLM": "sglang.srt.models.llava:LlavaLlamaForCausalLM",
    "Gemma3ForConditionalGeneration": "sglang.srt.models.gemma3_mm:Gemma3ForConditionalGeneration",
    "CLIPMLP": "sglang.srt.models.clip:CLIPMLP",
    "CLIPVisionModel": "sglang.srt.models.clip:CLIPVisionModel",
    "default_weight_loader": "sglang.srt.model_loader.weight_utils:default_weight_loader",
    "Qwen2VLForConditionalGeneration": "sglang.srt.models.qwen2_vl:Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration": "sglang.srt.models.qwen2_5_vl:Qwen2_5_VLForConditionalGeneration",
    "Qwen2_5_VisionTransformer": "sglang.srt.models.qwen2_5_vl:Qwen2_5_VisionTransformer",
    "Qwen2_5_VisionBlock": "sglang.srt.models.qwen2_5_vl:Qwen2_5_VisionBlock",
    "Qwen2_5_VisionPatchEmbed": "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VisionPatchEmbed",
    "Qwen2VisionTransformer": "sglang.srt.models.qwen2_vl:Qwen2VisionTransformer",
    "Qwen3VLMoeVisionModel": "sglang.srt.models.qwen3_vl:Qwen3VLMoeVisionModel",
    "Qwen3LLMModel": "sglang.srt.models.qwen3_vl:Qwen3LLMModel",
    "Qwen3_VisionBlock": "sglang.srt.models.qwen3_vl:Qwen3_VisionBlock",
    "Qwen2VisionBlock": "sglang.srt.models.qwen2_vl:Qwen2VisionBlock",
    "InternVisionModel": "sglang.srt.models.internvl:InternVisionModel",
    "InternVisionEncoderLayer": "sglang.srt.models.internvl:InternVisionEncoderLayer",
    "InternVLChatModel": "sglang.srt.models.internvl:InternVLChatModel",
    "VisionAttention": "sglang.srt.layers.attention.vision:VisionAttention",
    "VisionFlash3Attention": "sglang.srt.layers.attention.vision:VisionFlash3Attention",
    # LoRA
    "lora_module": "sglang.srt.lora.lora",
    "LoadConfig": "sglang.srt.configs.load_config:LoadConfig",
    "LoRAManager": "sglang.srt.lora.lora_manager:LoRAManager",
    "LoRAMemoryPool": "sglang.srt.lora.mem_pool:LoRAMemoryPool",
    "EMPTY_SLOT": "sglang.srt.lora.mem_pool:EMPTY_SLOT",
    "dense_lora_b": "sglang.srt.lora.mem_pool:_SGLANG_EXPERIMENTAL_LORA_OPTI",
    "LoRAConfig": "sglang.srt.lora.lora_config:LoRAConfig",
    "LoRAAdapter": "sglang.srt.lora.lora:LoRAAdapter",
    "RMSNorm": "sglang.srt.layers.layernorm:RMSNorm",
    "fused_moe": "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe",
    "FusedMoE": "sglang.srt.layers.moe.fused_moe_triton.layer:FusedMoE",
    "UnquantizedFusedMoEMethod": "sglang.srt.layers.quantization.unquant:UnquantizedFusedMoEMethod",
    "LinearBase": "sglang.srt.layers.linear:LinearBase",
    "QKVParallelLinear": "sglang.srt.layers.linear:QKVParallelLinear",
    "MergedColumnParallelLinear": "sglang.srt.layers.linear:MergedColumnParallelLinear",
    "VocabParallelEmbedding": "sglang.srt.layers.vocab_parallel_embedding:VocabParallelEmbedding",
    "ParallelLMHead": "sglang.srt.layers.vocab_parallel_embedding:ParallelLMHead",
    "BaseLoRABackend": "sglang.srt.lora.backend.base_backend:BaseLoRABackend",
    "ColumnParallelLinearWithLoRA": "sglang.srt.lora.layers:ColumnParallelLinearWithLoRA",
    "RowParallelLinearWithLoRA": "sglang.srt.lora.layers:RowParallelLinearWithLoRA",
    "MergedColumnParallelLinearWithLoRA": "sglang.srt.lora.layers:MergedColumnParallelLinearWithLoRA",
    "QKVParallelLinearWithLoRA": "sglang.srt.lora.layers:QKVParallelLinearWithLoRA",
    "ReplicatedLinearWithLoRA": "sglang.srt.lora.layers:ReplicatedLinearWithLoRA",
    "VocabParallelEmbeddingWithLoRA": "sglang.srt.lora.layers:VocabParallelEmbeddingWithLoRA",
    "ParallelLMHeadWithLoRA": "sglang.srt.lora.layers:ParallelLMHeadWithLoRA",
    "get_lm_head_pruned_lens": "sglang.srt.lora.utils:get_lm_head_pruned_lens",
    "FusedMoEWithLoRA": "sglang.srt.lora.layers:FusedMoEWithLoRA",
    "LoRAHooks": "sglang.srt.lora.lora_moe_runners:LoRAHooks",
    "build_lora_hooks": "sglang.srt.lora.lora_moe_runners:build_lora_hooks",
    "get_lora_layer": "sglang.srt.lora.layers:get_lora_layer",
    "ColumnParallelLinear": "sglang.srt.layers.linear:ColumnParallelLinear",
    "ReplicatedLinear": "sglang.srt.layers.linear:ReplicatedLinear",
    "RowParallelLinear": "sglang.srt.layers.linear:RowParallelLinear",
    "tensor_model_parallel_all_gather": "sglang.srt.distributed:tensor_model_parallel_all_gather",
    "tensor_model_parallel_all_reduce": "sglang.srt.distributed:tensor_model_parallel_all_reduce",
    "should_skip_mlp_all_reduce": "sglang.srt.layers.moe.utils:should_skip_mlp_all_reduce",
    "get_tp_group": "sglang.srt.distributed:get_tp_group",
    "get_parallel": "sglang.srt.runtime_context:get_parallel",
    "get_exec": "sglang.srt.runtime_context:get_exec",
    "SiluAndMul": "sglang.srt.layers.activation:SiluAndMul",
    "LlamaMLP": "sglang.srt.models.llama:LlamaMLP",
    "Qwen2MLP": "sglang.srt.models.qwen2:Qwen2MLP",
    "Qwen2_5_VLMLP": "sglang.srt.models.qwen2_5_vl:Qwen2_5_VLMLP",
    "UnquantizedLinearMethod": "sglang.srt.layers.quantization.unquant:UnquantizedLinearMethod",
    # quantised linears, and the configurations that choose them
    "Fp8Config": "sglang.srt.layers.quantization.fp8:Fp8Config",
    "Fp8LinearMethod": "sglang.srt.layers.quantization.fp8:Fp8LinearMethod",
    "quantise_rows": "sglang.srt.layers.quantization.fp8_utils:sglang_per_token_quant_fp8",
    "W8A8Fp8Config": "sglang.srt.layers.quantization.w8a8_fp8:W8A8Fp8Config",
    "W8A8Fp8LinearMethod": "sglang.srt.layers.quantization.w8a8_fp8:W8A8Fp8LinearMethod",
    "W8A8Int8Config": "sglang.srt.layers.quantization.w8a8_int8:W8A8Int8Config",
    "W8A8Int8LinearMethod": "sglang.srt.layers.quantization.w8a8_int8:W8A8Int8LinearMethod",
    "CompressedTensorsConfig": "sglang.srt.layers.quantization.compressed_tensors.compressed_tensors"
    ":CompressedTensorsConfig",
    "CompressedTensorsLinearMethod": "sglang.srt.layers.quantization.compressed_tensors.compressed_tensors"
    ":CompressedTensorsLinearMethod",
    "AWQConfig": "sglang.srt.layers.quantization.awq.awq:AWQConfig",
    "AWQLinearMethod": "sglang.srt.layers.quantization.awq.awq:AWQLinearMethod",
    "GPTQConfig": "sglang.srt.layers.quantization.gptq.gptq:GPTQConfig",
    "GPTQLinearMethod": "sglang.srt.layers.quantization.gptq.gptq:GPTQLinearMethod",
    "GPTQMarlinLinearMethod": "sglang.srt.layers.quantization.gptq.gptq:GPTQMarlinLinearMethod",
    "EMBEDDING_NAMES": "sglang.srt.lora.utils:EMBEDDING_NAMES",
    "get_target_module_name": "sglang.srt.lora.utils:get_target_module_name",
    "LORA_BACKENDS": "sglang.srt.lora.backend.lora_registry:LORA_SUPPORTED_BACKENDS",
    # objects that we read, as `_sgl_types` describes them
    "TokenizedGenerateReqInput": "sglang.srt.managers.io_struct:TokenizedGenerateReqInput",
    "Modality": "sglang.srt.managers.schedule_batch:Modality",
    "MultimodalDataItem": "sglang.srt.managers.schedule_batch:MultimodalDataItem",
    "MultimodalInputs": "sglang.srt.managers.schedule_batch:MultimodalInputs",
    "Req": "sglang.srt.managers.schedule_batch:Req",
    "Range": "sglang.srt.utils.common:Range",
    "ForwardMode": "sglang.srt.model_executor.forward_batch_info:ForwardMode",
    "ForwardBatch": "sglang.srt.model_executor.forward_batch_info:ForwardBatch",
    "ScheduleBatch": "sglang.srt.managers.schedule_batch:ScheduleBatch",
    "LogitsProcessorOutput": "sglang.srt.layers.logits_processor:LogitsProcessorOutput",
    "GenerationBatchResult": "sglang.srt.managers.utils:GenerationBatchResult",
    "CudaGraphConfig": "sglang.srt.model_executor.cuda_graph_config:CudaGraphConfig",
    "PhaseConfig": "sglang.srt.model_executor.cuda_graph_config:PhaseConfig",
    "RadixAttention": "sglang.srt.layers.radix_attention:RadixAttention",
    "LoRALayer": "sglang.srt.lora.lora:LoRALayer",
    "TreeNode": "sglang.srt.mem_cache.radix_cache:TreeNode",
    "TreeCacheBuildContext": "sglang.srt.mem_cache.registry:TreeCacheBuildContext",
    "MatchResult": "sglang.srt.mem_cache.base_prefix_cache:MatchResult",
    "InsertResult": "sglang.srt.mem_cache.base_prefix_cache:InsertResult",
}

# Methods we override or call -> the parameters they must have (in this order; more may follow).
SIGNATURES: dict[str, tuple[str, ...]] = {
    "HookRegistry.register": ("cls", "target", "hook", "hook_type"),
    "Scheduler.run_batch": ("self", "batch"),
    "Scheduler._add_request_to_queue": ("self", "req", "is_retracted"),
    "Scheduler._can_schedule_lora_req": ("self", "req", "running_loras"),
    "Scheduler.get_new_batch_prefill": ("self", "running_batch"),
    "Scheduler.get_next_batch_to_run": ("self", "running_batch", "last_batch"),
    "Scheduler.set_internal_state": ("self", "recv_req"),
    "TokenizerManager.collect_metrics": ("self", "state", "recv_obj", "i"),
    "decide_request_auth": ("method", "path"),
    "Scheduler.get_internal_state": ("self", "recv_req"),
    "Scheduler.process_batch_result": ("self", "batch", "result"),
    "TpModelWorker.forward_batch_generation": ("self", "batch"),
    "get_max_seq_length": ("regex_str",),
    "Req._stop_match_tail_len": ("self", "new_accepted_len"),
    "Req._check_str_based_finish": ("self", "new_accepted_len"),
    "Req.update_finish_state": ("self", "new_accepted_len"),
    "Req.check_match_stop_str_prefix": ("self",),
    "Req.tail_str": ("self", "new_accepted_len"),
    "StreamAccumulator.accept": ("self", "req"),
    "FINISHED_MATCHED_REGEX.to_json": ("self",),
    "SchedulePolicy.calc_priority": ("self", "waiting_queue", "running_batch"),
    "TokenizerManager._resolve_lora_path": ("self", "obj"),
    "TokenizerManager._validate_and_resolve_lora": ("self", "obj"),
    "TokenizerManager._tokenize_one_request": ("self", "obj"),
    "TokenizerManager._validate_batch_tokenization_constraints": ("self", "batch_size", "obj"),
    "TokenizerManager.generate_request": ("self", "obj", "request"),
    "TokenizerManager.init_lora": ("self",),
    "TokenizerManager.auto_create_handle_loop": ("self",),
    "TokenizerManager.sigterm_watchdog": ("self",),
    "TokenizerManager.open_session": ("self", "obj", "request"),
    "TokenizerManager.pause_generation": ("self", "obj"),
    "TokenizerManager._wait_for_model_update_from_disk": ("self", "obj"),
    "TokenizerManager.dump_requests_before_crash": ("self",),
    "TokenizerManager.create_abort_task": ("self", "obj"),
    "TokenizerManager.abort_request": ("self", "rid", "abort_all"),
    "PortArgs.init_new": ("server_args", "dp_rank", "worker_ports"),
    "TokenizerManager._dispatch_to_scheduler": ("self", "obj"),
    "BaseMultimodalProcessor.process_mm_data": ("self", "input_text", "images", "videos", "audios", "processor"),
    "BaseMultimodalProcessor._resolve_processor": ("self", "processor"),
    "BaseMultimodalProcessor._fast_image_processor_device": ("self", "processor"),
    "BaseMultimodalProcessor._wrap_tensor_for_cuda_ipc": ("self", "tensor"),
    "BaseMultimodalProcessor.get_mm_items_offset": ("input_ids", "mm_token_id"),
    "get_mm_processor": ("hf_config", "server_args", "processor", "transport_mode", "model_config"),
    "get_model_architecture": ("model_config",),
    "LlavaForConditionalGeneration._get_sgl_model_cls": ("self", "config", "auto_model_type"),
    "LlavaForConditionalGeneration.get_image_feature": ("self", "items"),
    "LlavaForConditionalGeneration.pad_input_ids": ("self", "input_ids", "image_inputs"),
    "get_image_bytes": ("image_file",),
    "load_image": ("image_file", "gpu_image_decode"),
    "get_token_ids_logprobs": ("logprobs", "token_ids_logprobs", "no_copy_to_cpu"),
    "OpenAIServingBase.create_error_response": ("self", "message", "err_type", "status_code", "param"),
    "AnthropicServing._error_response": ("self", "status_code", "error_type", "message", "exception_name"),
    "counted_path": ("request",),
    "ProcessorMixin._check_special_mm_tokens": ("self", "text", "text_inputs", "modalities"),
    "ProcessorMixin._merge_kwargs": ("self", "ModelProcessorKwargs", "tokenizer_init_kwargs"),
    "get_rope_index": (
        *("spatial_merge_size", "image_token_id", "video_token_id", "vision_start_token_id", "model_type"),
        *("tokens_per_second", "input_ids", "image_grid_thw", "video_grid_thw"),
    ),
    "TokenizerManager.load_lora_adapter": ("self", "obj", "_"),
    "TokenizerManager.unload_lora_adapter": ("self", "obj", "_"),
    "LoRARegistry._register_adapter": ("self", "lora_ref"),
    "LoRARegistry.release": ("self", "lora_id"),
    "LoRARegistry.acquire": ("self", "lora_name"),
    "FanOutCommunicator.queueing_call": ("self", "obj"),
    "LoRARegistry.wait_for_unload": ("self", "lora_id"),
    "Scheduler.init_request_receiver": ("self",),
    "Scheduler.process_input_requests": ("self", "recv_reqs"),
    "Scheduler.handle_generate_request": ("self", "recv_req"),
    "Scheduler.handle_embedding_request": ("self", "recv_req"),
    "TokenizerManager._handle_batch_output": ("self", "recv_obj"),
    "TokenizerManager._handle_abort_req": ("self", "recv_obj"),
    "Scheduler.unload_lora_adapter": ("self", "recv_req"),
    "Scheduler.on_idle": ("self",),
    "Scheduler.is_fully_idle": ("self",),
    "VisionFlash3Attention.forward": (
        *("self", "q", "k", "v", "cu_seqlens", "bsz", "seq_len", "softmax_scale", "forward_metadata"),
    ),
    "VisionAttention.forward": (
        *("self", "x", "cu_seqlens", "position_embeddings", "rotary_pos_emb_cos", "rotary_pos_emb_sin"),
        *("attention_mask", "forward_metadata", "full_attn"),
    ),
    "Qwen2VisionTransformer.forward": ("self", "x", "grid_thw"),
    "Qwen2_5_VisionTransformer.forward": ("self", "x", "grid_thw"),
    "Qwen2_5_VisionTransformer.get_window_index": ("self", "grid_thw"),
    "Qwen3VLMoeVisionModel.forward": ("self", "x", "grid_thw"),
    "Qwen3VLMoeVisionModel.fast_pos_embed_interpolate_from_list": ("self", "grid_thw"),
    "Qwen2VisionBlock.forward": ("self", "x", "cu_seqlens", "position_embeddings", "forward_metadata"),
    "Qwen2_5_VisionBlock.forward": ("self", "x", "cu_seqlens", "position_embeddings", "output_ws", "forward_metadata"),
    "Qwen3_VisionBlock.forward": ("self", "x", "cu_seqlens", "rotary_pos_emb_cos", "rotary_pos_emb_sin"),
    "InternVisionEncoderLayer.forward": ("self", "hidden_states", "cu_seqlens", "output_ws", "forward_metadata"),
    "InternVLChatModel.extract_feature": ("self", "pixel_values"),
    "InternVLChatModel.pixel_shuffle": ("self", "x", "scale_factor"),
    "OpenAIServingChat._apply_jinja_template": ("self", "request", "tools", "is_multimodal"),
    "OpenAIServingChat._apply_conversation_template": ("self", "request", "is_multimodal"),
    "TokenizersBackend._encode_plus": ("self", "text"),
    "OpenAIServingBase._resolve_lora_path": ("self", "request_model", "explicit_lora_path"),
    "RadixCache.match_prefix": ("self", "params"),
    "RadixCache.insert": ("self", "params"),
    "RadixCache.cache_unfinished_req": ("self", "req", "chunked"),
    "RadixCache.cache_finished_req": ("self", "req"),
    "RadixCache._split_node": ("self", "key", "child", "split_len"),
    "MultiModalStaticCache.get": ("self", "mm_hashes", "combined_hash"),
    "MultiModalStaticCache.get_single": ("self", "mm_hash"),
    "chunked_prefill_embedding": (
        *("data_embedding_func", "embedding_items", "items_size", "prefix_length", "extend_length"),
        *("items_offset_list", "input_ids"),
    ),
    "adjust_embedding_length": ("embedding", "mask", "logger"),
    "ServerArgs.override": ("self", "source"),
    "LoRAManager.load_lora_weights_from_tensors": ("self", "lora_ref", "tensors"),
    "LoRAManager._load_lora_adapter": ("self", "lora_ref"),
    "LoRAManager.load_lora_adapter": ("self", "lora_ref"),
    "LoRAManager.unload_lora_adapter": ("self", "lora_ref"),
    "LoRAManager.validate_new_adapter": ("self", "lora_config", "lora_ref"),
    "LoRAManager.create_lora_update_result": ("self", "success", "error_message"),
    "LoRAAdapter.__init__": ("self", "uid", "config", "base_hf_config", "load_config", "lora_backend"),
    "LoRAManager.init_lora_adapters": ("self", "lora_paths"),
    "LoRAManager.init_memory_pool": ("self",),
    "LoRAManager.init_lora_shapes": ("self", "max_lora_rank", "target_modules"),
    "LoRAMemoryPool.init_buffers": ("self", "base_model"),
    "LoRAMemoryPool.get_lora_A_shape": ("self", "module_name", "base_model", "max_lora_dim", "layer_idx"),
    "LoRAMemoryPool.get_lora_B_shape": ("self", "module_name", "base_model", "max_lora_dim", "layer_idx"),
    "LoRAMemoryPool.prepare_lora_batch": ("self", "cur_uids", "lora_adapters", "lora_modules", "lora_refs"),
    "LoRAMemoryPool.load_lora_weight_to_buffer": (
        *("self", "uid", "buffer_id", "lora_adapter", "lora_modules", "lora_embed_tokens_module"),
        "lora_lm_head_module",
    ),
    "LoRAMemoryPool._clear_buffer_slot_for_base": ("self", "buffer_id"),
    "VocabParallelEmbeddingWithLoRA.forward": ("self", "input_"),
    "ParallelLMHeadWithLoRA.apply_lora": ("self", "base_output", "hidden_states"),
    "get_lm_head_pruned_lens": ("forward_batch",),
    "LoRAManager.prepare_lora_batch": ("self", "forward_batch"),
    "LoRAManager.fetch_new_loras": ("self", "new_loras"),
    "LoRAManager.validate_lora_batch": ("self", "lora_ids"),
    "LoRAManager.init_lora_modules": ("self",),
    "LoRAManager._unload_lora_adapter": ("self", "lora_ref"),
    "get_lora_layer": ("layer", "lora_backend"),
    "FusedMoEWithLoRA.forward": ("self", "hidden_states", "topk_output"),
    "FusedMoEWithLoRA._get_lora_info": ("self",),
    "FusedMoEWithLoRA.set_lora_info": (
        *("self", "gate_up_lora_a_weights", "gate_up_lora_b_weights", "down_lora_a_weights", "down_lora_b_weights"),
    ),
    "build_lora_hooks": ("hidden_states", "lora_info", "topk_ids"),
    "MRotaryEmbedding._match_cos_sin_cache_dtype": ("self", "query"),
    "Qwen2DecoderLayer.forward": ("self", "positions", "hidden_states", "forward_batch", "residual"),
    "LogitsProcessor.forward": ("self", "input_ids", "hidden_states"),
    "BaseLoRABackend.init_cuda_graph_batch_info": ("self", "max_bs_in_cuda_graph", "num_tokens_per_req"),
    "RowParallelLinearWithLoRA.forward": ("self", "input_", "skip_all_reduce", "forward_batch"),
    "ModelRunner.init_weight_updater": ("self",),
    "ModelRunner.init_weight_exporter": ("self",),
    "ModelRunner.forward": ("self", "forward_batch"),
    "ModelRunner.sample": ("self", "logits_output", "forward_batch"),
    "ModelRunner.compute_logprobs_only": ("self", "logits_output", "forward_batch"),
    "ModelRunner.check_weights": ("self", "action", "allow_quant_error"),
    "ModelRunner._decode_cuda_graph_runner_cls": ("self",),
    "DecodeCudaGraphRunner._resolve_lora_variant": ("self", "forward_batch"),
    "PrefillCudaGraphRunner.capture": ("self",),
    "PrefillCudaGraphRunner._run_forward": ("self", "forward_batch", "num_tokens"),
    "Qwen3LLMModel.forward": (
        *("self", "input_ids", "positions", "forward_batch", "input_embeds", "pp_proxy_tensors"),
        "input_deepstack_embeds",
    ),
    "PrefillCudaGraphRunner.capture_one_shape": ("self", "size", "prefix_num_chunks"),
    "PrefillCudaGraphRunner._execute_body_capture": (
        *("self", "forward_batch", "static_forward_batch", "static_num_tokens", "raw_num_tokens", "shape_key"),
    ),
    "PrefillCudaGraphRunner._prepare_forward_metadata_for_replay": (
        *("self", "forward_batch", "static_forward_batch", "num_tokens"),
    ),
    "PrefillCudaGraphRunner._init_forward_metadata_for_capture": ("self", "forward_batch", "num_tokens"),
    "PrefillCudaGraphRunner._pad_to_bucket": ("raw_size", "buckets"),
    "PrefillCudaGraphRunner.can_run_graph": ("self", "forward_batch"),
    "PrefillCudaGraphRunner.execute": ("self", "forward_batch"),
    "LoRAManager.can_use_prefill_cuda_graph": ("self", "forward_batch"),
    "BaseLoRABackend.init_prefill_cuda_graph_batch_info": ("self", "max_num_tokens"),
    "SchedulerWeightUpdaterManager.release_memory_occupation": ("self", "recv_req"),
    "run_scheduler_process": ("server_args", "port_args", "gpu_id"),
    "init_tokenizer_manager": ("server_args", "port_args", "TokenizerManagerClass"),
}


NOT_ON_A_CPU = ("FlashAttentionBackend",)
"""Classes whose module loads a CUDA library: looked for in its source."""

PLACES_MARKERS = "_ensure_placeholders_before_assistant"
"""Method of a multimodal processor that itself places the markers that a prompt lacks."""

MODELS_PACKAGE = "sglang.srt.models"
"""Where SGLang keeps one module per model; named, not imported."""

# SGLang's logger -> beginnings of messages of every start that nobody can act on.
NOISE: dict[str, tuple[str, ...]] = {
    "sglang.srt.distributed.bootstrap": ("init_cpu_threads_env and shared memory",),
    "sglang.srt.distributed.device_communicators.pynccl_wrapper": ("Failed to load NCCL library",),
    # The tokenizer manager says it, for every route.
    "sglang.srt.entrypoints.http_server": ("[http_server] Error: image ",),
    "sglang.srt.managers.multimodal_processor": ("Ignore import error when loading",),
    "sglang.srt.models.registry": ("Ignore import error when loading",),
    "sglang.srt.server_args": ("Cuda graph is disabled because of using torch native attention",),
    # A prompt beside one that was refused, or whose client left.
    "sglang.srt.managers.tokenizer_manager": ("Received output for rid=",),
    "sglang.srt.utils.common": ("Fail to set RLIMIT", "Processor tokenizer for"),
}

# SGLang's loggers that tell of a client's fault with the place in the source where it was found.
TOLD_AT_LENGTH = (
    *(f"sglang.srt.entrypoints.openai.serving_{kind}" for kind in ("base", "chat", "responses", "tokenize", "rerank")),
    "sglang.srt.entrypoints.anthropic.serving",
)


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its table NAMES lists what it has")
    module, _, attribute = NAMES[name].partition(":")
    try:
        found: Any = importlib.import_module(module)
        if attribute:
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        raise ContractError(f"SGLang {version('sglang')} lacks {NAMES[name]}: {error}") from error
    globals()[name] = found
    return found


def check_version() -> None:
    """Refuse any SGLang but the one we extend.

    Raises:
        ContractError: another release is installed.
    """
    installed = version("sglang")
    if installed != SGLANG_VERSION:
        raise ContractError(f"vlora_sgl extends sglang=={SGLANG_VERSION}; installed is {installed}")


def is_a(thing: object, *names: str) -> bool:
    """Whether an object's class is one of these, by their names in ``NAMES``; imports none of them."""
    kind = type(thing)
    return f"{kind.__module__}:{kind.__qualname__}" in [NAMES[name] for name in names]


def check_contract(*targets: str) -> None:
    """Check version, names and signatures. Imports all of them, which takes about 20 s on a cold machine.

    Args:
        targets: of the rows of ``plugin.TABLE``; each must name something that exists.

    Raises:
        ContractError: the first difference found, in one line.
    """
    check_version()
    for name in NAMES:
        if name in NOT_ON_A_CPU:
            _check_source(name)
        else:
            __getattr__(name)
    for path, expected in SIGNATURES.items():
        name, _, method = path.partition(".")
        target = __getattr__(name)
        if method:
            target = inspect.getattr_static(target, method, None)
            if target is None:
                raise ContractError(f"SGLang's {path} is gone")
        target = getattr(target, "__func__", target)
        found = tuple(inspect.signature(target).parameters)
        if found[: len(expected)] != expected:
            raise ContractError(f"SGLang's {path} takes {found}, expected it to begin with {expected}")
    for target in targets:
        check_target(target)


def _check_source(name: str) -> None:
    module, _, attribute = NAMES[name].partition(":")
    spec = importlib.util.find_spec(module)
    source = Path(spec.origin).read_text() if spec is not None and spec.origin is not None else ""
    if not re.search(rf"^class {attribute}\b", source, re.MULTILINE):
        raise ContractError(f"SGLang {version('sglang')} lacks {NAMES[name]}")


def check_target(path: str) -> None:
    """Check that what a row of ``plugin.TABLE`` replaces exists: a name of ``NAMES`` or a module, and attributes.

    One that only objects have, or that a function uses, is looked for in the source of what is before it.

    Raises:
        ContractError: it does not.
    """
    name, *attributes = path.split(".")
    found = __getattr__(name) if name in NAMES else importlib.import_module(name)
    for attribute in attributes:
        if hasattr(found, attribute):
            found = getattr(found, attribute)
        elif not re.search(rf"\.{attribute}\b", _source(found)):
            raise ContractError(f"SGLang's {path} is gone: {name} has no {attribute}")


def _source(thing: Any) -> str:
    with contextlib.suppress(OSError, TypeError):  # it is written in C, or an object
        return inspect.getsource(thing)
    return ""
