"""DreamerV3: an actor-critic trained on trajectories imagined with a world model.

Every update infers posterior states for a replay batch and imagines trajectories from
each of them with the current policy. It trains the world model on the batch, the critic
on the lambda-returns of imagined and replayed trajectories, and the actor on the
advantages of imagined actions.

World model, actor-critic and update are parts that the config selects by name
(`factory.py`). With the world model, the actor-critic losses and the separate
optimizers of dreamerv3-torch, this class reproduces dreamerv3-torch.

The replay stores the latent state of every step, so that a sequence from the middle of
an episode starts from the state inferred there (`replay_context`). Training writes the
refreshed states back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from reverie.agents.actions import previous_actions, to_tensors, zero_actions
from reverie.agents.dreamer.carry import (
    LATENTS,
    DreamerCarry,
    gather_carry,
    latents_to_store,
    local_carry,
    update_carry,
)
from reverie.agents.dreamer.config import REPRESENTATION_LOSSES, DreamerConfig
from reverie.agents.dreamer.explorer import Explorer, ExplorerUpdate, join_metrics
from reverie.agents.dreamer.factory import ACTOR_CRITICS, UPDATES, make_world
from reverie.agents.dreamer.harmony import Harmony
from reverie.agents.dreamer.initialize import initialize_weights
from reverie.agents.dreamer.loss_scales import (
    check_names,
    gradient_norms,
    scaled_means,
    selection_scale,
    step_priorities,
)
from reverie.agents.dreamer.sections import dreamer_sections
from reverie.agents.dreamer.slow_weights import SLOW_WEIGHTS, copy_slow_weights
from reverie.agents.dreamer.updates import DreamerLoss, join_losses
from reverie.agents.dreamer.warm_up import compute_gradients
from reverie.agents.explore import ENSEMBLE, EXPLORE_PREFIX, check_mode
from reverie.agents.export_steps import IS_FIRST, StepModule, latent_world_steps
from reverie.agents.open_loop import open_loop_videos
from reverie.agents.options import BuildOptions
from reverie.agents.trained import TrainedAgent
from reverie.agents.weights import trainable_parameters
from reverie.agents.world_model_env import LatentWorldModelEnv
from reverie.api import (
    Action,
    Batch,
    Carry,
    Extras,
    Feed,
    LatentWorld,
    Metrics,
    Mode,
    Obs,
    PolicyOutput,
    StateDict,
    WorldLoss,
)
from reverie.capabilities import ExportStep, Stateful, Statistics, WorldModelEnv
from reverie.kernels.accelerate import Accelerator
from reverie.nets import standardize
from reverie.nets.heads import PolicyHead, check_actions
from reverie.nets.optim.optimizer import Optimizer
from reverie.nets.rng import Rng
from reverie.nets.streams import wait_for
from reverie.nets.tree import rows_from, tree_map, tree_where
from reverie.rows import Window
from reverie.spaces import STEP_KEYS, Spaces, agent_obs_space

__all__ = ["Dreamer", "DreamerConfig"]


class UpdateOutput(NamedTuple):
    """Output of one update: metrics, refreshed replay latents and new priorities."""

    metrics: Metrics
    extras: Extras
    priority: Tensor | None


TRAINING_ONLY = ("val", "slowval", "retnorm", "valnorm", "advnorm")
"""Components of the actor-critic that are used in training only."""


class Dreamer(TrainedAgent):
    """The DreamerV3 agent; implements `api.Agent`."""

    not_in_policy = (
        *("dec", "rew", "con", ENSEMBLE, "representation", "harmony"),
        *TRAINING_ONLY,
        *(f"{EXPLORE_PREFIX}{name}" for name in TRAINING_ONLY),
    )
    """Components that acting does not need (see `policy_weights`)."""

    def __init__(
        self,
        obs_space: Spaces,
        act_space: Spaces,
        config: DreamerConfig,
        options: BuildOptions,
    ):
        device, dtype, seed = options.device, options.dtype, options.seed
        check_actions(act_space)
        self.obs_space, self.act_space = agent_obs_space(obs_space), act_space
        check_names(self.obs_space, config)
        self.config, self.device = config, device
        detached = tuple(self.obs_space) if config.has_detached_decoder else ()
        self.detached_decoder_losses = detached  # named after observation keys

        self.world: Any = make_world(config, obs_space, act_space, dtype)
        make_actor_critic = ACTOR_CRITICS[config.actor_critic]
        self.actor_critic = make_actor_critic(self.world.width, act_space, config)
        self.explorer: Explorer | None = None
        if options.explore.policy == "plan2explore":
            args = (self.world, act_space, config, options.explore)
            self.explorer = Explorer(*args, make_actor_critic)
        self.harmony: Harmony | None = None
        if config.harmony:
            names = REPRESENTATION_LOSSES.get(config.representation, self.obs_space)
            self.harmony = Harmony(names).to(device)
        initialize_weights(self, seed)
        accelerator = Accelerator(options.compile, device, options.overlap)
        self.accelerator = accelerator
        modules: list[nn.Module] = [self.world, self.actor_critic]
        modules += [self.explorer] if self.explorer else []
        accelerator.use_fast_modules(*modules)
        accelerator.use_low_precision(modules, dtype)
        loss_scaling = dtype == torch.float16
        make_optimizer = partial(accelerator.make_optimizer, scaling=loss_scaling)
        self.update_step = UPDATES[config.optimizers](self, make_optimizer)
        self.opt = self.update_step.opt
        self.harmony_opt: Optimizer | None = None
        if self.harmony:
            sigma = trainable_parameters({"harmony": self.harmony})
            self.harmony_opt = accelerator.make_optimizer(
                sigma, config.harmony_opt, decayed=()
            )
        self.explorer_update = self.explorer and ExplorerUpdate(
            self, self.explorer, make_optimizer
        )
        self.updates_taken = torch.zeros((), device=device)  # without skipped ones
        generators = ("policy", "eval", "train", "report")
        self.rng = {name: Rng(seed, name, device) for name in generators}
        self.carry: dict[str, DreamerCarry] = {
            name: self.initial(config.batch_size) for name in ("train", "report")
        }
        self.last_metrics = {}

        size, context = config.batch_size, config.replay_context
        train = Window(size, config.batch_length, context, config.consec_train)
        report = Window(size, config.report_length, context, config.consec_report)
        self.windows = {"train": train, "report": replace(report, online=False)}
        self.extras = self.world.extras if config.replay_context else {}
        self.schedule = None
        # the last feed and batch, whose memory a CUDA graph reads (see `_next_batch`)
        self._batch: tuple[Feed | None, Batch | None] = None, None
        self._run_update = self.accelerator.capture(
            self._update, "update", self.rng["train"], static_inputs=True
        )
        policies = dict.fromkeys(("train", "eval", "greedy"), self.actor_critic.pol)
        if self.explorer:
            policies["explore"] = self.explorer.actor_critic.pol
        self._run_policy = {
            mode: self.accelerator.make_policy(
                partial(self._policy_step, mode),
                (self.world, pol),
                self._policy_rng(mode),
                collects=mode in ("train", "explore"),
            )
            for mode, pol in policies.items()
        }

    # Acting

    def initial(self, batch: int) -> Carry:
        prevact = zero_actions(self.act_space, batch, self.device)
        return DreamerCarry(self.world.initial(batch), prevact)

    @torch.inference_mode()
    def policy(self, carry: Carry, obs: Obs, mode: Mode = "train") -> PolicyOutput:
        """Sample actions; take the most likely ones in the mode `greedy`, and with
        `greedy_eval` in the mode `eval`. The mode `explore` needs `plan2explore`."""
        check_mode(mode, self.explorer is not None)
        inputs = {k: torch.as_tensor(obs[k]) for k in (*self.obs_space, "is_first")}
        return self._run_policy[mode](carry, inputs)

    def _policy_rng(self, mode: str) -> Rng:
        return self.rng["policy" if mode in ("train", "explore") else "eval"]

    def _is_greedy(self, mode: str) -> bool:
        return mode == "greedy" or (self.config.greedy_eval and mode == "eval")

    def _policy_step(
        self,
        mode: str,
        world: LatentWorld,
        pol: PolicyHead,
        carry: DreamerCarry,
        obs: Batch,
    ) -> tuple[DreamerCarry, dict[str, Tensor], Extras]:
        """Run `_act`; reads `self.rng` in every step, since parity tests replace it."""
        rng, greedy = self._policy_rng(mode), self._is_greedy(mode)
        return self._act(rng, greedy, world, pol, carry, obs)

    def _act(
        self,
        rng: Rng,
        greedy: bool,
        world: LatentWorld,
        pol: PolicyHead,
        carry: DreamerCarry,
        obs: Batch,
    ) -> tuple[DreamerCarry, dict[str, Tensor], Extras]:
        """Update the latent state from the observation and choose an action."""
        batch: Batch = {key: x.to(self.device)[:, None] for key, x in obs.items()}
        batch["prevact"] = {key: x[:, None] for key, x in carry.prevact.items()}
        state = tree_map(lambda x: x[:, 0], world.observe(carry.state, batch, rng))
        action = self.actor_critic.act(world.features(state), rng, pol, greedy)
        extras = world.to_replay(state) if self.extras else {}
        return DreamerCarry(state, action), action, extras

    def replace_action(self, carry: Carry, action: Action) -> Carry:
        """Replace the previous actions in the carry by those that were executed."""
        return carry._replace(prevact=to_tensors(action, carry.prevact))

    # Export

    def export_policy(self, greedy: bool) -> ExportStep:
        modules = (self.world, self.actor_critic.pol)
        greedy = self._is_greedy("greedy" if greedy else "eval")

        def step(inputs: Batch, carry: DreamerCarry, rng: Rng) -> Any:
            carry, action, _ = self._act(rng, greedy, *modules, carry, inputs)
            return action, carry

        inputs = {**self.obs_space, "is_first": IS_FIRST}
        module = StepModule(step, self.world, self.actor_critic)
        return ExportStep(module, inputs, self.initial)

    def world_steps(self) -> dict[str, ExportStep]:
        return latent_world_steps(self.world, self.obs_space, self.act_space)

    # Training

    def train(self, feed: Feed) -> Metrics:
        """Run one update on one batch."""
        data = self._next_batch(feed)
        self._reset_carry_if_resized("train", len(data["is_first"]))
        self.accelerator.before_update()
        output: UpdateOutput = self._run_update(data)
        stepid = data["stepid"][:, self.config.replay_context :]
        if self.extras:
            feed.write_back(stepid, output.extras)
        if output.priority is not None:
            feed.prioritize(stepid[:, -output.priority.shape[1] :], output.priority)
        self.last_metrics = output.metrics
        return output.metrics

    def _next_batch(self, feed: Feed) -> Batch:
        """Return the next batch. With CUDA graphs, it overwrites the last one, because
        a graph always reads the same memory."""
        if not self.accelerator.has_graphs:
            return feed("train")
        last_feed, batch = self._batch
        batch = feed("train", batch if feed is last_feed else None)
        self._batch = feed, batch
        return batch

    def _update(self, data: Batch) -> UpdateOutput:
        """Run an update; all state changes in place, for capture as a CUDA graph."""
        carry, state, batch = self.prepare_batch("train", data)
        running_stats = self._running_stats()
        old_stats = [buffer.clone() for buffer in running_stats]
        rng, explorer = self.rng["train"], self.explorer
        embed = explorer.embed_target(self.world, batch) if explorer else None
        loss, stepped, metrics = self.update_step(self, state, batch, rng)
        metrics = {**loss.metrics, **metrics}
        if self.explorer_update:
            wait_for(stepped, SLOW_WEIGHTS)  # `stepped` only selects the device
            args = (loss.states, batch, rng, stepped, embed)
            metrics = join_metrics(metrics, self.explorer_update(self, *args))

        # A skipped update (`stepped` is False) keeps the statistics, carry and stored
        # latents, but sets priorities, because losses are computed before the step.
        extras = {}
        if self.extras:
            extras = latents_to_store(self.world, loss.states, data, stepped)
        for buffer, old in zip(running_stats, old_stats, strict=True):
            buffer.copy_(torch.where(stepped, buffer, old))
        update_carry(carry, loss.states, {k: data[k] for k in self.act_space}, stepped)
        for stream in (SLOW_WEIGHTS, LATENTS):
            wait_for(stepped, stream)
        self.updates_taken.add_(stepped)
        detached = self.detached_decoder_losses
        priority = step_priorities(loss.losses, self.config, detached)
        return UpdateOutput(metrics, extras, priority)

    def state_changed_by_loss(self) -> tuple[list[Tensor], list[Stateful]]:
        """Return the buffers and generators that change when the loss is computed."""
        return self._running_stats(), [self.rng["train"]]

    def _running_stats(self) -> list[Tensor]:
        return [*self.actor_critic.normalizer_buffers(), *self.world.buffers()]

    def loss(self, state: Any, batch: Batch, rng: Rng, training: bool) -> DreamerLoss:
        """Return all losses of a batch; update the normalizers if `training`."""
        world = self.world_loss(state, batch, rng, training)
        behaviour = None
        if self.config.behaviour:
            args = (self.world, world.states, batch, rng, training)
            behaviour = self.actor_critic.losses(*args)
        return join_losses(world, behaviour)

    def world_loss(
        self, state: Any, batch: Batch, rng: Rng, training: bool
    ) -> WorldLoss:
        """Return the losses of the world model on a batch."""
        if self.world.training != training:
            self.world.train(training)
        loss: WorldLoss = self.world.loss(state, batch, rng)
        return loss

    def total_loss(self, losses: dict[str, Tensor]) -> Float[Tensor, ""]:
        """Return the sum of the scaled means of all losses (see `scaled_means`)."""
        scaled = scaled_means(losses, self.config.loss_scales)
        if self.harmony:
            return self.harmony.scale_losses(scaled)
        return torch.stack(list(scaled.values())).sum()

    def update_harmony(self, losses: dict[str, Tensor], stepped: Tensor) -> Metrics:
        """Update the learned scales of HarmonyDream, if used, and if `stepped`."""
        if self.harmony is None or self.harmony_opt is None:
            return {}
        metrics = self.harmony.metrics()
        total = self.harmony.loss(scaled_means(losses, self.config.loss_scales))
        self.harmony_opt.update(torch.where(stepped, total, torch.nan))
        return metrics

    def _reset_carry_if_resized(self, name: str, batch_size: int) -> None:
        """Reset the carry of `train` or `report` if the batch size has changed."""
        # a checkpoint has the carry of the global batch: take the part of this rank
        self.carry[name] = local_carry(self.carry[name])
        if len(self.carry[name].state[0]) != batch_size:
            self.carry[name] = self.initial(batch_size)

    def prepare_batch(self, name: str, data: Batch) -> tuple[DreamerCarry, Any, Batch]:
        """Return carry, initial latent state and batch without the context rows.

        Sequences start from the stored latent state of their last context row, or from
        the carry if they continue the sequences of the last batch (`consec`). Without
        `replay_context`, all start from the carry.
        """
        context, carry = self.config.replay_context, self.carry[name]
        keys = (*self.obs_space, *STEP_KEYS)
        batch: Batch = {key: rows_from(data[key], context) for key in keys}
        if not context:
            batch["prevact"] = {
                key: torch.cat([carry.prevact[key][:, None], data[key][:, :-1]], 1)
                for key in self.act_space
            }
            return carry, tree_map(torch.clone, carry.state), batch
        batch["prevact"] = {k: data[k][:, context - 1 : -1] for k in self.act_space}
        latents = {k: data[k][:, context - 1] for k in self.extras}
        stored = self.world.from_replay(latents)
        is_new = data["consec"][:, 0] == 0
        return carry, tree_where(is_new, stored, carry.state), batch

    # Reporting and evaluation

    def report(self, feed: Feed) -> Metrics:
        """Return the metrics of one batch without training, and open-loop videos."""
        data, rng = feed("report"), self.rng["report"]
        self._reset_carry_if_resized("report", len(data["is_first"]))
        _, state, batch = self.prepare_batch("report", data)
        with torch.set_grad_enabled(self.config.report_gradnorms):
            loss = self.loss(state, batch, rng, training=False)
            metrics = loss.metrics
            if self.config.report_gradnorms:
                metrics.update(gradient_norms(loss.losses, self.opt.leaves))
        if self.explorer:
            metrics |= self.explorer.report(self.world, loss.states, batch, rng)
        metrics.update(open_loop_videos(self.world, state, batch, rng))
        last = tree_map(lambda x: x[:, -1].detach().clone(), loss.states)
        actions = {key: data[key][:, -1].clone() for key in self.act_space}
        self.carry["report"] = DreamerCarry(last, actions)
        return metrics

    @property
    def needs_statistics(self) -> bool:
        return bool(standardize.standardizers(self.world, "dataset"))

    def set_statistics(self, statistics: Statistics) -> None:
        """Standardize images with mean and standard deviation of the dataset."""
        standardize.set_statistics(self.world, statistics)

    @torch.no_grad()
    def episode_losses(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """Return the world model losses of full episodes.

        Every row has the value of losses that are one number per batch. The random seed
        is fixed, so that results are comparable.
        """
        rows = {**batch, "prevact": previous_actions(batch, self.act_space)}
        start = self.world.initial(len(batch["is_first"]))
        rng = Rng(0, "episode_losses", self.device)
        losses = self.world.eval().loss(start, rows, rng).losses
        shape = batch["mask"].shape
        by_row = {k: x if x.ndim else x.expand(shape) for k, x in losses.items()}
        return by_row, batch["mask"]

    def episode_loss_scale(self, name: str) -> float:
        """Return the scale of a loss in the sum that selects the best checkpoint."""
        scales, detached = self.config.loss_scales, self.detached_decoder_losses
        return selection_scale(name, scales, detached)

    def world_model_env(self, seed: int = 0) -> WorldModelEnv:
        def act(state: Any, rng: Rng, greedy: bool) -> dict[str, Tensor]:
            return self.actor_critic.act(self.world.features(state), rng, greedy=greedy)

        spaces = (self.obs_space, self.act_space)
        inspect = self.actor_critic.inspect
        return LatentWorldModelEnv(self.world, *spaces, self.device, seed, act, inspect)

    def sections(self, feed: Feed) -> dict[str, Callable[[], Any]]:
        return dreamer_sections(self, feed)

    def warm_up(self, batch: Batch) -> None:
        compute_gradients(self, batch)

    def nonfinite(self) -> list[str]:
        explore = self.explorer_update
        names = explore.opt.nonfinite() if explore else []
        return super().nonfinite() + [f"grad/{name}" for name in names]

    def parameter_count(self) -> int:
        explore = self.explorer_update
        return super().parameter_count() + (explore.opt.size if explore else 0)

    # Checkpoints

    def components(self) -> dict[str, nn.Module]:
        explore = self.explorer.components() if self.explorer else {}
        harmony = {"harmony": self.harmony} if self.harmony else {}
        return {**self.task_components(), **explore, **harmony}

    def task_components(self) -> dict[str, nn.Module]:
        """Return the components of the world model and the task policy."""
        return dict((*self.world.named_children(), *self.actor_critic.named_children()))

    def state_dict(self) -> StateDict:
        explore = self.explorer_update
        train = gather_carry(self.carry["train"], self.config.batch_size)
        return {
            **super().state_dict(),
            **({"explore_opt": explore.opt.state_dict()} if explore else {}),
            **({"harmony_opt": opt.state_dict()} if (opt := self.harmony_opt) else {}),
            "counters": {"updates_taken": self.updates_taken},
            "carry": {
                name: {"state": carry.state._asdict(), "prevact": carry.prevact}
                for name, carry in {**self.carry, "train": train}.items()
            },
        }

    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        if self.explorer_update:
            self.explorer_update.opt.load_state_dict(state["explore_opt"])
        if self.harmony_opt:
            self.harmony_opt.load_state_dict(state["harmony_opt"])
        self.updates_taken.copy_(torch.as_tensor(state["counters"]["updates_taken"]))
        for name, saved in state["carry"].items():
            self._reset_carry_if_resized(name, len(next(iter(saved["state"].values()))))
            carry = self.carry[name]
            own = {"state": carry.state._asdict(), "prevact": carry.prevact}
            tree_map(lambda tensor, value: tensor.copy_(value), own, saved)

    def _complete_weights(self, loaded: list[str]) -> None:
        copy_slow_weights(self, loaded)
