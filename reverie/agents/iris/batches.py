"""Rows of Reverie as Δ-IRIS wants them: one image, one action, and its own time."""

from __future__ import annotations

import torch
from torch import Tensor

from reverie.api import Batch, UserError
from reverie.spaces import Spaces, agent_obs_space
from reverie.worlds.iris.segment import EpisodeSegment


def to_segment(
    batch: Batch, image: str, action: str, low: int, ends: str = "is_last"
) -> EpisodeSegment:
    """Rows of the replay in the time of Δ-IRIS; one row fewer.

    Row t keeps what was seen and done there, and takes the reward and the end of row
    t + 1, to which that led. It is real if both rows belong to the episode, so the last
    observation is not. What is not real is black, and zero.
    """
    mask = batch["mask"]
    real = mask[:, :-1] & mask[:, 1:]
    chosen = batch[action][:, :-1].long() - low
    return EpisodeSegment(
        torch.where(with_axes_of(batch[image], real), batch[image][:, :-1], 0),
        torch.where(real, chosen, 0),
        torch.where(real, batch["reward"][:, 1:], 0.0),
        batch[ends][:, 1:] & real,
        real,
    )


def choose_image(obs_space: Spaces, wanted: str) -> str:
    """The one image to see."""
    images = [
        key for key, space in agent_obs_space(obs_space).items() if space.is_image
    ]
    if wanted and wanted not in images:
        raise UserError(
            f"iris.image names {wanted!r}, which is no image of this environment.\n"
            f"  Fix: use one of {', '.join(images) or 'another environment'}."
        )
    if wanted or len(images) == 1:
        return wanted or images[0]
    if "image" in images:
        return "image"
    if images:
        raise UserError(
            f"Δ-IRIS sees one image, this environment shows {', '.join(images)}.\n"
            f"  Fix: --iris.image {images[0]}"
        )
    raise UserError(
        "Δ-IRIS learns from images (uint8, height x width x colours), and this "
        "environment shows none.\n"
        "  Fix: choose an environment with images (gymnasium.wrappers."
        "AddRenderObservation gives some to any of Gymnasium), or `--agent dreamer`."
    )


def choose_action(act_space: Spaces) -> tuple[str, int, int]:
    """The one discrete action: its key, its lowest value, how many there are."""
    for key, space in act_space.items():
        if not space.is_discrete or space.shape or len(act_space) > 1:
            kind = "continuous" if not space.is_discrete else "one of several"
            raise UserError(
                f"Δ-IRIS chooses one discrete action per step; {key!r} is {kind}, of "
                f"shape {space.shape}.\n  Fix: use `--agent dreamer` here, or an "
                "environment with one discrete action."
            )
        return key, int(space.low), space.classes
    raise UserError("This environment takes no action.\n  Fix: choose another one.")


def at_least(x: Tensor, steps: int) -> Tensor:
    """The same rows, and as many that are not real as it takes."""
    missing = max(0, steps - x.shape[1])
    return torch.cat([x, x.new_zeros(len(x), missing, *x.shape[2:])], 1)


def with_axes_of(x: Tensor, mask: Tensor) -> Tensor:
    """A mask of the first axes of `x`, to be chosen by from `x`."""
    mask = mask.to(x.device)
    return mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))
