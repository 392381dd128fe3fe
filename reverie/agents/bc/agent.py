"""Behavior cloning: supervised learning of demonstrated actions.

The policy is a head on a feature extractor (`feature_extractor.py`): the encoder or the
latent state of a trained world model, frozen or fine-tuned, or a new encoder. Row t of
a recording holds the observation and the action chosen there, so every row is one
training example, except the last row of an episode, which has no action.
"""

# ruff: noqa: RUF009 (the nested defaults are frozen, so sharing them is safe)
from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from reverie import api
from reverie.agents.actions import previous_actions, to_tensors, zero_actions
from reverie.agents.bc.feature_extractor import (
    EncoderFeatures,
    check_keys,
    make_feature_extractor,
)
from reverie.agents.bc.head import ActionNormalizer, BCHead, BCHeadConfig
from reverie.agents.export_steps import IS_FIRST, StepModule
from reverie.agents.options import BuildOptions
from reverie.agents.trained import TrainedAgent
from reverie.agents.weights import check_same_tensors, matching_components
from reverie.capabilities import (
    AgentConfig,
    ExportStep,
    ImportedEncoder,
    Stateful,
    Statistics,
    UnusedSetting,
)
from reverie.config import check_minimum
from reverie.distributed.collective import all_reduce_with_grad
from reverie.kernels.accelerate import Accelerator
from reverie.nets.blocks import initialize
from reverie.nets.encoder import NO_KEYS, EncoderConfig
from reverie.nets.encoders import ENCODERS
from reverie.nets.heads import check_actions
from reverie.nets.optim.adam import AdamConfig
from reverie.nets.optim.optimizer import Optimizer, dense_weights
from reverie.nets.rng import Rng
from reverie.nets.standardize import set_statistics, standardizers
from reverie.rows import Window
from reverie.spaces import Spaces, agent_obs_space


@dataclass(frozen=True)
class DreamerV3TorchFileConfig:
    """Settings that are not saved in checkpoints of dreamerv3-torch."""

    images: Literal["", "shift", "standardize"] = ""
    """Preprocessing of the images that the checkpoint was trained on: `shift` to
    [-0.5, 0.5] (dreamerv3-torch, or its robomimic fork with `image_standardize:
    False`), or `standardize` with mean and standard deviation of `offline.data` or
    `offline.stats` (the fork). Required if its encoder has images.
    """


