"""The nouns of Reverie, and the few verbs between them. Read this file first.

An `Env` shows observations and takes actions. An `Agent` acts in it, and trains on
batches it pulls from a `Feed`, which cuts them out of the replay as the agent's
`windows` asks. A `World` is what most agents learn inside: it follows recorded
experience (`observe`) and dreams its own (`imagine`). One loop (`run/train.py`) moves
data between them and never asks which agent, world or environment it has.

Time is written down once, here. Row `t` of any stored sequence holds what was seen on
arrival and what was done about it:

    row                0     1     2
    image, is_* flags  o0    o1    o2     seen on arrival
    reward             0     r1    r2     earned by arriving
    action             a0    a1    a2     chosen on seeing this row; leads to the next

The action of a row with `is_last` is zero. An episode of n environment steps is n + 1
rows. Other people's data is shifted at the border, by the reader or the agent that
needs it.

Shapes: `B` batch, `T` time, `N` start states, `H` horizon, `A` action, `E` embedding,
`F` feature, `D` deterministic, `S` stochastic groups, `K` classes per group, `L`
tokens, `h w c` image axes, `*b` any leading axes. Images are uint8, channels last,
everywhere outside a network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:  # environment workers know this file and do not need torch
    from torch import Tensor

Obs = dict[str, Any]
"""Observation arrays or tensors by key. Every one has the four `FLAGS`; besides them
any images (uint8, h w c), vectors and integers. Keys under `log/` are for people: the
replay drops them and no agent sees them."""

Action = dict[str, Any]
Extras = dict[str, Any]
Batch = dict[str, Any]
Carry = Any
"""What an agent carries from one call of `policy` to the next: any nest of NamedTuples,
dicts and tensors whose first axis is the environment. The loop stores and restores
it."""

Metrics = dict[str, Any]
"""Scalars (tensors on any device, or numbers), images (h w c uint8) and videos
(t h w c uint8) by name; the logger tells them apart by rank."""

Mode = Literal["train", "eval", "report"]
StateDict = dict[str, Any]
"""A nest of dicts and lists with string keys whose leaves are tensors, arrays, numbers,
strings, booleans or None: what a checkpoint can hold without pickle."""

FLAGS = ("reward", "is_first", "is_last", "is_terminal")
RESERVED = (*FLAGS, "stepid", "consec", "reset")
EVENT = "log/event"
"""Where something is known to have happened: to measure by, never to learn from."""


class UserError(Exception):
    """Something the user can mend: shown as one sentence with its fix, exit code 2."""


@dataclass(frozen=True, eq=False)
class Space:
    """The dtype, shape and bounds of one observation, action or note.

    Integers count from `low` up to, not including, `high`; an integer (or bool) space
    that is not an image is discrete. Bounds may be numbers or arrays of the shape.

    An action that was scaled to [-1, 1] keeps the bounds it had in the environment's
    own units as `native`, a pair; entries without finite bounds are not scaled.
    """

    dtype: Any
    shape: Any = ()
    low: Any = None
    high: Any = None
    native: Any = None

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "dtype", np.dtype(self.dtype))
        shape = (self.shape,) if isinstance(self.shape, int) else self.shape
        set_(self, "shape", tuple(int(n) for n in shape))
        set_(self, "low", self._bound(self.low, lowest=True))
        set_(self, "high", self._bound(self.high, lowest=False))
        if self.native is not None:
            low, high = self.native
            pair = (self._bound(low, lowest=True), self._bound(high, lowest=False))
            set_(self, "native", pair)

    def _bound(self, value: Any, lowest: bool) -> np.ndarray:
        wide = np.int64 if self.dtype.kind in "iub" else self.dtype
        if value is None:
            if self.dtype.kind == "f":
                value = -np.inf if lowest else np.inf
            elif self.dtype.kind == "b":
                value = 0 if lowest else 2
            else:
                info = np.iinfo(self.dtype)
                value = info.min if lowest else min(info.max + 1, 2**63 - 1)
        bound = np.broadcast_to(np.asarray(value, wide), self.shape)
        return np.ascontiguousarray(bound).reshape(self.shape)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Space)
            and (self.dtype, self.shape) == (other.dtype, other.shape)
            and np.array_equal(self.low, other.low)
            and np.array_equal(self.high, other.high)
            and (self.native is None) == (other.native is None)
            and (self.native is None or np.array_equal(self.native, other.native))
        )

    @property
    def is_image(self) -> bool:
        return self.dtype == np.uint8 and len(self.shape) == 3

    @property
    def is_discrete(self) -> bool:
        return self.dtype.kind in "iub" and not self.is_image

    @property
    def classes(self) -> int:
        """How many values one entry of a discrete space takes."""
        if not self.is_discrete:
            raise TypeError(f"{self} is not discrete")
        return int((self.high - self.low).max()) if self.low.size else 0

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def zeros(self, *batch: int) -> np.ndarray:
        return np.zeros((*batch, *self.shape), self.dtype)

    def sample(self, rng: np.random.Generator, *batch: int) -> np.ndarray:
        """Uniform within the bounds; a standard normal where they are infinite."""
        shape = (*batch, *self.shape)
        if self.dtype.kind in "iub":
            return rng.integers(self.low, self.high, shape).astype(self.dtype)
        finite = np.isfinite(self.low) & np.isfinite(self.high)
        low, high = np.where(finite, self.low, 0), np.where(finite, self.high, 1)
        uniform = low + (high - low) * rng.random(shape)
        return np.where(finite, uniform, rng.standard_normal(shape)).astype(self.dtype)

    def to_native(self, value: Any) -> np.ndarray:
        """An action of this space in the environment's own units."""
        value = np.asarray(value)
        if self.native is None:
            return value
        low, high = self.native
        finite = np.isfinite(low) & np.isfinite(high)
        low, high = np.where(finite, low, -1), np.where(finite, high, 1)
        stretched = np.clip((value + 1) / 2 * (high - low) + low, low, high)
        return np.where(finite, stretched, value).astype(value.dtype)

    def problem(self, value: Any) -> str | None:
        """What is wrong with `value` as an element of this space, or None."""
        array = np.asarray(value)
        if array.shape != self.shape:
            return f"has shape {array.shape}, the space says {self.shape}"
        if array.dtype != self.dtype:
            return f"has dtype {array.dtype}, the space says {self.dtype}"
        if array.dtype.kind == "f" and np.isnan(array).any():
            return "has NaN entries"
        above = array > self.high if array.dtype.kind == "f" else array >= self.high
        if (array < self.low).any() or above.any():
            return (
                f"has values in [{array.min()}, {array.max()}], the space says "
                f"[{self.low.min()}, {self.high.max()}"
                f"{']' if array.dtype.kind == 'f' else ')'}"
            )
        return None

    def to_json(self) -> dict[str, Any]:
        def bound(value: np.ndarray) -> Any:
            same = value.size and (value == value.flat[0]).all()
            numbers = value.flat[0].item() if same else value.tolist()
            return str(numbers) if isinstance(numbers, float) else numbers

        found = {
            "dtype": self.dtype.name,
            "shape": list(self.shape),
            "low": bound(self.low),
            "high": bound(self.high),
        }
        if self.native is not None:
            found["native"] = [bound(value) for value in self.native]
        return found

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Space:
        def bound(value: Any) -> Any:
            return float(value) if isinstance(value, str) else value

        low, high = bound(data["low"]), bound(data["high"])
        native = data.get("native")
        pair = native and (bound(native[0]), bound(native[1]))
        return cls(np.dtype(data["dtype"]), tuple(data["shape"]), low, high, pair)


