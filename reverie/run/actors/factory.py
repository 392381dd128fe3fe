"""Builds the actors of a run from its config."""

from __future__ import annotations

import dataclasses
import os
import pickle
import sys
from collections.abc import Callable

from reverie.api import UserError
from reverie.plugins import import_optional
from reverie.run.actors.chunks import ActorSpec
from reverie.run.actors.pool import ActorPool
from reverie.run.actors.ray_transport import RayTransport
from reverie.run.config import Config
from reverie.run.factory import MakeEnv


def open_actors(
    config: Config,
    make_env: MakeEnv | None,
    print_message: Callable[[str], None],
    check_stop: Callable[[], None],
) -> ActorPool:
    """Start the actors of a run; `check_stop` raises if a signal was received."""
    if config.deterministic and not config.actors.lockstep:
        raise UserError(
            "A deterministic run with actors must collect in lockstep.\n"
            "  Fix: add `--actors.lockstep True`."
        )
    pickled = pickle_make_env(make_env)
    transport = RayTransport(config.actors)
    settings = dataclasses.asdict(config)
    folder, paths = os.getcwd(), tuple(sys.path)

    def make_spec(actor: int, incarnation: int, times_lost: int) -> ActorSpec:
        return ActorSpec(
            actor, incarnation, times_lost, settings, pickled, folder, paths
        )

    pool = ActorPool(config.actors, transport, make_spec, print_message, check_stop)
    try:
        pool.start_processes()
    except BaseException:
        pool.close()
        raise
    return pool


def pickle_make_env(make_env: MakeEnv | None) -> bytes | None:
    """Pickle the user's function that makes environments, with cloudpickle."""
    if make_env is None:
        return None
    # unlike pickle, cloudpickle also pickles lambdas and functions of the main module
    cloudpickle = import_optional("ray.cloudpickle", "ray", "--actors.count")
    try:
        pickled: bytes = cloudpickle.dumps(make_env)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UserError(
            f"The environment cannot be sent to actors: {error}\n  Fix: pass a "
            "function that makes it, or --task package.module:function."
        ) from error
    return pickled
