"""`Player`: a trained agent that acts in the environment of a user's own program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch.utils import _pytree as pytree

from reverie.api import Agent, Mode, Obs, UserError
from reverie.envs.wrappers import cast, resize
from reverie.run.load import PolicySource
from reverie.spaces import (
    FLAGS,
    Space,
    Spaces,
    agent_obs_space,
    to_flat,
    to_nested,
)


class Player:
    """A trained agent that acts in an environment and keeps its recurrent state.

    It can be pickled and copied, with its weights, recurrent state and random
    generators.
    """

    def __init__(self, source: PolicySource, agent: Agent):
        self.source, self.agent = source, agent
        self.obs_space, self.act_space = source.spaces
        self.reset()

    def reset(self, where: Any = None) -> None:
        """Start a new episode with the next observation.

        With a mask `where`, start new episodes only in these entries of a batch.
        """
        if where is None:
            self._carry: Any = None
            self._is_first = np.ones(0, bool)
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
        rows, is_batch = self._rows(obs, flags)
        count = len(rows["is_first"])
        if self._carry is None:
            self._carry = self.agent.initial(count)
        mode: Mode = "greedy" if greedy else "eval"
        self._carry, action, _ = self.agent.policy(self._carry, rows, mode)
        self._is_first = rows["is_last"]
        own = {k: _to_own_units(action[k], s) for k, s in self.act_space.items()}
        if not is_batch:
            own = {k: _first(x, self.act_space[k]) for k, x in own.items()}
        return to_nested(self.act_space, own)

    def _rows(self, obs: Any, flags: dict[str, Any]) -> tuple[Obs, bool]:
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
            flags = {**{key: obs[key] for key in FLAGS if key in obs}, **flags}
        if unknown := [key for key in flags if key not in FLAGS]:
            raise UserError(
                f"act() got {', '.join(unknown)}.\n"
                f"  Fix: pass greedy, {', '.join(FLAGS)}, or none of them."
            )
        arrays = {key: _to_array(key, value) for key, value in flat.items()}
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
        for key in FLAGS:
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
            if array.ndim == 3:  # gray images without an axis of channels
                array = array[..., None]
            size, resample = space.shape[:2], self.source.config.env.resample
            array = np.stack([resize(image, size, resample) for image in array])
        array = cast(array, space.dtype)
        for row in array:
            problem = space.problem(row)
            if problem is None and not np.isfinite(row).all():
                problem = "has infinite entries"
            if problem:
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
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        source = state["source"]
        self.__init__(source, source.restore(state["agent"]))  # type: ignore[misc]
        if len(state["is_first"]):
            self._is_first = state["is_first"]
            start, tree = pytree.tree_flatten(self.agent.initial(len(self._is_first)))
            pairs = zip(state["carry"], start, strict=True)
            leaves = [x.to(like.device) for x, like in pairs]
            self._carry = pytree.tree_unflatten(leaves, tree)


def _to_array(key: str, value: Any) -> np.ndarray:
    """Return numbers as an array; raise for other values."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # a ragged list, or a tensor on a GPU
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise UserError(
            f"The observation {key!r} is a {type(value).__name__}, which is not an "
            "array of numbers.\n  Fix: pass it as the environment returned it in "
            "training."
        )
    return array


def _has_batch_axis(arrays: dict[str, np.ndarray], spaces: Spaces) -> bool:
    """True if all observations have one axis more than their spaces."""
    axes = set()
    for key, array in arrays.items():
        space = spaces[key]
        shapes = {space.shape}
        if space.source is not None:
            shapes.add(space.source.space.shape)
        if array.shape in shapes:
            axes.add(0)
        elif array.shape[1:] in shapes and len(array):
            axes.add(1)
        else:
            expected = " or ".join(str(shape) for shape in sorted(shapes))
            raise UserError(
                f"The observation {key!r} has shape {array.shape}, expected "
                f"{expected}, or a batch of it.\n  Fix: pass it in that shape."
            )
    if len(axes) > 1 or len({len(array) for array in arrays.values() if 1 in axes}) > 1:
        given = {key: array.shape for key, array in arrays.items()}
        raise UserError(
            f"The observations do not have the same batch size: {given}.\n"
            "  Fix: pass all of them with the same first axis, or all without it."
        )
    return axes == {1}


def _to_own_units(value: np.ndarray, space: Space) -> np.ndarray:
    """Return a batch of actions in the environment's own units, dtype and shape."""
    is_float = space.dtype.kind == "f"
    if is_float:
        value = space.to_native(np.clip(value, space.low, space.high))
    if space.source is None:
        return value
    own = space.source.space
    value = value.astype(own.dtype).reshape(len(value), *own.shape)
    return np.clip(value, own.low, own.high) if is_float else value


def _first(value: np.ndarray, space: Space) -> Any:
    """Return the only entry of a batch, as a Python int if the environment uses one."""
    if space.source is not None and space.source.is_int:
        return int(value[0])
    return value[0] if space.source is None else np.asarray(value[0])


def _to_host(value: Any) -> Any:
    """Return a copy of a tensor in host memory; other values as they are."""
    return value.detach().cpu().clone() if hasattr(value, "detach") else value
