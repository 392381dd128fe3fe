"""World models simulated step by step, for Dreamer and Δ-IRIS.

The classes implement `capabilities.InspectableWorldModelEnv`, which documents their
methods.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from reverie.agents.actions import previous_actions
from reverie.agents.iris.actor_critic import LSTMState, PixelNet
from reverie.api import Action, Batch, Carry, LatentWorld, Obs
from reverie.capabilities import HasBoundaryProbability, HasPriorKL, StateInspection
from reverie.kernels.graphs.runner import clone_outputs
from reverie.nets.distributions import Categorical, Distribution
from reverie.nets.rng import Rng
from reverie.nets.transformer import Cache
from reverie.nets.tree import tree_map
from reverie.spaces import Space, Spaces, agent_obs_space
from reverie.worlds.iris.world import IrisState, IrisWorld
from reverie.worlds.latent import eval_mode

LatentPolicy = Callable[[Any, Rng, bool], dict[str, Tensor]]
"""Maps latent states, a generator and `greedy` to actions (greedy: most probable)."""

RNG_NAME = "dreams"
"""Name of the random generators, which is a part of their seed."""

Tensors = dict[str, Tensor]
Capture = Callable[[Callable[[Tensors], Tensors], Rng], Callable[[Tensors], Tensors]]
"""Returns a function of tensors that samples from a generator, captured as a CUDA graph
if the device has graphs."""


class LatentWorldModelEnv:
    """Simulates an `api.LatentWorld`.

    States are inferred from the context and then predicted with the prior. A rollout is
    terminal when the continue probability is below 0.5. The carry of the agent's policy
    must have the fields `state` and `prevact`.
    """

    def __init__(
        self,
        world: LatentWorld,
        obs_space: Spaces,
        act_space: Spaces,
        device: torch.device,
        seed: int = 0,
        act: LatentPolicy | None = None,
        inspect: Callable[[Tensor], StateInspection] | None = None,
    ):
        """`act` is the policy of the agent; `inspect` returns the outputs of its actor
        and critic for features. Without them, the world model can only be stepped."""
        self.world, self.device, self._act = world, device, act
        self._inspect = inspect
        self.obs_space, self.act_space = agent_obs_space(obs_space), act_space
        self.seed(seed)

    def seed(self, seed: int) -> None:
        self.rng = Rng(seed, RNG_NAME, self.device)

    @functools.cached_property
    def predicted_keys(self) -> list[str]:
        with torch.no_grad():
            states = tree_map(lambda x: x[:, None], self.world.initial(1))
            return [key for key in self.world.decode(states) if key in self.obs_space]

    @torch.no_grad()
    def begin(self, context: Batch) -> Any:
        keys = [*self.obs_space, *self.act_space, "is_first"]
        keys += ["reward"] if "reward" in context else []  # an input of some worlds
        rows: Batch = {key: self._to_tensor(context[key]) for key in keys}
        # the context may begin within an episode, but the model starts from its initial
        # state
        rows["is_first"] = rows["is_first"].clone()
        rows["is_first"][:, 0] = True
        rows["prevact"] = previous_actions(rows, self.act_space)
        start = self.world.initial(len(rows["is_first"]))
        states = self.world.observe(start, rows, self.rng)
        return tree_map(lambda x: x[:, -1], states)

    @torch.no_grad()
    def step(self, state: Any, action: Action) -> tuple[Any, Obs]:
        actions = {key: self._to_tensor(value) for key, value in action.items()}
        with eval_mode(self.world):
            rollout = self.world.imagine(state, lambda _: actions, 1, self.rng)
        states = tree_map(lambda x: x[:, 1:], rollout.states)
        reward, cont = self.world.reward_and_cont(self.world.features(states))
        decoded = {key: x[:, 0] for key, x in self.world.decode(states).items()}
        rows: Obs = {
            key: _to_space(decoded[key], space)
            if key in decoded
            else space.zeros(len(reward))
            for key, space in self.obs_space.items()
        }
        rows["reward"] = reward[:, 0].float().cpu().numpy()
        rows["cont"] = cont[:, 0].float().cpu().numpy()
        rows["is_terminal"] = rows["cont"] < 0.5
        return tree_map(lambda x: x[:, 0], states), rows

    def resume(self, carry: Carry, context: Batch) -> Any:
        return carry.state

    @torch.no_grad()
    def act(self, state: Any, greedy: bool = False) -> Action:
        assert self._act is not None, "this world model was made without a policy"
        actions = self._act(state, self.rng, greedy)
        return {key: value.cpu().numpy() for key, value in actions.items()}

    @torch.no_grad()
    def latent(self, state: Any) -> dict[str, Tensor]:
        fields = {k: x for k, x in state._asdict().items() if isinstance(x, Tensor)}
        return {**fields, "feat": self.world.features(state)}

    @torch.no_grad()
    def inspect(self, state: Any) -> StateInspection:
        first = tree_map(lambda x: x[:1], state)
        result = StateInspection()
        if self._inspect is not None:
            result = self._inspect(self.world.features(first))
        if isinstance(self.world, HasBoundaryProbability):
            probability = float(self.world.boundary_probability(first)[0])
            result = result._replace(boundary=probability)
        stoch = getattr(state, "stoch", None)  # one-hot (N, S, K), if categorical
        if stoch is not None and stoch.ndim == 3 and stoch.shape[-1] > 1:
            latents = stoch[0].argmax(-1).cpu().numpy()
            result = result._replace(latents=latents, classes=stoch.shape[-1])
        return result

    def inspect_policy(self, carry: Carry) -> StateInspection:
        return self.inspect(carry.state)

    @torch.no_grad()
    def observation_kl(self, carry: Carry, row: Obs) -> float | None:
        if not isinstance(self.world, HasPriorKL):
            return None
        keys = [key for key in (*self.obs_space, "is_first", "reward") if key in row]
        batch: Batch = {key: self._to_tensor(row[key])[:, None] for key in keys}
        batch["prevact"] = {key: x[:, None] for key, x in carry.prevact.items()}
        rng = Rng(0, "observation_kl", self.device)  # `self.rng` must not advance
        return float(self.world.prior_kl(carry.state, batch, rng)[0, 0])

    def _to_tensor(self, value: Any) -> Tensor:
        return torch.as_tensor(np.asarray(value)).to(self.device)


class ImaginedIrisState(NamedTuple):
    """State of the world model, and LSTM state of the policy after `resume`."""

    world: IrisState
    lstm: LSTMState | None


class _StepKind(NamedTuple):
    """What a step depends on besides tensors; each kind has its own CUDA graph."""

    cache_size: int
    i_token_is_cached: bool  # see `IrisState`
    inputs: tuple[str, ...]  # names of the input tensors


class IrisWorldModelEnv:
    """Simulates the Δ-IRIS world.

    A rollout starts from real frames; its end is sampled from the prediction. `net` is
    the network of the policy, whose LSTM state is returned as the latent state.

    A step launches hundreds of small kernels. With a batch size of 1, steps are
    therefore captured as CUDA graphs, one for each `_StepKind`.
    """

    def __init__(
        self,
        world: IrisWorld,
        net: PixelNet,
        obs_space: Spaces,
        act_space: Spaces,
        device: torch.device,
        seed: int = 0,
        value: Callable[[Tensor], Distribution] | None = None,
        capture: Capture | None = None,
    ):
        """`value` returns the value distribution for outputs of the critic."""
        self.world, self.net, self.device = world, net, device
        self._value, self._capture = value, capture
        self._captured: dict[_StepKind, Callable[[Tensors], Tensors]] = {}
        self.act_space = act_space
        self.obs_space = {world.key: obs_space[world.key]}
        ((self.action_key, space),) = act_space.items()
        self.lowest_action = int(space.low)
        self.rng = Rng(seed, RNG_NAME, device)

    def seed(self, seed: int) -> None:
        # keep the generator, which CUDA graphs refer to
        new = Rng(seed, RNG_NAME, self.device)
        self.rng.reseed(new.generator.initial_seed())

    @property
    def predicted_keys(self) -> list[str]:
        return list(self.obs_space)

    @torch.no_grad()
    def begin(self, context: Batch) -> ImaginedIrisState:
        frames = self.world.dynamics.config.transformer.blocks  # the longest context
        image = torch.as_tensor(np.asarray(context[self.world.key]))[:, -frames:]
        actions = self._to_index(context[self.action_key])[:, -frames:-1]
        state = self.world.state_from_frames(image.to(self.device), actions)
        return ImaginedIrisState(state, None)

    @torch.no_grad()
    def step(
        self, state: ImaginedIrisState, action: Action
    ) -> tuple[ImaginedIrisState, Obs]:
        world = state.world
        inputs = {
            "action": self._to_index(action[self.action_key]),
            "image": world.image,
            "reward": world.reward,
            "end": world.end,
            "keys": world.cache.keys,
            "values": world.cache.values,
        }
        if world.last_token is not None:
            inputs["last_token"] = world.last_token
        if state.lstm is not None:
            inputs |= state.lstm._asdict()
        kind = _StepKind(world.cache.size, world.i_token_is_cached, tuple(inputs))
        outputs = self._run(kind, inputs)
        cache = Cache(outputs["keys"], outputs["values"], self._next_size(kind))
        after = IrisState(
            outputs["image"],
            outputs["reward"],
            outputs["end"],
            cache=cache,
            i_token_is_cached=False,
            last_token=outputs["last_token"],
        )
        lstm = state.lstm
        if lstm is not None:
            lstm = LSTMState(outputs["hidden"], outputs["cell"])
        rows = {
            self.world.key: after.image.cpu().numpy(),
            "reward": after.reward.float().cpu().numpy(),
            "cont": outputs["cont"].cpu().numpy(),
            "is_terminal": after.end.cpu().numpy(),
        }
        return ImaginedIrisState(after, lstm), rows

    def _run(self, kind: _StepKind, inputs: Tensors) -> Tensors:
        """Run a step, as a CUDA graph if possible."""
        function = functools.partial(self._step_tensors, kind)
        if self._capture is None or len(inputs["action"]) > 1:
            return function(inputs)
        if kind not in self._captured:
            self._captured[kind] = self._capture(function, self.rng)
        # the next replay of a graph overwrites its outputs
        copies: Tensors = clone_outputs(self._captured[kind](inputs))
        return copies

    def _step_tensors(self, kind: _StepKind, inputs: Tensors) -> Tensors:
        """Step world model and policy on the device; may be captured as a graph."""
        state = IrisState(
            inputs["image"],
            inputs["reward"],
            inputs["end"],
            cache=Cache(inputs["keys"], inputs["values"], kind.cache_size),
            i_token_is_cached=kind.i_token_is_cached,
            last_token=inputs.get("last_token"),
        )
        step = self.world.step(state, inputs["action"], self.rng)
        after = step.state
        assert after.cache.size == self._next_size(kind)
        assert after.last_token is not None
        outputs = {
            "image": after.image,
            "reward": after.reward,
            "end": after.end,
            "keys": after.cache.keys,
            "values": after.cache.values,
            "last_token": after.last_token,
            "cont": step.end_logits.float().softmax(-1)[..., 0],
        }
        if "hidden" in inputs:
            lstm = LSTMState(inputs["hidden"], inputs["cell"])
            lstm, _ = self.net.policy_step(lstm, after.image)
            outputs |= lstm._asdict()
        return outputs

    def _next_size(self, kind: _StepKind) -> int:
        """Return the length of the KV cache after a step; see `IrisWorld.step`."""
        tokens = self.world.dynamics.tokens_per_step
        # I-token, action and Δ-tokens, except the last one: the next step adds it
        size, new = kind.cache_size, tokens - 1
        if self.world.dynamics.transformer.length - size <= tokens:
            return new  # the step clears a full cache
        # add the last Δ-token of the preceding step; do not count a cached I-token
        return size + new + ("last_token" in kind.inputs) - kind.i_token_is_cached

    def resume(self, carry: Carry, context: Batch) -> ImaginedIrisState:
        return self.begin(context)._replace(lstm=carry.lstm)

    @torch.no_grad()
    def act(self, state: ImaginedIrisState, greedy: bool = False) -> Action:
        assert state.lstm is not None, "a state of `begin` has no LSTM state"
        logits = self.net.actor(state.lstm.hidden).float()
        probs = logits.softmax(-1)
        index = logits.argmax(-1) if greedy else self.rng.categorical(probs)
        dtype = self.act_space[self.action_key].dtype
        action = (index.cpu().numpy() + self.lowest_action).astype(dtype)
        return {self.action_key: action}

    def latent(self, state: ImaginedIrisState) -> dict[str, Tensor]:
        assert state.lstm is not None, "a state of `begin` has no LSTM state"
        return state.lstm._asdict()

    def inspect(self, state: ImaginedIrisState) -> StateInspection:
        cache, tokens = state.world.cache, self.world.dynamics.tokens_per_step
        # time steps in the KV cache, and the maximum
        context = (cache.size // tokens, cache.keys.shape[-2] // tokens)
        if state.lstm is None:
            return StateInspection(context=context)
        return self._inspect_lstm(state.lstm)._replace(context=context)

    def inspect_policy(self, carry: Carry) -> StateInspection:
        return self._inspect_lstm(carry.lstm)

    def observation_kl(self, carry: Carry, row: Obs) -> float | None:
        return None

    @torch.no_grad()
    def _inspect_lstm(self, lstm: LSTMState) -> StateInspection:
        """Return the predictions of actor and critic for the first LSTM state."""
        hidden = lstm.hidden[:1]
        policy = Categorical(self.net.actor(hidden))
        value = None
        if self._value is not None:
            value = float(self._value(self.net.critic(hidden)).pred()[0])
        probs = {self.action_key: policy.probs[0].cpu().numpy()}
        return StateInspection(value, float(policy.entropy()[0]), probs)

    def _to_index(self, action: Any) -> Tensor:
        """Convert actions of the environment to indices from 0."""
        index = torch.as_tensor(np.asarray(action)).long() - self.lowest_action
        return index.to(self.device)


def _to_space(value: Tensor, space: Space) -> np.ndarray:
    """Convert decoder outputs `(N, ...)` to the dtype, shape and bounds of a space."""
    value = value.float()
    if space.is_image:
        value = (value.clamp(0, 1) * 255).round()
    low, high = np.asarray(space.low, float), np.asarray(space.high, float)
    array = value.cpu().numpy().reshape(len(value), *space.shape)
    # integer spaces exclude `high`
    largest = high - 1 if space.dtype.kind in "iub" else high
    clipped: np.ndarray = np.clip(array, low, largest).astype(space.dtype)
    return clipped
