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

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from reverie.agents.actor_critic import ActorCritic
from reverie.agents.dreamer_config import DreamerConfig
from reverie.agents.openloop import openloop
from reverie.agents.sizes import check_fit
from reverie.api import (
    FLAGS,
    Action,
    Batch,
    Dream,
    Feed,
    Memory,
    Metrics,
    Mode,
    Notes,
    Obs,
    Report,
    Spaces,
    StateDict,
    UserError,
    Window,
    sight,
)
from reverie.nets.blocks import initialize
from reverie.nets.dice import Dice
from reverie.nets.heads import check_actions
from reverie.nets.optim import Optimizer
from reverie.nets.tree import map1, map2
from reverie.worlds.rssm import RSSM

__all__ = ["Dreamer", "DreamerConfig"]

PRECISIONS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
RETURN_KEYS = ("reward", "is_last", "is_terminal")


def make_rssm(
    config: DreamerConfig, obs_space: Spaces, act_space: Spaces, dtype: torch.dtype
) -> RSSM:
    return RSSM(
        obs_space,
        act_space,
        rssm=config.rssm,
        enc=config.enc,
        dec=config.dec,
        rewhead=config.rewhead,
        conhead=config.conhead,
        discount=config.discount if config.contdisc else 1.0,
        reward_grad=config.reward_grad,
        dtype=dtype,
    )


def make_actor_critic(
    config: DreamerConfig, inputs: int, act_space: Spaces
) -> ActorCritic:
    return ActorCritic(
        inputs,
        act_space,
        policy=config.policy,
        value=config.value,
        slowvalue=config.slowvalue,
        imag_loss=config.imag_loss,
        repl_loss=config.repl_loss,
        retnorm=config.retnorm,
        valnorm=config.valnorm,
        advnorm=config.advnorm,
        discount=config.discount,
        contdisc=config.contdisc,
    )


WORLDS = {"rssm": make_rssm}


class Carry(NamedTuple):
    """What goes on from one step, or one batch, to the next."""

    state: Any
    prevact: dict[str, Tensor]


