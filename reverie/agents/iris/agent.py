"""Δ-IRIS: a tokenizer of frame differences, a transformer that predicts their tokens,
and an actor-critic that is trained on imagined rollouts.

The three components are trained separately, each with its own optimizer and batches, in
epochs: collect data, then update each component a number of times (`schedule.py`).
Every call of `train` is one update of the component that is due. With Plan2Explore, it
also updates the exploration component that is trained on the same batch, if there is
one (`explorer.py`).

Time convention of training segments, as in the original: reward and end belong to the
action that caused them, and the last observation of an episode is not used.
`batches.py` converts replay batches. In imagined rollouts, reward and end belong to the
frame that the action led to, as in `api.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from reverie import api
from reverie.agents.explore import ENSEMBLE, check_mode
from reverie.agents.export_steps import IS_FIRST, StepModule
from reverie.agents.iris.acting import PixelPolicy
from reverie.agents.iris.actor_critic import PixelActorCritic
from reverie.agents.iris.batches import select_action, select_image, to_segment
from reverie.agents.iris.config import (
    COMPONENTS,
    WORLD_COMPONENTS,
    ComponentTrainingConfig,
    IrisConfig,
)
from reverie.agents.iris.explorer import EXPLORE_COMPONENTS, TokenExplorer
from reverie.agents.iris.report import episode_losses, report_metrics
from reverie.agents.iris.schedule import EpochSchedule
from reverie.agents.iris.world_steps import iris_world_steps
from reverie.agents.options import BuildOptions
from reverie.agents.trained import TrainedAgent
from reverie.agents.weights import init_generator
from reverie.agents.world_model_env import IrisWorldModelEnv
from reverie.capabilities import ExportStep, Stateful, WorldModelEnv
from reverie.distributed.collective import average_metrics, mean_contribution
from reverie.kernels.accelerate import Accelerator
from reverie.nets.blocks import initialize
from reverie.nets.optim.group import OptimizerGroup
from reverie.nets.optim.optimizer import Optimizer, dense_weights
from reverie.nets.residual import set_recompute
from reverie.nets.rng import Rng
from reverie.rows import Window
from reverie.spaces import Spaces
from reverie.worlds.iris.segment import EpisodeSegment
from reverie.worlds.iris.world import IrisWorld, StepReward

Update = Callable[[tuple[api.Batch, ...]], api.Metrics]
"""Runs one update of a component with the mean gradient of several batches."""
CONSECUTIVE_SKIPS = "opt/consecutive_skips"
"""Metric that counts consecutive updates that were skipped."""
REPORT_SEQUENCES = 8
"""Sequences in the batch of a report."""


class ComponentLoss(NamedTuple):
    """Scaled losses of a component; their means add up to the total."""

    losses: dict[str, Float[Tensor, ...]]
    metrics: api.Metrics


class Iris(TrainedAgent):
    """The Δ-IRIS agent; implements `api.Agent`."""

    opt: OptimizerGroup
    not_in_policy = (*WORLD_COMPONENTS, ENSEMBLE)

    def __init__(
        self,
        obs_space: Spaces,
        act_space: Spaces,
        config: IrisConfig,
        options: BuildOptions,
    ):
        device, dtype, seed = options.device, options.dtype, options.seed
        if dtype == torch.float16:
            raise api.UserError(
                "Δ-IRIS does not support the precision 'float16'.\n"
                "  Fix: --precision bfloat16 or float32"
            )
        self.config, self.device = config, device
        self.obs_space, self.act_space = obs_space, act_space
        self.image_key = select_image(obs_space, config.image)
        self.action_key, self.lowest_action, num_actions = select_action(act_space)
        space = obs_space[self.image_key]
        self.world = IrisWorld(
            space,
            num_actions,
            tokenizer=config.tokenizer,
            dynamics=config.world_model,
            dtype=dtype,
            key=self.image_key,
        )
        self.actor_critic = PixelActorCritic(
            space.shape, num_actions, config.actor_critic, self.world.dtype
        )
        self.explorer: TokenExplorer | None = None
        if options.explore.policy == "plan2explore":
            self.explorer = TokenExplorer(
                self.world, config.actor_critic, options.explore
            )
        self._initialize(seed)
        if config.save_memory and device.type == "cuda":
            set_recompute(self.world, True)
        self.accelerator = Accelerator(options.compile, device, options.overlap)
        explorers = [self.explorer] if self.explorer else []
        self.accelerator.use_fast_modules(self.world, self.actor_critic, *explorers)
        # imagination uses the world itself, or a copy with low-precision weights
        self.imagination_world = self.world
        if self.world.dtype != torch.float32:
            self.imagination_world = self.world.frozen_copy(self.world.dtype)
        self._copy_is_outdated = True

        actor_critics = [self.actor_critic, *(x.actor_critic for x in explorers)]
        nets = [net for x in actor_critics for net in (x.online, x.target)]
        encoders = [net.frame for net in nets if net.dtype != torch.float32]
        self.accelerator.use_low_precision([self.world, *encoders], self.world.dtype)
        opts = {name: self._make_optimizer(name) for name in self.components()}
        self.opt = OptimizerGroup(opts)
        generators = ("policy", "eval", "train", "report")
        self.rng = {name: Rng(seed, name, device) for name in generators}
        training = {name: getattr(config.training, name) for name in COMPONENTS}
        if not config.behaviour:
            training["actor_critic"] = ComponentTrainingConfig(steps=0)
        self.schedule = EpochSchedule(config.schedule, training)
        self.extras: Spaces = {}
        self.windows = {name: self._make_window(name) for name in COMPONENTS}
        trained_frames = config.training.world_model.length
        # videos need the burn-in, the first frame of the rollout and a predicted one
        longest = max(trained_frames, config.actor_critic.burn_in + 2)
        self.windows["report"] = Window(
            REPORT_SEQUENCES, longest + 1, select="episodes", online=False
        )
        frames = config.rollout_frames
        if config.behaviour and trained_frames < frames:
            warnings.warn(
                f"The transformer is trained on sequences of {trained_frames} frames, "
                f"but imagined rollouts have {frames}: the last positions are never "
                f"trained.\n  Fix: --iris.training.world_model.length {frames}",
                stacklevel=2,
            )
        self._last_losses: dict[str, api.Metrics] = {}  # by component
        self._run_update = {name: self._capture_update(name) for name in COMPONENTS}
        self._policy = PixelPolicy(
            self.actor_critic,
            self.explorer.actor_critic if self.explorer else None,
            num_actions,
            space.shape,
            config.acting,
            self.rng,
            self.accelerator,
        )

    # Acting

    def initial(self, batch: int) -> api.Carry:
        return self._policy.initial(batch)

    def policy(
        self, carry: api.Carry, obs: api.Obs, mode: api.Mode = "train"
    ) -> api.PolicyOutput:
        """Choose actions (see `acting.py`); the mode `explore` needs `plan2explore`."""
        check_mode(mode, self.explorer is not None)
        training = mode in ("train", "explore")
        carry, index = self._policy(
            mode,
            carry,
            obs[self.image_key],
            obs["is_first"],
            obs["is_last"],
            epoch=self.schedule.epoch if training else 0,
            random=training and self.schedule.uses_random_actions,
        )
        dtype = self.act_space[self.action_key].dtype
        return carry, {self.action_key: (index + self.lowest_action).astype(dtype)}, {}

    # Export

    def export_policy(self, greedy: bool) -> ExportStep:
        mode = "greedy" if greedy else "eval"
        policy_step, initial = self._policy.exported_step(mode)
        low, space = self.lowest_action, self.act_space[self.action_key]
        dtype = torch.as_tensor(space.zeros()).dtype

        def step(inputs: api.Batch, state: Any, rng: Rng) -> Any:
            frames = {"image": inputs[self.image_key], "is_first": inputs["is_first"]}
            output, state = policy_step(frames, state, rng)
            return {self.action_key: (output["index"] + low).to(dtype)}, state

        inputs = {self.image_key: self.obs_space[self.image_key], "is_first": IS_FIRST}
        return ExportStep(StepModule(step, policy_step), inputs, initial)

    def world_steps(self) -> dict[str, ExportStep]:
        # the context has `blocks` frames, one of them imagined; two must be given
        max_frames = self.config.world_model.transformer.blocks - 1
        frames = max(2, min(self.config.actor_critic.burn_in + 1, max_frames))
        image = self.obs_space[self.image_key]
        return iris_world_steps(self.world, frames, image, self.act_space)

    # Training

    def train(self, feed: api.Feed) -> api.Metrics:
        """Run one update of the component that is due.

        If none is due, as in offline training, run one update of every component.
        """
        name = self.schedule.component
        self._last_losses = {}
        if name is None:
            names = COMPONENTS if self.config.behaviour else WORLD_COMPONENTS
            metrics = [self._sample_and_update(name, feed) for name in names]
            skips = torch.stack([x[CONSECUTIVE_SKIPS] for x in metrics])
            merged = {key: x for each in metrics for key, x in each.items()}
            return {**merged, CONSECUTIVE_SKIPS: skips.amax()}
        # uses are not counted in the first epoch, so episodes are sampled uniformly
        feed.count_uses(name, self.schedule.epoch > 1)
        return self._sample_and_update(name, feed)

    def _sample_and_update(
        self, name: str, feed: api.Feed, run: Update | None = None
    ) -> api.Metrics:
        """Sample the batches of one update and run it, with `run` if given."""
        count = getattr(self.config.training, name).accumulate
        return self.update(name, [feed(name) for _ in range(count)], run)

    def update(
        self, name: str, batches: Sequence[api.Batch], run: Update | None = None
    ) -> api.Metrics:
        """Run one update of a component, with the mean gradient of all batches.
        `run` replaces the captured update."""
        if name == "actor_critic":
            self._refresh_imagination_world()
            self.accelerator.before_update()  # copies the weights for the policies
        metrics = (run or self._run_update[name])(tuple(batches))
        metrics = average_metrics(dict(metrics))  # over ranks
        for component in self._trained_with(name):
            prefix = f"loss/{component}/"
            losses = {k: x for k, x in metrics.items() if k.startswith(prefix)}
            self._last_losses[component] = losses
        if name != "actor_critic":
            self._copy_is_outdated = True
        return metrics

    def _update(self, name: str, batches: tuple[api.Batch, ...]) -> api.Metrics:
        """Run the computations of an update; may be captured as a CUDA graph."""
        count, names = len(batches), self._trained_with(name)
        totals = {key: torch.zeros((), device=self.device) for key in names}
        grads: dict[str, list[Tensor]] = {}
        means = dict[str, Any]()  # of metrics; sums until they are divided below
        stats = [] if self.explorer is None else self.explorer.running_stats(name)
        old_stats = [buffer.clone() for buffer in stats]
        for batch in batches:
            values: dict[str, Any] = {}
            for component, (losses, metrics) in self.losses(
                name, self._to_segment(batch)
            ).items():
                terms = [mean_contribution(x) for x in losses.values()]
                loss = torch.stack(terms).sum() / count
                batch_grads = self.opt[component].gradients(loss)
                if component in grads:
                    torch._foreach_add_(grads[component], batch_grads)
                else:
                    grads[component] = batch_grads
                totals[component] = totals[component] + loss.detach()
                for key, x in losses.items():
                    values[f"loss/{component}/{key}"] = x.mean().detach()
                values |= {f"{component}/{key}": x for key, x in metrics.items()}
            means = {k: means[k] + x for k, x in values.items()} if means else values
        if count > 1:
            means = {key: value / count for key, value in means.items()}
        skips = []
        for component, total in totals.items():
            stepped, metrics = self.opt[component].apply(total, grads[component])
            skips.append(metrics.pop(CONSECUTIVE_SKIPS))
            means |= {f"{component}/{key}": x for key, x in metrics.items()}
        # `stepped` is that of the last component, to which `stats` belong
        for buffer, old in zip(stats, old_stats, strict=True):
            buffer.copy_(torch.where(stepped, buffer, old))
        most_skips = torch.stack(skips).amax() if len(names) > 1 else skips[0]
        return {**means, CONSECUTIVE_SKIPS: most_skips}

    def _trained_with(self, name: str) -> list[str]:
        """Return a component and the exploration component trained with it, if any."""
        if self.explorer and name in EXPLORE_COMPONENTS:
            return [name, EXPLORE_COMPONENTS[name]]
        return [name]

    def state_changed_by_loss(self) -> tuple[list[Tensor], list[Stateful]]:
        """Return what the loss of the current component changes: the codebook, or the
        target networks and statistics of actor-critics, and the random generator."""
        name = self.schedule.component or COMPONENTS[0]
        tensors: list[Tensor] = []
        if name == "tokenizer":
            tensors = list(self.world.tokenizer.quantizer.buffers())
        elif name == "actor_critic":
            tensors = self.actor_critic.changed_by_loss()
            if self.explorer:
                tensors += self.explorer.actor_critic.changed_by_loss()
        return tensors, [self.rng["train"]]

    def losses(self, name: str, segment: EpisodeSegment) -> dict[str, ComponentLoss]:
        """Return the losses of a component, and of the exploration component, if any.

        Updates the codebook of the tokenizer, or the target networks and normalization
        of the actor-critics.
        """
        explorer = self.explorer
        losses: dict[str, ComponentLoss] = {}
        if name == "tokenizer":
            loss = self.world.tokenizer.loss(segment, self.rng["train"])
            losses[name] = ComponentLoss(loss.losses, loss.metrics)
        elif name == "world_model":
            tokens = self.world.tokenizer.tokenize(segment.image, segment.action)
            loss = self.world.dynamics.loss(segment, tokens)
            losses[name] = ComponentLoss(loss.losses, loss.metrics)
            if explorer:
                heads = explorer.head_loss(loss.states, tokens, segment)
                losses[EXPLORE_COMPONENTS[name]] = ComponentLoss(*heads)
        else:
            losses[name] = self._behaviour_loss(self.actor_critic, segment)
            if explorer:
                rewards: list[Tensor] = []
                behaviour = self._behaviour_loss(
                    explorer.actor_critic, segment, explorer.reward_fn(rewards)
                )
                behaviour.metrics["intrinsic_reward"] = torch.stack(rewards).mean()
                losses[EXPLORE_COMPONENTS[name]] = behaviour
            self.accelerator.refresh_slow_copies()  # low-precision target networks
        return losses

    def _behaviour_loss(
        self,
        actor_critic: PixelActorCritic,
        segment: EpisodeSegment,
        reward: StepReward | None = None,
    ) -> ComponentLoss:
        """Imagine rollouts of an actor-critic and return its losses."""
        world, rng = self._refresh_imagination_world(), self.rng["train"]
        context = segment.image[:, :-1]
        lstm = actor_critic.burn_in(context)
        rollout = actor_critic.imagine(
            *(world, segment.image, segment.action, rng),
            lstm=lstm,
            act_in_last_frame=False,
            reward=reward,
        )
        frames, action = rollout.states, rollout.actions["action"][:, :-1]
        loss = actor_critic.loss(context, frames, action, lstm)
        actor_critic.update_target()
        return ComponentLoss(loss.losses, loss.metrics)

    def nonfinite(self) -> list[str]:
        losses = {k: x for each in self._last_losses.values() for k, x in each.items()}
        names = [key for key, loss in losses.items() if not torch.isfinite(loss)]
        for name in self._last_losses:
            names += [f"grad/{name}.{key}" for key in self.opt[name].nonfinite()]
        return names

    def _refresh_imagination_world(self) -> IrisWorld:
        """Copy new weights to the world for imagination, if needed, and return it."""
        if self._copy_is_outdated and self.imagination_world is not self.world:
            self.world.copy_weights_to(self.imagination_world)
        self._copy_is_outdated = False
        return self.imagination_world

    def _to_segment(self, batch: api.Batch) -> EpisodeSegment:
        """Convert a replay batch to a training segment (`batches.py`)."""
        end_key = "is_last" if self.config.ends == "last" else "is_terminal"
        keys = (self.image_key, self.action_key)
        return to_segment(batch, *keys, self.lowest_action, end_key)

    def sections(self, feed: api.Feed) -> dict[str, Callable[[], Any]]:
        """Return one update of each component, in order.

        Each update is captured as a new CUDA graph, so that `reverie bench` can measure
        its memory. The update of the actor-critic includes imagination.
        """
        run, capture = self._sample_and_update, self._capture_update
        return {name: partial(run, name, feed, capture(name)) for name in COMPONENTS}

    # Reporting and evaluation

    @torch.no_grad()
    def report(self, feed: api.Feed) -> api.Metrics:
        """Return losses, codebook statistics and videos; see `report.py`."""
        return report_metrics(
            self.world,
            self._refresh_imagination_world(),
            self.actor_critic,
            self.explorer,
            self._to_segment(feed("report")),
            self.rng["report"],
            self.config.training.tokenizer.length,
        )

    def episode_losses(self, batch: api.Batch) -> tuple[dict[str, Tensor], Tensor]:
        """Return the world model losses of episodes; the first row is masked."""
        length, training = batch["mask"].shape[1], self.config.training
        lengths = {name: getattr(training, name).length for name in WORLD_COMPONENTS}
        flags = ("is_last", "is_terminal", "mask")
        keys = (self.image_key, self.action_key, "reward", *flags)
        # a loss needs two frames and the reward and end after the second
        rows = {key: batch[key] for key in keys}
        if length < 3:
            pad = (0, 3 - length)  # of the time axis
            rows = {
                k: F.pad(x, (*[0, 0] * (x.ndim - 2), *pad)) for k, x in rows.items()
            }
        segment = self._to_segment(rows)
        losses, mask = episode_losses(self.world, segment, lengths, self.rng["report"])
        shifted = {key: F.pad(loss, (1, 0))[:, :length] for key, loss in losses.items()}
        return shifted, F.pad(mask, (1, 0))[:, :length]

    def world_model_env(self, seed: int = 0) -> WorldModelEnv:
        spaces = (self.obs_space, self.act_space)
        world, net = self._refresh_imagination_world(), self.actor_critic.online
        value, device = self.actor_critic.value, self.device

        def capture(step: Callable[..., Any], rng: Rng) -> Callable[..., Any]:
            return self.accelerator.capture(step, "step of the world model", rng)

        capture_ = capture if self.accelerator.has_graphs else None
        return IrisWorldModelEnv(world, net, *spaces, device, seed, value, capture_)

    # Checkpoints

    def components(self) -> dict[str, nn.Module]:
        world = self.world
        modules = (world.tokenizer, world.dynamics, self.actor_critic)
        components = dict(zip(COMPONENTS, modules, strict=True))
        return components | (self.explorer.components() if self.explorer else {})

    def load_weights(self, state: api.StateDict, components: str = ".*") -> list[str]:
        self._copy_is_outdated = True
        return super().load_weights(state, components)

    # Construction

    def _capture_update(self, name: str) -> Update:
        """Return the update of a component, captured as a CUDA graph if enabled."""
        label = f"update of the {name.replace('_', ' ')}"
        return self.accelerator.capture(
            partial(self._update, name), label, self.rng["train"]
        )

    def _initialize(self, seed: int) -> None:
        generator = init_generator(seed)
        initialize(self.world, generator)
        self.actor_critic.initialize(generator)
        self.world.to(self.device)
        self.actor_critic.to(self.device)
        if self.explorer:
            self.explorer.initialize(generator)
            self.explorer.to(self.device)

    def _make_optimizer(self, name: str) -> Optimizer:
        module = self.components()[name]
        trained: dict[str, Tensor] = {
            key: parameter
            for key, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        decayed = [key for key in dense_weights(module) if key in trained]
        # an exploration component has the settings of the component it is trained with
        trained_with = {explore: own for own, explore in EXPLORE_COMPONENTS.items()}
        training = getattr(self.config.training, trained_with.get(name, name))
        return self.accelerator.make_optimizer(
            trained, training.opt, decayed, accumulates=training.accumulate > 1
        )

    def _make_window(self, name: str) -> Window:
        """Return the window of a component: one row more than it has frames.

        The last row has the reward and end that the last frame's action caused.
        """
        training: Any = getattr(self.config.training, name)
        is_actor_critic = name == "actor_critic"
        burn_in = self.config.actor_critic.burn_in
        return Window(
            training.batch,
            (burn_in + 1 if is_actor_critic else training.length) + 1,
            select="episodes",
            online=False,
            pad="left" if is_actor_critic else "both",
            alpha=training.alpha,
        )
