"""Worlds as `capabilities.WorldModelEnv`: rows in, rows out, one step at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reverie.api import Action, Batch, LatentWorld, Obs
from reverie.nets.rng import Rng
from reverie.nets.tree import tree_map
from reverie.spaces import Spaces, agent_obs_space
from reverie.worlds.iris.world import IrisState, IrisWorld


@contextlib.contextmanager
def _calm(world: Any) -> Iterator[None]:
    """As after training, whatever was done before: without noise of flags."""
    before = world.training
    world.eval()
    try:
        yield
    finally:
        world.train(before)


class LatentWorldModelEnv:
    """WorldModelEnv in any `api.LatentWorld`: it follows the context, then goes on by
    its prior.

    A dream ends when the world gives it less than an even chance to go on.
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
    def foreseen(self) -> list[str]:
        """The keys that the world draws; others are zero in its rows."""
        states = tree_map(lambda x: x[:, None], self.world.initial(1))
        return [key for key in self.world.decode(states) if key in self.obs_space]

    @torch.no_grad()
    def begin(self, context: Batch) -> Any:
        keys = [*self.obs_space, *self.act_space, "is_first"]
        keys += ["reward"] if "reward" in context else []  # some worlds see it
        rows: Batch = {key: self._tensor(context[key]) for key in keys}
        rows["is_first"] = rows["is_first"].clone()
        rows["is_first"][:, 0] = True
        rows["prevact"] = {
            key: torch.cat([torch.zeros_like(rows[key][:, :1]), rows[key][:, :-1]], 1)
            for key in self.act_space
        }
        start = self.world.initial(len(rows["is_first"]))
        states = self.world.observe(start, rows, self.rng)
        return tree_map(lambda x: x[:, -1], states)

    @torch.no_grad()
    def step(self, state: Any, action: Action) -> tuple[Any, Obs]:
        chosen = {key: self._tensor(value) for key, value in action.items()}
        with _calm(self.world):
            dream = self.world.imagine(state, lambda _: chosen, 1, self.rng)
        after = tree_map(lambda x: x[:, 1:], dream.states)
        reward, cont = self.world.outcome(self.world.features(after))
        drawn = {k: x[:, 0] for k, x in self.world.decode(after).items()}
        rows: Obs = {}
        for key, space in self.obs_space.items():
            if key not in drawn:
                rows[key] = space.zeros(len(reward))
                continue
            value = drawn[key].float()
            if space.is_image:
                value = (value.clamp(0, 1) * 255).round()
            low, high = np.asarray(space.low, float), np.asarray(space.high, float)
            array = value.cpu().numpy().reshape(len(reward), *space.shape)
            top = high - 1 if space.dtype.kind in "iub" else high
            rows[key] = np.clip(array, low, top).astype(space.dtype)
        rows["reward"] = reward[:, 0].float().cpu().numpy()
        rows["is_terminal"] = (cont[:, 0] < 0.5).cpu().numpy()
        return tree_map(lambda x: x[:, 0], after), rows

    def _tensor(self, value: Any) -> Tensor:
        return torch.as_tensor(np.asarray(value)).to(self.device)


class IrisWorldModelEnv:
    """WorldModelEnv in the world of Δ-IRIS, which begins from frames and draws its
    ends.
    """

    def __init__(
        self,
        world: IrisWorld,
        obs_space: Spaces,
        act_space: Spaces,
        action: str,
        device: torch.device,
        seed: int = 0,
    ):
        self.world, self.action, self.device = world, action, device
        self.obs_space = {world.key: obs_space[world.key]}
        self.act_space = act_space
        self.low = int(act_space[action].low)
        self.seed(seed)

    def seed(self, seed: int) -> None:
        self.rng = Rng(seed, "dreams", self.device)

    @torch.no_grad()
    def begin(self, context: Batch) -> IrisState:
        blocks = self.world.dynamics.config.transformer.blocks
        image = torch.as_tensor(np.asarray(context[self.world.key]))[:, -blocks:]
        taken = self._index(context[self.action])[:, -blocks:-1]
        return self.world.state_from_frames(image.to(self.device), taken)

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
