"""Open-loop videos of recorded episodes (`reverie draw openloop`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from reverie.api import UserError
from reverie.evaluation.rollout_ensembles import predict
from reverie.play.load import LoadedRun
from reverie.render.channels import cameras_side_by_side
from reverie.render.open_loop import open_loop_video
from reverie.render.video import encode_gif, write_video
from reverie.spaces import Arrays
from reverie.storage.atomic import make_parent, write_file

MAX_TRIES = 200
"""Maximum number of episodes that are read in search of sufficiently long ones."""
GIF_COLORS = (256, 128, 64)
"""Palette sizes to try until a GIF is small enough."""


def draw_open_loop(
    loaded: LoadedRun,
    path: Path,
    clips: int = 6,
    observed: int = 16,
    horizon: int = 48,
    seed: int = 0,
    fps: float = 15.0,
    max_bytes: int = 0,
) -> Path:
    """Write a video that compares random clips of recorded episodes with predictions.

    The world model observes the first `observed` frames of a clip, which are shown as
    they are, and predicts the next `horizon` frames from the recorded actions. If a GIF
    is larger than `max_bytes` (0 for no limit), it gets fewer colors, then fewer clips.
    """
    model_env = loaded.world_model_env
    if model_env is None:
        raise UserError(
            f"There is nothing to draw: {loaded.missing['model']}.\n"
            "  Fix: give a run of an agent with a world model."
        )
    batch = sample_clips(loaded, clips, observed + horizon, seed)
    if loaded.crop is not None:
        batch = loaded.crop.center_crop(batch)
    model_env.seed(seed)
    predictions = predict(model_env, batch, observed, horizon)
    if not predictions:
        raise UserError(
            "There is nothing to draw: the world model has no decoder.\n"
            "  Fix: train DreamerV3 with --dreamer.draw True."
        )
    images = [key for key in predictions if model_env.obs_space[key].is_image]
    if not images:
        raise UserError(
            "There is nothing to draw: the world model predicts no images.\n"
            "  Fix: `reverie eval LOGDIR` evaluates predictions of vectors."
        )
    key = images[0]
    truth = cameras_side_by_side(batch[key])
    model = np.concatenate(
        [truth[:, :observed], cameras_side_by_side(predictions[key])], 1
    )
    for count in range(clips, 0, -1):
        video = open_loop_video(truth, model, observed, count)
        if path.suffix != ".gif" or not max_bytes:
            return write_video(path, video, fps)
        for colors in GIF_COLORS:
            data = encode_gif(video, fps, colors)
            if len(data) <= max_bytes:
                make_parent(path)
                write_file(path, data)
                return path
    raise UserError(
        f"A GIF of one clip has {len(data) // 1000} kB, more than "
        f"{max_bytes // 1000} kB.\n  Fix: a smaller --horizon, or a file that ends "
        "with .mp4"
    )


def sample_clips(loaded: LoadedRun, count: int, rows: int, seed: int) -> Arrays:
    """Return random clips of recorded episodes as a batch, with `rows` steps each.

    Actions are in the units of the world model. There may be fewer than `count` clips.
    """
    rng, clips = np.random.default_rng(seed), list[Arrays]()
    longest = 0
    for _ in range(MAX_TRIES):
        episode = loaded.episodes.sample(rng)
        length = len(episode["is_first"])
        longest = max(longest, length)
        if length < rows:
            continue
        start = int(rng.integers(length - rows + 1))
        clips.append({key: x[start : start + rows] for key, x in episode.items()})
        if len(clips) == count:
            break
    if not clips:
        raise UserError(
            f"No recorded episode has {rows} rows; the longest that was found has "
            f"{longest}.\n  Fix: a smaller --horizon or --observed"
        )
    keys = set.intersection(*(set(clip) for clip in clips))
    batch = {key: np.stack([clip[key] for clip in clips]) for key in keys}
    return loaded.to_model_units(batch)
