"""Recordings as the material of a run: which episodes train, and which judge.

`Recordings` opens what `offline.data` names, sets some episodes aside for evaluation,
prepares images, and knows how all of it is kept in a checkpoint (part `material`), so
that whoever uses the run later prepares observations the same way.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reverie.api import Agent, Metrics, StateDict, UserError
from reverie.capabilities import (
    HasBase,
    HasEpisodeLosses,
    HasWorldModelEnv,
    Moments,
    NeedsStatistics,
)
from reverie.convert.dreamerv3_torch import is_torch_file, read_encoder
from reverie.datasets.episode_cache import EpisodeCacheConfig
from reverie.datasets.episode_format import BadEpisode, with_flag_spaces
from reverie.datasets.episodes import ReaderConfig, open_episodes
from reverie.datasets.feed import EpisodeFeed
from reverie.datasets.images import (
    ImageConfig,
    ImageCrop,
    check_obs_space,
    load_image_crop,
)
from reverie.datasets.readers import Reader, SelectedKeys
from reverie.datasets.split import Subset, split_by_mask, split_by_seed
from reverie.datasets.statistics import compute_statistics
from reverie.evaluation.offline import LookConfig, look
from reverie.run import checkpoint
from reverie.spaces import Space, Spaces


@dataclass(frozen=True)
class OfflineConfig:
    """Learning from recordings (`reverie offline`)."""

    data: str = ""
    """The recordings to learn from: a file or folder that `reverie data inspect`
    knows."""
    eval_data: str = ""
    """Those to judge by, read the same way; if none, some of `data` are set aside."""
    read: ReaderConfig = field(default_factory=ReaderConfig)
    """What is made of their keys, as `reverie data convert` would."""
    split: float = 0.1
    """The share that is set aside; selections `train` and `valid` of the recordings
    themselves come first."""
    keys: tuple[str, ...] = ()
    """Observations to use; none for all."""
    images: ImageConfig = field(default_factory=ImageConfig)
    """How images are prepared."""
    cache: EpisodeCacheConfig = field(default_factory=EpisodeCacheConfig)
    """How recordings are kept at hand."""
    look: LookConfig = field(default_factory=LookConfig)
    """How the run is judged."""
    passes: int = 0
    """Passes over the recordings, but no more than `run.steps` updates, for agents that
    learn from single rows; 0 to count updates."""
    report_passes: int = 0
    """Passes between two evaluations, but no more than `run.report_every` updates."""
    patience: int = 0
    """Evaluations without a better one after which the run ends; 0 for never."""

    def __post_init__(self) -> None:
        if not 0 <= self.split < 1:
            raise ValueError(f"split must be at least 0 and below 1, not {self.split}")
        if min(self.passes, self.report_passes, self.patience) < 0:
            raise ValueError("passes, report_passes and patience must be at least 0")


class Recordings:
    """See the top of this file; the material of a run (`watch.Material`)."""

    def __init__(self, config: OfflineConfig, seed: int, run: str = ""):
        if not config.data:
            raise UserError(
                "There are no recordings to learn from.\n  Fix: --offline.data PATH"
            )
        self.config, self.seed, self.run = config, seed, run
        reader = SelectedKeys(open_episodes(config.data, config.read), config.keys)
        self.images = ImageCrop(config.images, reader.obs_space)
        self.obs_space = with_flag_spaces(self.images.obs_space)
        self.act_space = reader.act_space
        self.training, self.judging = self._split(reader)

    def _split(self, reader: Reader) -> tuple[Reader, Reader]:
        config = self.config
        if config.eval_data:
            judges = open_episodes(config.eval_data, config.read)
            check_obs_space(self.images, judges.obs_space, config.eval_data)
            same_actions(
                config.data, reader.act_space, config.eval_data, judges.act_space
            )
            return reader, SelectedKeys(judges, tuple(reader.obs_space))
        if {"train", "valid"} <= reader.masks.keys():
            names = split_by_mask(reader, "train", "valid")
        elif config.split:
            names = split_by_seed(reader.names(), config.split, self.seed)
        else:
            return reader, reader
        return Subset(reader, names[0]), Subset(reader, names[1])

    @property
    def steps(self) -> int:
        """Actions taken in the training episodes."""
        reader, steps = self.training, 0
        for name in reader.names():
            with contextlib.suppress(BadEpisode):
                steps += reader.rows(name) - 1
        return steps

    # What a run asks of its material.

    def open(self, agent: Agent, device: torch.device) -> EpisodeFeed:
        return EpisodeFeed(
            self.training,
            agent.windows,
            device,
            held_out=self.judging,
            config=self.config.cache,
            seed=self.seed,
            augment=self.images.augment,
            prefetch=device.type == "cuda",
        )

    def begin(self, agent: Agent) -> None:
        """Before the first update: let the agent see through the world of another run,
        if it is to, and tell it about its recordings.
        """
        if not isinstance(agent, HasEpisodeLosses | HasWorldModelEnv):
            raise UserError(
                f"A {type(agent).__name__} learns nothing from recordings.\n"
                "  Fix: --agent dreamer"
            )
        if self.run:
            assert isinstance(agent, HasBase), type(agent)
            agent.load_base(self._weights(self.run))
        if isinstance(agent, NeedsStatistics) and agent.needs_statistics:
            found = compute_statistics(self.training, prepare=self.images.center_crop)
            agent.set_statistics(
                {k: Moments(s.mean, s.std, s.min, s.max) for k, s in found.items()}
            )

    def _weights(self, run: str) -> StateDict:
        if is_torch_file(run):
            return {"encoder": read_encoder(run)}
        path = checkpoint.find_checkpoint(Path(run))
        if images := images_of(path):
            check_obs_space(images, self.images.input_space, self.config.data)
        return checkpoint.read_part(path, "agent")

    def report(self, agent: Agent, feed: Any) -> Metrics:
        return look(agent, feed, self.images, self.config.look)

    def parts(self) -> dict[str, StateDict]:
        return {"material": self.images.state_dict()}

    def sentence(self, agent: Agent) -> str:
        return (
            f"{len(self.training.names())} episodes to learn from, "
            f"{len(self.judging.names())} to judge by"
        )

    @property
    def patience(self) -> int:
        return self.config.patience

    def close(self) -> None:
        for reader in (self.training, self.judging):
            reader.close()


def same_actions(one: str, some: Spaces, other: str, others: Spaces) -> None:
    """Raise unless what was done in two places can be compared.

    Of a discrete action, `others` may have fewer kinds.
    """

    def kind(space: Space) -> tuple[Any, ...]:
        return space.shape, space.is_discrete

    def more(key: str, space: Space) -> bool:
        high, low = np.max(space.high), np.min(space.low)
        known = some[key]
        return bool(high > np.max(known.high) or low < np.min(known.low))

    alike = {k: kind(s) for k, s in some.items()} == {
        k: kind(s) for k, s in others.items()
    }
    if not alike or any(more(k, s) for k, s in others.items() if s.is_discrete):
        words = [", ".join(map(_in_words, x, x.values())) for x in (some, others)]
        raise UserError(
            f"The actions of {one} are {words[0]}, those of {other} are {words[1]}.\n"
            "  Fix: use what was recorded on one machine, with one kind of control."
        )


def _in_words(key: str, space: Space) -> str:
    if space.is_discrete and not space.shape:
        return f"{key} from {int(space.low)} to {int(space.high) - 1}"
    return f"{key} {space.shape}"


def images_of(path: Path) -> ImageCrop | None:
    """How a checkpoint says images are prepared, if it was made of recordings."""
    if "material" not in checkpoint.read_manifest(path)["parts"]:
        return None
    return load_image_crop(checkpoint.read_part(path, "material"))
