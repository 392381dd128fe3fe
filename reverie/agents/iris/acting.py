"""Policy steps of Δ-IRIS: LSTM state, burn-in and random actions.

At the start of every collection epoch the LSTM state is discarded and computed again
with the new weights from the last frames of the running episode (burn-in). Episodes
that start within an epoch start from the zero state. There is also a burn-in when the
task policy continues an episode of the exploration policy, or the reverse.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from reverie.agents.export_steps import StepModule
from reverie.agents.iris.actor_critic import LSTMState, PixelActorCritic, PixelNet
from reverie.agents.iris.config import ActingConfig
from reverie.api import Batch, Extras
from reverie.kernels.accelerate import Accelerator
from reverie.nets.rng import Rng
from reverie.nets.tree import tree_map, tree_where

COLLECTING_MODES = ("train", "explore")
"""Modes in which data is collected."""
NO_BURN_IN = -1
"""Value of `IrisCarry.burn_in_id` before the first burn-in."""


class IrisCarry(NamedTuple):
    """LSTM state and last frames of the running episodes."""

    lstm: LSTMState
    frames: UInt8[Tensor, "N T h w c"]  # zero before the first frame of the episode
    burn_in_id: Int[Tensor, " N"]  # identifies the last burn-in; on the CPU


class DeviceCarry(NamedTuple):
    """The part of the carry that is on the device."""

    lstm: LSTMState
    frames: UInt8[Tensor, "N T h w c"]


class ExportedPolicyState(NamedTuple):
    """Recurrent state of the step for `reverie export`."""

    lstm: LSTMState
    started: Bool[Tensor, " N"]  # False before the first step, which has a burn-in


class PixelPolicy:
    """Policy steps with the online network of an actor-critic.

    `actions` is the number of actions, and `shape` that of a frame. `rng` has the
    generators `policy` (for training) and `eval`. The mode `greedy` is evaluation with
    the most probable action; `explore` acts as `train` does, with the actor-critic
    `explorer`.
    """

    def __init__(
        self,
        actor_critic: PixelActorCritic,
        explorer: PixelActorCritic | None,
        actions: int,
        shape: tuple[int, ...],
        config: ActingConfig,
        rng: dict[str, Rng],
        accelerator: Accelerator,
    ):
        self.actor_critic, self.actions, self.shape = actor_critic, actions, shape
        self.config, self.rng, self.device = config, rng, accelerator.device
        modes = ("train", "eval", "greedy")
        self.actor_critics = dict.fromkeys(modes, actor_critic)
        if explorer:
            self.actor_critics["explore"] = explorer
        self._policy_steps = {
            mode: accelerator.make_policy(
                partial(self._step, mode),
                (networks.online,),
                self._rng(mode),
                mode in COLLECTING_MODES,
            )
            for mode, networks in self.actor_critics.items()
        }

    def initial(self, batch: int) -> IrisCarry:
        shape = (batch, self.actor_critic.config.burn_in, *self.shape)
        return IrisCarry(
            self.actor_critic.online.initial(batch),
            torch.zeros(shape, dtype=torch.uint8, device=self.device),
            torch.full((batch,), NO_BURN_IN, dtype=torch.int64),
        )

    @torch.inference_mode()
    def __call__(
        self,
        mode: str,
        carry: IrisCarry,
        image: Any,
        is_first: Any,
        is_last: Any,
        epoch: int,
        random: bool,
    ) -> tuple[IrisCarry, Int[np.ndarray, " N"]]:
        """Return the next carry and action indices for a batch of observations.

        Episodes whose last burn-in was in another epoch get a new burn-in, except in
        their last row. With `random`, actions are uniform and the network does not run.
        """
        first = torch.as_tensor(np.asarray(is_first))
        last = torch.as_tensor(np.asarray(is_last))
        state = DeviceCarry(carry.lstm, carry.frames)
        inputs = {"image": torch.as_tensor(image), "is_first": first}
        last_id, current_id = carry.burn_in_id, burn_in_id(mode, epoch)
        action: dict[str, Any]
        if random:
            state, action = self._random_step(state, inputs)
        elif (outdated := (last_id != current_id) & ~last).any():
            actor_critic = self.actor_critics[mode]
            state = self._burn_in(actor_critic, state, first, outdated)
            # `_burn_in` has reset the carry; the step must not reset it again
            inputs["is_first"] = torch.zeros_like(first)
            state, action, _ = self._step(mode, actor_critic.online, state, inputs)
            last_id = torch.where(outdated, current_id, last_id)
        else:
            state, action, _ = self._policy_steps[mode](state, inputs)
        index = action["index"]  # a NumPy array if from `self._policy_steps`
        index = index.cpu().numpy() if isinstance(index, Tensor) else index
        return IrisCarry(state.lstm, state.frames, last_id), index

    def _step(
        self, mode: str, net: PixelNet, carry: DeviceCarry, inputs: Batch
    ) -> tuple[DeviceCarry, dict[str, Tensor], Extras]:
        """Run a policy step on the device; may be captured as a CUDA graph."""
        image = inputs["image"].to(self.device)
        lstm, frames = _reset(carry, inputs["is_first"])
        lstm, logits = net.policy_step(lstm, image)
        index = self._sample(logits, mode, self._rng(mode))
        return DeviceCarry(lstm, _append_frame(frames, image)), {"index": index}, {}

    def exported_step(self, mode: str) -> tuple[StepModule, Callable[[int], Any]]:
        """Return the step of the mode `eval` or `greedy`, and its initial state.

        The state contains no frames: in evaluation, the only burn-in is before the
        first frame, on black frames, so its result depends on the weights only.
        """
        net = self.actor_critic.online
        black = torch.zeros(1, self.actor_critic.config.burn_in, *self.shape)
        burned_in = self.actor_critic.burn_in(black.to(self.device, torch.uint8))

        def initial(batch: int) -> ExportedPolicyState:
            started = torch.zeros(batch, dtype=torch.bool)
            return ExportedPolicyState(net.initial(batch), started)

        def step(inputs: Batch, state: ExportedPolicyState, rng: Rng) -> Any:
            lstm = tree_where(
                inputs["is_first"], tree_map(lambda _: 0, state.lstm), state.lstm
            )
            lstm = tree_where(~state.started, burned_in, lstm)
            lstm, logits = net.policy_step(lstm, inputs["image"])
            index = self._sample(logits, mode, rng)
            started = torch.ones_like(state.started)
            return {"index": index}, ExportedPolicyState(lstm, started)

        return StepModule(step, net), initial

    def _random_step(
        self, carry: DeviceCarry, inputs: Batch
    ) -> tuple[DeviceCarry, dict[str, Tensor]]:
        """Take uniformly random actions; store the frame, but do not run the LSTM."""
        image = inputs["image"].to(self.device)
        lstm, frames = _reset(carry, inputs["is_first"])
        index = self._uniform(len(image), self.rng["policy"])
        return DeviceCarry(lstm, _append_frame(frames, image)), {"index": index}

    @staticmethod
    def _burn_in(
        actor_critic: PixelActorCritic,
        carry: DeviceCarry,
        is_first: Bool[Tensor, " N"],
        outdated: Bool[Tensor, " N"],
    ) -> DeviceCarry:
        """Compute outdated LSTM states from the last frames."""
        lstm, frames = _reset(carry, is_first)
        new = actor_critic.burn_in(frames)
        return DeviceCarry(tree_where(outdated, new, lstm), frames)

    def _sample(self, logits: Tensor, mode: str, rng: Rng) -> Int[Tensor, " N"]:
        """Sample actions or take the most probable ones, as configured for the mode.

        Actions are random with probability `epsilon`.
        """
        if mode == "greedy":
            return logits.argmax(-1)
        config, training = self.config, mode in COLLECTING_MODES
        epsilon = config.epsilon if training else config.eval_epsilon
        temperature = config.temperature if training else config.eval_temperature
        sample = config.sample if training else config.eval_sample
        if sample:
            index = rng.categorical((logits / temperature).softmax(-1))
        else:
            index = logits.argmax(-1)
        if epsilon > 0:
            draws = 1 if config.epsilon_draw == "shared" else logits.shape[0]
            explore = rng.uniform(torch.zeros(draws, device=self.device)) < epsilon
            index = torch.where(explore, self._uniform(logits.shape[0], rng), index)
        return index

    def _rng(self, mode: str) -> Rng:
        return self.rng["policy" if mode in COLLECTING_MODES else "eval"]

    def _uniform(self, count: int, rng: Rng) -> Int[Tensor, " N"]:
        """Sample action indices uniformly."""
        return rng.categorical(torch.ones(count, self.actions, device=self.device))


def burn_in_id(mode: str, epoch: int) -> int:
    """Return the number that identifies the epoch and policy of a burn-in.

    The exploration policy has negative numbers, so that a change of the policy causes
    a burn-in; -1 is `NO_BURN_IN`.
    """
    return -2 - epoch if mode == "explore" else epoch


def _append_frame(
    frames: UInt8[Tensor, "N T h w c"], image: UInt8[Tensor, "N h w c"]
) -> UInt8[Tensor, "N T h w c"]:
    """Append the newest frame and drop the oldest."""
    return torch.cat([frames, image[:, None]], 1)[:, 1:]


def _reset(carry: DeviceCarry, is_first: Bool[Tensor, " N"]) -> DeviceCarry:
    """Set the carry to zero where an episode starts."""
    carry = tree_where(is_first, tree_map(lambda _: 0, carry), carry)
    return carry
