"""Remote actors: processes that step environments and act, also on other machines.

`worker.py` is the code in the process of an actor, `pool.py` starts actors and checks
what they send, `collector.py` is the `api.Collector` of the training loop. They use Ray
through `ray_transport.py` only.
"""
