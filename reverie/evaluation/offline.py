"""How good is what was learnt from recordings? Ask episodes that were not learnt from.

Two questions. How well is every row explained (`HasEpisodeLosses`): the mean of each
loss over real rows, never over padding. And how far can the world be trusted without
looking (`HasWorldModelEnv`): it watches some rows of an episode, then goes on with the
recorded actions alone, and every key it draws is compared with what really came, step
by step. Next to it stand two things anybody could do without a model: to copy the last
row seen, and to name the mean of all rows. How sure it is of vectors, and whether it
may be, is asked by `fans.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from reverie.api import Agent, Batch, Metrics, UserError
from reverie.capabilities import HasEpisodeLosses, HasWorldModelEnv, WorldModelEnv
from reverie.datasets.feed import EpisodeFeed
from reverie.datasets.images import ImageCrop
from reverie.evaluation.open_loop import dream_on
from reverie.evaluation.rollout_ensembles import FanConfig, Fans, fan_metrics, open_fans
from reverie.render.channels import cameras_side_by_side
from reverie.render.open_loop import open_loop_video
from reverie.storage.array_file import Arrays

SHOWN = 6
"""Episodes side by side in the video."""
AVERAGED = 32
"""Episodes whose rows make up the mean row."""


@dataclass(frozen=True)
class LookConfig:
    """How a run on recordings is judged."""

    episodes: int = 0
    """Episodes to look at; 0 for all that were set aside."""
    batch: int = 16
    """Episodes at a time."""
    length: int = 0
    """Rows of each; 0 for all of them."""
    context: int = 5
    """Rows that are shown before the world goes on by itself."""
    horizon: int = 45
    """Steps it then goes on for."""
    video: bool = True
    """Whether to draw the first of them: truth, model, error."""
    fan: FanConfig = field(default_factory=FanConfig)
    """How sure it may be of vectors."""

    def __post_init__(self) -> None:
        if min(self.episodes, self.length) < 0:
            raise ValueError("episodes and length must be at least 0")
        if self.length == 1:
            raise ValueError("length is 0 for whole episodes, or at least 2, not 1")
        if min(self.batch, self.context, self.horizon) < 1:
            raise ValueError("batch, context and horizon must be at least 1")


class OpenLoop(NamedTuple):
    """Squared errors of one key, averaged over its entries: `(N, H)`, NaN for none."""

    model: np.ndarray
    copy: np.ndarray
    mean: np.ndarray


def look(
    agent: Agent, feed: EpisodeFeed, images: ImageCrop, config: LookConfig
) -> Metrics:
    """All metrics; `loss` is what the best checkpoint is chosen by."""
    metrics: Metrics = {}
    rows = list(judge_episodes(agent, feed, images, config))
    if rows:
        for key in rows[0][1]:
            count = sum(n for _, _, n in rows)
            total = sum(losses[key] * n for _, losses, n in rows)
            metrics[f"loss/{key}"] = total / max(count, 1)
        metrics["loss"] = sum(v for k, v in metrics.items() if k[:5] == "loss/")
    if isinstance(agent, HasWorldModelEnv):
        errors, video = open_loop(agent.world_model_env(0), feed, images, config)
        for key, error in errors.items():
            for name in OpenLoop._fields:
                curve = np.nanmean(getattr(error, name), 0)
                metrics[f"openloop/{key}/{name}"] = float(np.nanmean(curve))
                for step in (1, 5, 15, 45):
                    if step <= len(curve):
                        at = float(curve[step - 1])
                        metrics[f"openloop/{key}/{name}_at_{step}"] = at
        metrics |= video
        fans, pictures = look_at_fans(agent, feed, images, config)
        metrics |= fan_metrics(fans) | pictures
        if "loss" not in metrics:
            models = [metrics[f"openloop/{key}/model"] for key in errors]
            metrics["loss"] = sum(models)
    return metrics


def judge_episodes(
    agent: Agent | HasEpisodeLosses,
    feed: EpisodeFeed,
    images: ImageCrop,
    config: LookConfig,
) -> Iterator[tuple[str, dict[str, float], int]]:
    """The mean of each loss over the real rows of each episode, and how many count."""
    if not isinstance(agent, HasEpisodeLosses):
        return
    for names, batch in _batches(feed, images, config):
        losses, real = agent.episode_losses(batch)
        for i, name in enumerate(names):
            count = int(real[i].sum())
            means = {
                key: float(loss[i][real[i]].mean()) if count else 0.0
                for key, loss in losses.items()
            }
            yield name, means, count


def open_loop(
    dreams: WorldModelEnv, feed: EpisodeFeed, images: ImageCrop, config: LookConfig
) -> tuple[dict[str, OpenLoop], Metrics]:
    """Errors by key and horizon, and a video of the first episodes."""
    found: dict[str, list[OpenLoop]] = {}
    video: Metrics = {}
    average = _mean_rows(feed, images, list(dreams.obs_space))
    for _, tensors in _batches(feed, images, config):
        batch = {key: value.cpu().numpy() for key, value in tensors.items()}
        length = batch["mask"].shape[1]
        context = min(config.context, length - 1)
        horizon = min(config.horizon, length - context)
        if horizon < 1:
            continue
        drawn = dream_on(dreams, batch, context, horizon)
        real = batch["mask"][:, context : context + horizon]
        for key in drawn:
            truth = batch[key][:, context : context + horizon]
            last = batch[key][:, context - 1 : context]
            guesses = (drawn[key], last, average[key][None, None])
            errors = (_error(truth, guess, real) for guess in guesses)
            found.setdefault(key, []).append(OpenLoop(*errors))
        if config.video and not video:
            video = _videos(batch, drawn, context, horizon)
    return {key: _join(pieces) for key, pieces in found.items()}, video


def look_at_fans(
    agent: HasWorldModelEnv, feed: EpisodeFeed, images: ImageCrop, config: LookConfig
) -> tuple[dict[str, Fans], Metrics]:
    """Fans of the first episodes, and pictures of those of the first one."""
    if not config.fan.samples:
        return {}, {}
    few = replace(config, batch=1, episodes=config.fan.episodes)
    episodes = (
        {key: value[0].cpu().numpy() for key, value in batch.items()}
        for _, batch in _batches(feed, images, few)
    )
    return open_fans(agent.world_model_env(1), episodes, config.fan, config.context)


def _batches(
    feed: EpisodeFeed, images: ImageCrop, config: LookConfig
) -> Iterator[tuple[list[str], Batch]]:
    names = feed.held_out.names()
    limits = (config.length or None, config.episodes or None)
    numbers: list[int] = []
    for batch in feed.episodes(config.batch, *limits):
        numbers = batch.pop("episode").tolist()
        yield [names[number] for number in numbers], images.center_crop(batch)
    if not numbers:
        raise nothing_to_judge(feed)


def _mean_rows(feed: EpisodeFeed, images: ImageCrop, keys: list[str]) -> Arrays:
    """The mean of each key over the rows of some episodes, one of them at a time."""
    total: Arrays = {}
    rows = 0
    for batch in feed.episodes(1, limit=AVERAGED):
        seen = images.center_crop(batch)
        for key in keys:
            if key in seen:
                sums = seen[key][0].sum(0, dtype=torch.float64).cpu().numpy()
                total[key] = total.get(key, 0) + sums
        rows += int(seen["mask"].sum())
    if not rows:
        raise nothing_to_judge(feed)
    return {key: value / rows for key, value in total.items()}


def nothing_to_judge(feed: EpisodeFeed) -> UserError:
    return UserError(
        f"None of the episodes of {feed.held_out.origin} that were set aside can be "
        "used.\n  Fix: mend them (`reverie data inspect` names them), or name others "
        "with --offline.eval_data."
    )


def _error(truth: np.ndarray, guess: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Mean squared error of every row, images in [0, 1]; NaN where no row is."""
    scale = 255.0 if truth.dtype == np.uint8 else 1.0
    apart = (truth.astype(np.float64) - guess) / scale
    error = np.square(apart).reshape(*truth.shape[:2], -1).mean(-1)
    return np.where(real, error, np.nan)


def _join(pieces: list[OpenLoop]) -> OpenLoop:
    longest = max(piece.model.shape[1] for piece in pieces)

    def wide(x: np.ndarray) -> np.ndarray:
        return np.pad(x, ((0, 0), (0, longest - x.shape[1])), constant_values=np.nan)

    columns = zip(*pieces, strict=True)
    return OpenLoop(*(np.concatenate([wide(x) for x in some]) for some in columns))


def _videos(
    batch: Arrays,
    drawn: Arrays,
    context: int,
    horizon: int,
) -> Metrics:
    videos: Metrics = {}
    for key, value in drawn.items():
        if value.dtype != np.uint8 or value.ndim != 5:
            continue
        truth = cameras_side_by_side(batch[key][:SHOWN, : context + horizon])
        model = np.concatenate(
            [truth[:, :context], cameras_side_by_side(value[:SHOWN])], 1
        )
        videos[f"openloop/{key}"] = open_loop_video(truth, model, context)
    return videos
