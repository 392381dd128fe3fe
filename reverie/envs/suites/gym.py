"""Any environment registered with Gymnasium, by its id (`gym_CartPole-v1`)."""

from __future__ import annotations

from functools import partial

from reverie.api import Env, UserError
from reverie.envs.adapters.custom import from_gymnasium
from reverie.envs.suite import Suite, suggest


def make_gym(name: str) -> Env:
    """Build the environment with the Gymnasium id `name`."""
    import gymnasium

    try:
        env = gymnasium.make(name)
    except gymnasium.error.DependencyNotInstalled as error:
        raise UserError(
            f"Task 'gym_{name}' needs a package that is not installed: {error}\n"
            "  Fix: install that package with pip."
        ) from error
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        hint = suggest(name, gym_tasks())
        raise UserError(
            f"Gymnasium cannot make {name!r}: {error}{hint}\n"
            "  Fix: use an id of `gymnasium.make`, such as gym_CartPole-v1."
        ) from error
    make_rendered = partial(gymnasium.make, name, render_mode="rgb_array")
    return from_gymnasium(env, make_rendered)


def gym_tasks() -> list[str]:
    """Return the task names of Gymnasium's own environments, in their newest versions.

    Environments of other packages are not registered until these are imported.
    """
    import gymnasium

    newest: dict[str, tuple[int, str]] = {}
    for spec in gymnasium.registry.values():
        if not str(spec.entry_point).startswith("gymnasium."):
            continue
        stem = f"{spec.namespace}/{spec.name}"
        version = spec.version if spec.version is not None else -1
        newest[stem] = max(newest.get(stem, (-1, spec.id)), (version, spec.id))
    ids = [name for _, name in newest.values()]
    return [f"gym_{name}" for name in sorted(ids, key=lambda name: "/" in name)]


SUITE = Suite(
    name="gym",
    description="any environment registered with Gymnasium",
    make=lambda name, _: make_gym(name),
    name_format="gym_ID, such as gym_CartPole-v1",
    tasks=(),
)
