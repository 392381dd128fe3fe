"""Datasets of offline training: recorded episodes and sequences.

`OfflineDataset` is the interface to the training loop: a feed of training batches, and
an evaluation. `OfflineEpisodes` uses the episodes of `offline.data`.
`OfflineSequences` is for agents that declare a `sequence_window` (VTA); it uses a
sequence dataset (`datasets/sequences`), or sequences of the episodes of `offline.data`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from reverie.api import Agent, Metrics, StateDict, UserError
from reverie.capabilities import (
    HasBase,
    HasEpisodeLosses,
    HasWorldModelEnv,
    KeyStatistics,
    NeedsStatistics,
    Statistics,
)
from reverie.config import check_minimum
from reverie.convert.importers import ImportedFile
from reverie.datasets.action_units import ConvertedActionsReader, check_same_actions
from reverie.datasets.episode_cache import EpisodeCacheConfig
from reverie.datasets.episode_format import BadEpisode
from reverie.datasets.episodes import ReaderConfig, open_episodes
from reverie.datasets.feed import EpisodeFeed
from reverie.datasets.images import (
    ImageConfig,
    ImageCrop,
    check_obs_space,
    load_image_crop,
)
from reverie.datasets.joined import join_readers
from reverie.datasets.readers import Reader, SelectedKeysReader
from reverie.datasets.sequences import (
    SequenceDataset,
    is_sequence_task,
    make_sequence_dataset,
)
from reverie.datasets.sequences.episodes import EpisodeSequences
from reverie.datasets.sequences.feed import SequenceFeed
from reverie.datasets.split import Subset, split_by_mask, split_by_seed
from reverie.datasets.statistics import compute_statistics, load_statistics
from reverie.evaluation.held_out import HeldOutConfig, evaluate_held_out, to_metrics
from reverie.run import checkpoint
from reverie.run.imported import encoder_importer, import_state
from reverie.spaces import Spaces, step_spaces

if TYPE_CHECKING:
    from reverie.run.config import Config


@dataclass(frozen=True)
class OfflineConfig:
    """Training on recorded episodes (`reverie offline` and `reverie bc`)."""

    data: str | tuple[str, ...] = ""
    """Recorded episodes to train on: one or more paths or dataset ids that `reverie
    data inspect` reads. Several must have the same observations and actions."""
    eval_data: str | tuple[str, ...] = ""
    """Recorded episodes to evaluate on, read like `data`. If empty, a part of `data` is
    held out."""
    read: ReaderConfig = field(default_factory=ReaderConfig)
    """How episodes are read; the same options as those of `reverie data convert`."""
    stats: str = ""
    """Dataset statistics, for agents that standardize images or normalize actions: a
    file written by `reverie data stats`. If empty, they are computed from the training
    episodes."""
    split: float = 0.1
    """Fraction of the episodes of `data` that is held out for evaluation; 0 evaluates
    on the training data. If the data has masks `train` and `valid`, these are used."""
    keys: tuple[str, ...] = ()
    """Observations to use; empty for all."""
    images: ImageConfig = field(default_factory=ImageConfig)
    """Cropping of images."""
    cache: EpisodeCacheConfig = field(default_factory=EpisodeCacheConfig)
    """Cache of episodes in memory."""
    eval: HeldOutConfig = field(default_factory=HeldOutConfig)
    """Evaluation on held-out episodes."""
    epochs: int = 0
    """Length of the run in epochs over the training data, at most `run.steps` updates;
    for agents that train on single rows (behavior cloning). 0 uses `run.steps` alone.
    """
    report_epochs: int = 0
    """Epochs between two evaluations, at most `run.report_every` updates; 0 uses
    `run.report_every` alone."""
    patience: int = 0
    """Early stopping: evaluations without improvement before the run ends; 0 disables
    it."""

    def __post_init__(self) -> None:
        if not 0 <= self.split < 1:
            raise ValueError(f"split must be at least 0 and below 1, not {self.split}")
        check_minimum(self, "offline.", epochs=0, report_epochs=0, patience=0)

    @property
    def evaluated_data(self) -> str:
        """Paths of the recorded episodes that are evaluated on, for messages."""
        return " ".join(as_paths(self.eval_data or self.data))


def as_paths(data: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the paths or dataset ids in `offline.data` or `offline.eval_data`."""
    return (data,) if isinstance(data, str) else data


