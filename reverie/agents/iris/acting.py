"""Acting of Δ-IRIS: LSTM state, burn-in and exploration.

At the start of every collection epoch the LSTM state is discarded and computed again
from the last frames of the running episode, with the new weights (burn-in). Episodes
that start within an epoch start from the zero state.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from reverie.agents.iris.actor_critic import LSTMState, PixelActorCritic, PixelNet
from reverie.agents.iris.config import ActingConfig
from reverie.api import Batch, Extras
from reverie.kernels.accelerate import Accelerator
from reverie.nets.rng import Rng
from reverie.nets.tree import tree_map, tree_where


class IrisCarry(NamedTuple):
    """LSTM state and last frames of the running episodes."""

    lstm: LSTMState
    frames: UInt8[Tensor, "N T h w c"]  # zero before the first frame of the episode
    epoch: Int[Tensor, " N"]  # epoch of the last burn-in, -1 for none; on the CPU


class DeviceCarry(NamedTuple):
    """The part of the carry that is on the device."""

    lstm: LSTMState
    frames: UInt8[Tensor, "N T h w c"]


class PixelPolicy:
    """Policy steps with the online network of the actor-critic.

    `rng` has the generators `policy` (for training) and `eval`. The purpose `greedy` is
    evaluation with the most probable action.
    """

    def __init__(
        self,
        actor_critic: PixelActorCritic,
        actions: int,
        shape: tuple[int, ...],
        config: ActingConfig,
        rng: dict[str, Rng],
        fast: Accelerator,
    ):
        self.actor_critic, self.actions, self.shape = actor_critic, actions, shape
        self.config, self.rng, self.device = config, rng, fast.device
        net = (actor_critic.online,)
        self._run = {
            purpose: fast.policy(
                partial(self._step, purpose),
                net,
                rng["policy" if purpose == "policy" else "eval"],
                purpose == "policy",
            )
            for purpose in ("policy", "eval", "greedy")
        }

    def initial(self, batch: int) -> IrisCarry:
        shape = (batch, self.actor_critic.config.burn_in, *self.shape)
        return IrisCarry(
            self.actor_critic.online.initial(batch),
            torch.zeros(shape, dtype=torch.uint8, device=self.device),
            torch.full((batch,), -1, dtype=torch.int64),
        )

    @torch.inference_mode()
    def __call__(
        self,
        purpose: str,
        carry: IrisCarry,
        image: Any,
        is_first: Any,
        is_last: Any,
        epoch: int,
        random: bool,
    ) -> tuple[IrisCarry, Int[np.ndarray, " N"]]:
        """Return the next carry and action indices for a batch of observations.

        Episodes whose last burn-in was in another epoch are burned in again. With
        `random`, actions are uniformly random and the network does not run.
        """
        first = torch.as_tensor(np.asarray(is_first))
        last = torch.as_tensor(np.asarray(is_last))
        state = DeviceCarry(carry.lstm, carry.frames)
        inputs = {"image": torch.as_tensor(image), "is_first": first}
        burn_in_epoch = carry.epoch
        action: dict[str, Any]
        if random:
            state, action = self._random_step(state, inputs)
        elif (outdated := (burn_in_epoch != epoch) & ~last).any():
            state = self._burn_in(state, first, outdated)
            inputs["is_first"] = torch.zeros_like(first)
            net = self.actor_critic.online
            state, action, _ = self._step(purpose, net, state, inputs)
            burn_in_epoch = torch.where(outdated, epoch, burn_in_epoch)
        else:
            state, action, _ = self._run[purpose](state, inputs)
        index = action["index"]  # a NumPy array already if it comes from `fast.policy`
        index = index.cpu().numpy() if isinstance(index, Tensor) else index
        return IrisCarry(state.lstm, state.frames, burn_in_epoch), index

    def _step(
        self, purpose: str, net: PixelNet, carry: DeviceCarry, inputs: Batch
    ) -> tuple[DeviceCarry, dict[str, Tensor], Extras]:
        """Run the device part of a policy step; captured as a CUDA graph."""
        image = inputs["image"].to(self.device)
        lstm, frames = _reset(carry, inputs["is_first"])
        lstm, logits = net.policy_step(lstm, image)
        index = self._sample(logits, purpose)
        return DeviceCarry(lstm, _append_frame(frames, image)), {"index": index}, {}

    def _random_step(
        self, carry: DeviceCarry, inputs: Batch
    ) -> tuple[DeviceCarry, dict[str, Tensor]]:
        image = inputs["image"].to(self.device)
        lstm, frames = _reset(carry, inputs["is_first"])
        index = self._uniform(len(image), self.rng["policy"])
        return DeviceCarry(lstm, _append_frame(frames, image)), {"index": index}

    def _burn_in(
        self,
        carry: DeviceCarry,
        is_first: Bool[Tensor, " N"],
        outdated: Bool[Tensor, " N"],
    ) -> DeviceCarry:
        """Compute outdated LSTM states from the last frames."""
        lstm, frames = _reset(carry, is_first)
        new = self.actor_critic.burn_in(frames)
        return DeviceCarry(tree_where(outdated, new, lstm), frames)

    def _sample(self, logits: Tensor, purpose: str) -> Int[Tensor, " N"]:
        """Choose actions: epsilon-greedy around samples or the most probable action."""
        if purpose == "greedy":
            return logits.argmax(-1)
        config, rng, training = self.config, self.rng[purpose], purpose == "policy"
        epsilon = config.epsilon if training else config.eval_epsilon
        temperature = config.temperature if training else config.eval_temperature
        sample = config.sample if training else config.eval_sample
        if sample:
            index = rng.categorical((logits / temperature).softmax(-1))
        else:
            index = logits.argmax(-1)
        if epsilon > 0:
            draws = 1 if config.epsilon_draw == "shared" else len(logits)
            explore = rng.uniform(torch.zeros(draws, device=self.device)) < epsilon
            index = torch.where(explore, self._uniform(len(logits), rng), index)
        return index

    def _uniform(self, count: int, rng: Rng) -> Int[Tensor, " N"]:
        return rng.categorical(torch.ones(count, self.actions, device=self.device))


def _append_frame(
    frames: UInt8[Tensor, "N T h w c"], image: UInt8[Tensor, "N h w c"]
) -> UInt8[Tensor, "N T h w c"]:
    """Append the newest frame and drop the oldest."""
    return torch.cat([frames, image[:, None]], 1)[:, 1:]


def _reset(carry: DeviceCarry, is_first: Bool[Tensor, " N"]) -> DeviceCarry:
    """Set the carry to zero where an episode starts."""
    carry = tree_where(is_first, tree_map(lambda _: 0, carry), carry)
    return carry
