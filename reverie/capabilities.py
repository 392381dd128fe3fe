"""Optional protocols of agents, worlds and environments, and `AgentConfig`.

Callers test for these protocols with `isinstance`, never for the class of an agent,
world or environment. `AgentConfig` is the base class of the settings of all agents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np

from reverie.api import Action, Agent, Batch, Carry, Feed, Obs, State, StateDict, World
from reverie.rows import Window
from reverie.spaces import Spaces

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Stateful(Protocol):
    """Can be saved in a checkpoint and restored from it."""

    def state_dict(self) -> StateDict: ...
    def load_state_dict(self, state: StateDict) -> None: ...


class KeyStatistics(NamedTuple):
    """Elementwise statistics of one key over a dataset."""

    mean: np.ndarray
    std: np.ndarray
    low: np.ndarray  # minimum
    high: np.ndarray  # maximum
    rows: int = 0  # number of rows


Statistics = dict[str, KeyStatistics]
"""Statistics by key. Image statistics are in [0, 1], after cropping and resizing."""


@runtime_checkable
class NeedsStatistics(Protocol):
    """Normalizes its inputs with dataset-wide statistics."""

    @property
    def needs_statistics(self) -> bool:
        """True if this config needs dataset statistics (one pass over the data)."""

    def set_statistics(self, statistics: Statistics) -> None:
        """Set the statistics of the training data, once, before the first update.
        Checkpoints include them."""


@runtime_checkable
class HasEpisodeLosses(Protocol):
    """Can compute its losses on recorded episodes."""

    def episode_losses(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """Return named losses `(B, T)` and a mask of the rows that count.

        Sequences start at the first row of an episode; `batch["mask"]` is False for
        padding. Losses have no gradient.
        """


@runtime_checkable
class Profilable(Protocol):
    """Can run the parts of one update separately; `reverie bench` times them."""

    def sections(self, feed: Feed) -> dict[str, Callable[[], Any]]:
        """Return functions that run the parts, in order; they can be called again."""


@runtime_checkable
class CountsEpochs(Protocol):
    """A schedule of epochs: each collects data and then trains on it.

    Used by the progress display, checkpoint names and the setting `run.clock: epochs`.
    `AgentConfig.epochs` is the number of epochs.
    """

    @property
    def last_epoch(self) -> int: ...  # epoch of the last action or update; 0 if none
    @property
    def collected_epochs(self) -> int: ...  # epochs whose data is collected
    @property
    def completed_epochs(self) -> int: ...  # epochs that are collected and trained
    @property
    def planned_env_steps(self) -> int: ...  # environment steps of all epochs


@runtime_checkable
class CanRepeatUpdate(Protocol):
    """Can repeat an update that was aborted before its optimizer step.

    On a CPU, a signal that stops the run aborts the update, and the resumed run repeats
    it (`run/repeatable.py`).
    """

    def state_changed_by_loss(self) -> tuple[list[Tensor], list[Stateful]]:
        """Return the tensors and random generators that change before the optimizer
        step. They are restored if the update is aborted."""


@runtime_checkable
class CanWarmUp(Protocol):
    """Can load the kernels of an update before the first one."""

    def warm_up(self, batch: Batch) -> None:
        """Run the kernels on a batch of the window `train`, without changing the agent.

        Called in a thread before the first update, while another calls `policy`.
        """


@runtime_checkable
class HasParameterCount(Protocol):
    """Can count its trainable parameters."""

    def parameter_count(self) -> int: ...


@runtime_checkable
class HasWorld(Protocol):
    """An agent whose world model other agents can use (`AgentConfig.base_run`)."""

    @property
    def world(self) -> World: ...


@runtime_checkable
class ObsEncoder(Protocol):
    """An `nn.Module` that encodes observations."""

    width: int  # size E of the embedding

    @property
    def keys(self) -> list[str]:
        """Observation keys in the order in which they enter the network."""

    def __call__(self, obs: Obs, dtype: Any) -> Tensor:
        """Return embeddings `(*b E)` of observations, computed in `dtype`."""


@runtime_checkable
class HasEncoder(Protocol):
    """A world with an encoder of single observations."""

    @property
    def encoder(self) -> ObsEncoder: ...


@runtime_checkable
class HasEnsembleTargets(Protocol):
    """A world whose states have parts that an ensemble can predict (Plan2Explore)."""

    def target_width(self, name: str) -> int:
        """Return the size of a target: `stoch`, `deter`, `embed` or `feat`."""

    def target(self, name: str, states: State, batch: Batch) -> Tensor:
        """Return the target `(B, T, width)` of the rows of a batch, detached."""


@runtime_checkable
class HasBoundaries(Protocol):
    """A world whose states are grouped into segments."""

    def boundaries(self, states: State) -> Tensor:
        """Return a bool tensor `(*b)`: True where a segment begins."""


@runtime_checkable
class FindsBoundaries(Agent, Protocol):
    """An agent that divides sequences into segments, such as VTA."""

    @property
    def image_key(self) -> str: ...  # the image that the agent models
    @property
    def modeled_rows(self) -> slice:
        """Rows of a sequence that are divided; earlier rows are context."""

    def evaluate(self, data: Batch) -> Any:
        """Return the boundaries, reconstructions and losses of sequences, as a
        `WindowEvaluation` (`worlds/vta/states.py`)."""

    def imagine(self, data: Batch, by_segment: bool) -> tuple[Tensor, Tensor]:
        """Return images imagined from the context rows (with `by_segment`, one image
        per segment), and a mask of the images with which a segment begins."""


@runtime_checkable
class ProfilableWorld(Protocol):
    """A world whose loss `reverie bench` can time in parts; see `Profilable`."""

    def sections(self, state: State, batch: Batch, rng: Any) -> dict[str, Any]: ...


@runtime_checkable
class WorldModelEnv(Protocol):
    """A world model simulated step by step on arrays, for a batch of rollouts.

    `envs/adapters/world_model.py` wraps it as an `api.Env`, so that evaluation, videos
    and play work inside the world model. It has its own random generator.
    """

    obs_space: Spaces
    act_space: Spaces

    @property
    def predicted_keys(self) -> list[str]:
        """Observation keys that the model predicts; the others are zero in its rows."""

    def seed(self, seed: int) -> None:
        """Reset the random generator."""

    def begin(self, context: Batch) -> Any:
        """Return the state after observing real rows `(N, T, ...)` of N episodes.

        Starts from the model's initial state. The action of the last row is ignored,
        because it is an argument of `step`.
        """

    def step(self, state: Any, action: Action) -> tuple[Any, Obs]:
        """Return the next state and its observations `(N, ...)`.

        Sets `reward`, `cont` (the predicted continue probability) and `is_terminal`;
        the caller sets `is_first` and `is_last`.
        """


@runtime_checkable
class PolicyWorldModelEnv(WorldModelEnv, Protocol):
    """A world model that can continue from the carry of its agent's policy."""

    def resume(self, carry: Carry, context: Batch) -> Any:
        """Return the state after real rows, given the policy's carry after them.

        Only this state, and states that `step` returns after it, can be passed to the
        methods below. The state may depend on rows before `context`, because the carry
        depends on them.
        """

    def act(self, state: Any, greedy: bool = False) -> Action:
        """Choose actions `(N, ...)` with the agent's policy."""

    def latent(self, state: Any) -> dict[str, Tensor]:
        """Return the latent variables `(N, ...)` of a state by name."""