class OfflineDataset(Protocol):
    """Training data and its evaluation."""

    obs_space: Spaces
    act_space: Spaces
    patience: int
    """Early stopping: evaluations without improvement; 0 disables it."""

    def open_feed(self, agent: Agent, device: torch.device) -> Any:
        """Return an `api.Feed` that can be closed and has a state dict.

        Its attribute `served` is the number of rows that it has returned.
        """

    def prepare_agent(self, agent: Agent) -> None:
        """Prepare the agent of a new run, before its first update."""

    def evaluate(self, agent: Agent, feed: Any) -> Metrics:
        """Return metrics on the evaluation data; `loss` selects the best checkpoint."""

    def parts(self) -> dict[str, StateDict]:
        """Return parts of a checkpoint in addition to `agent` and `loop`."""

    def describe(self, agent: Agent) -> str:
        """Return the amount of data, for the summary of the run."""

    def close(self) -> None: ...


class OfflineEpisodes:
    """Recorded episodes, some of them held out for evaluation.

    The image crop is stored in the checkpoint (part `images`), so that a later use of
    the agent crops observations in the same way. `base_run` is the run whose world
    model or encoder the agent uses, if any, or a checkpoint of another implementation.
    """

    def __init__(
        self, config: OfflineConfig, seed: int, base_run: str | ImportedFile = ""
    ):
        self.config, self.seed, self.base_run = config, seed, base_run
        self.training, self.held_out = open_split(config, seed)
        self.images = ImageCrop(config.images, self.training.obs_space)
        self.obs_space = {**self.images.obs_space, **step_spaces()}
        self.act_space = self.training.act_space
        self.patience = config.patience

    @property
    def env_steps(self) -> int:
        """Number of actions in the training episodes."""
        steps = 0
        for name in self.training.names():
            with contextlib.suppress(BadEpisode):
                steps += self.training.rows(name) - 1
        return steps

    def open_feed(self, agent: Agent, device: torch.device) -> EpisodeFeed:
        return EpisodeFeed(
            self.training,
            agent.windows,
            device,
            held_out=self.held_out,
            config=self.config.cache,
            seed=self.seed,
            augment=self.images.augment,
            prefetch=device.type == "cuda",
        )

    def prepare_agent(self, agent: Agent) -> None:
        """Load the base run and set the dataset statistics, if the agent needs them."""
        if not isinstance(agent, HasEpisodeLosses | HasWorldModelEnv):
            raise UserError(
                f"A {type(agent).__name__} cannot be trained on recorded episodes.\n"
                "  Fix: --agent dreamer"
            )
        if self.base_run:
            assert isinstance(agent, HasBase), type(agent)
            agent.load_base(self._base_weights(self.base_run, agent.base))
        if isinstance(agent, NeedsStatistics) and agent.needs_statistics:
            agent.set_statistics(self._statistics())

    def _statistics(self) -> Statistics:
        """Return the dataset statistics, for images after the center crop.

        They are read from `offline.stats`, or computed from the training episodes.
        """
        crop, path = self.images.center_crop, self.config.stats
        if not path:
            return compute_statistics(self.training, prepare=crop)
        statistics = load_statistics(Path(path).expanduser())
        keys = [*self.images.input_space, *self.act_space]
        if missing := [key for key in keys if key not in statistics]:
            raise UserError(
                f"{path} has no statistics of {', '.join(missing)}.\n"
                f"  Fix: write them with `reverie data stats`, or remove "
                "--offline.stats."
            )
        # `crop` takes one array for each key, so it is called with the means of all
        # keys, then with the standard deviations, the minima and the maxima
        fields = zip(*(statistics[key][:4] for key in keys), strict=True)
        cropped = [crop(dict(zip(keys, values, strict=True))) for values in fields]
        return {key: KeyStatistics(*(x[key] for x in cropped)) for key in keys}

    def _base_weights(self, run: str | ImportedFile, base: Agent | None) -> StateDict:
        """Read the weights of the base run, or of the encoder of an imported file."""
        if isinstance(run, ImportedFile):
            if base is None:
                with run.explain_import_errors():
                    return {"encoder": encoder_importer(run).read(run.path)}
            return import_state(run, base.state_dict(), ".*")
        path = checkpoint.find_checkpoint(Path(run))
        if images := saved_image_crop(path):
            check_obs_space(images, self.images.input_space, self.training.origin)
        return checkpoint.read_part(path, "agent")

    def evaluate(self, agent: Agent, feed: Any) -> Metrics:
        results = evaluate_held_out(agent, feed, self.images, self.config.eval)
        return to_metrics(results)

    def parts(self) -> dict[str, StateDict]:
        return {"images": self.images.state_dict()}

    def describe(self, agent: Agent) -> str:
        return (
            f"{len(self.training.names())} training episodes, "
            f"{len(self.held_out.names())} evaluation episodes"
        )

    def close(self) -> None:
        for reader in (self.training, self.held_out):
            reader.close()


