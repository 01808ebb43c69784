"""Several replicas of a server behind one address: ``python -m vlora_sgl.launch_cluster``.

``placement`` decides which replica serves which adapter; ``replica`` is the router's view of one and ``links`` its way
there; ``replica_router`` speaks HTTP, with ``adapters``, ``catalogue`` (which adapters there are) and ``status``;
``supervisor`` keeps processes alive. Nothing here imports the engine.

On several hosts there are several routers (``front``), which share a ``directory``; ``member`` is a replica's side of
it, and ``on_ray`` the only module that knows Ray.
"""