Spaces = dict[str, Space]


def agent_obs_space(obs_space: Spaces) -> Spaces:
    """The keys an agent may perceive: neither flags nor anything for people."""
    return {
        key: space
        for key, space in obs_space.items()
        if key not in RESERVED and not key.startswith("log/")
    }


@dataclass(frozen=True)
class Window:
    """One kind of batch an agent eats: how many sequences, how long, cut from where.

    A batch holds `batch` rows of `context + length` steps. The context steps come first
    and only bring stored extras along (`replay_context` of DreamerV3). With `consec` >
    1 each sampled sequence is served as that many consecutive batches; the batch key
    `consec` counts them. `select` names the way sequences are chosen.

    With `select="episodes"` a sequence never leaves its episode. Episodes are chosen by
    how rarely they have been, in proportion to `(1 + n) ** -alpha` for one that was
    served n times (`Feed.count_uses`), and not by their length; then one of the
    episode's transitions, around which the sequence is cut wherever it falls. It may
    stick out of the episode, on both sides or only on the left (`pad`): the batch key
    `mask` is False for such rows, whose content means nothing.
    """

    batch: int
    length: int
    context: int = 0
    consec: int = 1
    select: Literal["uniform", "mixture", "episodes"] = "mixture"
    online: bool = True
    pad: Literal["both", "left"] = "both"
    alpha: float = 0.0

    def __post_init__(self) -> None:
        if self.select == "episodes":
            assert self.length > 1, "a transition takes two rows"
            assert self.context == 0 and self.consec == 1, "of consecutive pieces"  # noqa: PT018

    @property
    def span(self) -> int:
        """Steps one sampled sequence takes from the replay."""
        return self.context + self.consec * self.length


