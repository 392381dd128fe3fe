"""`Player`: a trained agent that acts in an environment of the user's program."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from torch.utils import _pytree as pytree

from reverie.api import Action, Agent, Mode, Obs, UserError
from reverie.capabilities import HasWorldModelEnv, PolicyWorldModelEnv
from reverie.envs.wrappers import cast, resize
from reverie.run.load import PolicySource
from reverie.spaces import STEP_KEYS, Space, Spaces, agent_obs_space, to_flat, to_nested

DEFAULT_HORIZON = 15
"""Number of steps of `Player.imagine`, as in the training of DreamerV3."""

MAX_CONTEXT = 64
"""Number of last rows that are kept. World models without a recurrent state, such as
that of Δ-IRIS, start from the last frames and actions."""

OUTCOME = ("reward", "cont")
"""Keys of a predicted row that are not observations: reward and continuation."""


class ImaginedRollout(NamedTuple):
    """A rollout of a world model; entry h is the prediction after the h-th action.

    Arrays are `(H, ...)`, or `(N, H, ...)` for a batch.
    """

    obs: dict[str, np.ndarray]
    """Predicted observations by flat key, such as frames (uint8)."""
    reward: np.ndarray
    cont: np.ndarray
    """Probability that the episode continues; with DreamerV3's default `contdisc`, it
    is multiplied by the discount factor."""
    actions: Any
    """Actions in the environment's own units and nested form."""
    latent: dict[str, np.ndarray]
    """Latent states by name, as those of `Player.latent`."""


