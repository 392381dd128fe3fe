"""Agent that trains the VTA world model on sequence datasets; it does not act.

VTA is Variational Temporal Abstraction (Kim et al., 2019): a world model that divides
sequences into segments. Reports compare its segment boundaries with ground-truth
events. Events are used neither in training nor to choose the best checkpoint.
"""

# ruff: noqa: RUF009 (the nested defaults are frozen, so sharing them is safe)
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from reverie import api
from reverie.agents.open_loop import to_pixels
from reverie.agents.options import BuildOptions
from reverie.agents.trained import TrainedAgent
from reverie.agents.vta import boundary_metrics
from reverie.agents.weights import init_generator
from reverie.capabilities import AgentConfig, Stateful
from reverie.config import check_minimum
from reverie.distributed.collective import mean_contribution
from reverie.kernels.accelerate import Accelerator
from reverie.nets.optim.adam import AMSGradConfig
from reverie.nets.optim.optimizer import Optimizer
from reverie.nets.rng import Rng
from reverie.nets.tree import tree_map
from reverie.render.boundaries import boundary_strip, imagined_strip
from reverie.rows import Window
from reverie.spaces import EVENT, Spaces
from reverie.worlds.vta.config import VTAConfig
from reverie.worlds.vta.states import WindowEvaluation
from reverie.worlds.vta.world import VTA

IMAGE_SEQUENCES = 4
"""Sequences shown in the images of a report."""


@dataclass(frozen=True)
class VTAAgentConfig(AgentConfig):
    """Settings of VTA."""

    # the class variables are documented in `AgentConfig`
    explore_policies: ClassVar[tuple[str, ...]] = ()
    importers: ClassVar[tuple[str, ...]] = ("reverie.convert.vta.importer:IMPORTER",)
    reconstruction_setting: ClassVar[str] = "world.loss"
    batch_settings: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("batch_size", "world.length"),
    )

    batch_size: int = 64
    """Sequences per batch."""
    world: VTAConfig = VTAConfig()
    """World model."""
    opt: AMSGradConfig = AMSGradConfig()
    """Optimizer."""

    def __post_init__(self) -> None:
        check_minimum(self, "vta.", batch_size=1)

    @property
    def sequence_window(self) -> Window:
        return Window(self.batch_size, self.world.window)