@runtime_checkable
class Feed(Protocol):
    """Hands an agent the batches of its windows, as tensors on its device.

    A batch has the observation, action and note keys of the replay, each `(B, T, ...)`
    with `T = context + length`, and besides them `stepid` (int64, names each row) and
    `consec` (int64).
    """

    def __call__(self, name: str, out: Batch | None = None) -> Batch:
        """The next batch of this kind.

        With `out`, an earlier batch of this kind, it is put into those tensors, for
        whoever needs it in the same place every time (a CUDA graph).
        """
        ...

    def ready(self, name: str) -> bool:
        """Whether enough steps are stored to cut a batch of that kind."""
        ...

    def write_back(self, stepid: Tensor, extras: Extras) -> None:
        """Store fresher extras for these rows; rows already evicted are passed over."""
        ...

    def prioritize(self, stepid: Tensor, priority: Tensor) -> None:
        """Say how much these rows deserve to be replayed."""
        ...

    def count_uses(self, name: str, on: bool) -> None:
        """Whether batches of this kind count, from now on, as uses of their episodes.

        Only for windows that choose by episode.
        """
        ...


@runtime_checkable
class Env(Protocol):
    """One environment. It restarts only when told to.

    `step` takes an action without batch axis and returns the next observation; after
    one with `is_last` only `reset` may follow. `is_terminal` says the episode ended
    because the task did, so nothing lies beyond; a time limit sets `is_last` alone.
    An environment that also has `state_dict` and `load_state_dict` is resumed exactly
    where it stood; any other begins a new episode.
    """

    @property
    def obs_space(self) -> Spaces: ...

    @property
    def act_space(self) -> Spaces: ...

    def reset(self, seed: int | None = None) -> Obs: ...

    def step(self, action: Action) -> Obs: ...

    def close(self) -> None: ...


@runtime_checkable
class Stateful(Protocol):
    """Anything a checkpoint can hold."""

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> None: ...


@runtime_checkable
class VecEnv(Protocol):
    """Many environments stepping together; an ended episode restarts by itself.

    `step` takes and returns arrays with a leading environment axis. The step after a
    row with `is_last` ignores the action and returns the first row of a new episode.
    It comes in two halves as well, so that others can work while environments step:
    `send` begins a step, `recv` waits for its rows.
    """

    obs_space: Spaces
    act_space: Spaces

    def __len__(self) -> int: ...

    def reset(self) -> Obs: ...

    def step(self, action: Action) -> Obs: ...

    def send(self, action: Action) -> None: ...

    def recv(self) -> Obs: ...

    def close(self) -> None: ...

    def metrics(self) -> Metrics: ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> Obs:
        """Go on where the state was saved; returns the rows to go on from.

        Environments that cannot resume begin a new episode there.
        """
        ...


@runtime_checkable
class Schedule(Protocol):
    """Says when to act and when to train.

    The loop brings a steady one (`run.train_ratio`). An agent that trains in another
    schedule (Δ-IRIS: collect an epoch, then train each part in turn) brings its own.
    """

    @property
    def should_collect(self) -> bool:
        """Whether the loop should act before it asks for updates again.

        While this is False the loop only trains, and saves and stops as it always may.
        """
        ...

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do, however few steps were taken."""
        ...

    @property
    def phase(self) -> int:
        """Stretches of acting completed; the loop sums up the episodes of each."""
        ...

    def updates_due(self, step: int) -> int:
        """How many updates to do in this turn, now that `step` steps were taken.

        A few at a time: the loop answers signals and saves between turns.
        """
        ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> None: ...


@runtime_checkable
class Agent(Protocol):
    """Acts, learns, and says what it needs for both."""

    windows: dict[str, Window]
    """The batches it eats, by name. `train` begins when all of them can be served, save
    "report", which is for `report` alone."""

    extras: Spaces
    """What it wants stored beside every step (latents, ...); `policy` returns them."""

    schedule: Schedule | None
    """When it wants to train; None for the loop's steady train ratio."""

    def initial(self, batch: int) -> Carry: ...

    def policy(
        self, carry: Carry, obs: Obs, mode: Mode = "train"
    ) -> tuple[Carry, Action, Extras]:
        """Choose actions for a batch of observations (arrays in, arrays out).

        Forgets by itself wherever `is_first` is true.
        """
        ...

    def train(self, feed: Feed) -> Metrics: ...

    def report(self, feed: Feed) -> Metrics: ...

    def nonfinite(self) -> list[str]:
        """Names of the losses and gradients that were not finite in the last update.

        Such an update changes nothing; metric `opt/nonfinite_in_row` counts them.
        """
        ...

    def load_weights(self, state: StateDict, components: str = ".*") -> list[str]:
        """Take over the weights of the components a pattern names; says which."""
        ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> None: ...


