"""Loads trained agents: finds a checkpoint, reads its config and builds the agent.

    run = open_run(Path("logdir/catch"))
    agent = run.load_policy(envs)

Evaluation, figures, export and `reverie.load` all use this module.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from reverie import config as configs
from reverie.api import (
    Agent,
    Carry,
    Feed,
    Metrics,
    Mode,
    Obs,
    PolicyOutput,
    StateDict,
    UserError,
)
from reverie.capabilities import HasWorldModelEnv, NeedsStatistics, WorldModelEnv
from reverie.datasets.action_units import (
    ActionConverter,
    check_same_actions,
    make_action_converter,
)
from reverie.datasets.images import ImageCrop, check_obs_space
from reverie.datasets.statistics import load_statistics
from reverie.log.messages import print_message
from reverie.run import checkpoint, device
from reverie.run.checkpoint import Checkpoints, find_checkpoint
from reverie.run.config import Config, find_schema, resolve, with_flags
from reverie.run.factory import (
    import_note,
    load_initial_weights,
    make_agent,
    make_envs,
)
from reverie.run.folder import config_from_settings, read_config, run_folder_of
from reverie.run.imported import find_imported
from reverie.run.offline.datasets import as_paths, saved_image_crop
from reverie.spaces import agent_obs_space
from reverie.storage.run_spaces import SPACES_FILE, RunSpaces, read_spaces


class UntrainedPolicy(UserError):
    """The policy of a checkpoint has its initial weights."""


@dataclass(frozen=True)
class SavedRun:
    """A run folder, one of its checkpoints, and the config to load it with."""

    folder: Path
    checkpoint: Path
    config: Config

    @property
    def device(self) -> torch.device:
        return device.pick_device(self.config.device)

    def image_crop(self) -> ImageCrop | None:
        """Return the crop of images, for an agent trained on recorded episodes."""
        return saved_image_crop(self.checkpoint)

    def spaces(self) -> RunSpaces:
        """Return the spaces of the environment or data, before images are cropped."""
        spaces = read_spaces(self.folder)
        crop = self.image_crop()
        if crop is None:
            return spaces
        return RunSpaces({**spaces.obs_space, **crop.input_space}, spaces.act_space)

    def load_agent(self, spaces: Any) -> Agent:
        """Build the agent for these spaces and load its weights."""
        return self._load_weights(
            spaces, checkpoint.read_part(self.checkpoint, "agent")
        )

    def _load_weights(self, spaces: Any, state: StateDict) -> Agent:
        agent = _make_agent(self.config, spaces)
        checkpoint.check_finite(state, agent.load_weights(state), self.checkpoint)
        return agent

    def load_policy(self, spaces: Any) -> Agent:
        """Load the agent to evaluate it in an environment with these spaces.

        Raises `UntrainedPolicy` if the policy has its initial weights.
        """
        source = self.policy_source(spaces)
        state = checkpoint.read_part(self.checkpoint, "agent")
        updates = int(checkpoint.read_part(self.checkpoint, "loop")["clock"]["updates"])
        is_trained = self.config.agent_config.is_policy_trained(state, updates)
        if not is_trained and not self.config.run.from_checkpoint:
            raise UntrainedPolicy(
                f"The policy in {self.checkpoint} has not been trained yet, so there "
                "is nothing to evaluate.\n  Fix: continue the training: reverie train "
                f"--logdir {self.folder} (with more --run.steps if it has ended)."
            )
        return source.adapt(self._load_weights(source.trained_spaces, state))

    def policy_source(self, spaces: Any) -> PolicySource:
        """Return config, spaces and image crop of a policy for this environment."""
        self._check_policy()
        spaces = RunSpaces(spaces.obs_space, spaces.act_space)
        crop = self.image_crop()
        if crop is None:
            trained = self._training_spaces(spaces)
            return PolicySource(self.config, spaces, trained, None)
        trained, task = read_spaces(self.folder), self.config.task
        check_obs_space(crop, spaces.obs_space, task)
        check_same_actions(
            "the recordings",
            trained.act_space,
            task,
            spaces.act_space,
            check_range=False,
        )
        return PolicySource(self.config, spaces, trained, crop)

    def _training_spaces(self, spaces: RunSpaces) -> RunSpaces:
        """Return these spaces with the action bounds of the run's environment.

        Raises if the run has other actions or other shapes of observations.
        """
        if not (self.folder / SPACES_FILE).exists():
            return spaces
        saved, run, task = read_spaces(self.folder), str(self.folder), self.config.task
        for key, space in agent_obs_space(spaces.obs_space).items():
            trained = saved.obs_space.get(key, space)
            if trained.shape != space.shape:
                raise UserError(
                    f"The observation {key!r} has shape {space.shape} in {task}, but "
                    f"{run} was trained with {trained.shape}.\n  Fix: evaluate it in "
                    "its own task, or in one with the same observations."
                )
        check_same_actions(run, saved.act_space, task, spaces.act_space)
        return RunSpaces(spaces.obs_space, saved.act_space)

    def _check_policy(self) -> None:
        """Raise if the run trained a world model without a policy."""
        config, settings = self.config, self.config.agent_config
        if settings.trains_policy or config.run.from_checkpoint:
            return
        data = " ".join(as_paths(config.offline.data)) or "PATH"
        raise UserError(
            f"{self.folder} has no trained policy, only a world model.\n"
            f"  Fix: train one by behavior cloning, `reverie bc --bc.run {self.folder} "
            f"--offline.data {data}`, or train with --{config.agent}."
            f"{settings.policy_setting} True. Without --task, `reverie eval` evaluates "
            "the world model on recordings."
        )


@dataclass(frozen=True)
class ImportedRun(SavedRun):
    """A checkpoint of another implementation, and the config to load it with."""

    def image_crop(self) -> None:
        return None

    def _training_spaces(self, spaces: RunSpaces) -> RunSpaces:
        return spaces  # the bounds of its actions are not known

    def spaces(self) -> RunSpaces:
        """Return the spaces of the task, which the file does not contain."""
        with contextlib.closing(make_envs(self.config, 1)) as envs:
            return RunSpaces(envs.obs_space, envs.act_space)

    def load_agent(self, spaces: Any) -> Agent:
        settings = configs.flatten(self.config.agent_config)
        standard, path = settings.get("enc.standard", "none"), self.config.offline.stats
        if standard == "batch" or (standard == "dataset" and not path):
            file = "--offline.stats FILE (written by `reverie data stats`), or "
            raise UserError(
                f"{self.checkpoint} does not contain the mean and standard deviation "
                "with which its images are standardized.\n"
                f"  Fix: {file if standard == 'dataset' else ''}evaluate a run of "
                f"`reverie offline --run.from_checkpoint {self.checkpoint}`, which "
                "computes them from --offline.data."
            )
        agent = _make_agent(self.config, spaces)
        load_initial_weights(agent, self.config)
        if note := import_note(self.config):
            print_message(note)
        if isinstance(agent, NeedsStatistics) and agent.needs_statistics:
            inputs = agent_obs_space(spaces.obs_space).items()
            shapes = {key: space.shape for key, space in inputs if space.is_image}
            agent.set_statistics(load_statistics(Path(path).expanduser(), shapes))
        return agent

    def load_policy(self, spaces: Any) -> Agent:
        return self.policy_source(spaces).adapt(self.load_agent(spaces))


class PolicySource(NamedTuple):
    """Config and spaces from which a policy is built, without the agent's weights."""

    config: Config
    spaces: RunSpaces
    """Spaces of the environment to act in."""
    trained_spaces: RunSpaces
    """Spaces that the agent was trained with."""
    crop: ImageCrop | None
    """Crop of images, for an agent that was trained on recorded episodes."""

    def adapt(self, agent: Agent) -> Agent:
        """Return the agent, wrapped if it was trained with other actions or images.

        The wrapper converts actions to the units of the environment and, for recorded
        episodes, crops images as in training.
        """
        if self.crop is None and self.trained_spaces == self.spaces:
            return agent
        convert, message = make_action_converter(
            self.trained_spaces.act_space,
            self.spaces.act_space,
            "the run" if self.crop is None else "the recordings",
            self.config.task,
        )
        if message:
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        has_world_model = isinstance(agent, HasWorldModelEnv)
        wrapper = ConvertingWorldModelAgent if has_world_model else ConvertingAgent
        return wrapper(agent, self.crop, convert)

    def restore(self, state: StateDict) -> Agent:
        """Build a policy from the state of its agent."""
        agent = _make_agent(self.config, self.trained_spaces)
        agent.load_state_dict(state)
        return self.adapt(agent)

    def __reduce__(self) -> tuple[Any, ...]:
        # the class of a config with plug-ins is created at run time, so that pickle
        # cannot import it: pickle the settings instead
        return _unpickle_source, (asdict(self.config), *self[1:])


