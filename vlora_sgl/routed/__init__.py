"""Routed adapters: one name that applies several loaded adapters, chosen token by token (MoLoRA, arXiv:2603.15965).

``spec`` reads a routed adapter's directory, ``router`` decides which member each token gets, ``tables`` holds the
routers at fixed addresses and carries the decision out for a batch (``kernel`` in decode, ``prefill`` in prefills),
``regroup`` and ``tiles`` turn it into the operator's row groups, ``manager`` ties it into SGLang's LoRA manager, and
``peft`` is
the same in transformers: the reference, and what routers are trained with.
"""
