"""Settings of DreamerV3. The defaults are those of the original, at size200m."""

# ruff: noqa: RUF009 (the nested defaults are frozen, so sharing them is safe)
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from reverie.api import UserError
from reverie.capabilities import AgentConfig, UnusedSetting
from reverie.config import check_minimum
from reverie.nets.decoder import DecoderConfig
from reverie.nets.dreamerv3_torch.heads import NormalActionConfig
from reverie.nets.encoder import EncoderConfig
from reverie.nets.heads import HeadConfig, PolicyConfig
from reverie.nets.normalize import NormalizeConfig
from reverie.nets.optim.adam import AdamConfig
from reverie.nets.optim.laprop import LaPropConfig
from reverie.worlds.dreamerv3_torch.config import DreamerV3TorchConfig
from reverie.worlds.rssm.config import RSSMConfig
from reverie.worlds.vta.config import RecurrentVTAConfig


@dataclass(frozen=True)
class ImagLossConfig:
    """Actor and critic losses on imagined trajectories."""

    slowtar: bool = False
    """Bootstrap returns with the slow critic instead of the critic."""
    lam: float = 0.95
    """Lambda of the returns."""
    actent: float = 3e-4
    """Scale of the entropy bonus of the actor."""
    slowreg: float = 1.0
    """Scale of the regularization of the critic towards the slow critic."""

    def __post_init__(self) -> None:
        if not 0 <= self.lam <= 1:
            raise ValueError("lam must be from 0 to 1")


@dataclass(frozen=True)
class ReplLossConfig:
    """Critic loss on replayed trajectories."""

    slowtar: bool = False
    """Must be False. In the original, it has no effect: returns are bootstrapped with
    imagined returns."""
    lam: float = 0.95
    """Lambda of the returns."""
    slowreg: float = 1.0
    """Scale of the regularization of the critic towards the slow critic."""

    def __post_init__(self) -> None:
        if not 0 <= self.lam <= 1:
            raise ValueError("lam must be from 0 to 1")
        if self.slowtar:
            raise ValueError("slowtar must be False, because True has no effect")


@dataclass(frozen=True)
class SlowConfig:
    """Slow critic: an exponential moving average of the critic's weights."""

    rate: float = 0.02
    """Fraction of the critic's weights that is mixed in at each step of the average."""
    every: int = 1
    """Updates between steps of the average."""

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1 or self.every < 1:
            raise ValueError("rate must be from 0 to 1, and every at least 1")


@dataclass(frozen=True)
class DreamerV3TorchACConfig:
    """Actor and critic of dreamerv3-torch, for `actor_critic: dreamerv3_torch`."""

    imag_gradient: Literal["auto", "dynamics", "reinforce", "both"] = "auto"
    """Gradient of the actor: of the returns through the world model (`dynamics`),
    REINFORCE, or a mixture of `both`; `auto` is `dynamics` for continuous and
    `reinforce` for discrete actions."""
    imag_gradient_mix: float = 0.0
    """Weight of the returns in `both`; REINFORCE has 1 minus this weight."""
    discount: float = 0.997
    """Discount per step."""
    normal: NormalActionConfig = NormalActionConfig()
    """Distribution of continuous actions."""

    def __post_init__(self) -> None:
        if not (0 <= self.discount <= 1 and 0 <= self.imag_gradient_mix <= 1):
            raise ValueError("discount and imag_gradient_mix must be from 0 to 1")