def _unpickle_source(settings: dict[str, Any], *fields: Any) -> PolicySource:
    """Return the source from the arguments that `PolicySource.__reduce__` pickled."""
    return PolicySource(config_from_settings(settings), *fields)


def _make_agent(config: Config, spaces: Any) -> Agent:
    """Build the agent on the device and with the precision of the config."""
    torch_device = device.pick_device(config.device)
    precision = device.pick_precision(config.precision, torch_device)
    return make_agent(config, spaces, torch_device, precision)


class ConvertingAgent:
    """Wraps an agent that was trained with other action bounds or images."""

    def __init__(self, agent: Agent, crop: ImageCrop | None, convert: ActionConverter):
        self.agent, self.crop, self.convert = agent, crop, convert
        self.windows, self.extras = agent.windows, agent.extras
        self.schedule = agent.schedule

    def initial(self, batch: int) -> Carry:
        return self.agent.initial(batch)

    def policy(self, carry: Carry, obs: Obs, mode: Mode = "train") -> PolicyOutput:
        if self.crop is not None:
            obs = self.crop.center_crop(obs)
        carry, action, extras = self.agent.policy(carry, obs, mode)
        return carry, self.convert(action), extras

    def train(self, feed: Feed) -> Metrics:
        return self.agent.train(feed)

    def report(self, feed: Feed) -> Metrics:
        return self.agent.report(feed)

    def nonfinite(self) -> list[str]:
        return self.agent.nonfinite()

    def load_weights(self, state: StateDict, components: str = ".*") -> list[str]:
        return self.agent.load_weights(state, components)

    def state_dict(self) -> StateDict:
        return self.agent.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        self.agent.load_state_dict(state)


