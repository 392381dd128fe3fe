"""Evaluation on held-out recorded episodes: losses and open-loop prediction errors.

Losses (`HasEpisodeLosses`) are averaged over all rows that are not padding. For the
open-loop errors, the world model (`HasWorldModelEnv`) observes the first rows of an
episode and predicts the following rows from the recorded actions. The squared error of
every predicted key is compared with two baselines: the last observed row, and the mean
of all rows. `rollout_ensembles.py` evaluates the uncertainty of these predictions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from reverie.api import Agent, Batch, Metrics, UserError
from reverie.capabilities import HasEpisodeLosses, HasWorldModelEnv, WorldModelEnv
from reverie.config import check_minimum
from reverie.datasets.feed import EpisodeFeed
from reverie.datasets.images import ImageCrop
from reverie.evaluation.rollout_ensembles import (
    RolloutEnsembleConfig,
    RolloutEnsembles,
    ensemble_metrics,
    predict,
    sample_ensembles,
)
from reverie.render.channels import cameras_side_by_side
from reverie.render.open_loop import open_loop_video
from reverie.spaces import Arrays

VIDEO_EPISODES = 6
"""Episodes side by side in the video."""
MEAN_EPISODES = 32
"""Episodes from which the mean row is computed."""
LOGGED_HORIZONS = (1, 5, 15, 45)
"""Steps ahead whose open-loop errors are logged separately."""


@dataclass(frozen=True)
class HeldOutConfig:
    """Evaluation on held-out recorded episodes."""

    episodes: int = 0
    """Number of episodes; 0 for all held-out episodes."""
    batch: int = 16
    """Episodes per batch."""
    length: int = 0
    """Maximum number of rows of each episode; 0 for all."""
    ensemble: RolloutEnsembleConfig = field(default_factory=RolloutEnsembleConfig)
    """Rollout ensembles, which evaluate the uncertainty of predicted vectors."""
    context: int = 5
    """Rows that the world model observes before it predicts."""
    horizon: int = 45
    """Steps that the world model predicts."""
    video: bool = True
    """Write a video of the first episodes: truth, prediction and error."""

    def __post_init__(self) -> None:
        prefix = "offline.eval."
        check_minimum(self, prefix, episodes=0, length=0, batch=1, context=1, horizon=1)
        if self.length == 1:
            raise ValueError("length must be 0 (all rows) or at least 2, not 1")


@runtime_checkable
class ScalesEpisodeLosses(Protocol):
    """An agent that scales its losses in the sum that selects the best checkpoint.

    The losses of other agents have the scale 1.
    """

    def episode_loss_scale(self, name: str) -> float:
        """Return the scale of a loss of `episode_losses`; 0 leaves it out."""


class EpisodeLosses(NamedTuple):
    """Losses of one episode, averaged over its rows."""

    name: str
    losses: dict[str, float]
    rows: int


class OpenLoopErrors(NamedTuple):
    """Squared errors of one key `(N, H)`; NaN beyond the end of an episode."""

    model: np.ndarray
    copy: np.ndarray
    """Baseline: repeat the last observed row."""
    mean: np.ndarray
    """Baseline: predict the mean of all rows."""


class HeldOutResults(NamedTuple):
    """Results of one evaluation; fields that the agent does not support are empty."""

    losses: list[EpisodeLosses]
    errors: dict[str, OpenLoopErrors]
    ensembles: dict[str, RolloutEnsembles]
    media: Metrics
    """Videos and figures by name."""
    scales: dict[str, float]
    """Scales of losses in the sum that selects the best checkpoint."""


def evaluate_held_out(
    agent: Agent, feed: EpisodeFeed, crop: ImageCrop, config: HeldOutConfig
) -> HeldOutResults:
    """Evaluate an agent on the held-out episodes of a feed, with center crops."""
    losses = list(episode_losses(agent, feed, crop, config))
    scales: dict[str, float] = {}
    if isinstance(agent, ScalesEpisodeLosses):
        scales = {name: agent.episode_loss_scale(name) for name in mean_losses(losses)}
    if not isinstance(agent, HasWorldModelEnv):
        return HeldOutResults(losses, {}, {}, {}, scales)
    errors, media = open_loop_errors(agent.world_model_env(seed=0), feed, crop, config)
    if not config.ensemble.samples:
        return HeldOutResults(losses, errors, {}, media, scales)
    single = replace(config, batch=1, episodes=config.ensemble.episodes)
    episodes = (
        {key: value[0].cpu().numpy() for key, value in batch.items()}
        for _, batch in _batches(feed, crop, single)
    )
    ensembles, figures = sample_ensembles(
        agent.world_model_env(seed=1), episodes, config.ensemble, config.context
    )
    media = {**media, **figures}
    return HeldOutResults(losses, errors, ensembles, media, scales)


def to_metrics(results: HeldOutResults) -> Metrics:
    """Return scalars, videos and figures for the log.

    `loss` selects the best checkpoint: the sum of the losses, multiplied by their
    scales, or, without losses, the sum of the open-loop errors.
    """
    means = mean_losses(results.losses)
    metrics: Metrics = {f"loss/{key}": value for key, value in means.items()}
    if means:
        scaled = {key: results.scales.get(key, 1.0) for key in means}
        # without the losses of scale 0, which may be NaN
        metrics["loss"] = sum(x * means[key] for key, x in scaled.items() if x)
    for key, errors in results.errors.items():
        for name in OpenLoopErrors._fields:
            curve = np.nanmean(getattr(errors, name), 0)
            metrics[f"openloop/{key}/{name}"] = float(np.nanmean(curve))
            for step in LOGGED_HORIZONS:
                if step <= len(curve):
                    error = float(curve[step - 1])
                    metrics[f"openloop/{key}/{name}_at_{step}"] = error
    metrics |= ensemble_metrics(results.ensembles) | results.media
    if "loss" not in metrics:
        metrics["loss"] = sum(metrics[f"openloop/{k}/model"] for k in results.errors)
    return metrics


def mean_losses(table: Sequence[EpisodeLosses]) -> dict[str, float]:
    """Return the mean of each loss over the rows of all episodes."""
    rows = max(1, sum(episode.rows for episode in table))
    keys = table[0].losses if table else {}
    return {k: sum(e.losses[k] * e.rows for e in table) / rows for k in keys}


def episode_losses(
    agent: Agent | HasEpisodeLosses,
    feed: EpisodeFeed,
    crop: ImageCrop,
    config: HeldOutConfig,
) -> Iterator[EpisodeLosses]:
    """Yield the losses of each held-out episode, if the agent can compute them."""
    if not isinstance(agent, HasEpisodeLosses):
        return
    for names, batch in _batches(feed, crop, config):
        losses, mask = agent.episode_losses(batch)
        for i, name in enumerate(names):
            rows = int(mask[i].sum())
            means = {
                key: float(loss[i][mask[i]].mean()) if rows else 0.0
                for key, loss in losses.items()
            }
            yield EpisodeLosses(name, means, rows)


def open_loop_errors(
    env: WorldModelEnv, feed: EpisodeFeed, crop: ImageCrop, config: HeldOutConfig
) -> tuple[dict[str, OpenLoopErrors], Metrics]:
    """Return the errors by key, and videos of the first episodes by name."""
    pieces: dict[str, list[OpenLoopErrors]] = {}
    videos: Metrics = {}
    mean_row = _mean_row(feed, crop, list(env.obs_space))
    for _, tensors in _batches(feed, crop, config):
        batch = {key: value.cpu().numpy() for key, value in tensors.items()}
        length = batch["mask"].shape[1]
        context = min(config.context, length - 1)
        horizon = min(config.horizon, length - context)
        if horizon < 1:
            continue
        predictions = predict(env, batch, context, horizon)
        mask = batch["mask"][:, context : context + horizon]
        for key in predictions:
            truth = batch[key][:, context : context + horizon]
            last = batch[key][:, context - 1 : context]
            compared = (predictions[key], last, mean_row[key][None, None])
            errors = (_squared_error(truth, x, mask) for x in compared)
            pieces.setdefault(key, []).append(OpenLoopErrors(*errors))
        if config.video and not videos:
            videos = _videos(batch, predictions, context, horizon)
    return {key: _concatenate(errors) for key, errors in pieces.items()}, videos


def _batches(
    feed: EpisodeFeed, crop: ImageCrop, config: HeldOutConfig
) -> Iterator[tuple[list[str], Batch]]:
    """Yield names and cropped rows of the held-out episodes."""
    names = feed.held_out.names()
    limits = (config.length or None, config.episodes or None)
    numbers: list[int] = []
    for batch in feed.episodes(config.batch, *limits):
        numbers = batch.pop("episode").tolist()
        yield [names[number] for number in numbers], crop.center_crop(batch)
    if not numbers:
        raise _no_usable_episodes(feed)


def _mean_row(feed: EpisodeFeed, crop: ImageCrop, keys: list[str]) -> Arrays:
    """Return the mean of each key over the rows of some episodes."""
    total: Arrays = {}
    rows = 0
    for batch in feed.episodes(1, limit=MEAN_EPISODES):
        obs = crop.center_crop(batch)
        for key in keys:
            if key in obs:
                sums = obs[key][0].sum(0, dtype=torch.float64).cpu().numpy()
                total[key] = total.get(key, 0) + sums
        rows += int(obs["mask"].sum())
    if not rows:
        raise _no_usable_episodes(feed)
    return {key: value / rows for key, value in total.items()}


def _no_usable_episodes(feed: EpisodeFeed) -> UserError:
    return UserError(
        f"None of the held-out episodes of {feed.held_out.origin} can be used.\n"
        "  Fix: repair them (`reverie data inspect` lists the errors), or use others "
        "with --offline.eval_data."
    )


def _squared_error(
    truth: np.ndarray, prediction: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    """Return the mean squared error of every row, images in [0, 1]; NaN for padding."""
    scale = 255.0 if truth.dtype == np.uint8 else 1.0
    difference = (truth.astype(np.float64) - prediction) / scale
    error = np.square(difference).reshape(*truth.shape[:2], -1).mean(-1)
    return np.where(mask, error, np.nan)


def _concatenate(pieces: list[OpenLoopErrors]) -> OpenLoopErrors:
    """Concatenate batches, padded with NaN to the longest horizon."""
    longest = max(piece.model.shape[1] for piece in pieces)

    def pad(x: np.ndarray) -> np.ndarray:
        return np.pad(x, ((0, 0), (0, longest - x.shape[1])), constant_values=np.nan)

    columns = zip(*pieces, strict=True)
    return OpenLoopErrors(*(np.concatenate([pad(x) for x in c]) for c in columns))


def _videos(batch: Arrays, predictions: Arrays, context: int, horizon: int) -> Metrics:
    """Return a video of every predicted image: truth, prediction and error."""
    videos: Metrics = {}
    shown = slice(VIDEO_EPISODES)
    for key, value in predictions.items():
        if value.dtype != np.uint8 or value.ndim != 5:
            continue
        truth = cameras_side_by_side(batch[key][shown, : context + horizon])
        prediction = cameras_side_by_side(value[shown])
        model = np.concatenate([truth[:, :context], prediction], 1)
        videos[f"openloop/{key}"] = open_loop_video(truth, model, context)
    return videos