@dataclass(frozen=True)
class BCConfig(AgentConfig):
    """Settings of behavior cloning."""

    # the class variables and overridden methods are documented in `AgentConfig`
    explore_policies: ClassVar[tuple[str, ...]] = ()
    batch_settings: ClassVar[tuple[tuple[str, ...], ...]] = (("batch_size", "length"),)
    needs_recordings: ClassVar[bool] = True

    batch_size: int = 256
    """Sequences per batch."""
    length: int = 1
    """Rows per sequence; more than 1 only for recurrent policies."""
    run: str = ""
    """Run folder or checkpoint whose world model extracts the features, or `latest.pt`
    of dreamerv3-torch; empty for a new encoder."""
    run_agent: str = ""
    """Name of the agent of that run, such as `dreamer`; set automatically. Empty if
    only the encoder of a dreamerv3-torch checkpoint is loaded."""
    features: Literal["encoder", "state"] = "encoder"
    """Features from the world model of `run`: its embedding of an observation
    (`encoder`), or its latent state (`state`)."""
    finetune: bool = False
    """Also train the network loaded from `run`; a new encoder is always trained."""
    keys: tuple[str, ...] = ()
    """Observation keys to use, in the order in which they enter the encoder; empty for
    all, sorted by name. With `run`, they must be the keys it was trained on, in the
    same order."""
    enc: EncoderConfig = EncoderConfig()
    """New encoder; with a checkpoint of dreamerv3-torch, set automatically."""
    enc_architecture: Literal["dreamerv3", "dreamerv3_torch"] = "dreamerv3"
    """Architecture of the new encoder; with a checkpoint of dreamerv3-torch, set
    automatically."""
    dreamerv3_torch: DreamerV3TorchFileConfig = DreamerV3TorchFileConfig()
    """Settings that are not saved in checkpoints of dreamerv3-torch."""
    head: BCHeadConfig = BCHeadConfig()
    """Policy head."""
    normalize: Literal["none", "bounds", "moments"] = "none"
    """Normalization of continuous actions: `none`, to [-1, 1] with the minimum and
    maximum of the dataset (`bounds`), or with mean and standard deviation (`moments`).
    """
    opt: AdamConfig = AdamConfig(lr=1e-4, clip=100.0, wd=0.0)
    """Optimizer."""

    def __post_init__(self) -> None:
        check_minimum(self, "bc.", batch_size=1, length=1)
        if self.length < 2 and (self.head.recurrent or self.features == "state"):
            raise api.UserError(
                "A recurrent policy cannot be trained on sequences of length 1.\n"
                "  Fix: --bc.length 32"
            )

    @property
    def unused(self) -> tuple[UnusedSetting, ...]:
        if self.run:
            reason = "the features are those of --bc.run"
            unused = [UnusedSetting("bc.enc.", reason)]
        else:
            reason, fix = "a new encoder is trained", "add --bc.run PATH."
            options = ("features", "finetune", "dreamerv3_torch.")
            unused = [UnusedSetting(f"bc.{name}", reason, fix) for name in options]
        reason = f"bc.head.kind is {self.head.kind!r}"
        if self.head.kind == "mixture":
            unused.append(UnusedSetting("bc.head.loss", reason))
        else:
            fix = "add --bc.head.kind mixture."
            mixture_settings = ("bc.head.modes", "bc.head.minstd")
            unused += [UnusedSetting(name, reason, fix) for name in mixture_settings]
        reason = "behavior cloning trains a policy, not a world model"
        for name in ("context", "horizon", "video", "ensemble."):
            unused.append(UnusedSetting(f"offline.eval.{name}", reason))
        unused.append(UnusedSetting("bc.run_agent", "it is set automatically"))
        return tuple(unused)

    @property
    def rows_per_update(self) -> int:
        return self.batch_size * self.length

    @property
    def base_run(self) -> str:
        return self.run

    @property
    def uses_base_world(self) -> bool:
        return self.features == "state"

    @property
    def base_agent(self) -> str:
        return self.run_agent

    def with_base_agent(self, name: str) -> BCConfig:
        return replace(self, run_agent=name)

    def with_encoder(self, encoder: ImportedEncoder) -> BCConfig:
        images = self.dreamerv3_torch.images
        if encoder.config.cnn_keys != NO_KEYS and not images:
            raise api.UserError(
                f"{self.run} does not contain the preprocessing of its images.\n"
                "  Fix: --bc.dreamerv3_torch.images shift, if it was trained by "
                "dreamerv3-torch, or by its robomimic fork with `image_standardize: "
                "False`; otherwise --bc.dreamerv3_torch.images standardize, and "
                "--offline.stats FILE (written by `reverie data stats`) unless it was "
                "trained on the same data."
            )
        if self.features == "state":
            if images == "standardize":
                raise api.UserError(
                    "The latent state of a dreamerv3-torch checkpoint cannot be used "
                    "with standardized images.\n  Fix: --bc.features encoder"
                )
            return replace(self, run_agent=encoder.agent)
        standard = "dataset" if images == "standardize" else "none"
        enc: Any = replace(encoder.config, standard=standard)
        architecture: Any = encoder.architecture
        return replace(self, enc=enc, enc_architecture=architecture)


class BCCarry(NamedTuple):
    """Recurrent states of the feature extractor and of the GRU in the head (R units),
    and the previous actions."""

    feature_extractor: Any
    head: Float[Tensor, "B R"]
    prevact: dict[str, Tensor]