class Learned(NamedTuple):
    """The outcome of one batch; losses are not yet reduced."""

    losses: dict[str, Tensor]
    states: Any
    dream: Dream
    metrics: Metrics


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
    ):
        if precision not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            raise UserError(
                f"There is no precision {precision!r}.\n  Fix: use {known}."
            )
        if config.world not in WORLDS:
            known = ", ".join(WORLDS)
            raise UserError(f"There is no world {config.world!r}.\n  Fix: use {known}.")
        check_actions(act_space)
        self.obs_space, self.act_space = sight(obs_space), act_space
        for key in self.obs_space.keys() & vars(config.loss_scales).keys():
            raise UserError(
                f"The observation {key!r} is called like a loss.\n"
                "  Fix: rename it in the environment."
            )
        self.config, self.device = config, device
        self.dtype = PRECISIONS[precision]

        self.world = WORLDS[config.world](config, obs_space, act_space, self.dtype)
        self.actor_critic = make_actor_critic(config, self.world.width, act_space)
        self._initialize(seed)

        self.opt = Optimizer(
            dict(self._named_parameters()), config.opt, precision == "float16"
        )
        self.slow_updates = torch.zeros((), device=device)
        purposes = ("policy", "eval", "train", "report")
        self.dice = {purpose: Dice(seed, purpose, device) for purpose in purposes}
        self.carry: dict[str, Carry] = {
            name: self.initial(config.batch_size) for name in ("train", "report")
        }
        self.last_losses: dict[str, Tensor] = {}

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
        self.diet = {"train": train, "report": report}
        self.notes = self.world.notes if config.replay_context else {}
        self.rhythm = None

    # Acting

    def initial(self, batch: int) -> Memory:
        prevact = {
            key: torch.as_tensor(space.zeros(batch), device=self.device)
            for key, space in self.act_space.items()
        }
        return Carry(self.world.initial(batch), prevact)

    @torch.inference_mode()
    def policy(
        self, memory: Memory, obs: Obs, mode: Mode = "train"
    ) -> tuple[Memory, Action, Notes]:
        """Sample actions; also in evaluation, as the original's scores were made."""
        dice = self.dice["policy" if mode == "train" else "eval"]
        batch: Batch = {
            key: torch.as_tensor(obs[key]).to(self.device)[:, None]
            for key in (*self.obs_space, "is_first")
        }
        batch["prevact"] = {key: x[:, None] for key, x in memory.prevact.items()}
        state = map1(lambda x: x[:, 0], self.world.observe(memory.state, batch, dice))
        action = self._act(state, dice)
        notes = self.world.note(state) if self.notes else {}
        return Carry(state, action), _to_numpy(action), _to_numpy(notes)

    def _act(self, state: Any, dice: Dice) -> dict[str, Tensor]:
        return self.actor_critic.act(self.world.features(state), dice)

    # Learning

    def train(self, feed: Feed) -> Metrics:
        """One update on one batch."""
        data = feed("train")
        base, state, batch = self._restore("train", data)
        norms = [norm.clone() for norm in self.actor_critic.norms()]
        learned = self.loss(state, batch, self.dice["train"], training=True)
        self.last_losses = {k: learned.metrics[f"loss/{k}"] for k in learned.losses}
        ok, metrics = self.opt.update(self._weigh(learned.losses))

        # An update that was skipped leaves nothing behind.
        self.actor_critic.update_slow(self.slow_updates, ok)
        self.slow_updates = self.slow_updates + ok
        for norm, before in zip(self.actor_critic.norms(), norms, strict=True):
            norm.copy_(torch.where(ok, norm, before))
        after = Carry(
            map1(lambda x: x[:, -1].detach(), learned.states),
            {key: data[key][:, -1] for key in self.act_space},
        )
        self.carry["train"] = map2(
            lambda new, old: torch.where(ok, new, old), after, base
        )
        context = self.config.replay_context
        stepid = data["stepid"][:, context:]
        if self.notes:
            fresh = self.world.note(learned.states)
            notes = {k: torch.where(ok, fresh[k], data[k][:, context:]) for k in fresh}
            feed.update(stepid, notes)
        if self.config.priosignal:
            signal = self._priority(learned.losses)
            feed.prioritize(stepid[:, -signal.shape[1] :], signal)
        return {**learned.metrics, **metrics}

    def loss(self, state: Any, batch: Batch, dice: Dice, training: bool) -> Learned:
        """All losses of a batch; `training` lets the normalizers follow."""
        config = self.config
        world = self.world.loss(state, batch, dice)
        losses, metrics = dict(world.losses), dict(world.metrics)

        length = batch["is_first"].shape[1]
        last = min(config.imag_last or length, length)
        recent = map1(lambda x: x[:, -last:], world.states)
        start = map1(lambda x: x.detach().flatten(0, 1), recent)
        with torch.no_grad():
            dream = self.world.imagine(
                start, lambda state: self._act(state, dice), config.imag_length, dice
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
        metrics.update({f"loss/{k}": x.mean() for k, x in losses.items()})
        metrics = {key: value.detach() for key, value in metrics.items()}
        return Learned(losses, world.states, dream, metrics)

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
        losses = [k for k, x in self.last_losses.items() if not torch.isfinite(x)]
        return [f"loss/{key}" for key in losses] + [
            f"grad/{name}" for name in self.opt.nonfinite()
        ]

    def _restore(self, name: str, data: Batch) -> tuple[Carry, Any, Batch]:
        """Where the last batch ended, where this one begins, and its rows.

        Sequences that begin take the stored state of the context; consecutive pieces
        of one go on from where the last batch ended.
        """
        context, carry = self.config.replay_context, self.carry[name]
        rows = len(data["is_first"])
        if len(carry.state[0]) != rows:
            carry = self.initial(rows)
        batch = {key: data[key][:, context:] for key in (*self.obs_space, *FLAGS)}
        if not context:
            batch["prevact"] = {
                key: torch.cat([carry.prevact[key][:, None], data[key][:, :-1]], 1)
                for key in self.act_space
            }
            return carry, carry.state, batch
        batch["prevact"] = {
            key: data[key][:, context - 1 : -1] for key in self.act_space
        }
        stored = self.world.recall({k: data[k][:, context - 1] for k in self.notes})
        begins = data["consec"][:, 0] == 0
        state = map2(
            lambda new, old: torch.where(_like(begins, new), new, old),
            stored,
            carry.state,
        )
        return carry, state, batch

    # Looking

    def report(self, feed: Feed) -> Report:
        """All metrics of one batch without learning, and what the world foresees."""
        data, dice = feed("report"), self.dice["report"]
        _, state, batch = self._restore("report", data)
        with torch.set_grad_enabled(self.config.report_gradnorms):
            learned = self.loss(state, batch, dice, training=False)
            metrics = learned.metrics
            if self.config.report_gradnorms:
                metrics.update(self._gradnorms(learned.losses))
        with torch.no_grad():
            metrics.update(openloop(self.world, state, batch, dice))
        self.carry["report"] = Carry(
            map1(lambda x: x[:, -1].detach().clone(), learned.states),
            {key: data[key][:, -1].clone() for key in self.act_space},
        )
        return metrics

    def _gradnorms(self, losses: dict[str, Tensor]) -> Metrics:
        metrics = {}
        for name, loss in losses.items():
            grads = torch.autograd.grad(
                loss.mean(), self.opt.tensors, retain_graph=True, allow_unused=True
            )
            norms = [torch.linalg.vector_norm(g) for g in grads if g is not None]
            metrics[f"gradnorm/{name}"] = torch.linalg.vector_norm(torch.stack(norms))
        return metrics

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
            "rng": {name: dice.state_dict() for name, dice in self.dice.items()},
            "carry": {
                name: {"state": carry.state._asdict(), "prevact": carry.prevact}
                for name, carry in self.carry.items()
            },
        }

    def load_state_dict(self, state: StateDict) -> None:
        self.load_weights(state)
        self.opt.load_state_dict(state["opt"])
        slow_updates = torch.as_tensor(state["counters"]["slow_updates"])
        self.slow_updates = slow_updates.float().to(self.device)
        for name, dice in self.dice.items():
            dice.load_state_dict(state["rng"][name])
        for name, saved in state["carry"].items():
            fresh = self.initial(1)
            moved = map1(lambda x: x.to(self.device), saved)
            self.carry[name] = Carry(
                type(fresh.state)(**moved["state"]), moved["prevact"]
            )

    def load_weights(self, state: StateDict, components: str = ".*") -> list[str]:
        """Take over weights and statistics of the components that match."""
        mine = self.components()
        try:
            chosen = [name for name in mine if re.fullmatch(components, name)]
        except re.error:
            chosen = []
        if not chosen:
            raise UserError(
                f"No component matches {components!r}.\n"
                f"  Fix: use a pattern for some of {', '.join(mine)}."
            )
        for name in chosen:
            check_fit(name, mine[name].state_dict(), state)
        for name in chosen:
            mine[name].load_state_dict(state[name])
        return chosen

    # Private

    def _initialize(self, seed: int) -> None:
        seeds = np.random.SeedSequence([seed, *b"init"]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(seeds[0] >> 1))
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


def _to_numpy(values: Any) -> Any:
    return map1(lambda x: x.cpu().numpy(), values)
