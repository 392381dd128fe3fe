"""Δ-IRIS: a tokenizer of changes, a transformer that foresees them, and an actor-critic
that learns in its dreams.

The three parts are trained apart, each with an optimizer, batches and a start of its
own, in epochs: collect, then update each part a number of times (`epochs.py`). Every
call of `train` is one update of the part that is due.

Time is that of the original inside this agent and its world: reward and end belong to
the action that earned them, and the last observation of an episode does not exist. Rows
of the replay are shifted at the border (`iris_rows.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn

from reverie.agents.iris.actor_critic import PixelActorCritic, PixelNet, Recall
from reverie.agents.iris.batches import (
    at_least,
    choose_action,
    choose_image,
    to_segment,
    with_axes_of,
)
from reverie.agents.iris.config import PARTS, IrisConfig
from reverie.agents.iris.report import episode_losses, look
from reverie.agents.iris.schedule import Epochs, Share
from reverie.agents.weights import load_components
from reverie.agents.world_model_env import IrisWorldModelEnv
from reverie.api import (
    Action,
    Batch,
    Carry,
    Extras,
    Feed,
    Metrics,
    Mode,
    Obs,
    StateDict,
    UserError,
)
from reverie.capabilities import WorldModelEnv
from reverie.kernels.accelerate import Accelerator
from reverie.nets.optim.optimizer import Optimizer, dense_weights
from reverie.nets.rng import Rng
from reverie.rows import Window
from reverie.spaces import Spaces
from reverie.worlds.iris.segment import EpisodeSegment
from reverie.worlds.iris.world import IrisWorld

__all__ = ["Iris", "IrisConfig", "to_segment"]

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Learner = Callable[[tuple[Batch, ...]], Metrics]
IN_ROW = "opt/nonfinite_in_row"
REPORTED = 8
"""Sequences of a report."""


class IrisCarry(NamedTuple):
    """What goes on from one step of acting to the next."""

    recall: Recall
    frames: UInt8[Tensor, "N T h w c"]  # the newest of the episode; black before it
    stretch: Int[Tensor, " N"]  # of collecting in which `recall` began; on the CPU


class Looking(NamedTuple):
    """The part of it that lives on the device."""

    recall: Recall
    frames: UInt8[Tensor, "N T h w c"]


class Iris:
    """See the top of this file."""

    def __init__(
        self,
        obs_space: Spaces,
        act_space: Spaces,
        config: IrisConfig,
        *,
        device: torch.device,
        precision: str = "float32",
        seed: int = 0,
        compile: str = "none",
        overlap: bool = False,
    ):
        if precision not in PRECISIONS:
            known = " or ".join(PRECISIONS)
            raise UserError(
                f"Δ-IRIS does not train in {precision}.\n  Fix: --precision {known}."
            )
        self.config, self.device = config, device
        self.obs_space, self.act_space = obs_space, act_space
        self.image = choose_image(obs_space, config.image)
        self.action, self.low, actions = choose_action(act_space)
        space = obs_space[self.image]
        self.world = IrisWorld(
            space,
            actions,
            tokenizer=config.tokenizer,
            dynamics=config.world_model,
            dtype=PRECISIONS[precision],
            key=self.image,
        )
        self.actor_critic = PixelActorCritic(
            space.shape, actions, config.actor_critic, self.world.dtype
        )
        self._initialize(seed)
        if config.save_memory and device.type == "cuda":
            self.world.save_memory()
        self.fast = Accelerator(compile, device, overlap)
        self.fast.modules(self.world, self.actor_critic)
        # What dreams are dreamt in: the world itself, or a copy in half precision.
        self.dreamt = self.world
        if self.world.dtype != torch.float32:
            self.dreamt = self.world.frozen_copy(self.world.dtype)
        self._dreamt_is_old = True

        nets = (self.actor_critic.online, self.actor_critic.target)
        frames = [net.frame for net in nets if net.dtype != torch.float32]
        self.fast.low_precision([self.world, *frames], self.world.dtype)
        self.opts = {name: self._optimizer(name) for name in PARTS}
        purposes = ("policy", "eval", "train", "report")
        self.rng = {purpose: Rng(seed, purpose, device) for purpose in purposes}
        shares = {name: getattr(config.learn, name).share for name in PARTS}
        if not config.behaviour:
            shares["actor_critic"] = Share(0, 0, 0)
        self.schedule = Epochs(config.schedule, shares)
        self.extras: Spaces = {}
        self.windows = {name: self._window(name) for name in PARTS}
        longest = max(config.learn.world_model.length, config.actor_critic.burn_in + 2)
        self.windows["report"] = Window(
            REPORTED, longest + 1, select="episodes", online=False
        )
        trained, dreamt = config.learn.world_model.length, config.dreamt
        if config.behaviour and trained < dreamt:
            warnings.warn(
                f"The transformer learns from sequences of {trained} frames and dreams "
                f"of {dreamt}, whose last places nobody teaches it. "
                f"--iris.learn.world_model.length {dreamt} would.",
                stacklevel=2,
            )
        self._last: dict[str, Metrics] = {}  # losses of the last update, by part
        self.learning = {name: self._learner(name) for name in PARTS}
        net = (self.actor_critic.online,)
        self.acting = {
            purpose: self.fast.policy(
                partial(self.act, purpose), net, self.rng[purpose], purpose == "policy"
            )
            for purpose in ("policy", "eval")
        }

    # Acting

    def initial(self, batch: int) -> Carry:
        shape = (batch, self.config.actor_critic.burn_in, *self.world.shape)
        return IrisCarry(
            self.actor_critic.online.initial(batch),
            torch.zeros(shape, dtype=torch.uint8, device=self.device),
            torch.full((batch,), -1, dtype=torch.int64),
        )

    @torch.inference_mode()
    def policy(
        self, carry: Carry, obs: Obs, mode: Mode = "train"
    ) -> tuple[Carry, Action, Extras]:
        """Choose actions; when a stretch of acting begins, look back first.

        At that time the LSTM forgets, and watches the newest frames of the running
        episode again, black before its first. Episodes that begin within a stretch
        begin with an empty carry.
        """
        training = mode == "train"
        purpose = "policy" if training else "eval"
        first = torch.as_tensor(np.asarray(obs["is_first"]))
        last = torch.as_tensor(np.asarray(obs["is_last"]))
        looking = Looking(carry.recall, carry.frames)
        seen = {"image": torch.as_tensor(obs[self.image]), "first": first}
        stretch, began = self.schedule.epoch if training else 0, carry.stretch
        if training and self.schedule.is_random:
            looking, choice = self._wander(looking, seen)
        elif (late := (began != stretch) & ~last).any():
            looking = self._look_back(looking, first, late)
            seen["first"] = torch.zeros_like(first)
            net = self.actor_critic.online
            looking, choice, _ = self.act(purpose, net, looking, seen)
            began = torch.where(late, stretch, began)
        else:
            looking, choice, _ = self.acting[purpose](looking, seen)
        dtype = self.act_space[self.action].dtype
        index: Any = choice["index"]  # replays answer in host memory
        index = index.cpu().numpy() if isinstance(index, Tensor) else index
        action = (index + self.low).astype(dtype)
        carry = IrisCarry(looking.recall, looking.frames, began)
        return carry, {self.action: action}, {}

    def act(
        self, purpose: str, net: PixelNet, looking: Looking, seen: Batch
    ) -> tuple[Looking, dict[str, Tensor], Extras]:
        """See the newest frames and choose; all on the device."""
        image = seen["image"].to(self.device)
        recall, frames = self._forget(looking, seen["first"])
        recall, index = self._choose(net, recall, image, purpose)
        return Looking(recall, _newest(frames, image)), {"index": index}, {}

    def _wander(
        self, looking: Looking, seen: Batch
    ) -> tuple[Looking, dict[str, Tensor]]:
        """Choose anything, and remember only what was seen."""
        image = seen["image"].to(self.device)
        frames = torch.where(
            with_axes_of(looking.frames, seen["first"]), 0, looking.frames
        )
        index = self._random(len(image), self.rng["policy"])
        return Looking(looking.recall, _newest(frames, image)), {"index": index}

    def _forget(self, looking: Looking, first: Bool[Tensor, " N"]) -> Looking:
        """Begin anew where an episode does."""
        recall, frames = looking
        empty = self.actor_critic.online.initial(len(frames))
        frames = torch.where(with_axes_of(frames, first), 0, frames)
        return Looking(_where(first, empty, recall), frames)

    def _look_back(
        self, looking: Looking, first: Bool[Tensor, " N"], late: Bool[Tensor, " N"]
    ) -> Looking:
        """Burn in where a stretch of acting begins."""
        recall, frames = self._forget(looking, first)
        return Looking(_where(late, self.actor_critic.burn_in(frames), recall), frames)

    def _choose(
        self, net: PixelNet, recall: Recall, image: Tensor, purpose: str
    ) -> tuple[Recall, Int[Tensor, " N"]]:
        acting, training = self.config.acting, purpose == "policy"
        rng = self.rng[purpose]
        epsilon = acting.epsilon if training else acting.eval_epsilon
        temperature = acting.temperature if training else acting.eval_temperature
        sample = acting.sample if training else acting.eval_sample

        def choose(logits: Tensor) -> Tensor:
            if not sample:
                return logits.argmax(-1)
            return rng.categorical((logits / temperature).softmax(-1))

        recall, logits = net.decide(recall, image)
        index = choose(logits)
        if epsilon > 0:
            tosses = 1 if acting.coin == "vector" else len(image)
            coin = rng.uniform(torch.zeros(tosses, device=self.device)) < epsilon
            index = torch.where(coin, self._random(len(image), rng), index)
        return recall, index

    def _random(self, rows: int, rng: Rng) -> Int[Tensor, " N"]:
        even = torch.ones(rows, self.world.actions, device=self.device)
        return rng.categorical(even)

    # Learning

    def train(self, feed: Feed) -> Metrics:
        """One update of the part that is due; of every part, if none is."""
        name = self.schedule.part
        if name is None:
            acts = self.config.behaviour
            parts = [part for part in PARTS if acts or part != "actor_critic"]
            self._last = {}
            found = [self._update(part, feed) for part in parts]
            worst = torch.stack([metrics[IN_ROW] for metrics in found]).amax()
            return {**{k: x for each in found for k, x in each.items()}, IN_ROW: worst}
        self._last = {}
        # In the first epoch every episode counts the same, however often it is seen.
        feed.count_uses(name, self.schedule.epoch > 1)
        metrics = self._update(name, feed)
        metrics["epoch"] = self.schedule.epoch
        return metrics

    def _update(self, name: str, feed: Feed, learn: Learner | None = None) -> Metrics:
        rounds = getattr(self.config.learn, name).accumulate
        return self.update(name, [feed(name) for _ in range(rounds)], learn)

    def update(
        self, name: str, batches: Sequence[Batch], learn: Learner | None = None
    ) -> Metrics:
        """One update of a part, from the gradients of all batches together."""
        if name == "actor_critic":
            self._dream_world()
            self.fast.before_update()
        metrics = dict((learn or self.learning[name])(tuple(batches)))
        self._last[name] = {k: x for k, x in metrics.items() if k[:5] == "loss/"}
        if name != "actor_critic":
            self._dreamt_is_old = True
        return metrics

    def learn(self, name: str, batches: tuple[Batch, ...]) -> Metrics:
        """Everything an update does on the device, in place: what a graph records."""
        opt, rounds = self.opts[name], len(batches)
        total, found = torch.zeros((), device=self.device), dict[str, Any]()
        grads: list[Tensor] = []
        for batch in batches:
            losses, metrics = self.losses(name, self._segment(batch))
            loss = torch.stack([x.mean() for x in losses.values()]).sum() / rounds
            new = opt.gradients(loss)
            if grads:
                torch._foreach_add_(grads, new)
            else:
                grads = new
            total = total + loss.detach()
            seen = {f"loss/{name}/{k}": x.mean().detach() for k, x in losses.items()}
            seen |= {f"{name}/{k}": x for k, x in metrics.items()}
            found = seen if not found else {k: found[k] + x for k, x in seen.items()}
        if rounds > 1:
            found = {key: value / rounds for key, value in found.items()}
        _, metrics = opt.apply(total, grads)
        in_row = {IN_ROW: metrics.pop(IN_ROW)}
        return {**found, **{f"{name}/{k}": x for k, x in metrics.items()}, **in_row}

    def losses(
        self, name: str, segment: EpisodeSegment
    ) -> tuple[dict[str, Float[Tensor, ...]], Metrics]:
        """The losses of one part on a batch, scaled; their means add up to its total.

        The codebook of the tokenizer, and the slow copy of the actor-critic, follow.
        """
        rng = self.rng["train"]
        if name == "tokenizer":
            found = self.world.tokenizer_loss(segment, rng)
            return found.losses, found.metrics
        if name == "world_model":
            found = self.world.dynamics_loss(segment)
            return found.losses, found.metrics
        nets = self.actor_critic
        world = self._dream_world()
        before = segment.image[:, :-1]
        recall = nets.burn_in(before)
        dream = nets.dream(
            world,
            segment.image,
            segment.action,
            rng,
            recall=recall,
            acts_last=False,
        )
        view, action = dream.states, dream.actions["action"][:, :-1]
        learned = nets.loss(before, view.image, action, view.reward, view.end, recall)
        nets.update_target()
        self.fast.refresh_frozen()
        return learned.losses, learned.metrics

    def nonfinite(self) -> list[str]:
        """The losses, then the gradients, that were not finite in the last update."""
        losses = {key: x for part in self._last.values() for key, x in part.items()}
        bad = [key for key, loss in losses.items() if not torch.isfinite(loss)]
        for name in self._last:
            bad += [f"grad/{name}.{key}" for key in self.opts[name].nonfinite()]
        return bad

    def _dream_world(self) -> IrisWorld:
        """The world to dream in, with the weights of now."""
        if self._dreamt_is_old and self.dreamt is not self.world:
            self.world.refresh(self.dreamt)
        self._dreamt_is_old = False
        return self.dreamt

    def _segment(self, batch: Batch) -> EpisodeSegment:
        ends = "is_last" if self.config.ends == "last" else "is_terminal"
        return to_segment(batch, self.image, self.action, self.low, ends)

    def sections(self, feed: Feed) -> dict[str, Callable[[], Any]]:
        """An update of each part, to be timed; that of the last one with its dream.

        Each is recorded anew, so that the memory it takes shows as well.
        """
        return {
            name: partial(self._update, name, feed, self._learner(name))
            for name in PARTS
        }

    # Looking

    @torch.no_grad()
    def report(self, feed: Feed) -> Metrics:
        """Losses without learning, and pictures of what the world and policy do."""
        segment, rng = self._segment(feed("report")), self.rng["report"]
        return look(
            self.world,
            self._dream_world(),
            self.actor_critic,
            segment,
            rng,
            self.config.learn.tokenizer.length,
        )

    def episode_losses(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """Losses of each row, by what led to it; of the first one nothing is said."""
        rows, learn = batch["mask"].shape[1], self.config.learn
        lengths = {name: getattr(learn, name).length for name in PARTS[:2]}
        keys = (self.image, self.action, "reward", "is_last", "is_terminal", "mask")
        # two frames and the outcome of the second are the least there is to judge
        segment = self._segment({key: at_least(batch[key], 3) for key in keys})
        losses, counts = episode_losses(
            self.world, segment, lengths, self.rng["report"]
        )
        shifted = {key: F.pad(loss, (1, 0))[:, :rows] for key, loss in losses.items()}
        return shifted, F.pad(counts, (1, 0))[:, :rows]

    def world_model_env(self, seed: int = 0) -> WorldModelEnv:
        """Walks through the world it has learned."""
        return IrisWorldModelEnv(
            self._dream_world(),
            self.obs_space,
            self.act_space,
            self.action,
            self.device,
            seed,
        )

    # Keeping

    def components(self) -> dict[str, nn.Module]:
        """Everything with weights or statistics, by name."""
        world = self.world
        parts = (world.tokenizer, world.dynamics, self.actor_critic)
        return dict(zip(PARTS, parts, strict=True))

    def state_dict(self) -> StateDict:
        parts = {k: dict(m.state_dict()) for k, m in self.components().items()}
        return {
            **parts,
            "opt": {name: opt.state_dict() for name, opt in self.opts.items()},
            "rng": {name: rng.state_dict() for name, rng in self.rng.items()},
        }

    def load_state_dict(self, state: StateDict) -> None:
        self.load_weights(state)
        for name, opt in self.opts.items():
            opt.load_state_dict(state["opt"][name])
        for name, rng in self.rng.items():
            rng.load_state_dict(state["rng"][name])

    def load_weights(self, state: StateDict, components: str = ".*") -> list[str]:
        """Take over the weights of the parts that match."""
        chosen = load_components(self.components(), state, components)
        self.fast.weights_changed()
        self._dreamt_is_old = True
        return chosen

    # Private

    def _learner(self, name: str) -> Learner:
        """How to update a part: by running it, or on a GPU by replaying it."""
        label = f"update of the {name.replace('_', ' ')}"
        return self.fast.graph(partial(self.learn, name), label, self.rng["train"])

    def _initialize(self, seed: int) -> None:
        seeds = np.random.SeedSequence([seed, *b"init"]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(seeds[0]) >> 1)
        self.world.initialize(generator)
        self.actor_critic.initialize(generator)
        self.world.to(self.device)
        self.actor_critic.to(self.device)

    def _optimizer(self, name: str) -> Optimizer:
        module = self.components()[name]
        trained: dict[str, Tensor] = {
            key: parameter
            for key, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        decayed = [key for key in dense_weights(module) if key in trained]
        learn = getattr(self.config.learn, name)
        return self.fast.optimizer(
            trained, learn.opt, decayed, accumulates=learn.accumulate > 1
        )

    def _window(self, name: str) -> Window:
        """Sequences of so many frames, and the row that tells the outcome of each."""
        learn: Any = getattr(self.config.learn, name)
        if name == "actor_critic":
            length = self.config.actor_critic.burn_in + 1
        else:
            length = learn.length
        return Window(
            learn.batch,
            length + 1,
            select="episodes",
            online=False,
            pad="left" if name == "actor_critic" else "both",
            alpha=learn.alpha,
        )


def _newest(
    frames: UInt8[Tensor, "N T h w c"], image: UInt8[Tensor, "N h w c"]
) -> UInt8[Tensor, "N T h w c"]:
    """The last frames when one more was seen."""
    return torch.cat([frames, image[:, None]], 1)[:, 1:]


def _where(mask: Bool[Tensor, " N"], new: Recall, old: Recall) -> Recall:
    return Recall(
        *(
            torch.where(with_axes_of(b, mask), a, b)
            for a, b in zip(new, old, strict=True)
        )
    )
