"""Learn a world from sequences, without acting.

The watcher eats windows of a source (`data/sources`), trains one world on them, and
says how well its boundaries agree with the true events, which it is never shown while
it learns: neither a loss nor a choice between checkpoints nor a threshold knows them.
"""

# ruff: noqa: RUF009 (the nested defaults are frozen, so sharing them is safe)
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from reverie.agents.precision import dtype_of
from reverie.agents.vta import boundary_metrics
from reverie.agents.weights import load_components
from reverie.api import (
    Action,
    Batch,
    Carry,
    Extras,
    Feed,
    Metrics,
    Mode,
    Obs,
    StateDict,
    UserError,
)
from reverie.capabilities import AgentConfig
from reverie.kernels.accelerate import Accelerator
from reverie.nets.optim.amsgrad import AMSGradConfig
from reverie.nets.rng import Rng
from reverie.nets.tree import tree_map
from reverie.render.boundaries import boundary_strip, imagined_strip
from reverie.rows import Window
from reverie.spaces import EVENT, Spaces
from reverie.worlds.vta.config import VTAConfig
from reverie.worlds.vta.states import WindowEvaluation
from reverie.worlds.vta.world import VTA

SHOWN = 4
"""Sequences drawn in a report."""


@dataclass(frozen=True)
class VTAAgentConfig(AgentConfig):
    importer: ClassVar[str] = "reverie.convert.vta.weights:import_state"
    reconstruction_setting: ClassVar[str] = "world.loss"

    batch_size: int = 64
    """Windows per batch."""
    world: VTAConfig = VTAConfig()
    """Sizes, losses and limits of the world model."""
    opt: AMSGradConfig = AMSGradConfig()
    """Optimizer."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(
                "vta.batch_size must be at least 1.\n  Fix: --vta.batch-size 64"
            )

    @property
    def sequence_window(self) -> Window:
        """The sequences it wants to be shown."""
        return Window(self.batch_size, self.world.window)


class VTAAgent:
    """See the top of this file."""

    def __init__(
        self,
        obs_space: Spaces,
        act_space: Spaces,
        config: VTAAgentConfig,
        *,
        device: torch.device,
        precision: str = "float32",
        seed: int = 0,
        compile: str = "none",
        overlap: bool = False,  # no effect: this agent never acts
    ):
        dtype = dtype_of(precision)
        self.config, self.device = config, device
        self.world = VTA(obs_space, act_space, config.world, dtype)
        self._initialize(seed)
        self.fast = Accelerator(compile, device)
        self.fast.modules(self.world)
        named: dict[str, Tensor] = dict(self.world.named_parameters())
        scaling = precision == "float16"
        self.opt = self.fast.optimizer(named, config.opt, scaling=scaling)
        self.rng = {key: Rng(seed, key, device) for key in ("train", "report")}
        self.update = self.fast.graph(self.learn, "update", self.rng["train"])
        kinds = ("train", "report", "labelled")
        self.windows = dict.fromkeys(kinds, config.sequence_window)
        self.extras: Spaces = {}
        self.schedule = None
        self.last_losses: Metrics = {}
        self._threshold: float | None = None

    # Not acting

    def initial(self, batch: int) -> Carry:
        return ()

    def policy(
        self, carry: Carry, obs: Obs, mode: Mode = "train"
    ) -> tuple[Carry, Action, Extras]:
        raise UserError(
            "A watcher learns from sequences and cannot act.\n"
            "  Fix: --agent dreamer to learn a task, or --task sequences_balls."
        )

    # Learning

    def train(self, feed: Feed) -> Metrics:
        """One update on one batch."""
        metrics: Metrics = self.update(feed("train"))
        self.last_losses = {k: v for k, v in metrics.items() if k[:5] == "loss/"}
        return metrics

    def learn(self, data: Batch) -> Metrics:
        """Everything an update does on the device, in place: what a graph records."""
        world = self.world.train()
        before = self._buffers()
        found = world.loss(data, self.rng["train"])
        means = {key: loss.mean() for key, loss in found.losses.items()}
        ok, metrics = self.opt.update(torch.stack(list(means.values())).sum())
        for (buffers, old), (_, new) in zip(before, self._buffers(), strict=True):
            chosen = torch.where(ok, new, old)
            parts = torch.split(chosen, [x.numel() for x in buffers])
            pairs = zip(parts, buffers, strict=True)
            torch._foreach_copy_(buffers, [part.view_as(x) for part, x in pairs])
        losses = {f"loss/{key}": mean.detach() for key, mean in means.items()}
        return {**found.metrics, **losses, **metrics}

    def nonfinite(self) -> list[str]:
        """The losses, then the gradients, that were not finite in the last update."""
        losses = [k for k, x in self.last_losses.items() if not torch.isfinite(x)]
        return losses + [f"grad/{name}" for name in self.opt.nonfinite()]

    # Looking

    @torch.no_grad()
    def report(self, feed: Feed) -> Metrics:
        """Losses, boundaries and pictures of the evaluation set.

        `loss` is what the best checkpoint is chosen by.
        """
        data = feed("report")
        watched = self.watch(data)
        means = {key: loss.mean() for key, loss in watched.losses.items()}
        metrics: Metrics = {f"loss/{key}": mean for key, mean in means.items()}
        metrics["loss"] = torch.stack(list(means.values())).sum()
        metrics |= self._boundaries(data, watched, feed)
        return {**metrics, **self.pictures(data, watched)}

    @torch.no_grad()
    def watch(self, data: Batch) -> WindowEvaluation:
        """What the world makes of all sequences, a batch of them at a time."""
        world, size = self.world.eval(), self.config.batch_size
        tensors = {k: v for k, v in data.items() if k[:4] != "log/"}
        rows = len(next(iter(tensors.values())))
        pieces = []
        for start in range(0, rows, size):
            piece = tree_map(lambda x, s=start: x[s : s + size], tensors)
            pieces.append(world.evaluate(piece, self.rng["report"]))
        return _join(pieces)

    def _boundaries(
        self, data: Batch, watched: WindowEvaluation, feed: Feed
    ) -> Metrics:
        """Against the true events, where there are any; the first frame is forced."""
        read = watched.boundary.cpu().numpy()
        found = boundary_metrics.segment_statistics(read)
        metrics = {f"segments/{key}": value for key, value in found.items()}
        if EVENT not in data:
            return metrics
        events, change = self._labels(data)
        if self._threshold is None and EVENT in (labelled := feed("labelled")):
            known = self._labels(labelled)
            self._threshold = boundary_metrics.best_threshold(*known)
        read = read[:, 1:]
        chance = watched.detector_prob.cpu().numpy()[:, 1:].astype(np.float64)
        parts = {
            "boundaries": boundary_metrics.scores(events, read),
            "calibration": boundary_metrics.calibration(events, chance),
            "baselines": boundary_metrics.baselines(
                events, change, float(read.mean()), self._threshold
            ),
        }
        for key, loss in watched.losses.items():
            costs = loss[:, 1:].float().cpu().numpy()
            parts[f"costs/{key}"] = boundary_metrics.costs(events, read, costs)
        for part, numbers in parts.items():
            metrics |= {f"{part}/{key}": value for key, value in numbers.items()}
        return metrics

    def _labels(self, data: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Events and changes of pixels of the modelled frames but the first."""
        vta = self.config.world
        now = slice(vta.context + 1, vta.context + vta.length)
        frames = data[self.world.key][:, now.start - 1 : now.stop].cpu().numpy()
        change = boundary_metrics.frame_change(frames)[:, 1:]
        return data[EVENT][:, now].cpu().numpy(), change

    @torch.no_grad()
    def pictures(self, data: Batch, watched: WindowEvaluation) -> Metrics:
        """Strips of some sequences, and of dreams that begin with their context."""
        rows = slice(SHOWN)
        vta, key = self.config.world, self.world.key
        now = slice(vta.context, vta.context + vta.length)
        truth = data[key][rows, now].cpu().numpy()
        events = data[EVENT][rows, now].cpu().numpy() if EVENT in data else None
        strip = boundary_strip(
            truth,
            shades(watched.image[rows]),
            watched.boundary[rows].cpu().numpy(),
            watched.detector_prob[rows].float().cpu().numpy(),
            events,
        )
        some = {k: v[rows] for k, v in data.items() if k[:4] != "log/"}
        full, jumpy = (self.dream(some, jumpy=jumpy) for jumpy in (False, True))
        return {
            "boundaries": strip,
            "dream": imagined_strip(shades(full[0]), full[1].cpu().numpy()),
            "jumps": imagined_strip(shades(jumpy[0]), jumpy[1].cpu().numpy()),
        }

    @torch.no_grad()
    def dream(self, data: Batch, jumpy: bool) -> tuple[Tensor, Tensor]:
        """Go on after the context: images, and where segments begin.

        With the recorded actions; a jumpy dream takes one of them per segment.
        """
        world, rng, vta = self.world.eval(), self.rng["report"], self.config.world
        start = world.state_from_frames(data[world.key][:, : vta.context], rng)
        known = [key for key in data if key != world.key]
        acts = iter(
            {key: data[key][:, t] for key in known}
            for t in range(vta.context, vta.context + vta.length)
        )
        imagine = world.imagine_segments if jumpy else world.imagine
        dream = imagine(start, lambda _: next(acts), vta.length - 1, rng)
        return world.decode(dream.states)[world.key], dream.states.boundary > 0.5

    # Keeping

    def state_dict(self) -> StateDict:
        return {
            "world": dict(self.world.state_dict()),
            "opt": self.opt.state_dict(),
            "rng": {name: rng.state_dict() for name, rng in self.rng.items()},
            "threshold": self._threshold,
        }

    def load_state_dict(self, state: StateDict) -> None:
        self.load_weights(state)
        self.opt.load_state_dict(state["opt"])
        self._threshold = state.get("threshold")  # older checkpoints have none
        for name, rng in self.rng.items():
            rng.load_state_dict(state["rng"][name])

    def load_weights(self, state: StateDict, components: str = ".*") -> list[str]:
        """Take over the weights and the temperature of the world."""
        return load_components({"world": self.world}, state, components)

    def _buffers(self) -> list[tuple[list[Tensor], Tensor]]:
        """What updates change besides weights, and its values in one row, by kind."""
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self.world.buffers():
            kinds.setdefault(buffer.dtype, []).append(buffer)
        return [(x, torch.cat([b.flatten() for b in x])) for x in kinds.values()]

    def _initialize(self, seed: int) -> None:
        seeds = np.random.SeedSequence([seed, *b"init"]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(seeds[0]) >> 1)
        self.world.initialize(generator)
        self.world.to(self.device)
        if self.device.type == "cuda":
            self.world.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _join(pieces: list[WindowEvaluation]) -> WindowEvaluation:
    losses = {
        key: torch.cat([piece.losses[key] for piece in pieces])
        for key in pieces[0].losses
    }
    rest = (torch.cat(parts) for parts in zip(*(p[1:] for p in pieces), strict=True))
    return WindowEvaluation(losses, *rest)


def shades(image: Float[Tensor, "*b h w c"]) -> UInt8[np.ndarray, "*b h w c"]:
    """Images with numbers from 0 to 1 as pictures are drawn from them."""
    found: np.ndarray = (image * 255).clamp(0, 255).to(torch.uint8).cpu().numpy()
    return found