class WorldLoss(NamedTuple):
    """What a world has to say about a batch; losses are named and not yet reduced."""

    losses: dict[str, Tensor]  # each (B, T)
    states: Any
    metrics: Metrics


class Rollout(NamedTuple):
    """A rollout without the environment, beginning with the state it started from."""

    states: Any  # (N, H + 1, ...)
    actions: dict[str, Tensor]  # (N, H + 1, ...): the action chosen in each state


@runtime_checkable
class World(Protocol):
    """A model of the environment that can be followed, dreamt in and looked into.

    A state is a NamedTuple of tensors that only its world looks into: `initial` gives
    `(B, ...)`, `observe` and `imagine` add a time axis after the first. Besides the
    keys of the replay, a batch has `prevact`, the actions that *led to* each row.
    `rng` is where randomness comes from: whoever calls hands it down, so that a report
    does not disturb training and a checkpoint holds every generator. A world that finds
    segments also has `boundaries(states)`, which says where they begin.
    """

    @property
    def width(self) -> int:
        """Size of the features, F."""
        ...

    @property
    def extras(self) -> Spaces:
        """What the replay keeps of a state."""
        ...

    @property
    def drawn(self) -> Iterable[str]:
        """The image keys that `decode` draws."""
        ...

    def initial(self, batch: int) -> Any: ...

    def observe(self, state: Any, batch: Batch, rng: Any) -> Any:
        """Follow recorded steps: the posterior state of each."""
        ...

    def imagine(self, state: Any, policy: Any, horizon: int, rng: Any) -> Rollout:
        """Continue from `state` on the prior alone; `policy` maps a state to actions.

        Begins with `state` itself and ends `horizon` steps later.
        """
        ...

    def features(self, states: Any) -> Tensor:
        """What actors, critics and other heads see of states: `(*b F)`."""
        ...

    def outcome(self, feat: Tensor) -> tuple[Tensor, Tensor]:
        """The expected reward for arriving in a state, and the chance to go on."""
        ...

    def decode(self, states: Any) -> Obs:
        """What the observations probably looked like; images in [0, 1]."""
        ...

    def loss(self, state: Any, batch: Batch, rng: Any) -> WorldLoss: ...

    def to_replay(self, states: Any) -> Extras:
        """States as the replay keeps them."""
        ...

    def from_replay(self, extras: Extras) -> Any:
        """The states that extras were made of."""
        ...


class Moments(NamedTuple):
    """What is known of all values of one key, entry by entry."""

    mean: np.ndarray
    std: np.ndarray
    low: np.ndarray
    high: np.ndarray


Statistics = dict[str, Moments]
"""By key. Those of images are in [0, 1], of prepared frames."""


@runtime_checkable
class NeedsStatistics(Protocol):
    """An agent that wants to know its recordings before it learns from them."""

    @property
    def needs_statistics(self) -> bool:
        """Whether it does, with its settings; to find out takes a pass over them."""
        ...

    def set_statistics(self, statistics: Statistics) -> None:
        """Told once, before the first update; a checkpoint keeps what was made of it.

        `statistics` are of all training rows.
        """
        ...


@runtime_checkable
class HasEpisodeLosses(Protocol):
    """An agent that can say how well it explains recorded episodes."""

    def episode_losses(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """Losses of every row by name, each `(B, T)`, and which rows count.

        Sequences begin with an episode; `mask` says which of their rows are real.
        Nothing learns from it, and what comes after a row changes nothing about it.
        """
        ...


@runtime_checkable
class Profilable(Protocol):
    """An agent that can do the work of an update in pieces, to be timed alone."""

    def sections(self, feed: Feed) -> dict[str, Callable[[], Any]]:
        """The pieces in their order, by name; each may be called again and again."""
        ...


@runtime_checkable
class WorldModelEnv(Protocol):
    """A world to walk through one step at a time, in arrays.

    `envs/adapters/world_model.py` makes an environment of it, so that
    whoever can play, be evaluated or be looked at in an environment can be in a
    dream. All randomness is its own.
    """

    obs_space: Spaces
    act_space: Spaces

    def seed(self, seed: int) -> None:
        """From here on, draw what this seed says."""
        ...

    def begin(self, context: Batch) -> Any:
        """A state from which dreams go on where real rows end.

        `context` are rows `(N, T, ...)` of observations and actions, as in the replay,
        each of one episode; the action of the last row does not count.
        """
        ...

    def step(self, state: Any, action: Action) -> tuple[Any, Obs]:
        """What an action leads to: the next state, and its rows `(N, ...)`.

        `is_first` and `is_last` are those of the environment, which is not this.
        """
        ...


@runtime_checkable
class HasWorldModelEnv(Protocol):
    """An agent in whose world others may walk."""

    def world_model_env(self, seed: int = 0) -> WorldModelEnv: ...
