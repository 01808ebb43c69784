"""vlora_sgl: one large multimodal model, many LoRA adapters, served together."""

__version__ = "0.1.0"
