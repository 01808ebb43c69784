"""Several replicas of a server behind one address: ``python -m vlora_sgl.launch_cluster``.

``placement`` decides which replica serves which adapter; ``replica`` is the router's view of one and ``links`` its way
there; ``router`` speaks HTTP, with ``adapter_routes``, ``catalogue`` (which adapters there are) and ``status``;
``supervisor`` keeps processes alive. Nothing here imports the engine.
"""