@dataclass(frozen=True)
class LossScales:
    """Scale of each loss."""

    rec: float = 1.0
    """Reconstruction loss of every observation key."""
    rew: float = 1.0
    """Reward loss."""
    con: float = 1.0
    """Continue loss."""
    barlow: float = 0.05
    """Loss of the representation `barlow`."""
    infonce: float = 1.0
    """Loss of the representation `infonce`."""
    proto_swav: float = 1.0
    """SwAV loss: prototype assignments predicted from embeddings, for the
    representation `prototypes`."""
    proto_temp: float = 1.0
    """Temporal loss: prototype assignments predicted from latent states, for the
    representation `prototypes`."""
    proto_norm: float = 1.0
    """Regularization of the norm of the projections, for the representation
    `prototypes`."""
    dyn: float = 1.0
    """Dynamics loss: KL that trains the prior towards the posterior."""
    rep: float = 0.1
    """Representation loss: KL that trains the posterior towards the prior."""
    boundary: float = 1.0
    """KL of the boundary prior to the boundary posterior, for worlds with segments."""
    boundary_rate: float = 1.0
    """Deviation from the target boundary rate, for worlds that have one."""
    policy: float = 1.0
    """Actor loss."""
    value: float = 1.0
    """Critic loss on imagined trajectories."""
    repval: float = 0.3
    """Critic loss on replayed trajectories."""

    def __post_init__(self) -> None:
        for name, scale in vars(self).items():
            if not (math.isfinite(scale) and scale >= 0):
                raise UserError(
                    f"dreamer.loss_scales.{name} must be a number of at least 0, not "
                    f"{scale}.\n  Fix: --dreamer.loss_scales.{name} 1, or 0 to disable "
                    "the loss."
                )


WORLDS = ("rssm", "vta", "dreamerv3_torch")
"""Built-in world models; each has a group of settings of its name."""

REPRESENTATION_LOSSES = {
    "barlow": ("barlow",),
    "infonce": ("infonce",),
    "prototypes": ("proto_swav", "proto_temp", "proto_norm"),
}
"""Names of the losses of each representation. Losses of the decoder are named after
observation keys."""

ACTOR_CRITIC_SETTINGS = (
    *("imag_last", "imag_length", "imag_loss.", "repl_loss.", "ac_grads"),
    *("retnorm.", "valnorm.", "advnorm.", "slowvalue.", "repval_loss", "repval_grad"),
    *("loss_scales.policy", "loss_scales.value", "loss_scales.repval"),
)
"""Settings that are only used if `behaviour` is True."""


