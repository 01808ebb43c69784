"""How the embedded model (``vlora_sgl.models.tiny``) and its adapters were made."""
