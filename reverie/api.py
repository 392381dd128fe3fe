"""The contract: environments, agents, world models and the data between them.

`run/train.py` connects the parts and is the same for all agents and environments:

    while clock.running:
        rows = collector.collect()            # act in the environments
        replay.add(rows)
        for _ in range(clock.updates_due(feed_is_ready)):
            logger.add(agent.train(feed))     # the agent samples batches from the feed

Time convention: row `t` of a sequence holds the observation and reward received on
arrival and the action chosen there.

    row                0     1     2
    image, is_* flags  o0    o1    o2     received on arrival
    reward             0     r1    r2     for arriving
    action             a0    a1    a2     chosen in this row; leads to the next row

The action of a row with `is_last` is zero. An episode of n environment steps has n + 1
rows. Data with another convention is shifted by its reader or by the agent.

`spaces.py` has the shape legend, `capabilities.py` the optional protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from reverie.rows import Rows, Window
from reverie.spaces import Spaces

if TYPE_CHECKING:  # environment workers import this module and do not need torch
    import numpy as np
    from torch import Tensor

Obs = dict[str, Any]
"""Observations by key: `reward`, the flags `is_first is_last is_terminal`, images
(uint8, h w c), vectors and integers. Keys under `log/` are logged but not stored or
learned from."""
Action = dict[str, Any]
Extras = dict[str, Any]
"""What an agent stores in the replay with every row, such as latent states."""
Batch = dict[str, Any]
Carry = Any
"""Recurrent state of a policy: a tree of tensors; the first axis is environments."""
Metrics = dict[str, Any]
"""Scalars, images (h w c uint8) and videos (t h w c uint8) by name."""
Mode = Literal["train", "explore", "eval", "greedy"]
"""`train`: collect data with the task policy; `explore`: with the exploration policy;
`eval`: use the agent's evaluation settings; `greedy`: take the most probable action."""
PolicyOutput = tuple[Carry, Action, Extras]
"""Next carry, actions, and extras to store with the rows."""
StateDict = dict[str, Any]
"""Nested dicts and lists of tensors, arrays, numbers, strings, booleans and None."""
State = Any
"""State of a world model: a NamedTuple of tensors that only the world reads."""
Policy = Callable[[State], dict[str, Any]]
"""Maps a state `(N, ...)` of a world to actions `(N, ...)` by key."""


class UserError(Exception):
    """Invalid input: printed as one message with its fix, exit code 2."""


@runtime_checkable
class Env(Protocol):
    """One environment. `step` takes and returns values without a batch axis.

    After a row with `is_last`, only `reset` may be called. `is_terminal` marks a true
    end of the task; a time limit sets only `is_last`. An environment with `state_dict`
    and `load_state_dict` resumes mid-episode; others start a new episode.
    """

    @property
    def obs_space(self) -> Spaces: ...  # observations, with the reward and flags
    @property
    def act_space(self) -> Spaces: ...  # actions
    def reset(self, seed: int | None = None) -> Obs: ...  # start an episode
    def step(self, action: Action) -> Obs: ...  # return the next row
    def close(self) -> None: ...  # release the simulator


@runtime_checkable
class VecEnv(Protocol):
    """Several environments stepped together; arrays have a leading environment axis.

    After a row with `is_last`, the next step ignores the action and returns the first
    row of a new episode. In lockstep mode, it does so once all episodes have ended;
    until then, it repeats the last row. Other work can run between `send` and `recv`.
    """

    obs_space: Spaces
    act_space: Spaces
    waiting: np.ndarray  # (n,) bool: in lockstep mode, has ended and waits for others
    render_fps: float  # steps per second in real time, for videos; 0 if not known

    def __len__(self) -> int: ...  # number of environments
    def reset(self) -> Obs: ...  # start an episode in every environment
    def step(self, action: Action) -> Obs: ...  # send, then recv
    def send(self, action: Action) -> None: ...  # start a step
    def recv(self) -> Obs: ...  # wait for the result of `send`
    def close(self) -> None: ...  # stop workers and simulators
    def metrics(self) -> Metrics: ...  # restarts, timeouts, ...
    def state_dict(self) -> StateDict: ...  # of all environments
    def load_state_dict(self, state: StateDict) -> Obs: ...  # rows to continue from


@runtime_checkable
class Collector(Protocol):
    """Acts in environments and returns rows for the replay.

    Implementations act in this process, overlap with training, or receive the rows of
    remote actors. `collect` may return no rows if the run is asked to stop.
    """

    def collect(self) -> Rows: ...  # choose actions, start the next step
    def wait(self) -> None: ...  # wait for the step that `collect` started
    def summary(self) -> Metrics: ...  # episodes that ended since the last call
    def metrics(self) -> Metrics: ...  # of environments and remote actors
    def state_dict(self) -> StateDict: ...  # environments, carry and last rows
    def load_state_dict(self, state: StateDict) -> None: ...


