"""Several replicas of a server behind one address: ``python -m vlora_sgl.launch_cluster``.

``placement`` decides which replica serves which adapter, ``replica`` is the router's view of one, ``router`` speaks
HTTP, ``supervisor`` keeps the processes alive. Nothing here imports the engine.
"""
