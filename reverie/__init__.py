"""Agents that learn inside a world model: DreamerV3 and friends on one spine.

    import reverie
    reverie.train(env=make_env, configs=["size1m"], logdir="logdir/mine")
    agent = reverie.load("logdir/mine")
    action = agent.act(obs)

`reverie.api` is the contract between the parts; read it first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reverie.run.python import Player, load, train

__all__ = ["Player", "load", "train"]


def __getattr__(name: str) -> Any:
    # Imported on first use, so that `import reverie` costs next to nothing.
    if name in __all__:
        from reverie.run import python

        return getattr(python, name)
    raise AttributeError(f"module 'reverie' has no attribute {name!r}")