class BC(TrainedAgent):
    """The behavior cloning agent; implements `api.Agent`.

    `options.base` is the agent of `bc.run`, whose world model extracts the features.
    """

    opt: Optimizer

    def __init__(
        self,
        obs_space: Spaces,
        act_space: Spaces,
        config: BCConfig,
        options: BuildOptions,
    ):
        check_actions(act_space)
        device, dtype, seed = options.device, options.dtype, options.seed
        self.config, self.device, self.base = config, device, options.base
        self.obs_space = _select_keys(agent_obs_space(obs_space), config.keys)
        self.act_space = act_space
        generator = torch.Generator().manual_seed(seed)
        self.feature_extractor: Any
        if self.base is None:
            make_encoder = ENCODERS[config.enc_architecture]
            encoder = make_encoder(self.obs_space, config.enc, config.keys)
            initialize(encoder, generator)
            self.feature_extractor = EncoderFeatures(encoder, dtype)
        else:
            self.feature_extractor = make_feature_extractor(
                self.base, config.features, self.obs_space, dtype
            )
            if config.keys:
                source = f"The world model of {config.run_agent}"
                check_keys(list(config.keys), self.feature_extractor.keys, source)
        self.head = BCHead(self.feature_extractor.width, act_space, config.head)
        initialize(self.head, generator)
        self.normalizer = ActionNormalizer(act_space)
        for module in self.components().values():
            module.to(device)
        # with `run`, but no base agent, the encoder comes from a dreamerv3-torch file
        has_new_encoder = self.base is None and not config.run
        self.trains_features = config.finetune or has_new_encoder
        trained: list[tuple[str, nn.Module]] = [("head", self.head)]
        if self.trains_features:
            trained.append(("feature_extractor", self.feature_extractor))
        self.accelerator = Accelerator(options.compile, device)
        self.accelerator.use_fast_modules(self.feature_extractor, self.head)
        self.accelerator.use_low_precision([self.feature_extractor], dtype)
        self.opt = self.accelerator.make_optimizer(
            {
                f"{component}.{name}": parameter
                for component, module in trained
                for name, parameter in module.named_parameters()
            },
            config.opt,
            decayed=[
                f"{component}.{name}"
                for component, module in trained
                for name in dense_weights(module)
            ],
        )
        self.rng = {name: Rng(seed, name, device) for name in ("train", "eval")}
        self._run_update = self.accelerator.capture(
            self._update, "update", self.rng["train"]
        )
        self.windows = {"train": Window(config.batch_size, config.length, online=False)}
        self.extras: Spaces = {}
        self.schedule = None
        self.last_metrics = {}

    # Acting

    def initial(self, batch: int) -> api.Carry:
        return BCCarry(
            self.feature_extractor.initial(batch),
            self.head.initial(batch, self.device),
            zero_actions(self.act_space, batch, self.device),
        )

    @torch.no_grad()
    def policy(
        self, carry: api.Carry, obs: api.Obs, mode: api.Mode = "train"
    ) -> api.PolicyOutput:
        """Return the most likely actions, clipped to the action space."""
        if mode in ("train", "explore"):
            raise api.UserError(
                "Behavior cloning trains on recordings, not in an environment.\n"
                "  Fix: reverie bc --offline.data PATH"
            )
        keys = (*self.obs_space, "is_first")
        inputs = {key: torch.as_tensor(obs[key]).to(self.device) for key in keys}
        self.feature_extractor.eval()
        carry, action = self._act(carry, inputs, self.rng["eval"])
        return carry, {key: value.cpu().numpy() for key, value in action.items()}, {}

    def _act(
        self, carry: BCCarry, inputs: api.Batch, rng: Rng
    ) -> tuple[BCCarry, dict[str, Tensor]]:
        """Choose actions in the dtype and range of their spaces."""
        batch: api.Batch = {key: x[:, None] for key, x in inputs.items()}
        batch["prevact"] = {key: x[:, None] for key, x in carry.prevact.items()}
        feat, extractor_carry = self.feature_extractor(
            carry.feature_extractor, batch, rng
        )
        predictions, head_carry = self.head(carry.head, feat, batch["is_first"])
        action = {}
        for key, space in self.act_space.items():
            value = predictions[key].mode()[:, 0]
            if not space.is_discrete:
                value = self.normalizer.denormalize(key, value)
                low, high = (torch.tensor(x) for x in (space.low, space.high))
                value = value.clamp(low.to(value.device), high.to(value.device))
            action[key] = value.to(carry.prevact[key].dtype)
        return BCCarry(extractor_carry, head_carry, action), action

    def export_policy(self, greedy: bool) -> ExportStep:
        """Return a policy step; `greedy` has no effect, as actions are not sampled."""

        def step(inputs: api.Batch, carry: BCCarry, rng: Rng) -> Any:
            carry, action = self._act(carry, inputs, rng)
            return action, carry

        inputs = {**self.obs_space, "is_first": IS_FIRST}
        module = StepModule(step, *self.components().values())
        return ExportStep(module, inputs, self.initial)

    def replace_action(self, carry: api.Carry, action: api.Action) -> api.Carry:
        """Replace the previous actions in the carry by those that were executed."""
        return carry._replace(prevact=to_tensors(action, carry.prevact))

    # Training

    def load_base(self, state: api.StateDict) -> None:
        """Load the world model of the base run, or an encoder of dreamerv3-torch."""
        if self.base is not None:
            self.base.load_weights(state)
        else:
            encoder = self.feature_extractor.encoder
            if encoder.veckeys != sorted(encoder.veckeys):
                warnings.warn(
                    f"bc.keys has the vectors {', '.join(encoder.veckeys)}, but "
                    "dreamerv3-torch trains world models on them in alphabetical order "
                    "(also if `bc_mlp_keys_order` of its robomimic fork differs).\n"
                    f"  Fix: list them as {', '.join(sorted(encoder.veckeys))}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            # the file has no image statistics, so those of this agent are kept
            old = encoder.state_dict()
            statistics = {k: v for k, v in old.items() if k.startswith("standardizer")}
            weights = {**statistics, **state["encoder"]}
            check_same_tensors("encoder", old, {"encoder": weights})
            encoder.load_state_dict(weights)
        self.accelerator.weights_changed()

    @property
    def needs_statistics(self) -> bool:
        if self.config.normalize != "none":
            return True
        if self.base is not None:
            return False
        return bool(standardizers(self.feature_extractor, "dataset"))

    def set_statistics(self, statistics: Statistics) -> None:
        """Set the statistics that normalize actions and the images of a new encoder."""
        if self.base is None:
            set_statistics(self.feature_extractor, statistics)
        for key in self.normalizer.spaces:
            values = statistics[key][:4]  # without the number of rows
            mean, std, low, high = (torch.as_tensor(x).float() for x in values)
            if self.config.normalize == "moments":
                self.normalizer.set(key, mean, std)
            elif self.config.normalize == "bounds":
                self.normalizer.set(key, (low + high) / 2, (high - low) / 2)

    def train(self, feed: api.Feed) -> api.Metrics:
        """Run one update on one batch."""
        data = feed("train")
        keys = (*self.obs_space, *self.act_space, "is_first", "is_last", "mask")
        self.last_metrics = self._run_update({k: data[k] for k in keys if k in data})
        return self.last_metrics

    def _update(self, batch: api.Batch) -> api.Metrics:
        """Run the computations of an update; may be captured as a CUDA graph."""
        loss, mask = self.loss(batch, "train")
        num_rows = all_reduce_with_grad(mask.sum()).clamp(min=1)  # of all ranks
        total = torch.where(mask, loss, 0).sum() / num_rows
        _, metrics = self.opt.update(total)
        return {"loss/action": all_reduce_with_grad(total.detach()), **metrics}

    def state_changed_by_loss(self) -> tuple[list[Tensor], list[Stateful]]:
        buffers = [*self.feature_extractor.buffers(), *self.head.buffers()]
        return buffers, [self.rng["train"]]

    def loss(self, batch: api.Batch, purpose: str) -> tuple[Tensor, Tensor]:
        """Return the loss `(B, T)` and a mask of the rows that have an action.

        `purpose` is `train` or `eval`; only `train` trains the feature extractor.
        """
        rows = {**batch, "prevact": previous_actions(batch, self.act_space)}
        training = purpose == "train" and self.trains_features
        extractor = self.feature_extractor.train(training)
        size = len(batch["is_first"])
        with torch.set_grad_enabled(training):
            feat, _ = extractor(extractor.initial(size), rows, self.rng[purpose])
        gru_state = self.head.initial(size, self.device)
        predictions, _ = self.head(gru_state, feat, batch["is_first"])
        target = self.normalizer.normalize({key: batch[key] for key in self.act_space})
        losses = [dist.loss(target[key]) for key, dist in predictions.items()]
        mask = ~batch["is_last"]
        if "mask" in batch:
            mask = mask & batch["mask"]
        return torch.stack(losses).sum(0), mask

    @torch.no_grad()
    def episode_losses(self, batch: api.Batch) -> tuple[dict[str, Tensor], Tensor]:
        loss, mask = self.loss(batch, "eval")
        return {"action": loss}, mask

    def report(self, feed: api.Feed) -> api.Metrics:
        return {}  # evaluation on recordings calls `episode_losses` instead

    # Checkpoints

    def components(self) -> dict[str, nn.Module]:
        return {
            "feature_extractor": self.feature_extractor,
            "head": self.head,
            "normalizer": self.normalizer,
        }

    def state_dict(self) -> api.StateDict:
        return {**super().state_dict(), "keys": list(self.feature_extractor.keys)}

    def load_weights(self, state: api.StateDict, components: str = ".*") -> list[str]:
        """Load the matching components, if they use the same observation keys."""
        if "feature_extractor" in matching_components(self.components(), components):
            keys = self.feature_extractor.keys
            check_keys(keys, state.get("keys", keys), "The checkpoint")
        return super().load_weights(state, components)


def _select_keys(obs_space: Spaces, keys: tuple[str, ...]) -> Spaces:
    """Return the spaces of `keys` in their order; all spaces if `keys` is empty."""
    missing = [key for key in keys if key not in obs_space]
    if missing:
        raise api.UserError(
            f"bc.keys has {', '.join(missing)}, which are not observation keys.\n"
            f"  Fix: --bc.keys with some of {', '.join(obs_space)}"
        )
    return {key: obs_space[key] for key in keys} if keys else obs_space
