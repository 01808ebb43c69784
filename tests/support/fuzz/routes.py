"""Which routes the fuzzer does not call, and why. Every other route that a server has is called."""

from __future__ import annotations

WEIGHTS = "an operator's: it replaces or frees the model's weights"
PEERS = "an operator's: it waits for other machines"
STOPS = "an operator's: it stops or slows the engine for everybody"
FILES = "an operator's: it writes files, or changes what is logged"

SKIPPED: dict[str, str] = {
    **dict.fromkeys(("/update_weights_from_disk", "/update_weights_from_tensor", "/update_weights_from_ipc"), WEIGHTS),
    **dict.fromkeys(("/update_weights_from_distributed", "/update_weight_version"), WEIGHTS),
    **dict.fromkeys(("/release_memory_occupation", "/resume_memory_occupation", "/weights_checker"), WEIGHTS),
    **dict.fromkeys(("/init_weights_send_group_for_remote_instance", "/send_weights_to_remote_instance"), PEERS),
    **dict.fromkeys(("/init_weights_update_group", "/destroy_weights_update_group", "/scale_elastic_ep"), PEERS),
    **dict.fromkeys(("/pause_generation", "/continue_generation", "/slow_down", "/freeze_gc", "/flush_cache"), STOPS),
    **dict.fromkeys(("/start_profile", "/stop_profile", "/configure_logging", "/set_trace_level"), FILES),
    "/v1/realtime": "a websocket, for models that hear",
}

BESIDE = ("/metrics", "/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc", "/lora_adapters/x", "/nothing")
"""Called too: what OpenAPI does not list."""

FAVOURED: dict[str, int] = {
    **{"/generate": 12, "/v1/chat/completions": 10, "/v1/completions": 5, "/v1/responses": 4, "/v1/messages": 4},
    **{"/load_lora_adapter": 6, "/reload_lora_adapter": 2, "/unload_lora_adapter": 2, "/pin_lora_adapter": 2},
    **dict.fromkeys(("/v1/vision/classify", "/v1/vision/count", "/v1/vision/detect", "/v1/score", "/encode"), 2),
    **dict.fromkeys(("/api/chat", "/api/generate", "/v1/embeddings", "/tokenize", "/detokenize"), 2),
}
"""How much more often than the others these are called: they reach the engine."""