class StateInspection(NamedTuple):
    """Predictions of an agent in one state; those that it does not make are None."""

    value: float | None = None
    entropy: float | None = None  # of the policy, summed over all actions
    probs: dict[str, np.ndarray] = {}  # noqa: RUF012
    """Probability of every value of the discrete actions `(..., K)`, by key."""
    latents: np.ndarray | None = None  # class indices `(S,)` of categorical latents
    classes: int = 0  # number of classes K of each latent
    boundary: float | None = None  # probability that the next step begins a segment
    context: tuple[int, int] | None = None  # steps in transformer context, its limit


@runtime_checkable
class InspectableWorldModelEnv(PolicyWorldModelEnv, Protocol):
    """A world model whose predictions can be shown while it is simulated."""

    def inspect(self, state: Any) -> StateInspection:
        """Return the predictions of the first rollout in this state."""

    def inspect_policy(self, carry: Carry) -> StateInspection:
        """Return the predictions for the first environment in a carry of the policy."""

    def observation_kl(self, carry: Carry, row: Obs) -> float | None:
        """Return KL(posterior || prior) of a new row `(1, ...)`, in nats; None if the
        model has no such distributions. `carry` is the policy's carry before the row.
        """


@runtime_checkable
class HasPriorKL(Protocol):
    """A latent world that can compute the KL divergence of posterior and prior."""

    def prior_kl(self, state: State, batch: Batch, rng: Any) -> Tensor:
        """Return KL(posterior || prior) `(B, T)` of rows after `state`, in nats."""


