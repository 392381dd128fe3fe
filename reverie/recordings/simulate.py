"""Replay recorded episodes open loop in a simulator, or render their states.

The recording must contain flat states of the simulator (robomimic's `states`), and the
environment must be able to load them (`capabilities.HasSimulatorState`). Row t of an
episode is observed in state t. The state after the last action is usually not recorded,
so the simulator executes the last action in the last recorded state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np

from reverie import envs
from reverie.api import Env, Obs, UserError
from reverie.datasets.action_units import check_same_actions, make_action_converter
from reverie.datasets.episode_format import LOG, BadEpisode, Episode
from reverie.datasets.readers import Reader, WrappedReader
from reverie.envs.registry import SUITES, split_task
from reverie.envs.wrappers import RENDERED, has_simulator_state
from reverie.spaces import SUCCESS, Space, Spaces

ReplayMode = Literal["actions", "states"]
T = TypeVar("T")


@dataclass(frozen=True)
class SimulatorConfig:
    """The simulator of a recording, and where its states are stored."""

    task: str = ""
    """Task that was recorded, such as robosuite_Lift."""
    env: envs.EnvConfig = field(default_factory=envs.EnvConfig)
    """Settings of the environment."""
    recorded_settings: bool = True
    """Use the robot, controller and control frequency stored in the recording, unless
    they are set with flags."""
    states: tuple[str, ...] = ("states",)
    """Arrays of the simulator states in an episode; several are concatenated
    (`infos/qpos infos/qvel`)."""
    model: bool = True
    """Load the recorded model of the scene (XML), if there is one. It contains the
    sizes and colors of the objects."""


@dataclass
class OpenLoopReplay:
    """A recorded episode, and the observations of the simulator that replayed it."""

    episode: Episode
    rows: list[Obs]
    """Observations in the simulator; fewer than recorded if its episode ended early."""
    state_errors: list[float]
    """Largest absolute difference between simulated and recorded state, per row; empty
    without recorded states."""

    def errors(self) -> dict[str, np.ndarray]:
        """Return the mean absolute difference per row of every common observation."""
        found = {}
        for key, value in self.rows[0].items():
            recorded = self.episode.get(key)
            if recorded is None or key.startswith((LOG, "is_")):
                continue
            if recorded.shape[1:] != np.shape(value):
                continue
            rows = np.stack([row[key] for row in self.rows]).astype(np.float64)
            difference = np.abs(rows - recorded[: len(rows)].astype(np.float64))
            found[key] = difference.reshape(len(rows), -1).mean(1)
        return found

    def describe(self) -> str:
        """Return the comparison as lines of text."""
        steps, total = len(self.rows) - 1, len(self.episode["reward"]) - 1
        lines = [f"{steps} of {total} steps"]
        if steps < total:
            lines[0] += (
                ": the episode ended in the simulator (its time limit, a terminal "
                "state, or success)"
            )
        table = {key: error for key, error in self.errors().items() if key != "reward"}
        if self.state_errors:
            table["simulator state"] = np.array(self.state_errors)
        if table:
            lines.append(
                f"  {'absolute error':<28} {'first row':>10} {'mean':>10} "
                f"{'largest':>10}"
            )
        for key, error in table.items():
            numbers = (error[0], error.mean(), error.max())
            lines.append(f"  {key:<28} " + " ".join(f"{x:>10.4g}" for x in numbers))
        replayed = sum(float(row["reward"]) for row in self.rows)
        recorded = float(self.episode["reward"].sum())
        lines.append(f"  return: recorded {recorded:.4g}, replayed {replayed:.4g}")
        success = [float(row[SUCCESS]) for row in self.rows if SUCCESS in row]
        if success and max(success) >= 0:  # -1 if it is not reported
            lines.append(f"  success in the simulator: {max(success) > 0}")
        return "\n".join(lines)

    def frames(self) -> Obs:
        """Return recorded and simulated images `(T, h, w, c)` by title."""
        count = len(self.rows)
        images = {
            f"recorded {key}": value[:count]
            for key, value in self.episode.items()
            if value.dtype == np.uint8 and value.ndim == 4
        }
        for key, value in self.rows[0].items():
            if value.dtype == np.uint8 and value.ndim == 3:
                images[f"replayed {key}"] = np.stack([row[key] for row in self.rows])
        return images


class Simulator:
    """The environment of a recording.

    All calls of the environment are made in one thread, because OpenGL contexts belong
    to a thread. Use the simulator in a `with` statement, which closes it.
    """

    def __init__(self, config: SimulatorConfig, reader: Reader, seed: int = 0):
        if not config.task:
            raise UserError(
                "The task that was recorded is not given.\n"
                "  Fix: --task TASK, such as --task robosuite_Lift"
            )
        self.config, self.reader = config, reader
        self.settings = _recorded_settings(config, reader)
        env_config = _with_settings(config, self.settings)
        self._thread = ThreadPoolExecutor(1, "simulator")
        self.env: Any = self._run(lambda: _make_env(config.task, env_config, seed))
        try:
            recorded, simulated = reader.act_space, self.env.act_space
            names = reader.origin, config.task
            check_same_actions(
                names[0], recorded, names[1], simulated, check_range=False
            )
            self._convert, self.unit_warning = make_action_converter(
                recorded, simulated, *names
            )
        except UserError:
            self.close()
            raise

    def replay(self, name: str, mode: ReplayMode = "actions") -> OpenLoopReplay:
        """Play the actions or the states of an episode.

        Actions are played from the first recorded state or, without recorded states,
        from the state after a reset of the environment.
        """
        episode = self.reader.read(name)
        states, model = self._read_states(name, required=mode == "states")
        return self._run(lambda: self._replay(episode, states, model, mode))

    def render(self, name: str) -> tuple[Episode, list[Obs]]:
        """Return an episode and the images of its rows, by key."""
        episode = self.reader.read(name)
        states, model = self._read_states(name, required=True)
        assert states is not None
        rows = self._run(lambda: self._observe_states(episode, states, model))
        return episode, [self.images(obs) for obs in rows]

    def image_space(self) -> Spaces:
        """Return the spaces of the images that `render` returns."""
        spaces = self.env.obs_space.items()
        zeros = {key: np.zeros(s.shape, s.dtype) for key, s in spaces if s.is_image}
        images = {
            key: Space(np.uint8, x.shape) for key, x in self.images(zeros).items()
        }
        if not images:
            suite = split_task(self.config.task)[0]
            raise UserError(
                f"Task {self.config.task!r} has no images with these settings.\n"
                f"  Fix: enable its camera; `reverie config --explain env.{suite}` "
                "lists the settings."
            )
        return images

    def images(self, obs: Obs) -> Obs:
        """Return the images of an observation; stacked cameras are separated."""
        spaces = self.env.obs_space
        images = {key: value for key, value in obs.items() if spaces[key].is_image}
        if RENDERED in images:
            images["image"] = images.pop(RENDERED)
        cameras: tuple[str, ...] = getattr(self.env, "camera_names", ())
        if cameras and "image" in images:
            views = np.split(images.pop("image"), len(cameras), axis=-1)
            images |= {f"{c}_image": v for c, v in zip(cameras, views, strict=True)}
        return images

    def close(self) -> None:
        self._run(self._close)
        self._thread.shutdown()

    def __enter__(self) -> Simulator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close(self) -> None:
        self.env.close()
        del self.env

    def _run(self, function: Callable[[], T]) -> T:
        """Call a function in the thread of the environment."""
        return self._thread.submit(function).result()

    def _read_states(self, name: str, required: bool) -> tuple[np.ndarray | None, str]:
        """Return recorded states and model; None and "" if missing and not required."""
        is_settable = has_simulator_state(self.env)
        if required and not is_settable:
            raise UserError(
                f"Task {self.config.task!r} cannot be set to recorded states.\n  Fix: "
                "use a task of robosuite, mujoco or dmc, or play the actions with "
                "`reverie data replay`."
            )
        if not is_settable:
            return None, ""
        try:
            states, model = self.reader.read_states(name, self.config.states)
        except (BadEpisode, UserError):
            if required:
                raise
            return None, ""
        return states, model if self.config.model else ""

    def _replay(
        self, episode: Episode, states: np.ndarray | None, model: str, mode: ReplayMode
    ) -> OpenLoopReplay:
        """Play an episode in the environment; called in its thread."""
        errors: list[float] = []
        if mode == "states":
            assert states is not None
            rows = self._observe_states(episode, states, model)
            return OpenLoopReplay(episode, rows, errors)
        rows = [self.env.reset()]
        if states is not None:
            rows = [self.env.set_simulator_state(states[0], model)]
        for step in range(len(episode["reward"])):
            if states is not None and step < len(states):
                # recorded states may lack the time, which is the first entry
                reached = self.env.simulator_state()[-states.shape[1] :]
                errors.append(float(np.abs(reached - states[step]).max()))
            if step == len(episode["reward"]) - 1 or rows[-1]["is_last"]:
                break
            rows.append(self.env.step(self._env_action(episode, step)))
        return OpenLoopReplay(episode, rows, errors)

    def _observe_states(
        self, episode: Episode, states: np.ndarray, model: str
    ) -> list[Obs]:
        """Return the observations of all recorded states, and of the state after the
        last action."""
        rows = len(episode["reward"])
        if len(states) not in (rows - 1, rows):
            raise BadEpisode(
                f"has {len(states)} simulator states, expected {rows - 1} or {rows}"
            )
        self.env.reset()
        observed = [self.env.set_simulator_state(states[0], model)]
        observed += [self.env.set_simulator_state(state) for state in states[1:]]
        if len(states) < rows:
            observed.append(self.env.step(self._env_action(episode, rows - 2)))
        return observed

    def _env_action(self, episode: Episode, row: int) -> dict[str, np.ndarray]:
        """Return the action of a row in the units of the environment."""
        action = {key: episode[key][row] for key in self.reader.act_space}
        return self._convert(action)


class RenderedReader(WrappedReader):
    """Reads the episodes of another reader, and renders images from their states."""

    def __init__(self, reader: Reader, simulator: Simulator):
        super().__init__(reader)
        self.simulator = simulator
        self._images = simulator.image_space()
        self._spaces = {**reader.obs_space, **self._images}, reader.act_space

    @property
    def options(self) -> dict[str, Any]:
        config = self.simulator.config
        return {
            **self.inner.options,
            "task": config.task,
            "states": list(config.states),
            "model": config.model,
        }

    def read(self, name: str) -> Episode:
        episode, rows = self.simulator.render(name)
        images = {key: np.stack([row[key] for row in rows]) for key in self._images}
        return {**episode, **images}

    def read_keys(self, name: str, keys: Collection[str]) -> Episode:
        if not self._images.keys() & set(keys):
            return self.inner.read_keys(name, keys)
        return self.read(name)


def _make_env(task: str, config: envs.EnvConfig, seed: int) -> Env:
    """Build the task; render frames if it has no image observations.

    A task that cannot be rendered is built without frames, unless `config.render` is
    set; then the error is raised.
    """
    try:
        return envs.make(task, replace(config, render=True), seed)
    except UserError:
        if config.render:
            raise
    return envs.make(task, config, seed)


def _recorded_settings(config: SimulatorConfig, reader: Reader) -> dict[str, Any]:
    """Return the recorded settings of the environment that the user has not set."""
    suite = SUITES.get(split_task(config.task)[0])
    if suite is None or suite.recorded_settings is None or not config.recorded_settings:
        return {}
    try:
        env_args = json.loads(reader.metadata.get("env_args", "{}"))
        names = reader.names()
        steps = max((_num_steps(reader, name) for name in names), default=0)
        found = suite.recorded_settings(env_args, steps)
    except (ValueError, TypeError, AttributeError, LookupError):
        return {}
    current = suite.own_config(config.env)
    default = type(current)()
    # A setting with its default value counts as not set by the user. Recorded values
    # that are equal to the default are left out.
    return {
        name: value
        for name, value in found.items()
        if getattr(current, name) == getattr(default, name)
        and value != getattr(default, name)
    }


def _num_steps(reader: Reader, name: str) -> int:
    """Return the number of steps of an episode; 0 if it cannot be read."""
    try:
        return reader.rows(name) - 1
    except BadEpisode:
        return 0


def _with_settings(config: SimulatorConfig, settings: dict[str, Any]) -> envs.EnvConfig:
    """Return the settings of the environment with the recorded `settings` applied."""
    if not settings:
        return config.env
    suite = SUITES[split_task(config.task)[0]]
    suite_config = replace(suite.own_config(config.env), **settings)
    return replace(config.env, **{suite.config_name or suite.name: suite_config})


def describe_settings(task: str, settings: dict[str, Any]) -> str:
    """Format settings taken from a recording as command-line flags."""
    suite = SUITES[split_task(task)[0]]
    group = f"env.{suite.config_name or suite.name}"
    return " ".join(f"--{group}.{name} {value}" for name, value in settings.items())