class Player:
    """A trained agent that acts in an environment and keeps its recurrent state.

    It can be pickled and copied, with its weights, recurrent state and random
    generators.
    """

    def __init__(self, source: PolicySource, agent: Agent):
        self.source, self.agent = source, agent
        self.obs_space, self.act_space = source.spaces
        self._keeps_context = isinstance(agent, HasWorldModelEnv)
        self.reset()

    def reset(self, where: Any = None) -> None:
        """Start a new episode with the next observation.

        With a mask `where`, start new episodes only in these entries of a batch.
        """
        if where is None:
            self._carry: Any = None
            self._is_first = np.ones(0, bool)
            self._latest_obs: Any = None
            self._is_batch = False  # True if the latest observation is a batch
            self._context: list[Obs] = []  # the last rows, with actions
        elif self._carry is not None:
            mask = np.asarray(where, bool)
            if mask.shape != self._is_first.shape:
                raise UserError(
                    f"reset() got a mask of shape {mask.shape} for a batch of "
                    f"{len(self._is_first)} observations.\n"
                    "  Fix: pass one bool per observation, or call reset()."
                )
            self._is_first = self._is_first | mask

    def act(self, obs: Any, greedy: bool = False, **flags: Any) -> Any:
        """Return the action for an observation, or the actions for a batch of them.

        `obs` is what the environment returns, or a dict by flat key of `obs_space`. The
        action is what the environment's `step` takes: in its own units, dtype and
        nested form. A batch has one more axis at the front of every array, as in a
        Gymnasium vector environment; all batches of an episode have the same size.

        The agent acts as in evaluation; with `greedy`, it always takes the most
        probable action. `is_first` (in `obs` or as an argument) starts a new episode.
        """
        rows, is_batch = self._to_batch(obs, flags)
        count = len(rows["is_first"])
        if self._carry is None:
            self._carry = self.agent.initial(count)
        mode: Mode = "greedy" if greedy else "eval"
        self._carry, action, _ = self.agent.policy(self._carry, rows, mode)
        self._is_first = rows["is_last"]
        if self._keeps_context:
            self._latest_obs, self._is_batch = obs, is_batch
            chosen = {key: np.array(action[key]) for key in self.act_space}
            self._context.append({**rows, **chosen})
            del self._context[:-MAX_CONTEXT]
        flat = {k: _to_env_units(action[k], s) for k, s in self.act_space.items()}
        if not is_batch:
            flat = {k: _unbatch(x, self.act_space[k]) for k, x in flat.items()}
        return to_nested(self.act_space, flat)

    def latent(self) -> dict[str, np.ndarray]:
        """Return the latent state after the last observation given to `act`, by name.

        For DreamerV3: `deter`, `stoch`, and `feat`, the features that the policy gets.
        """
        model, state = self._resume(0)
        arrays = {k: _to_numpy(x) for k, x in model.latent(state).items()}
        return arrays if self._is_batch else {k: x[0] for k, x in arrays.items()}

    def imagine(
        self,
        actions: Any = None,
        horizon: int | None = None,
        greedy: bool = False,
        seed: int = 0,
    ) -> ImaginedRollout:
        """Predict what follows the last observation given to `act`.

        `actions` is a sequence of actions as `act` returns them; or a function from an
        observation, in the environment's own form, to such an action; or None for the
        agent's own policy (with `greedy`, its most probable actions). `horizon` is the
        number of steps, by default the number of given actions, or 15. The rollout
        continues after a predicted end of the episode. The recurrent state of the agent
        does not change.
        """
        is_policy = actions is None or callable(actions)
        try:
            action_list = None if is_policy else list(actions)
            default = DEFAULT_HORIZON if action_list is None else len(action_list)
            steps = default if horizon is None else operator.index(horizon)
        except TypeError:
            raise UserError(
                f"imagine() got {type(actions).__name__} as actions and "
                f"{type(horizon).__name__} as horizon.\n  Fix: pass a list of actions, "
                "a function or None as actions, and horizon=N."
            ) from None
        if steps < 1 or (action_list is not None and len(action_list) < steps):
            given = (
                "a function" if action_list is None else f"{len(action_list)} actions"
            )
            raise UserError(
                f"imagine() got a horizon of {steps} and {given}.\n"
                "  Fix: pass a horizon of at least 1 and an action for every step."
            )
        model, state = self._resume(seed)
        keys = [key for key in model.predicted_keys if key in model.obs_space]
        obs, collected = self._latest_obs, []
        for step in range(steps):
            if actions is None:
                action = model.act(state, greedy)
            else:
                env_action = actions(obs) if action_list is None else action_list[step]
                action = self._to_model_units(env_action, model.act_space)
            state, rows = model.step(state, action)
            latent = {k: _to_numpy(x) for k, x in model.latent(state).items()}
            collected.append((action, rows, latent))
            if callable(actions):
                obs = self._to_env_form(rows)
        acts, all_rows, latents = zip(*collected, strict=True)
        # the model's action spaces, with the dtype and shape that the environment uses
        spaces = {
            key: replace(space, source=self.act_space[key].source)
            for key, space in model.act_space.items()
        }
        taken = [{k: _to_env_units(a[k], s) for k, s in spaces.items()} for a in acts]
        predicted = self._stack([{k: x[k] for k in keys} for x in all_rows])
        outcome = self._stack([{k: x[k] for k in OUTCOME} for x in all_rows])
        return ImaginedRollout(
            predicted,
            outcome["reward"],
            outcome["cont"],
            to_nested(spaces, self._stack(taken)),
            self._stack(list(latents)),
        )

    def _resume(self, seed: int) -> tuple[PolicyWorldModelEnv, Any]:
        """Return the world model and its state after the last observation."""
        model = None
        if isinstance(self.agent, HasWorldModelEnv):
            model = self.agent.world_model_env(seed)
        if not isinstance(model, PolicyWorldModelEnv):
            raise UserError(
                f"The agent {self.source.config.agent!r} has no world model that can "
                "predict from an observation.\n"
                "  Fix: load a run of an agent with a world model, such as dreamer."
            )
        if self._carry is None or not self._context:
            raise UserError("There is no observation yet.\n  Fix: call act(obs) first.")
        # use only rows that belong to the current episode in all entries of the batch
        first = np.stack([row["is_first"] for row in self._context])
        start = max(int(np.flatnonzero(x).max(initial=0)) for x in first.T)
        rows = {
            key: np.stack([row[key] for row in self._context[start:]], 1)
            for key in self._context[0]
        }
        if self.source.crop is not None:
            rows = self.source.crop.center_crop(rows)
        return model, model.resume(self._carry, rows)

    def _to_model_units(self, action: Any, spaces: Spaces) -> Action:
        """Return an action of the environment as a batch in the model's units."""
        count, is_batch = len(self._is_first), self._is_batch
        flat, converted = to_flat(self.act_space, action), {}
        for key, space in spaces.items():
            shape = self.act_space[key].shape
            value = _to_array(key, flat.get(key), "action")
            expected = (count, *shape) if is_batch else shape
            if value.size != math.prod(expected) or not np.isfinite(value).all():
                raise UserError(
                    f"The action {key!r} has shape {value.shape} or entries that are "
                    f"not finite, expected shape {expected}.\n"
                    "  Fix: pass an action of the environment's action space."
                )
            value = value.reshape(count, *shape)
            _check_action(key, value, self.act_space[key])
            converted[key] = space.from_native(value.astype(space.dtype))
        return converted

    def _to_env_form(self, rows: Obs) -> Any:
        """Return predicted observations as the environment would return them."""
        inputs, flat = agent_obs_space(self.obs_space), {}
        for key, space in inputs.items():
            value = rows.get(key, space.zeros(len(self._is_first)))
            env_space = space if space.source is None else space.source.space
            if math.prod(env_space.shape) == math.prod(space.shape):  # not resized
                value = value.astype(env_space.dtype)
                value = value.reshape(len(value), *env_space.shape)
            flat[key] = value if self._is_batch else value[0]
        return to_nested(inputs, flat)

    def _stack(self, steps: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Stack steps along a time axis, after the batch axis if there is one."""
        stacked = {k: np.stack([step[k] for step in steps], 1) for k in steps[0]}
        return stacked if self._is_batch else {k: x[0] for k, x in stacked.items()}

    def _to_batch(self, obs: Any, flags: dict[str, Any]) -> tuple[Obs, bool]:
        """Return checked observations with a batch axis, and whether they had one."""
        inputs = agent_obs_space(self.obs_space)
        flat = to_flat(inputs, obs)
        if missing := [key for key in inputs if key not in flat]:
            form = "a dict" if isinstance(obs, Mapping) else f"a {type(obs).__name__}"
            raise UserError(
                f"The observation is {form} without {', '.join(missing)}.\n"
                "  Fix: pass what the environment returns, or a dict with the keys "
                f"{', '.join(inputs)}."
            )
        if isinstance(obs, Mapping):
            flags = {**{key: obs[key] for key in STEP_KEYS if key in obs}, **flags}
        if unknown := [key for key in flags if key not in STEP_KEYS]:
            raise UserError(
                f"act() got unknown arguments: {', '.join(unknown)}.\n"
                f"  Fix: the arguments are obs, greedy, {', '.join(STEP_KEYS)}."
            )
        arrays = {k: _to_array(k, value, "observation") for k, value in flat.items()}
        is_batch = _has_batch_axis(arrays, self.obs_space)
        if not is_batch:
            arrays = {key: array[None] for key, array in arrays.items()}
        rows = {
            key: self._to_space(key, array, inputs[key])
            for key, array in arrays.items()
        }
        count = len(next(iter(rows.values())))
        if self._carry is not None and count != len(self._is_first):
            raise UserError(
                f"act() got {count} observations after {len(self._is_first)}.\n"
                "  Fix: call reset() before a batch of another size."
            )
        first = self._is_first if self._carry is not None else np.ones(count, bool)
        for key in STEP_KEYS:
            default = first if key == "is_first" else 0
            value = np.asarray(flags.get(key, default), self.obs_space[key].dtype)
            rows[key] = np.array(np.broadcast_to(value, (count,)))
        return rows, is_batch

    def _to_space(self, key: str, array: np.ndarray, space: Space) -> np.ndarray:
        """Return a batch of an observation in the dtype and shape of its space."""
        if (
            space.is_image
            and array.dtype == np.uint8
            and array.shape[1:] != space.shape
        ):
            if array.ndim == 3:  # grayscale images without a channel axis
                array = array[..., None]
            size, resample = space.shape[:2], self.source.config.env.resample
            array = np.stack([resize(image, size, resample) for image in array])
        # a copy: environments may overwrite their arrays
        array = np.array(cast(array, space.dtype), order="C")
        for row in array:
            if problem := space.problem(row):
                raise UserError(
                    f"The observation {key!r} {problem}.\n"
                    "  Fix: pass it as the environment returned it in training."
                )
        return array

    def __getstate__(self) -> dict[str, Any]:
        leaves = pytree.tree_leaves(self._carry)
        return {
            "source": self.source,
            "agent": pytree.tree_map(_to_host, self.agent.state_dict()),
            "carry": [_to_host(leaf) for leaf in leaves],
            "is_first": self._is_first,
            "latest": (self._latest_obs, self._is_batch),
            "context": self._context,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        source = state["source"]
        self.__init__(source, source.restore(state["agent"]))  # type: ignore[misc]
        if len(state["is_first"]):
            self._is_first, self._context = state["is_first"], state["context"]
            self._latest_obs, self._is_batch = state["latest"]
            start, tree = pytree.tree_flatten(self.agent.initial(len(self._is_first)))
            pairs = zip(state["carry"], start, strict=True)
            leaves = [x.to(like.device) for x, like in pairs]
            self._carry = pytree.tree_unflatten(leaves, tree)


def _to_array(key: str, value: Any, kind: str) -> np.ndarray:
    """Return numbers as an array; raise for other values."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # a ragged list, or a tensor on a GPU
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise UserError(
            f"The {kind} {key!r} is a {type(value).__name__}, which is not an array of "
            "numbers.\n  Fix: pass it in the form that the environment uses."
        )
    return array


def _check_action(key: str, value: np.ndarray, space: Space) -> None:
    """Raise if an action in the environment's own units is outside of its space."""
    value = value.astype(np.float64)
    low, high = space.native_bounds
    if space.is_discrete:
        is_valid = (value == np.floor(value)) & (value >= low) & (value < high)
    else:
        # rounding errors of float32 are allowed
        tolerance = 1e-4 * np.where(np.isfinite(high - low), high - low, 0)
        is_valid = (value >= low - tolerance) & (value <= high + tolerance)
    if not is_valid.all():
        raise UserError(
            f"The action {key!r} has {value[~is_valid][0]:g}, which is outside of the "
            "action space.\n  Fix: pass an action of the environment's action space."
        )


def _has_batch_axis(arrays: dict[str, np.ndarray], spaces: Spaces) -> bool:
    """True if all observations have one axis more than their spaces."""
    extra_axes = set()  # numbers of axes before those of the space
    for key, array in arrays.items():
        space = spaces[key]
        shapes = {space.shape}
        if space.source is not None:
            shapes.add(space.source.space.shape)
        if array.shape in shapes:
            extra_axes.add(0)
        elif array.shape[1:] in shapes and len(array):
            extra_axes.add(1)
        else:
            expected = " or ".join(str(shape) for shape in sorted(shapes))
            raise UserError(
                f"The observation {key!r} has shape {array.shape}, expected "
                f"{expected}, or a batch of it.\n  Fix: pass it in that shape."
            )
    is_batch = extra_axes == {1}
    if len(extra_axes) > 1 or (is_batch and len({*map(len, arrays.values())}) > 1):
        given = {key: array.shape for key, array in arrays.items()}
        raise UserError(
            f"The observations do not have the same batch size: {given}.\n"
            "  Fix: pass all of them with the same first axis, or all without it."
        )
    return is_batch


def _to_env_units(value: np.ndarray, space: Space) -> np.ndarray:
    """Return a batch of actions in the environment's own units, dtype and shape."""
    is_float = space.dtype.kind == "f"
    if is_float:
        value = space.to_native(np.clip(value, space.low, space.high))
    if space.source is None:
        return value
    env_space = space.source.space
    value = value.astype(env_space.dtype).reshape(len(value), *env_space.shape)
    return np.clip(value, env_space.low, env_space.high) if is_float else value


def _unbatch(value: np.ndarray, space: Space) -> Any:
    """Return the only entry of a batch, as a Python int if the environment uses one."""
    if space.source is not None and space.source.is_int:
        return int(value[0])
    return value[0] if space.source is None else np.asarray(value[0])


def _to_numpy(value: Any) -> np.ndarray:
    """Return a tensor as an array; floating-point tensors as float32."""
    value = value.detach().cpu()
    array: np.ndarray = (value.float() if value.is_floating_point() else value).numpy()
    return array


def _to_host(value: Any) -> Any:
    """Return a copy of a tensor in host memory; other values as they are."""
    return value.detach().cpu().clone() if hasattr(value, "detach") else value