@runtime_checkable
class HasBoundaryProbability(Protocol):
    """A latent world that predicts where segments begin."""

    def boundary_probability(self, states: State) -> Tensor:
        """Return the probability `(*b)` that the next step begins a segment."""


@runtime_checkable
class SeedablePolicy(Protocol):
    """A policy whose random numbers can be seeded."""

    def seed_policy(self, seed: int) -> None:
        """Reset the random generator that `policy` uses in evaluation."""


@runtime_checkable
class CanReplaceAction(Protocol):
    """A policy whose carry contains its previous actions."""

    def replace_action(self, carry: Carry, action: Action) -> Carry:
        """Return the carry with the executed actions as previous actions, if they are
        not those of the policy (for example, if a human player chose them)."""


@runtime_checkable
class HasWorldModelEnv(Protocol):
    """Has a world model that can be simulated as an environment."""

    def world_model_env(self, seed: int = 0) -> WorldModelEnv: ...


@runtime_checkable
class HasSimulatorState(Protocol):
    """An environment whose simulator can be set to recorded states.

    Used by `reverie data replay` and `reverie data render`. If `image` has several
    cameras, stacked along the channels, the attribute `camera_names` has their names.
    """

    def simulator_state(self) -> np.ndarray: ...  # the current state as one vector
    def simulator_model(self) -> str:
        """Return the scene of the episode (XML); empty if it is always the same."""

    def set_simulator_state(self, state: np.ndarray, model: str = "") -> Obs:
        """Set the state within an episode; return the observation. `model` is the
        recorded scene (XML), which replaces the current scene; empty to keep it."""


class ExportStep(NamedTuple):
    """One pure step of an agent or world model, for `reverie export`."""

    module: Any  # nn.Module: (inputs by name, state, rng) -> (outputs by name, state)
    inputs: Spaces  # in addition to the state
    initial: Callable[[int], Any]  # returns the initial state for a batch size


@runtime_checkable
class Exportable(SeedablePolicy, Protocol):
    """Has a policy that `reverie export` can write to a file."""

    def export_policy(self, greedy: bool) -> ExportStep:
        """Return one step of `policy` in mode `greedy` or `eval`: observations and
        `is_first` in, actions out. `is_first` resets the state."""


@runtime_checkable
class HasWorldSteps(Protocol):
    """Has a world model that `reverie export` can write to files."""

    def world_steps(self) -> dict[str, ExportStep]:
        """Return `observe`, `imagine` and `decode`; see `agents/export_steps.py`."""


@runtime_checkable
class HasBase(Protocol):
    """An agent that uses the world model or encoder of another run."""

    @property
    def base(self) -> Agent | None:
        """The agent whose world model is used; None for an encoder from a file."""

    def load_base(self, state: StateDict) -> None:
        """Load the weights of the base run."""


class UnusedSetting(NamedTuple):
    """A setting that has no effect in a run."""

    name: str  # dotted name of a setting, or of a group with a dot at its end
    reason: str  # why it has no effect: a clause, without a period
    instead: str = ""
    """Suggested fix, with `{value}` for the given value; empty: remove the flag."""


