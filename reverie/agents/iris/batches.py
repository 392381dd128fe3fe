"""Convert replay batches to the segments of Δ-IRIS: one image, one discrete action.

In Δ-IRIS, reward and end belong to the action that caused them, and the last
observation of an episode is not used.
"""

from __future__ import annotations

import torch

from reverie.api import Batch, UserError
from reverie.spaces import Spaces, agent_obs_space
from reverie.worlds.iris.segment import EpisodeSegment


def to_segment(
    batch: Batch,
    image_key: str,
    action_key: str,
    lowest_action: int,
    end_key: str = "is_last",
) -> EpisodeSegment:
    """Convert a batch of T rows to a segment of T - 1 rows.

    Row t of the segment has observation and action of row t of the batch, and reward
    and end (`end_key`) of row t + 1 of the batch. It is `real` if both of these rows
    belong to the episode; rows that are not real are zero. The `lowest_action` has the
    index 0.
    """
    mask = batch["mask"]
    real = mask[:, :-1] & mask[:, 1:]
    index = batch[action_key][:, :-1].long() - lowest_action
    return EpisodeSegment(
        torch.where(real[..., None, None, None], batch[image_key][:, :-1], 0),
        torch.where(real, index, 0),
        torch.where(real, batch["reward"][:, 1:], 0.0),
        batch[end_key][:, 1:] & real,
        real,
    )


def select_image(obs_space: Spaces, key: str) -> str:
    """Return `key`; if it is empty, return the only image key, or `image`."""
    images = [k for k, space in agent_obs_space(obs_space).items() if space.is_image]
    if key and key not in images:
        fix = f"--iris.image {' or '.join(images)}"
        raise UserError(
            f"iris.image is {key!r}, which is not an image of this environment.\n"
            f"  Fix: {fix if images else 'choose an environment with images.'}"
        )
    if key or len(images) == 1:
        return key or images[0]
    if "image" in images:
        return "image"
    if images:
        raise UserError(
            f"Δ-IRIS uses one image, but the environment has {', '.join(images)}.\n"
            f"  Fix: --iris.image {images[0]}"
        )
    raise UserError(
        "Δ-IRIS needs an image observation (uint8, height x width x channels), but the "
        "environment has none.\n"
        "  Fix: choose an environment with images (gymnasium.wrappers."
        "AddRenderObservation adds them to any Gymnasium environment), or "
        "`--agent dreamer`."
    )


def select_action(act_space: Spaces) -> tuple[str, int, int]:
    """Return key, lowest value and number of values of the one discrete action."""
    for key, space in act_space.items():
        if not space.is_discrete or space.shape or len(act_space) > 1:
            kind = "discrete" if space.is_discrete else "continuous"
            raise UserError(
                f"Δ-IRIS needs a single discrete action, but {key!r} is {kind} with "
                f"shape {space.shape} (action keys: {', '.join(act_space)}).\n  Fix: "
                "use `--agent dreamer`, or an environment with one discrete action."
            )
        return key, int(space.low), space.classes
    raise UserError(
        "The environment has no actions.\n  Fix: choose another environment."
    )