class VTAAgent(TrainedAgent):
    """The VTA agent; implements `api.Agent`, except that its policy raises an error."""

    opt: Optimizer

    def __init__(
        self,
        obs_space: Spaces,
        act_space: Spaces,
        config: VTAAgentConfig,
        options: BuildOptions,
    ):
        device, dtype, seed = options.device, options.dtype, options.seed
        self.config, self.device = config, device
        self.world = VTA(obs_space, act_space, config.world, dtype)
        self._initialize(seed)
        self.accelerator = Accelerator(options.compile, device)
        self.accelerator.use_fast_modules(self.world)
        parameters: dict[str, Tensor] = dict(self.world.named_parameters())
        loss_scaling = dtype == torch.float16
        make_optimizer = self.accelerator.make_optimizer
        self.opt = make_optimizer(parameters, config.opt, scaling=loss_scaling)
        self.rng = {key: Rng(seed, key, device) for key in ("train", "report")}
        self._run_update = self.accelerator.capture(
            self._update, "update", self.rng["train"]
        )
        # "labelled": training sequences; their events set the threshold of a baseline
        names = ("train", "report", "labelled")
        self.windows = dict.fromkeys(names, config.sequence_window)
        self.extras: Spaces = {}
        self.schedule = None
        self.last_metrics = {}
        self._pixel_threshold: float | None = None  # of the pixel-change baseline

    def initial(self, batch: int) -> api.Carry:
        return ()

    def policy(
        self, carry: api.Carry, obs: api.Obs, mode: api.Mode = "train"
    ) -> api.PolicyOutput:
        raise api.UserError(
            "VTA trains on sequences and cannot act.\n"
            "  Fix: --agent dreamer for an environment, or --task sequences_balls."
        )

    # Training

    def train(self, feed: api.Feed) -> api.Metrics:
        """Run one update on one batch."""
        self.last_metrics = self._run_update(feed("train"))
        return self.last_metrics

    def _update(self, data: api.Batch) -> api.Metrics:
        """Run an update; all state changes in place, for capture as a CUDA graph."""
        world = self.world.train()
        old_buffers = self._flat_buffers()
        loss = world.loss(data, self.rng["train"])
        total = torch.stack([mean_contribution(x) for x in loss.losses.values()]).sum()
        stepped, metrics = self.opt.update(total)
        # a skipped update (`stepped` is False) must not change the buffers
        for (buffers, old), (_, new) in zip(
            old_buffers, self._flat_buffers(), strict=True
        ):
            flat = torch.where(stepped, new, old)
            values = torch.split(flat, [x.numel() for x in buffers])
            pairs = zip(values, buffers, strict=True)
            torch._foreach_copy_(buffers, [value.view_as(x) for value, x in pairs])
        losses = {f"loss/{key}": x.mean().detach() for key, x in loss.losses.items()}
        return {**loss.metrics, **losses, **metrics}

    def state_changed_by_loss(self) -> tuple[list[Tensor], list[Stateful]]:
        return list(self.world.buffers()), [self.rng["train"]]

    # Reporting and evaluation

    @torch.no_grad()
    def report(self, feed: api.Feed) -> api.Metrics:
        """Return losses, boundary metrics and images of the evaluation sequences.

        The best checkpoint is the one with the lowest `loss`.
        """
        data = feed("report")
        evaluation = self.evaluate(data)
        means = {key: loss.mean() for key, loss in evaluation.losses.items()}
        metrics: api.Metrics = {f"loss/{key}": mean for key, mean in means.items()}
        metrics["loss"] = torch.stack(list(means.values())).sum()
        metrics |= self._boundary_metrics(data, evaluation, feed)
        return {**metrics, **self._images(data, evaluation)}

    @property
    def image_key(self) -> str:
        return self.world.key

    @property
    def modeled_rows(self) -> slice:
        """Rows of a sequence that the world models, after the context rows."""
        config = self.config.world
        return slice(config.context, config.context + config.length)

    @torch.no_grad()
    def evaluate(self, data: api.Batch) -> WindowEvaluation:
        """Evaluate the world model on sequences, in batches of the training size."""
        world, size = self.world.eval(), self.config.batch_size
        tensors = {k: v for k, v in data.items() if not k.startswith("log/")}
        count = len(next(iter(tensors.values())))
        results = []
        for start in range(0, count, size):
            batch = tree_map(lambda x, s=start: x[s : s + size], tensors)
            results.append(world.evaluate(batch, self.rng["report"]))
        return _concatenate(results)

    @torch.no_grad()
    def imagine(self, data: api.Batch, by_segment: bool) -> tuple[Tensor, Tensor]:
        """Imagine the modeled rows from the context rows with the recorded actions.

        Returns images, and a bool tensor that is True where a segment begins. With
        `by_segment`, every step is a whole segment and uses the next recorded action.
        """
        world, rng, rows = self.world.eval(), self.rng["report"], self.modeled_rows
        start = world.state_from_frames(data[world.key][:, : rows.start], rng)
        keys = [key for key in data if key != world.key]
        steps = range(rows.start, rows.stop)
        actions = iter({key: data[key][:, t] for key in keys} for t in steps)
        imagine = world.imagine_segments if by_segment else world.imagine
        rollout = imagine(start, lambda _: next(actions), len(steps) - 1, rng)
        return world.decode(rollout.states)[world.key], rollout.states.boundary > 0.5

    def _boundary_metrics(
        self, data: api.Batch, evaluation: WindowEvaluation, feed: api.Feed
    ) -> api.Metrics:
        """Return segment statistics and, with events, scores of the boundaries.

        Scores exclude the first modeled row, which always begins a segment.
        """
        boundaries = evaluation.boundary.cpu().numpy()
        statistics = boundary_metrics.segment_statistics(boundaries)
        metrics = {f"segments/{key}": value for key, value in statistics.items()}
        if EVENT not in data:
            return metrics
        events, change = self._events_and_changes(data)
        if self._pixel_threshold is None and EVENT in (labelled := feed("labelled")):
            labelled_pair = self._events_and_changes(labelled)
            self._pixel_threshold = boundary_metrics.best_threshold(*labelled_pair)
        boundaries = boundaries[:, 1:]
        probs = evaluation.detector_prob.cpu().numpy()[:, 1:].astype(np.float64)
        groups = {
            "boundaries": boundary_metrics.scores(events, boundaries),
            "calibration": boundary_metrics.calibration(events, probs),
            "baselines": boundary_metrics.baselines(
                events, change, float(boundaries.mean()), self._pixel_threshold
            ),
        }
        for key, loss in evaluation.losses.items():
            groups[f"costs/{key}"] = boundary_metrics.mean_losses(
                events, boundaries, loss[:, 1:].float().cpu().numpy()
            )
        for group, values in groups.items():
            metrics |= {f"{group}/{key}": value for key, value in values.items()}
        return metrics

    def _events_and_changes(self, data: api.Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return events and pixel changes of all modeled rows but the first."""
        start, stop = self.modeled_rows.start, self.modeled_rows.stop
        frames = data[self.world.key][:, start:stop].cpu().numpy()
        change = boundary_metrics.frame_change(frames)[:, 1:]
        return data[EVENT][:, start + 1 : stop].cpu().numpy(), change

    def _images(self, data: api.Batch, evaluation: WindowEvaluation) -> api.Metrics:
        """Draw sequences with their boundaries, and imagined continuations."""
        shown, rows = slice(IMAGE_SEQUENCES), self.modeled_rows
        truth = data[self.world.key][shown, rows].cpu().numpy()
        events = data[EVENT][shown, rows].cpu().numpy() if EVENT in data else None
        images = {
            "boundaries": boundary_strip(
                truth,
                to_pixels(evaluation.image[shown]),
                evaluation.boundary[shown].cpu().numpy(),
                evaluation.detector_prob[shown].float().cpu().numpy(),
                events,
            )
        }
        inputs = {k: v[shown] for k, v in data.items() if not k.startswith("log/")}
        for name, by_segment in (("imagined", False), ("imagined_segments", True)):
            frames, boundaries = self.imagine(inputs, by_segment)
            images[name] = imagined_strip(to_pixels(frames), boundaries.cpu().numpy())
        return images

    # Checkpoints

    def components(self) -> dict[str, nn.Module]:
        return {"world": self.world}

    def state_dict(self) -> api.StateDict:
        return {**super().state_dict(), "threshold": self._pixel_threshold}

    def load_state_dict(self, state: api.StateDict) -> None:
        super().load_state_dict(state)
        self._pixel_threshold = state["threshold"]

    def _flat_buffers(self) -> list[tuple[list[Tensor], Tensor]]:
        """Return the buffers by dtype, each with one flat copy (fewer GPU kernels)."""
        groups: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self.world.buffers():
            groups.setdefault(buffer.dtype, []).append(buffer)
        return [(x, torch.cat([b.flatten() for b in x])) for x in groups.values()]

    def _initialize(self, seed: int) -> None:
        self.world.initialize(init_generator(seed))
        self.world.to(self.device)
        if self.device.type == "cuda":  # faster convolutions
            self.world.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _concatenate(results: list[WindowEvaluation]) -> WindowEvaluation:
    """Join the results of several batches."""
    losses = {
        key: torch.cat([result.losses[key] for result in results])
        for key in results[0].losses
    }
    # all fields but the first, `losses`, are tensors
    fields = zip(*(result[1:] for result in results), strict=True)
    return WindowEvaluation(losses, *(torch.cat(field) for field in fields))