@dataclass(frozen=True)
class AgentConfig:
    """Base class of an agent's settings, with properties of the agent that the rest of
    the package depends on.

    The defaults describe an agent that acts in environments and trains on the replay.
    """

    importers: ClassVar[tuple[str, ...]] = ()
    """Instances of `reverie.convert.importer.Importer`, each as `package.module:NAME`.
    They read checkpoints of other implementations of the agent."""
    changeable_on_resume: ClassVar[tuple[str, ...]] = ()
    """Settings (in this dataclass) that may change when a run is resumed."""
    plugin_settings: ClassVar[tuple[str, ...]] = ()
    """Settings whose value may be a class, `package.module:Class`, such as a world."""
    reconstruction_setting: ClassVar[str] = ""
    """Setting that selects the reconstruction loss. A sequence dataset sets it to the
    loss that fits its images."""
    explore_policies: ClassVar[tuple[str, ...]] = ("random",)
    """Values of `explore.policy` that the agent supports, in addition to `none`. Random
    actions are chosen by the training loop, so every agent that acts supports them."""
    explore_settings: ClassVar[tuple[str, ...]] = ()
    """Settings of `explore` that have an effect with `plan2explore`, in addition to
    `policy` and `until`; groups have a dot at their end."""
    needs_recordings: ClassVar[bool] = False
    """True if the agent trains on recorded episodes only, not in environments."""
    policy_setting: ClassVar[str] = ""
    """Setting that enables training of the policy; empty if it is always trained."""
    sizes: ClassVar[tuple[str, ...]] = ()
    """Presets with sizes of the agent's networks, largest first. Without a size in its
    settings, a run uses the largest preset that fits on its CUDA GPU (see
    `training_memory`), or the smallest on other devices."""
    batch_settings: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """One tuple of settings for each kind of batch, with the number of sequences first.
    The product is the number of rows, including imagined rows. Runs whose batches do
    not fit into memory are refused, with an error that names the settings."""

    @property
    def trains_policy(self) -> bool:
        """False if only a world model is trained."""
        return not self.policy_setting or bool(getattr(self, self.policy_setting))

    def is_policy_trained(self, state: StateDict, updates: int) -> bool:
        """True if the policy is trained enough to be evaluated.

        `state` is the `state_dict` of the agent after this number of updates.
        """
        return updates > 0

    @property
    def sequence_window(self) -> Window | None:
        """Batches of a sequence dataset; None for agents that do not train on one."""
        return None

    @property
    def base_run(self) -> str:
        """Run folder or checkpoint whose world model or encoder is used; or empty."""
        return ""

    @property
    def uses_base_world(self) -> bool:
        """False if only the encoder of the base run is used. Settings of the world
        model are then not needed."""
        return True

    @property
    def base_agent(self) -> str:
        """Name of the agent of the base run, which is built but not trained."""
        return ""

    @property
    def rows_per_update(self) -> int:
        """Dataset rows per update, for agents whose training length is set in passes
        over the dataset; 0 for others."""
        return 0

    @property
    def epochs(self) -> int:
        """Epochs of the agent's schedule (see `CountsEpochs`); 0 if it has none."""
        return 0

    @property
    def training_memory(self) -> int:
        """Approximate bytes of GPU memory in training, for agents with `sizes`."""
        return 0

    @property
    def sets_priorities(self) -> bool:
        """True if the agent sets sampling priorities in the replay."""
        return False

    @property
    def unused(self) -> tuple[UnusedSetting, ...]:
        """Settings of the run and the agent that have no effect with this config;
        given as flags, they are an error."""
        return ()


class ImportedEncoder(NamedTuple):
    """The encoder in a checkpoint of another implementation."""

    architecture: str  # its name in `nets/encoders.py`
    config: Any  # its settings, such as `EncoderConfig`
    agent: str  # name of an agent that can load the world model of the checkpoint


@runtime_checkable
class ConfiguresBase(Protocol):
    """Config of an agent that uses the world model or encoder of another run."""

    def with_base_agent(self, name: str) -> Any:
        """Return this config with `base_agent` set to the agent of the base run."""

    def with_encoder(self, encoder: ImportedEncoder) -> Any:
        """Return this config for the encoder of another implementation."""
