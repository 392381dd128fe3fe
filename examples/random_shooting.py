"""A custom agent: plans by random shooting in an RSSM, and adds a loss to it.

    reverie train --agent examples.random_shooting:RandomShooting --task catch \
        --random_shooting.candidates 64

At every step, it samples action sequences, imagines them with the world model, and
takes the first action of the sequence with the highest predicted return. The additional
loss trains a head that predicts the action between two states (inverse dynamics).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from reverie.agents.dreamer.config import DreamerConfig
from reverie.agents.dreamer.factory import make_world
from reverie.agents.open_loop import open_loop_videos
from reverie.agents.weights import load_components
from reverie.capabilities import AgentConfig
from reverie.nets.blocks import initialize
from reverie.nets.heads import PolicyConfig, PolicyHead
from reverie.nets.optim.optimizer import Optimizer
from reverie.nets.rng import Rng
from reverie.nets.tree import tree_map
from reverie.rows import Window
from reverie.spaces import STEP_KEYS, agent_obs_space


@dataclass(frozen=True)
class RandomShootingConfig(AgentConfig):
    """Settings, as flags `--random_shooting.*`."""

    candidates: int = 256
    """Number of action sequences that are compared at every step."""
    horizon: int = 10
    """Length of each sequence in steps."""
    inverse_scale: float = 0.1
    """Scale of the inverse-dynamics loss."""
    model: DreamerConfig = field(default_factory=DreamerConfig)
    """World model, batch size and optimizer, as in `dreamer`."""


class PlannerCarry(NamedTuple):
    """Recurrent state of the policy: world-model state and previous action."""

    state: Any
    prevact: dict[str, torch.Tensor]


class RandomShooting:
    """An agent (protocol `reverie.api.Agent`) without actor and critic."""

    Config = RandomShootingConfig

    def __init__(self, obs_space, act_space, config, options):
        model, device, seed = config.model, options.device, options.seed
        self.config, self.device, self.act_space = config, device, act_space
        self.obs_space = agent_obs_space(obs_space)
        self.world = make_world(model, obs_space, act_space, options.dtype)
        head = PolicyConfig(layers=1, units=64)
        self.inverse = PolicyHead(2 * self.world.width, act_space, head)
        for part in self.components().values():
            initialize(part, torch.Generator().manual_seed(seed))
            part.to(device)
        parts = self.components().items()
        params = {f"{k}.{n}": p for k, m in parts for n, p in m.named_parameters()}
        self.opt = Optimizer(params, model.opt)
        self.rng = {k: Rng(seed, k, device) for k in ("train", "policy", "report")}
        train = Window(model.batch_size, model.batch_length)
        self.windows = {"train": train, "report": Window(4, model.report_length)}
        self.extras, self.schedule, self.losses = {}, None, {}

    def initial(self, batch):
        zeros = {k: s.zeros(batch) for k, s in self.act_space.items()}
        prevact = {k: torch.as_tensor(x).to(self.device) for k, x in zeros.items()}
        return PlannerCarry(self.world.initial(batch), prevact)

    @torch.no_grad()
    def policy(self, carry, obs, mode="train"):
        keys = (*self.obs_space, "is_first")
        row = {k: torch.as_tensor(obs[k]).to(self.device)[:, None] for k in keys}
        row["prevact"] = {k: x[:, None] for k, x in carry.prevact.items()}
        states = self.world.observe(carry.state, row, self.rng["policy"])
        state = tree_map(lambda x: x[:, 0], states)
        action = self.plan(state, len(obs["is_first"]))
        arrays = {k: x.cpu().numpy() for k, x in action.items()}
        return PlannerCarry(state, action), arrays, {}

    def plan(self, state, count):
        """Return the first action of the best sequence, for each of `count` states."""
        candidates, rng = self.config.candidates, self.rng["policy"]
        start = tree_map(lambda x: x.repeat_interleave(candidates, 0), state)
        rollout = self.world.imagine(
            start,
            lambda _: self.random_actions(count * candidates),
            self.config.horizon,
            rng,
        )
        reward, cont = self.world.reward_and_cont(self.world.features(rollout.states))
        weight = torch.cumprod(cont[:, :-1], 1)  # P(the episode continues until there)
        returns = (reward[:, 1:] * weight).sum(1).reshape(count, candidates)
        best = returns.argmax(1) + torch.arange(count, device=self.device) * candidates
        return {key: x[best, 0] for key, x in rollout.actions.items()}

    def random_actions(self, count):
        """Sample actions uniformly."""
        action = {}
        for key, space in self.act_space.items():
            low, high = torch.tensor(space.low), torch.tensor(space.high)
            if not space.is_discrete:  # continuous actions are in [-1, 1]
                low, high = low.clamp(min=-1), high.clamp(max=1)
            zeros = torch.zeros(count, *space.shape, device=self.device)
            uniform = self.rng["policy"].uniform(zeros)
            value = low.to(zeros) + (high - low).to(zeros) * uniform
            dtype = torch.as_tensor(space.zeros()).dtype
            action[key] = value.to(dtype)  # rounds down, so `high` is never reached
        return action

    def train(self, feed):
        loss, _ = self.loss(feed("train"), self.rng["train"])
        self.losses = {f"loss/{k}": x.mean().detach() for k, x in loss.items()}
        _, metrics = self.opt.update(sum(x.mean() for x in loss.values()))
        return {**self.losses, **metrics}

    def loss(self, data, rng):
        """Return the losses by name, not reduced, and the batch of the world model."""
        batch = {key: data[key] for key in (*self.obs_space, *STEP_KEYS)}
        batch["prevact"] = {k: shift(data[k]) for k in self.act_space}
        start = self.world.initial(len(data["is_first"]))
        world_loss = self.world.loss(start, batch, rng)
        feat = self.world.features(world_loss.states)
        dists = self.inverse(torch.cat([feat[:, :-1], feat[:, 1:]], -1))
        nll = sum(-dist.logp(data[k][:, :-1]) for k, dist in dists.items())
        same_episode = (~batch["is_first"][:, 1:]).float()
        inverse = self.config.inverse_scale * nll * same_episode
        return {**world_loss.losses, "inverse": inverse}, batch

    @torch.no_grad()
    def report(self, feed):
        losses, batch = self.loss(feed("report"), self.rng["report"])
        start = self.world.initial(len(batch["is_first"]))
        videos = open_loop_videos(self.world, start, batch, self.rng["report"])
        return {**{f"loss/{k}": x.mean() for k, x in losses.items()}, **videos}

    def nonfinite(self):
        losses = [key for key, x in self.losses.items() if not torch.isfinite(x)]
        return losses + [f"grad/{name}" for name in self.opt.nonfinite()]

    def components(self):
        return {"world": self.world, "inverse": self.inverse}

    def load_weights(self, state, components=".*"):
        return load_components(self.components(), state, components)

    def state_dict(self):
        parts = {k: dict(m.state_dict()) for k, m in self.components().items()}
        rng = {name: rng.state_dict() for name, rng in self.rng.items()}
        return {**parts, "opt": self.opt.state_dict(), "rng": rng}

    def load_state_dict(self, state):
        self.load_weights(state)
        self.opt.load_state_dict(state["opt"])
        for name, rng in self.rng.items():
            rng.load_state_dict(state["rng"][name])


def shift(action):
    """Convert the actions chosen in each row to the actions that led to each row."""
    return torch.cat([torch.zeros_like(action[:, :1]), action[:, :-1]], 1)