class ConvertingWorldModelAgent(ConvertingAgent):
    """A `ConvertingAgent` with a world model.

    The world model uses the action bounds and image crops of the training.
    """

    agent: Any

    def world_model_env(self, seed: int = 0) -> WorldModelEnv:
        model: WorldModelEnv = self.agent.world_model_env(seed)
        return model


def is_foreign_checkpoint(logdir: Path, flags: Sequence[tuple[str, Any]] = ()) -> bool:
    """True if `logdir` is a checkpoint or run folder of another implementation.

    The agent that the flags select may add importers of such checkpoints.
    """
    return find_imported(logdir, find_schema([dict(flags)])) is not None


def open_run(
    logdir: Path,
    flags: Sequence[tuple[str, Any]] = (),
    prefer_best: bool = False,
    presets: Sequence[str] = (),
    files: Sequence[str] = (),
    replaces_task: bool = False,
) -> SavedRun:
    """Open the newest checkpoint of a run folder, or the checkpoint that is named.

    With `prefer_best`, open the checkpoint of a run folder with the lowest evaluation
    loss instead, if there is one. Flags change settings of the run. With
    `replaces_task`, the task of the run is not used (as with a flag `task`), so it may
    name code that is not trusted.

    `logdir` may also be a checkpoint file or run folder of another implementation. Its
    settings are inferred from its tensors and, where this is not possible, given by
    presets, config files and flags.
    """
    if imported := find_imported(logdir, find_schema([dict(flags)])):
        given = [*flags, ("run.from_checkpoint", str(imported.path))]
        folder = logdir.expanduser()
        folder = folder if folder.is_dir() else folder.resolve().parent
        return ImportedRun(folder, imported.path, resolve(presets, files, given))
    path = find_checkpoint(logdir)
    folder = run_folder_of(path)
    replaces_task = replaces_task or any(name == "task" for name, _ in flags)
    config = with_flags(read_config(folder, replaces_task), flags)
    if prefer_best and logdir.resolve() == folder.resolve():
        path = Checkpoints(folder / "best").newest(read_only=True) or path
    return SavedRun(folder, path, config)
