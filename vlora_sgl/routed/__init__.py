"""Routed adapters: one name that applies several loaded adapters, chosen token by token (MoLoRA, arXiv:2603.15965).

``spec`` reads a routed adapter's directory, ``token_router`` decides which members each token gets, ``router_tables``
holds the token routers at fixed addresses and decides for a batch (by ``decode`` or ``prefill``), ``regroup`` and
``tiles`` make the operator's row groups of the decision, ``manager`` ties it into SGLang's LoRA manager, and ``peft``
is the same in transformers: the reference, and what token routers are trained with.
"""