@runtime_checkable
class Feed(Protocol):
    """Samples batches of the agent's `windows`, as tensors on its device.

    A batch has the observations, actions and extras of the replay `(B, T, ...)`, and
    the keys `stepid` (int64, identifies each row) and `consec` (see `Window`).
    """

    def __call__(self, name: str, out: Batch | None = None) -> Batch:
        """Return the next batch, copied into `out` if given (for CUDA graphs)."""

    def ready(self, name: str) -> bool: ...  # enough rows are stored for a batch
    def write_back(self, stepid: Tensor, extras: Extras) -> None:
        """Replace the stored extras of these rows; evicted rows are skipped."""

    def prioritize(self, stepid: Tensor, priority: Tensor) -> None: ...  # for sampling
    def count_uses(self, name: str, on: bool) -> None:
        """Start or stop counting how often each episode is sampled. With `Window.alpha`
        above 0, episodes that were sampled more often become less likely."""


@runtime_checkable
class Schedule(Protocol):
    """When to act and when to train. Only the training loop advances it.

    The default is a constant train ratio. Δ-IRIS alternates between collecting and
    training each component. `updates_due` returns few updates at a time, so that the
    loop can log and save in between. An agent step is one row, an environment step one
    action: an episode of n environment steps has n + 1 agent steps.
    """

    @property
    def should_collect(self) -> bool: ...  # act before training again
    @property
    def finished(self) -> bool: ...  # training is complete, regardless of run.steps
    def updates_due(self, step: int) -> int: ...  # updates to run at this agent step
    def add_env_steps(self, steps: int) -> None: ...  # count environment steps
    def add_update(self) -> None: ...  # count an update
    def state_dict(self) -> StateDict: ...
    def load_state_dict(self, state: StateDict) -> None: ...


@runtime_checkable
class Agent(Protocol):
    """Acts in environments and trains on batches."""

    windows: dict[str, Window]
    """Batches it trains on, by name. Training starts when the feed is ready for all of
    them except "report", which only `report` uses."""
    extras: Spaces
    """What `policy` returns for the replay to store with every row."""
    schedule: Schedule | None
    """When to train; None for the constant train ratio of the run."""

    def initial(self, batch: int) -> Carry: ...  # carry at the start of an episode
    def policy(self, carry: Carry, obs: Obs, mode: Mode = "train") -> PolicyOutput:
        """Choose actions for observations; the carry is reset where `is_first`."""

    def train(self, feed: Feed) -> Metrics: ...  # one update
    def report(self, feed: Feed) -> Metrics: ...  # losses and videos, no training
    def nonfinite(self) -> list[str]:
        """Return the losses and gradients that were not finite in the last update.

        Such an update is skipped. The metric `opt/consecutive_skips` is the number of
        consecutive skipped updates.
        """

    def load_weights(self, state: StateDict, components: str = ".*") -> list[str]:
        """Load the components whose names match a pattern; return their names."""

    def state_dict(self) -> StateDict: ...  # weights, optimizers, random generators
    def load_state_dict(self, state: StateDict) -> None: ...


class Rollout(NamedTuple):
    """An imagined trajectory, including the state it starts from."""

    states: State  # (N, H + 1, ...)
    actions: dict[str, Tensor]  # (N, H + 1, ...), chosen in each state


class WorldLoss(NamedTuple):
    """Losses of a world model, named and unreduced."""

    losses: dict[str, Tensor]  # each (B, T), or a scalar per batch
    states: State  # posterior states (B, T, ...)
    metrics: Metrics


@runtime_checkable
class World(Protocol):
    """A world model: imagines trajectories and decodes their observations.

    Random numbers come from the generator `rng` of the caller, so that reports do not
    affect training and checkpoints contain every generator.
    """

    @property
    def image_keys(self) -> Iterable[str]: ...  # images that `decode` returns
    def imagine(self, state: State, policy: Policy, horizon: int, rng: Any) -> Rollout:
        """Continue from `state` for `horizon` steps with the prior."""

    def decode(self, states: State) -> Obs: ...  # predictions; images in [0, 1]


@runtime_checkable
class LatentWorld(World, Protocol):
    """A world model with latent states that an actor-critic can be trained on.

    Batches have, in addition to the replay's keys, `prevact`: the actions that led to
    each row. States of `observe` and `imagine` have a time axis after the first axis.
    """

    @property
    def width(self) -> int: ...  # size F of the features
    @property
    def extras(self) -> Spaces: ...  # what the replay stores of a state
    def initial(self, batch: int) -> State: ...  # state before the first row
    def observe(self, state: State, batch: Batch, rng: Any) -> State: ...  # posteriors
    def loss(self, state: State, batch: Batch, rng: Any) -> WorldLoss: ...
    def features(self, states: State) -> Tensor: ...  # (*b F), for actor and critic
    def reward_and_cont(self, feat: Tensor) -> tuple[Tensor, Tensor]:
        """Return expected reward and continue probability of arriving in a state."""

    def to_replay(self, states: State) -> Extras: ...  # the form that is stored
    def from_replay(self, extras: Extras) -> State: ...  # the inverse of `to_replay`
