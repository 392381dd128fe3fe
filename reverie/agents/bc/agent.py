"""Behaviour cloning: do what an expert did when it saw this.

A head on the eyes of a world (`eyes.py`), which stay as they are or learn on, or on
eyes of its own. Row t of a recording holds what was seen and what was then done, so a
pair to learn from is one row; only the last row of an episode, where nothing is done,
is none.
"""

# ruff: noqa: RUF009 (the nested defaults are frozen, so sharing them is safe)
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from reverie.agents.bc.feature_extractor import EncoderEyes, check_order, eyes_of
from reverie.agents.bc.head import ActionScale, CloneHead, CloneHeadConfig
from reverie.agents.precision import dtype_of
from reverie.agents.weights import check_fit, load_components, matching
from reverie.api import (
    Action,
    Agent,
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
from reverie.capabilities import AgentConfig, Statistics
from reverie.kernels.accelerate import Accelerator
from reverie.nets import standardize as standard
from reverie.nets.blocks import initialize
from reverie.nets.dreamerv3_torch import (
    DreamerV3TorchEncoder,
    DreamerV3TorchEncoderConfig,
)
from reverie.nets.encoder import Encoder, EncoderConfig
from reverie.nets.heads import check_actions
from reverie.nets.optim.adam import AdamConfig
from reverie.nets.optim.optimizer import dense_weights
from reverie.nets.rng import Rng
from reverie.rows import Window
from reverie.spaces import Spaces, agent_obs_space

OLDER = "dreamerv3-torch"


@dataclass(frozen=True)
class BCConfig(AgentConfig):
    batch_size: int = 256
    """Sequences per batch."""
    length: int = 1
    """Rows of each; one is enough without any carry."""
    run: str = ""
    """A run, or a checkpoint, whose world is looked through, or the `latest.pt` of
    dreamerv3-torch; none for own eyes."""
    on: str = ""
    """The agent of that run, as found there; `dreamerv3-torch` for such a file."""
    see: Literal["encoder", "state"] = "encoder"
    """Its encoder alone, or the state of the whole world."""
    tune: bool = False
    """Whether these eyes learn on; own ones always do."""
    keys: tuple[str, ...] = ()
    """The keys to see, in the order in which the eyes read them; none for all. They are
    checked against the order the eyes were trained with."""
    enc: EncoderConfig = EncoderConfig()
    """Own eyes."""
    older: DreamerV3TorchEncoderConfig = DreamerV3TorchEncoderConfig()
    """The encoder of dreamerv3-torch, as found in its file."""
    head: CloneHeadConfig = CloneHeadConfig()
    """What is cloned into."""
    normalize: Literal["none", "bounds", "moments"] = "none"
    """How actions are scaled: not, by their range, or by mean and deviation."""
    opt: AdamConfig = AdamConfig(lr=1e-4, clip=100.0, wd=0.0)
    """Optimizer."""

    def __post_init__(self) -> None:
        if min(self.batch_size, self.length) < 1:
            raise UserError(
                "bc.batch_size and bc.length must be at least 1.\n"
                "  Fix: --bc.batch-size 256"
            )
        if self.length < 2 and (self.head.recurrent or self.see == "state"):
            raise UserError(
                "A memory cannot be learnt from single rows.\n  Fix: --bc.length 32"
            )

    @property
    def rows_per_update(self) -> int:
        return self.batch_size * self.length

    @property
    def base_run(self) -> str:
        return self.run

    @property
    def base_agent(self) -> str:
        return "" if self.on == OLDER else self.on

    def with_base_agent(self, name: str) -> BCConfig:
        """Return the config of a clone that uses the world model of this agent."""
        return replace(self, on=name)

    def with_encoder(self, encoder: Any) -> BCConfig:
        """Return the config of a clone that uses an encoder of dreamerv3-torch."""
        return replace(self, on=OLDER, older=encoder)


class BCCarry(NamedTuple):
    """What goes on from one step of acting to the next."""

    eyes: Any
    head: Float[Tensor, "B R"]
    prevact: dict[str, Tensor]


class BC:
    """See the top of this file. `base` is the agent whose world it looks through."""

    def __init__(
        self,
        obs_space: Spaces,
        act_space: Spaces,
        config: BCConfig,
        *,
        device: torch.device,
        precision: str = "float32",
        seed: int = 0,
        compile: str = "none",
        overlap: bool = False,  # no effect: this agent never acts while it trains
        base: Agent | None = None,
    ):
        check_actions(act_space)
        self.config, self.device, self.base = config, device, base
        self.obs_space, self.act_space = (
            _chosen(agent_obs_space(obs_space), config),
            act_space,
        )
        generator = torch.Generator().manual_seed(seed)
        if base is None:
            encoder = self._encoder()
            initialize(encoder, generator)
            self.eyes: Any = EncoderEyes(encoder, dtype_of(precision))
        else:
            self.eyes = eyes_of(base, config.see, self.obs_space)
        if config.keys and base is not None:
            check_order(list(config.keys), self.eyes.order, f"The world of {config.on}")
        self.head = CloneHead(self.eyes.width, act_space, config.head)
        initialize(self.head, generator)
        self.scale = ActionScale(act_space)
        for part in (self.eyes, self.head, self.scale):
            part.to(device)
        self.learns = config.tune or not config.on
        learnt: list[tuple[str, nn.Module]] = [("head", self.head)]
        if self.learns:
            learnt.append(("eyes", self.eyes))
        self.fast = Accelerator(compile, device)
        self.fast.modules(self.eyes, self.head)
        self.fast.low_precision([self.eyes], dtype_of(precision))
        self.opt = self.fast.optimizer(
            {f"{k}.{n}": p for k, m in learnt for n, p in m.named_parameters()},
            config.opt,
            [f"{k}.{n}" for k, m in learnt for n in dense_weights(m)],
        )
        self.rng = {name: Rng(seed, name, device) for name in ("train", "eval")}
        self.update = self.fast.graph(self.learn, "update", self.rng["train"])
        self.windows = {"train": Window(config.batch_size, config.length, online=False)}
        self.extras: Spaces = {}
        self.schedule = None
        self.last: Metrics = {}

    # Acting

    def initial(self, batch: int) -> Carry:
        prevact = {
            key: torch.as_tensor(space.zeros(batch), device=self.device)
            for key, space in self.act_space.items()
        }
        head = self.head.initial(batch, self.device)
        return BCCarry(self.eyes.initial(batch), head, prevact)

    @torch.no_grad()
    def policy(
        self, carry: Carry, obs: Obs, mode: Mode = "train"
    ) -> tuple[Carry, Action, Extras]:
        """The action it thinks most likely, within the bounds of its space."""
        if mode == "train":
            raise UserError(
                "A clone learns from recordings, not from what it does itself.\n"
                "  Fix: reverie bc --offline.data PATH"
            )
        keys = (*self.obs_space, "is_first")
        batch: Batch = {
            key: torch.as_tensor(obs[key]).to(self.device)[:, None] for key in keys
        }
        batch["prevact"] = {key: x[:, None] for key, x in carry.prevact.items()}
        self.eyes.eval()
        feat, eyes = self.eyes(carry.eyes, batch, self.rng["eval"])
        guesses, head = self.head(carry.head, feat, batch["is_first"])
        chosen, action = {}, {}
        for key, space in self.act_space.items():
            value = guesses[key].mode()[:, 0]
            if not space.is_discrete:
                value = self.scale.widen(key, value)
            array = value.cpu().numpy()
            if not space.is_discrete:
                array = np.clip(array, space.low, space.high)
            action[key] = array.astype(space.dtype)
            chosen[key] = torch.as_tensor(action[key], device=self.device)
        return BCCarry(eyes, head, chosen), action, {}

    # Learning

    def load_base(self, state: StateDict) -> None:
        """Load the weights of the base run."""
        if self.base is not None:
            self.base.load_weights(state)
        else:
            check_fit("encoder", self.eyes.encoder.state_dict(), state)
            self.eyes.encoder.load_state_dict(state["encoder"])
        self.fast.weights_changed()

    @property
    def needs_statistics(self) -> bool:
        own = self.base is None and standard.needs_statistics(self.eyes)
        return own or self.config.normalize != "none"

    def set_statistics(self, statistics: Statistics) -> None:
        """Scale actions, and own images, by what is known of all of them."""
        if self.base is None:
            standard.set_statistics(self.eyes, statistics)
        for key in self.scale.spaces:
            known = statistics[key]
            mean, std, low, high = (torch.as_tensor(x).float() for x in known)
            if self.config.normalize == "moments":
                self.scale.set(key, mean, std)
            elif self.config.normalize == "bounds":
                self.scale.set(key, (low + high) / 2, (high - low) / 2)

    def train(self, feed: Feed) -> Metrics:
        """One update on one batch."""
        data = feed("train")
        keys = (*self.obs_space, *self.act_space, "is_first", "is_last", "mask")
        metrics: Metrics = self.update({key: data[key] for key in keys if key in data})
        self.last = {"loss/action": metrics["loss/action"]}
        return metrics

    def learn(self, batch: Batch) -> Metrics:
        """One update, all on the device, so that it can be a CUDA graph."""
        loss, real = self.loss(batch, "train")
        total = torch.where(real, loss, 0).sum() / real.sum().clamp(min=1)
        _, metrics = self.opt.update(total)
        return {"loss/action": total.detach(), **metrics}

    def loss(self, batch: Batch, purpose: str) -> tuple[Tensor, Tensor]:
        """How far every row `(B, T)` is from what was done there, and which count."""
        rows = {**batch, "prevact": led_to(batch, self.act_space)}
        training = purpose == "train" and self.learns
        self.eyes.train(training)
        count = len(batch["is_first"])
        with torch.set_grad_enabled(training):
            feat, _ = self.eyes(self.eyes.initial(count), rows, self.rng[purpose])
        start = self.head.initial(count, self.device)
        guesses, _ = self.head(start, feat, batch["is_first"])
        wanted = self.scale.narrow({key: batch[key] for key in self.act_space})
        losses = [guess.loss(wanted[key]) for key, guess in guesses.items()]
        real = ~batch["is_last"]
        if "mask" in batch:
            real = real & batch["mask"]
        return torch.stack(losses).sum(0), real

    @torch.no_grad()
    def episode_losses(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """The loss of every row of whole episodes; nothing is learnt."""
        loss, real = self.loss(batch, "eval")
        return {"action": loss}, real

    def report(self, feed: Feed) -> Metrics:
        return {}

    def nonfinite(self) -> list[str]:
        """The loss, then the gradients, that were not finite in the last update."""
        losses = [key for key, x in self.last.items() if not torch.isfinite(x)]
        return losses + [f"grad/{name}" for name in self.opt.nonfinite()]

    # Keeping

    def _encoder(self) -> nn.Module:
        if self.config.on == OLDER:
            return DreamerV3TorchEncoder(
                self.obs_space, self.config.older, self.config.keys
            )
        return Encoder(self.obs_space, self.config.enc)

    def components(self) -> dict[str, nn.Module]:
        return {"eyes": self.eyes, "head": self.head, "scale": self.scale}

    def state_dict(self) -> StateDict:
        parts = {k: dict(m.state_dict()) for k, m in self.components().items()}
        return {
            **parts,
            "order": list(self.eyes.order),
            "opt": self.opt.state_dict(),
            "rng": {name: rng.state_dict() for name, rng in self.rng.items()},
        }

    def load_state_dict(self, state: StateDict) -> None:
        self.load_weights(state)
        self.opt.load_state_dict(state["opt"])
        for name, rng in self.rng.items():
            rng.load_state_dict(state["rng"][name])

    def load_weights(self, state: StateDict, components: str = ".*") -> list[str]:
        """Take over the weights of the parts that match, if they read the same keys."""
        mine = self.components()
        if "eyes" in matching(mine, components):
            saved = state.get("order", self.eyes.order)
            check_order(self.eyes.order, saved, "The checkpoint")
        chosen = load_components(mine, state, components)
        self.fast.weights_changed()
        return chosen


def led_to(batch: Batch, act_space: Spaces) -> dict[str, Tensor]:
    """The actions that led to each row; none to the first."""
    return {
        key: torch.cat([torch.zeros_like(batch[key][:, :1]), batch[key][:, :-1]], 1)
        for key in act_space
    }


def _chosen(obs_space: Spaces, config: BCConfig) -> Spaces:
    """The keys that the config names; all, if it names none."""
    missing = [key for key in config.keys if key not in obs_space]
    if missing:
        raise UserError(
            f"bc.keys names {', '.join(missing)}, which is not seen here.\n"
            f"  Fix: choose from {', '.join(obs_space)}."
        )
    return {key: obs_space[key] for key in config.keys} if config.keys else obs_space