class OfflineSequences:
    """Sequences of a dataset, with the length of the agent's `sequence_window`.

    `seed_offset` is added to the seed, so that a later evaluation of the run can use
    other sequences.
    """

    def __init__(self, config: Config, seed_offset: int = 0):
        self.dataset = make_sequences(config, seed_offset)
        self.obs_space, self.act_space = self.dataset.obs_space, self.dataset.act_space
        self.patience = config.offline.patience
        self._has_feed = False  # if there is a feed, it closes the dataset

    def open_feed(self, agent: Agent, device: torch.device) -> SequenceFeed:
        self._has_feed = True
        return SequenceFeed(self.dataset, device, prefetch=device.type == "cuda")

    def prepare_agent(self, agent: Agent) -> None:
        pass

    def evaluate(self, agent: Agent, feed: Any) -> Metrics:
        return agent.report(feed)

    def parts(self) -> dict[str, StateDict]:
        return {}

    def describe(self, agent: Agent) -> str:
        window = agent.windows["train"]
        frames = window.context + window.length
        return f"batches of {window.batch} sequences of {frames} frames"

    def close(self) -> None:
        if not self._has_feed:
            self.dataset.close()


def trains_on_sequences(config: Config) -> bool:
    """True if the agent trains on a sequence dataset, as VTA does.

    The dataset is the task or is made from `offline.data`; raise if it is neither.
    """
    is_dataset = is_sequence_task(config.task)
    needs_sequences = config.agent_config.sequence_window is not None
    if is_dataset and not needs_sequences:
        raise UserError(
            f"Task {config.task} is a sequence dataset; agent {config.agent!r} needs "
            "an environment.\n  Fix: --agent vta"
        )
    if needs_sequences and not is_dataset and not config.offline.data:
        raise UserError(
            f"Task {config.task} is an environment; agent {config.agent!r} trains on "
            "sequences.\n  Fix: --task sequences_balls or sequences_maze, `reverie "
            "offline --configs vta_episodes --offline.data PATH`, or --agent dreamer"
        )
    return needs_sequences


def make_sequences(config: Config, seed_offset: int = 0) -> SequenceDataset:
    """Return the sequence dataset of a config, with the windows of its agent."""
    assert trains_on_sequences(config), config.agent
    window, seed = config.agent_config.sequence_window, config.seed + seed_offset
    assert window is not None
    if is_sequence_task(config.task):
        return make_sequence_dataset(config.task, config.sequences, window, seed)
    if max(config.offline.images.crop):
        raise UserError(
            f"Agent {config.agent!r} does not crop images.\n  Fix: remove "
            "--offline.images.crop, or resize with `reverie data convert --size`."
        )
    # The split does not depend on `seed_offset`: held-out episodes stay held out.
    training, held_out = open_split(config.offline, config.seed, incomplete=True)
    return EpisodeSequences(training, held_out, config.sequences, window, seed)


def open_split(
    config: OfflineConfig, seed: int, incomplete: bool = False
) -> tuple[Reader, Reader]:
    """Open `offline.data` and return its training and evaluation episodes.

    With `incomplete`, NPZ files without actions, rewards or flags are accepted, too.
    """
    if not config.data:
        raise UserError("No recorded episodes are given.\n  Fix: --offline.data PATH")

    def open_all(data: str | tuple[str, ...]) -> list[Reader]:
        return [
            open_episodes(path, config.read, incomplete=incomplete)
            for path in as_paths(data)
        ]

    reader = join_readers(
        [SelectedKeysReader(r, config.keys) for r in open_all(config.data)]
    )
    if config.eval_data:
        others = open_all(config.eval_data)
        crop = ImageCrop(config.images, reader.obs_space)
        for other in others:
            check_obs_space(crop, other.obs_space, other.origin)
        keys = tuple(reader.obs_space)
        held_out = join_readers([SelectedKeysReader(other, keys) for other in others])
        check_same_actions(
            reader.origin, reader.act_space, held_out.origin, held_out.act_space
        )
        return reader, ConvertedActionsReader(held_out, reader.act_space, reader.origin)
    if {"train", "valid"} <= reader.masks.keys():
        names = split_by_mask(reader, "train", "valid")
    elif config.split:
        names = split_by_seed(reader.names(), config.split, seed)
    else:
        return reader, reader
    return Subset(reader, names[0]), Subset(reader, names[1])


def saved_image_crop(path: Path) -> ImageCrop | None:
    """Return the image crop that a checkpoint of offline training contains, or None."""
    if "images" not in checkpoint.read_manifest(path)["parts"]:
        return None
    return load_image_crop(checkpoint.read_part(path, "images"))
