"""Reinforcement learning with world models in PyTorch: DreamerV3, Δ-IRIS and VTA.

    import reverie
    reverie.train(env=make_env, configs=["size1m"], logdir="logdir/mine")
    agent = reverie.load("logdir/mine")
    action = agent.act(obs)
    result = reverie.evaluate("logdir/mine", env=make_env, episodes=20)

`reverie.api` defines the interfaces between agents, environments and the training loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reverie.run.player import Player
    from reverie.run.python import evaluate, load, train

__all__ = ["Player", "evaluate", "load", "train"]


def __getattr__(name: str) -> Any:
    # imported on first use, to keep `import reverie` fast
    if name in __all__:
        from reverie.run import python

        return getattr(python, name)
    raise AttributeError(f"module 'reverie' has no attribute {name!r}")
