"""World models as `capabilities.WorldModelEnv`, simulated step by step on arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reverie.agents.actions import previous_actions
from reverie.api import Action, Batch, LatentWorld, Obs
from reverie.nets.rng import Rng
from reverie.nets.tree import tree_map
from reverie.spaces import Space, Spaces, agent_obs_space
from reverie.worlds.iris.world import IrisState, IrisWorld


class LatentWorldModelEnv:
    """WorldModelEnv of an `api.LatentWorld`.

    States are inferred from the context and then predicted with the prior. A rollout is
    terminal when the continue probability is below 0.5.
    """

    def __init__(
        self,
        world: LatentWorld,
        obs_space: Spaces,
        act_space: Spaces,
        device: torch.device,
        seed: int = 0,
    ):
        self.world, self.device = world, device
        self.obs_space, self.act_space = agent_obs_space(obs_space), act_space
        self.seed(seed)

    def seed(self, seed: int) -> None:
        self.rng = Rng(seed, "dreams", self.device)

    @property
    @torch.no_grad()
    def predicted_keys(self) -> list[str]:
        states = tree_map(lambda x: x[:, None], self.world.initial(1))
        return [key for key in self.world.decode(states) if key in self.obs_space]

    @torch.no_grad()
    def begin(self, context: Batch) -> Any:
        keys = [*self.obs_space, *self.act_space, "is_first"]
        keys += ["reward"] if "reward" in context else []  # an input of some worlds
        rows: Batch = {key: self._tensor(context[key]) for key in keys}
        rows["is_first"] = rows["is_first"].clone()
        rows["is_first"][:, 0] = True
        rows["prevact"] = previous_actions(rows, self.act_space)
        start = self.world.initial(len(rows["is_first"]))
        states = self.world.observe(start, rows, self.rng)
        return tree_map(lambda x: x[:, -1], states)

    @torch.no_grad()
    def step(self, state: Any, action: Action) -> tuple[Any, Obs]:
        actions = {key: self._tensor(value) for key, value in action.items()}
        with _eval_mode(self.world):
            rollout = self.world.imagine(state, lambda _: actions, 1, self.rng)
        states = tree_map(lambda x: x[:, 1:], rollout.states)
        reward, cont = self.world.outcome(self.world.features(states))
        decoded = {key: x[:, 0] for key, x in self.world.decode(states).items()}
        rows: Obs = {
            key: _to_space(decoded[key], space)
            if key in decoded
            else space.zeros(len(reward))
            for key, space in self.obs_space.items()
        }
        rows["reward"] = reward[:, 0].float().cpu().numpy()
        rows["is_terminal"] = (cont[:, 0] < 0.5).cpu().numpy()
        return tree_map(lambda x: x[:, 0], states), rows

    def _tensor(self, value: Any) -> Tensor:
        return torch.as_tensor(np.asarray(value)).to(self.device)


class IrisWorldModelEnv:
    """WorldModelEnv of the Δ-IRIS world.

    It starts from frames, and samples whether a rollout is terminal.
    """

    def __init__(
        self,
        world: IrisWorld,
        obs_space: Spaces,
        act_space: Spaces,
        device: torch.device,
        seed: int = 0,
    ):
        self.world, self.device, self.act_space = world, device, act_space
        self.obs_space = {world.key: obs_space[world.key]}
        ((self.action, space),) = act_space.items()
        self.low = int(space.low)
        self.seed(seed)

    def seed(self, seed: int) -> None:
        self.rng = Rng(seed, "dreams", self.device)

    @property
    def predicted_keys(self) -> list[str]:
        return list(self.obs_space)

    @torch.no_grad()
    def begin(self, context: Batch) -> IrisState:
        blocks = self.world.dynamics.config.transformer.blocks
        image = torch.as_tensor(np.asarray(context[self.world.key]))[:, -blocks:]
        actions = self._index(context[self.action])[:, -blocks:-1]
        return self.world.state_from_frames(image.to(self.device), actions)

    @torch.no_grad()
    def step(self, state: IrisState, action: Action) -> tuple[IrisState, Obs]:
        index = self._index(action[self.action])
        state = self.world.step(state, index, self.rng).state
        rows = {
            self.world.key: state.image.cpu().numpy(),
            "reward": state.reward.float().cpu().numpy(),
            "is_terminal": state.end.cpu().numpy(),
        }
        return state, rows

    def _index(self, action: Any) -> Tensor:
        index = torch.as_tensor(np.asarray(action)).long() - self.low
        return index.to(self.device)


@contextlib.contextmanager
def _eval_mode(world: Any) -> Iterator[None]:
    """Put a world into eval mode, so that VTA adds no noise to its boundary logits."""
    training = world.training
    world.eval()
    try:
        yield
    finally:
        world.train(training)


def _to_space(value: Tensor, space: Space) -> np.ndarray:
    """Convert decoder outputs `(N, ...)` to the dtype, shape and bounds of a space."""
    value = value.float()
    if space.is_image:
        value = (value.clamp(0, 1) * 255).round()
    low, high = np.asarray(space.low, float), np.asarray(space.high, float)
    array = value.cpu().numpy().reshape(len(value), *space.shape)
    top = high - 1 if space.dtype.kind in "iub" else high
    clipped: np.ndarray = np.clip(array, low, top).astype(space.dtype)
    return clipped
