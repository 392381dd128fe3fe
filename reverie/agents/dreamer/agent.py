"""DreamerV3: learn a world, dream in it, and learn to act from the dreams.

Every update follows a batch of recorded sequences with the world, dreams on from all
of their states with the current policy, and trains three things at once: the world to
explain what was recorded, the critic to foresee returns (dreamt, and recorded), and the
policy to prefer actions that did better than the critic foresaw.

The replay keeps the state the world was in at each step, so that a sequence cut from
the middle of an episode begins where the episode was (`replay_context`); training
refreshes what the replay keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from reverie.agents.dreamer.config import DreamerConfig
from reverie.agents.dreamer.factory import make_actor_critic, make_world
from reverie.agents.openloop import openloop
from reverie.agents.precision import dtype_of
from reverie.agents.weights import load_components
from reverie.agents.world_model_env import LatentWorldModelEnv
from reverie.api import (
    Action,
    Batch,
    Carry,
    Extras,
    Feed,
    LatentWorld,
    Metrics,
    Mode,
    Obs,
    Rollout,
    StateDict,
    UserError,
)
from reverie.capabilities import Statistics, WorldModelEnv
from reverie.kernels.accelerate import Accelerator
from reverie.nets import standardize as standard
from reverie.nets.blocks import initialize
from reverie.nets.heads import PolicyHead, check_actions
from reverie.nets.rng import Rng
from reverie.nets.tree import tree_map
from reverie.rows import Window
from reverie.spaces import FLAGS, Spaces, agent_obs_space

__all__ = ["Dreamer", "DreamerConfig"]

RETURN_KEYS = ("reward", "is_last", "is_terminal")


class DreamerCarry(NamedTuple):
    """What goes on from one step, or one batch, to the next."""

    state: Any
    prevact: dict[str, Tensor]


class Learned(NamedTuple):
    """The outcome of one batch; losses are not yet reduced."""

    losses: dict[str, Tensor]
    states: Any
    dream: Rollout | None
    metrics: Metrics


class Update(NamedTuple):
    """What an update has to say, and what the replay is to keep of it."""

    metrics: Metrics
    extras: Extras
    priority: Tensor | None


class Dreamer:
    """See the top of this file."""

    def __init__(
        self,
        obs_space: Spaces,
        act_space: Spaces,
        config: DreamerConfig,
        *,
        device: torch.device,
        precision: str = "float32",
        seed: int = 0,
        compile: str = "none",
        overlap: bool = False,
    ):
        dtype = dtype_of(precision)
        check_actions(act_space)
        self.obs_space, self.act_space = agent_obs_space(obs_space), act_space
        taken = {*vars(config.loss_scales), "prevact"}
        for key in self.obs_space.keys() & taken:
            raise UserError(
                f"The observation {key!r} has a name that is used for another thing.\n"
                "  Fix: rename it in the environment."
            )
        self.config, self.device = config, device
        self.dtype = dtype

        self.world: Any = make_world(config, obs_space, act_space, self.dtype)
        self.actor_critic = make_actor_critic(config, self.world.width, act_space)
        self._initialize(seed)

        self.fast = Accelerator(compile, device, overlap)
        self.fast.modules(self.world, self.actor_critic)
        self.fast.low_precision([self.world, self.actor_critic], dtype)
        parameters = dict(self._named_parameters())
        self.opt = self.fast.optimizer(
            parameters, config.opt, scaling=precision == "float16"
        )
        self.slow_updates = torch.zeros((), device=device)
        purposes = ("policy", "eval", "train", "report")
        self.rng = {purpose: Rng(seed, purpose, device) for purpose in purposes}
        self.carry: dict[str, DreamerCarry] = {
            name: self.initial(config.batch_size) for name in ("train", "report")
        }
        self.last_metrics: Metrics = {}

        train = Window(
            config.batch_size,
            config.batch_length,
            config.replay_context,
            config.consec_train,
        )
        report = Window(
            config.batch_size,
            config.report_length,
            config.replay_context,
            config.consec_report,
            online=False,
        )
        self.windows = {"train": train, "report": report}
        self.extras = self.world.extras if config.replay_context else {}
        self.schedule = None
        self.update = self.fast.graph(self.learn, "update", self.rng["train"])
        nets = (self.world, self.actor_critic.pol)
        self.acting = {
            name: self.fast.policy(
                partial(self.act, name), nets, self.rng[name], trains=name == "policy"
            )
            for name in ("policy", "eval")
        }

    # Acting

    def initial(self, batch: int) -> Carry:
        prevact = {
            key: torch.as_tensor(space.zeros(batch), device=self.device)
            for key, space in self.act_space.items()
        }
        return DreamerCarry(self.world.initial(batch), prevact)

    @torch.inference_mode()
    def policy(
        self, carry: Carry, obs: Obs, mode: Mode = "train"
    ) -> tuple[Carry, Action, Extras]:
        """Sample actions; also in evaluation, as the original's scores were made."""
        seen = {key: torch.as_tensor(obs[key]) for key in (*self.obs_space, "is_first")}
        return self.acting["policy" if mode == "train" else "eval"](carry, seen)

    def act(
        self,
        purpose: str,
        world: LatentWorld,
        pol: PolicyHead,
        carry: DreamerCarry,
        seen: Batch,
    ) -> tuple[DreamerCarry, dict[str, Tensor], Extras]:
        """One step with the given weights: what was seen to what is done about it."""
        batch: Batch = {key: x.to(self.device)[:, None] for key, x in seen.items()}
        batch["prevact"] = {key: x[:, None] for key, x in carry.prevact.items()}
        rng = self.rng[purpose]
        state = tree_map(lambda x: x[:, 0], world.observe(carry.state, batch, rng))
        action = self.actor_critic.act(world.features(state), rng, pol)
        return (
            DreamerCarry(state, action),
            action,
            world.to_replay(state) if self.extras else {},
        )

    def _act(self, state: Any, rng: Rng) -> dict[str, Tensor]:
        return self.actor_critic.act(self.world.features(state), rng)

    # Learning

    def train(self, feed: Feed) -> Metrics:
        """One update on one batch."""
        data = feed("train")
        self._make_room("train", len(data["is_first"]))
        self.fast.before_update()
        update: Update = self.update(data)
        stepid = data["stepid"][:, self.config.replay_context :]
        if self.extras:
            feed.write_back(stepid, update.extras)
        if update.priority is not None:
            feed.prioritize(stepid[:, -update.priority.shape[1] :], update.priority)
        self.last_metrics = update.metrics
        return update.metrics

    def learn(self, data: Batch) -> Update:
        """Everything an update does on the device, in place: what a graph records."""
        carry, state, batch = self._restore("train", data)
        followers = [*self.actor_critic.norms(), *self.world.buffers()]
        before = [follower.clone() for follower in followers]
        learned = self.loss(state, batch, self.rng["train"], training=True)
        ok, metrics = self.opt.update(self._weigh(learned.losses))

        # An update that was skipped leaves nothing behind.
        self.actor_critic.update_slow(self.slow_updates, ok)
        self.fast.refresh_frozen()
        self.slow_updates.add_(ok)
        for follower, old in zip(followers, before, strict=True):
            follower.copy_(torch.where(ok, follower, old))
        after = DreamerCarry(
            tree_map(lambda x: x[:, -1].detach(), learned.states),
            {key: data[key][:, -1] for key in self.act_space},
        )
        tree_map(lambda old, new: old.copy_(torch.where(ok, new, old)), carry, after)
        extras, context = {}, self.config.replay_context
        if self.extras:
            fresh = self.world.to_replay(learned.states)
            extras = {k: torch.where(ok, fresh[k], data[k][:, context:]) for k in fresh}
        priority = self._priority(learned.losses) if self.config.priosignal else None
        return Update({**learned.metrics, **metrics}, extras, priority)

    def loss(self, state: Any, batch: Batch, rng: Rng, training: bool) -> Learned:
        """All losses of a batch; `training` lets the normalizers follow."""
        config = self.config
        if self.world.training != training:
            self.world.train(training)
        world = self.world.loss(state, batch, rng)
        losses, metrics = dict(world.losses), dict(world.metrics)
        dream = None
        if config.behaviour:
            dream, more, found = self._behave(world.states, batch, rng, training)
            losses |= more
            metrics |= found
        metrics.update({f"loss/{k}": x.mean() for k, x in losses.items()})
        metrics = {key: value.detach() for key, value in metrics.items()}
        return Learned(losses, world.states, dream, metrics)

    def _behave(
        self, states: Any, batch: Batch, rng: Rng, training: bool
    ) -> tuple[Rollout, dict[str, Tensor], Metrics]:
        """Dream on from recorded states; what actor and critic make of it."""
        config = self.config
        losses: dict[str, Tensor] = {}
        metrics: Metrics = {}
        length = batch["is_first"].shape[1]
        last = min(config.imag_last or length, length)
        recent = tree_map(lambda x: x[:, -last:], states)
        start = tree_map(lambda x: x.detach().flatten(0, 1), recent)
        with torch.no_grad():
            dream = self.world.imagine(
                start, lambda state: self._act(state, rng), config.imag_length, rng
            )
        feat = self.world.features(dream.states)  # (N, H + 1, F)
        recorded = self.world.features(recent)  # (B, last, F)
        if config.ac_grads:
            feat = torch.cat([recorded.flatten(0, 1)[:, None], feat[:, 1:]], 1)
        with torch.no_grad():
            reward, cont = self.world.outcome(feat)
        imagined = self.actor_critic.imag_loss(
            feat, dream.actions, reward, cont, training
        )
        metrics.update(imagined.metrics)
        for name, loss in imagined.losses.items():
            losses[name] = loss.mean(1).reshape(-1, last)  # (B, last)
        if config.repval_loss:
            reward, is_last, is_terminal = (
                batch[key][:, -last:].float() for key in RETURN_KEYS
            )
            boot = imagined.ret[:, 0].reshape(-1, last)
            feat = recorded if config.repval_grad else recorded.detach()
            losses["repval"] = self.actor_critic.repl_loss(
                feat, reward, is_last, is_terminal, boot, training
            ).loss
        return dream, losses, metrics

    def _weigh(self, losses: dict[str, Tensor]) -> Float[Tensor, ""]:
        """The one place where losses are weighed and averaged."""
        scales = vars(self.config.loss_scales)
        parts = [scales.get(k, scales["rec"]) * x.mean() for k, x in losses.items()]
        return torch.stack(parts).sum()

    def _priority(self, losses: dict[str, Tensor]) -> Float[Tensor, "B T"]:
        name, scales = self.config.priosignal, vars(self.config.loss_scales)
        if name == "model":
            others = ("policy", "value", "repval")
            parts = {k: x for k, x in losses.items() if k not in others}
            signal = sum(scales.get(k, scales["rec"]) * x for k, x in parts.items())
        elif name in losses and name != "repval":  # which has one step less
            signal = losses[name]
        else:
            known = ", ".join(["model", *(key for key in losses if key != "repval")])
            raise UserError(
                f"No loss is called {name!r}.\n"
                f"  Fix: set dreamer.priosignal to one of {known}, or to nothing."
            )
        # the policy loss has both signs; what counts is how much there is to learn
        return torch.nan_to_num(signal.detach().abs(), posinf=0.0)

    def nonfinite(self) -> list[str]:
        """The losses, then the gradients, that were not finite in the last update."""
        losses = {k: x for k, x in self.last_metrics.items() if k.startswith("loss/")}
        return [
            *(key for key, loss in losses.items() if not torch.isfinite(loss)),
            *(f"grad/{name}" for name in self.opt.nonfinite()),
        ]

    def _make_room(self, name: str, rows: int) -> None:
        """Begin anew if the number of sequences has changed."""
        if len(self.carry[name].state[0]) != rows:
            self.carry[name] = self.initial(rows)

    def _restore(self, name: str, data: Batch) -> tuple[DreamerCarry, Any, Batch]:
        """Where the last batch ended, where this one begins, and its rows.

        Sequences that begin take the stored state of the context; consecutive pieces
        of one go on from where the last batch ended.
        """
        context, carry = self.config.replay_context, self.carry[name]
        batch = {key: data[key][:, context:] for key in (*self.obs_space, *FLAGS)}
        if not context:
            batch["prevact"] = {
                key: torch.cat([carry.prevact[key][:, None], data[key][:, :-1]], 1)
                for key in self.act_space
            }
            return carry, tree_map(torch.clone, carry.state), batch
        batch["prevact"] = {
            key: data[key][:, context - 1 : -1] for key in self.act_space
        }
        stored = self.world.from_replay(
            {k: data[k][:, context - 1] for k in self.extras}
        )
        begins = data["consec"][:, 0] == 0
        state = tree_map(
            lambda new, old: torch.where(_like(begins, new), new, old),
            stored,
            carry.state,
        )
        return carry, state, batch

    # Looking

    def report(self, feed: Feed) -> Metrics:
        """All metrics of one batch without learning, and what the world foresees."""
        data, rng = feed("report"), self.rng["report"]
        self._make_room("report", len(data["is_first"]))
        _, state, batch = self._restore("report", data)
        with torch.set_grad_enabled(self.config.report_gradnorms):
            learned = self.loss(state, batch, rng, training=False)
            metrics = learned.metrics
            if self.config.report_gradnorms:
                metrics.update(self._gradnorms(learned.losses))
        with torch.no_grad():
            metrics.update(openloop(self.world, state, batch, rng))
        self.carry["report"] = DreamerCarry(
            tree_map(lambda x: x[:, -1].detach().clone(), learned.states),
            {key: data[key][:, -1].clone() for key in self.act_space},
        )
        return metrics

    def _gradnorms(self, losses: dict[str, Tensor]) -> Metrics:
        metrics = {}
        for name, loss in losses.items():
            grads = torch.autograd.grad(
                loss.mean(), self.opt.leaves, retain_graph=True, allow_unused=True
            )
            norms = [
                torch.linalg.vector_norm(g.float()) for g in grads if g is not None
            ]
            metrics[f"gradnorm/{name}"] = torch.linalg.vector_norm(torch.stack(norms))
        return metrics

    @property
    def needs_statistics(self) -> bool:
        return standard.needs_statistics(self.world)

    def set_statistics(self, statistics: Statistics) -> None:
        """Standardise images by what is known of all of them."""
        standard.set_statistics(self.world, statistics)

    @torch.no_grad()
    def episode_losses(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """Losses of the world for every row of whole episodes; nothing is learnt.

        With the same draws every time, so that two judgements can be compared.
        """
        prevact = {
            key: torch.cat([torch.zeros_like(batch[key][:, :1]), batch[key][:, :-1]], 1)
            for key in self.act_space
        }
        start = self.world.initial(len(batch["is_first"]))
        rng = Rng(0, "judge", self.device)
        found = self.world.eval().loss(start, {**batch, "prevact": prevact}, rng)
        return found.losses, batch["mask"]

    def world_model_env(self, seed: int = 0) -> WorldModelEnv:
        """Walks through the world it has learned."""
        spaces = (self.obs_space, self.act_space)
        return LatentWorldModelEnv(self.world, *spaces, self.device, seed)

    def sections(self, feed: Feed) -> dict[str, Callable[[], Any]]:
        """The work of an update in pieces, to be timed."""
        from reverie.agents.dreamer.sections import dreamer_sections

        return dreamer_sections(self, feed)

    # Keeping

    def components(self) -> dict[str, nn.Module]:
        """Everything with weights or statistics, by name."""
        return dict((*self.world.named_children(), *self.actor_critic.named_children()))

    def state_dict(self) -> StateDict:
        parts = {k: dict(m.state_dict()) for k, m in self.components().items()}
        return {
            **parts,
            "opt": self.opt.state_dict(),
            "counters": {"slow_updates": self.slow_updates},
            "rng": {name: rng.state_dict() for name, rng in self.rng.items()},
            "carry": {
                name: {"state": carry.state._asdict(), "prevact": carry.prevact}
                for name, carry in self.carry.items()
            },
        }

    def load_state_dict(self, state: StateDict) -> None:
        self.load_weights(state)
        self.opt.load_state_dict(state["opt"])
        slow_updates = torch.as_tensor(state["counters"]["slow_updates"])
        self.slow_updates.copy_(slow_updates)
        for name, rng in self.rng.items():
            rng.load_state_dict(state["rng"][name])
        for name, saved in state["carry"].items():
            self._make_room(name, len(next(iter(saved["state"].values()))))
            carry = self.carry[name]
            tree_map(
                lambda mine, x: mine.copy_(x), carry.state._asdict(), saved["state"]
            )
            tree_map(lambda mine, x: mine.copy_(x), carry.prevact, saved["prevact"])

    def load_weights(self, state: StateDict, components: str = ".*") -> list[str]:
        """Take over weights and statistics of the components that match."""
        chosen = load_components(self.components(), state, components)
        self.fast.weights_changed()
        return chosen

    # Private

    def _initialize(self, seed: int) -> None:
        seeds = np.random.SeedSequence([seed, *b"init"]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(seeds[0]) >> 1)
        parts = self.actor_critic
        for part in (self.world, parts.pol, parts.val):
            initialize(part, generator)
        parts.slowval.load_state_dict(parts.val.state_dict())
        self.world.to(self.device)
        parts.to(self.device)

    def _named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for part, module in self.components().items():
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    yield f"{part}.{name}", parameter


def _like(mask: Tensor, x: Tensor) -> Tensor:
    return mask.reshape(-1, *[1] * (x.ndim - 1))