@dataclass(frozen=True)
class DreamerConfig(AgentConfig):
    """Settings of DreamerV3."""

    # the class variables are documented in `AgentConfig`
    importers: ClassVar[tuple[str, ...]] = (
        "reverie.convert.dreamerv3.importer:IMPORTER",
        "reverie.convert.dreamerv3_torch.importer:IMPORTER",
    )
    policy_setting: ClassVar[str] = "behaviour"
    explore_policies: ClassVar[tuple[str, ...]] = ("random", "plan2explore")
    explore_settings: ClassVar[tuple[str, ...]] = (
        *("intrinsic", "extrinsic", "target", "offset", "action_conditioned", "log"),
        *("ensemble.", "retnorm."),
    )
    plugin_settings: ClassVar[tuple[str, ...]] = ("world",)
    batch_settings: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("batch_size", "batch_length", "imag_length"),
    )
    sizes: ClassVar[tuple[str, ...]] = (
        *("size200m", "size100m", "size50m", "size25m", "size12m", "size1m"),
    )

    batch_size: int = 16
    """Sequences per batch."""
    batch_length: int = 64
    """Steps per sequence."""
    report_length: int = 32
    """Steps per sequence in reports."""
    consec_train: int = 1
    """Consecutive batches from one sampled sequence; the latent state is carried over
    between them."""
    consec_report: int = 1
    """Same as `consec_train`, for reports."""
    replay_context: int = 1
    """Number of steps before each sequence that are sampled with it: the latent state
    stored at the last of them is the initial state of the sequence. 0 starts from the
    state that is carried over from the preceding batch."""
    behaviour: bool = True
    """Train actor and critic; False trains the world model only."""
    world: str = "rssm"
    """World model: rssm, vta (recurrent Variational Temporal Abstraction, which learns
    segment boundaries), dreamerv3_torch, or package.module:Class for your own."""
    rssm: RSSMConfig = RSSMConfig()
    """RSSM dynamics, for the world `rssm`."""
    vta: RecurrentVTAConfig = RecurrentVTAConfig()
    """Recurrent VTA dynamics, for the world `vta`."""
    dreamerv3_torch: DreamerV3TorchConfig = DreamerV3TorchConfig()
    """RSSM, image and observation key settings of dreamerv3-torch, for the world
    `dreamerv3_torch`."""
    actor_critic: Literal["dreamerv3", "dreamerv3_torch"] = "dreamerv3"
    """Actor and critic networks and their losses: those of DreamerV3, or those of
    dreamerv3-torch, which need separate optimizers."""
    dreamerv3_torch_ac: DreamerV3TorchACConfig = DreamerV3TorchACConfig()
    """Settings of the actor-critic `dreamerv3_torch`."""
    greedy_eval: bool = False
    """Act with the most likely action in evaluation, instead of sampling."""
    enc: EncoderConfig = EncoderConfig()
    """Encoder."""
    dec: DecoderConfig = DecoderConfig()
    """Decoder."""
    rewhead: HeadConfig = HeadConfig(1, output="symexp_twohot", outscale=0.0)
    """Reward head."""
    conhead: HeadConfig = HeadConfig(1, output="binary", outscale=1.0)
    """Continue head."""
    policy: PolicyConfig = PolicyConfig()
    """Actor."""
    value: HeadConfig = HeadConfig(3, output="symexp_twohot", outscale=0.0)
    """Critic."""
    slowvalue: SlowConfig = SlowConfig()
    """Slow critic."""
    loss_scales: LossScales = LossScales()
    """Scale of each loss."""
    representation: Literal["decoder", "barlow", "infonce", "prototypes"] = "decoder"
    """Loss that trains the latent state to represent observations: `decoder`
    reconstructs them; `barlow` (R2-Dreamer) correlates features and embeddings;
    `infonce` classifies which embedding in the batch belongs to the features;
    `prototypes` (DreamerPro) predicts assignments of two views to learned prototypes.
    """
    draw: bool = False
    """With a representation other than `decoder`, also train a decoder for videos in
    reports and for `reverie play`; its loss does not train the world model."""
    harmony: bool = False
    """HarmonyDream: divide the losses of observations, rewards and dynamics by learned
    scales."""
    harmony_opt: AdamConfig = AdamConfig(
        lr=3e-3, eps=1e-8, beta2=0.99, clip=0.0, wd=0.0
    )
    """Optimizer of the scales of HarmonyDream. With these values the scales converge
    within 4,000 updates, a seventh of an Atari 100k run."""
    optimizers: Literal["joint", "separate"] = "joint"
    """One optimizer for the sum of all losses (`joint`), or one each for world model,
    actor and critic (`separate`); then, each loss trains only its own networks."""
    opt: LaPropConfig = LaPropConfig()
    """Joint optimizer."""
    world_opt: AdamConfig = AdamConfig(lr=1e-4, eps=1e-8, clip=1000.0, wd=0.0)
    """Separate optimizer of the world model."""
    actor_opt: AdamConfig = AdamConfig(lr=3e-5, eps=1e-5, clip=100.0, wd=0.0)
    """Separate optimizer of the actor."""
    critic_opt: AdamConfig = AdamConfig(lr=3e-5, eps=1e-5, clip=100.0, wd=0.0)
    """Separate optimizer of the critic."""
    imag_last: int = 0
    """Imagination starts from this many last steps of each sequence; 0 for all."""
    imag_length: int = 15
    """Imagination horizon in steps."""
    horizon: int = 333
    """Discount horizon in steps: the discount is 1 - 1 / horizon."""
    contdisc: bool = True
    """Train the continue head towards the discount instead of 1, so that its
    predictions include the discount."""
    imag_loss: ImagLossConfig = ImagLossConfig()
    """Actor and critic losses on imagined trajectories."""
    repl_loss: ReplLossConfig = ReplLossConfig()
    """Critic loss on replayed trajectories."""
    retnorm: NormalizeConfig = NormalizeConfig("perc", limit=1.0, debias=False)
    """Normalization of returns, for advantages."""
    valnorm: NormalizeConfig = NormalizeConfig("none")
    """Normalization of the critic's targets."""
    advnorm: NormalizeConfig = NormalizeConfig("none")
    """Normalization of advantages."""
    ac_grads: bool = False
    """Backpropagate actor and critic losses into the states imagination starts from."""
    reward_grad: bool = True
    """Backpropagate the reward loss into the world model."""
    repval_loss: bool = True
    """Also train the critic on replayed trajectories."""
    repval_grad: bool = True
    """Backpropagate the critic loss on replayed trajectories into the world model."""
    priosignal: str = ""
    """Loss that sets the replay priority of each step: `model` for the sum of all world
    model losses, or the name of a loss; empty for no priorities."""
    report_gradnorms: bool = False
    """Report the gradient norm of every loss."""

    def __post_init__(self) -> None:
        check_minimum(self, "dreamer.", batch_size=1, batch_length=1, report_length=2)
        check_minimum(self, "dreamer.", consec_train=1, consec_report=1, horizon=2)
        check_minimum(self, "dreamer.", replay_context=0, imag_last=0, imag_length=1)
        heads = {"rewhead": self.rewhead, "conhead": self.conhead, "value": self.value}
        for name, head in heads.items():
            if (head.output == "binary") != (name == "conhead"):
                raise UserError(
                    f"dreamer.{name}.output is {head.output!r}, but conhead needs "
                    "`binary`, and rewhead and value need another output.\n"
                    f"  Fix: leave out --dreamer.{name}.output"
                )
        if self.actor_critic == "dreamerv3_torch" and (
            self.optimizers != "separate" or self.repval_loss
        ):
            raise UserError(
                "The actor-critic dreamerv3_torch needs separate optimizers, and has "
                "no loss on replayed trajectories.\n  Fix: --configs dreamerv3_torch, "
                "or --dreamer.optimizers separate --dreamer.repval_loss False"
            )
        compares_steps = self.representation in ("barlow", "infonce")
        if compares_steps and self.batch_size * self.batch_length < 2:
            raise UserError(
                f"The representation {self.representation} needs at least two steps "
                "per batch.\n"
                "  Fix: set dreamer.batch_size or dreamer.batch_length to 2 or more."
            )
        used_steps = self.batch_size * (self.batch_length - 1)
        if self.representation == "prototypes" and used_steps < 2:
            raise UserError(
                "The representation prototypes needs at least two steps per batch, not "
                "counting the first one of each sequence.\n"
                "  Fix: increase dreamer.batch_length or dreamer.batch_size."
            )
        if self.repval_loss and (self.imag_last == 1 or self.batch_length < 2):
            raise UserError(
                "The replay value loss needs at least two steps of each sequence.\n"
                "  Fix: set dreamer.imag_last to 0 or more than 1, and "
                "dreamer.batch_length to more than 1, or dreamer.repval_loss to False."
            )

    @property
    def unused(self) -> tuple[UnusedSetting, ...]:
        world = f"the world model is {self.world!r}"
        others = [name for name in WORLDS if name != self.world]
        if self.world not in WORLDS:  # a plug-in may use the settings of any world
            others = []
        unused = [UnusedSetting(f"dreamer.{name}.", world) for name in others]
        if others and self.world != "vta":
            for name in ("boundary", "boundary_rate"):
                unused.append(UnusedSetting(f"dreamer.loss_scales.{name}", world))
        if self.world == "vta" and not self.vta.boundary_rate:
            reason = "dreamer.vta.boundary_rate is 0"
            fix = "add --dreamer.vta.boundary_rate with a target rate."
            name = "dreamer.loss_scales.boundary_rate"
            unused.append(UnusedSetting(name, reason, fix))
        if self.actor_critic == "dreamerv3":
            reason = "the actor-critic is 'dreamerv3'"
            unused.append(UnusedSetting("dreamer.dreamerv3_torch_ac.", reason))
        optimizers = f"the optimizers are {self.optimizers!r}"
        if self.optimizers == "joint":
            instead = "--dreamer.opt.lr sets the learning rate."
            groups = ["world_opt.", "actor_opt.", "critic_opt."]
        else:
            instead = "--dreamer.world_opt.lr sets the world model's learning rate."
            groups = ["opt."]
            reason = "with separate optimizers, the actor-critic does not train the "
            unused.append(UnusedSetting("dreamer.ac_grads", f"{reason}world model"))
        unused += [UnusedSetting(f"dreamer.{x}", optimizers, instead) for x in groups]
        unused += self._unused_by_representation()
        if not self.harmony:
            fix = "add --dreamer.harmony True."
            reason = "the losses have no learned scales"
            unused.append(UnusedSetting("dreamer.harmony_opt.", reason, fix))
        if not self.behaviour:
            reason = "only the world model is trained"
            fix = "add --dreamer.behaviour True."
            unused += [
                UnusedSetting(f"dreamer.{name}", reason, fix)
                for name in ACTOR_CRITIC_SETTINGS
            ]
        elif not self.repval_loss:
            reason = "dreamer.repval_loss is False"
            # the actor-critic dreamerv3_torch cannot have this loss
            has_loss = self.actor_critic == "dreamerv3"
            fix = "add --dreamer.repval_loss True." if has_loss else ""
            for name in ("loss_scales.repval", "repl_loss.", "repval_grad"):
                unused.append(UnusedSetting(f"dreamer.{name}", reason, fix))
        return tuple(unused)

    def _unused_by_representation(self) -> list[UnusedSetting]:
        """Return the settings of other representations, and of a missing decoder."""
        reason = f"the representation is {self.representation!r}"
        unused = [
            UnusedSetting(
                f"dreamer.loss_scales.{loss}",
                reason,
                f"add --dreamer.representation {name}.",
            )
            for name, losses in REPRESENTATION_LOSSES.items()
            for loss in losses
            if name != self.representation
        ]
        if self.representation == "decoder":
            fix = "remove --dreamer.draw: this representation has a decoder already."
            unused.append(UnusedSetting("dreamer.draw", reason, fix))
        elif not self.draw:
            fix = "add --dreamer.draw True."
            reason += ", so there is no decoder"
            outputs = ("dreamerv3_torch.image_output", "dreamerv3_torch.image_dist")
            for name in ("dec.", "loss_scales.rec", *outputs):
                unused.append(UnusedSetting(f"dreamer.{name}", reason, fix))
        return unused

    @property
    def has_detached_decoder(self) -> bool:
        """True if there is a decoder whose loss does not train the other networks."""
        return self.draw and self.representation != "decoder"

    @property
    def discount(self) -> float:
        return 1 - 1 / self.horizon

    @property
    def training_memory(self) -> int:
        """Approximate bytes of GPU memory in training, for images of 64 x 64 pixels.

        Fitted to measurements of the size presets in bfloat16 with CUDA graphs
        (`benchmarks/speed/growth.json`), which it matches within 6 %. A size preset
        with n units has about 160 n ** 2 parameters. A built-in world model of another
        size is counted as the preset with `equivalent_units` units.
        """
        units, steps = self.value.units, self.batch_size * self.batch_length
        if self.world in WORLDS:
            units = max(units, getattr(self, self.world).equivalent_units)
        # 20 bytes per parameter: weight, gradient, moments and bfloat16 copies
        weights = 20 * 160 * units**2
        activations, constant = 3320 * units * steps, 200_000_000  # fitted
        return weights + activations + constant

    @property
    def sets_priorities(self) -> bool:
        return bool(self.priosignal)
