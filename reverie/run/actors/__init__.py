"""Remote actors: processes that act in environments, on this and other machines.

`worker.py` runs in the process of an actor. In the process of the learner, `pool.py`
starts actors and checks what they send, and `collector.py` is the `api.Collector` of
the training loop. Only `ray_transport.py` uses Ray.
"""
