"""The options of DreamerV3. Defaults are the original's, which are size200m."""

# ruff: noqa: RUF009 (the nested defaults are frozen, so sharing them is safe)
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from reverie.agents.dreamer.actor_critic import (
    ImagLossConfig,
    ReplLossConfig,
    SlowConfig,
)
from reverie.api import UserError
from reverie.capabilities import AgentConfig
from reverie.nets.decoder import DecoderConfig
from reverie.nets.encoder import EncoderConfig
from reverie.nets.heads import HeadConfig, PolicyConfig
from reverie.nets.normalize import NormalizeConfig
from reverie.nets.optim.laprop import LaPropConfig
from reverie.worlds.rssm.config import RSSMConfig
from reverie.worlds.vta.config import RecurrentVTAConfig


@dataclass(frozen=True)
class LossScales:
    """What each loss counts for."""

    rec: float = 1.0
    """Every observation key the decoder predicts."""
    rew: float = 1.0
    """Reward."""
    con: float = 1.0
    """Whether the episode goes on."""
    dyn: float = 1.0
    """Prior towards posterior."""
    rep: float = 0.1
    """Posterior towards prior."""
    boundary: float = 1.0
    """Boundaries foreseen towards those found; for worlds with segments."""
    boundary_rate: float = 1.0
    """Boundaries towards a wished rate; for worlds that have one."""
    policy: float = 1.0
    """Actor."""
    value: float = 1.0
    """Critic in dreams."""
    repval: float = 0.3
    """Critic on recorded steps."""


@dataclass(frozen=True)
class DreamerConfig(AgentConfig):
    """Defaults are those of the original, which are size200m."""

    importer: ClassVar[str] = "reverie.convert.dreamerv3:import_state"
    plugins: ClassVar[tuple[str, ...]] = ("world",)

    batch_size: int = 16
    """Sequences per batch."""
    batch_length: int = 64
    """Steps per sequence."""
    report_length: int = 32
    """Steps per sequence of a report."""
    consec_train: int = 1
    """Batches cut in a row from one sampled sequence."""
    consec_report: int = 1
    """The same, for reports."""
    replay_context: int = 1
    """Stored steps before each sequence from which its first state is restored."""
    behaviour: bool = True
    """Learn to act as well; without, only the world is learnt."""
    world: str = "rssm"
    """The world to learn: rssm, or vta, which finds segments."""
    rssm: RSSMConfig = RSSMConfig()
    """Dynamics."""
    vta: RecurrentVTAConfig = RecurrentVTAConfig()
    """Dynamics of the world `vta`."""
    enc: EncoderConfig = EncoderConfig()
    """Encoder."""
    dec: DecoderConfig = DecoderConfig()
    """Decoder."""
    rewhead: HeadConfig = HeadConfig(1, output="symexp_twohot", outscale=0.0)
    """Reward."""
    conhead: HeadConfig = HeadConfig(1, output="binary", outscale=1.0)
    """Whether the episode goes on."""
    policy: PolicyConfig = PolicyConfig()
    """Actor."""
    value: HeadConfig = HeadConfig(3, output="symexp_twohot", outscale=0.0)
    """Critic."""
    slowvalue: SlowConfig = SlowConfig()
    """Slow critic."""
    loss_scales: LossScales = LossScales()
    """Weights of the losses."""
    opt: LaPropConfig = LaPropConfig()
    """Optimizer."""
    imag_last: int = 0
    """Steps at the end of each sequence to dream from; 0 for all."""
    imag_length: int = 15
    """Steps of a dream."""
    horizon: int = 333
    """Steps after which a reward counts for 1/e."""
    contdisc: bool = True
    """Let the continue head learn the discount along with the end."""
    imag_loss: ImagLossConfig = ImagLossConfig()
    """Learning from dreams."""
    repl_loss: ReplLossConfig = ReplLossConfig()
    """Learning values from recorded steps."""
    retnorm: NormalizeConfig = NormalizeConfig("perc", limit=1.0, debias=False)
    """Scale of returns."""
    valnorm: NormalizeConfig = NormalizeConfig("none")
    """Scale of values."""
    advnorm: NormalizeConfig = NormalizeConfig("none")
    """Scale of advantages."""
    ac_grads: bool = False
    """Let actor and critic shape the recorded states they start from."""
    reward_grad: bool = True
    """Let the reward head shape the world."""
    repval_loss: bool = True
    """Also learn values from recorded steps."""
    repval_grad: bool = True
    """Let that shape the world."""
    priosignal: str = ""
    """Loss by which recorded steps are prioritized: model (all that explain the
    recording together), or the name of one with a value per step; empty for none."""
    report_gradnorms: bool = False
    """Report the gradient norm of every loss."""

    def __post_init__(self) -> None:
        least = {"replay_context": 0, "imag_last": 0, "report_length": 2, "horizon": 2}
        for name in ("batch_size", "batch_length", "consec_train", "consec_report"):
            least[name] = 1
        least["imag_length"] = 1
        for name, number in least.items():
            if getattr(self, name) < number:
                raise UserError(
                    f"dreamer.{name} is {getattr(self, name)}, but must be at least "
                    f"{number}.\n  Fix: --dreamer.{name} {number}"
                )
        heads = {"rewhead": self.rewhead, "conhead": self.conhead, "value": self.value}
        for name, head in heads.items():
            if (head.output == "binary") != (name == "conhead"):
                raise UserError(
                    f"dreamer.{name}.output cannot be {head.output!r}.\n  Fix: binary "
                    "is for conhead, and conhead for binary."
                )
        if self.repval_loss and (self.imag_last == 1 or self.batch_length < 2):
            raise UserError(
                "The replay value loss needs two steps of each sequence.\n"
                "  Fix: set dreamer.imag_last to 0 or more than 1, and "
                "dreamer.batch_length to more than 1, or dreamer.repval_loss to False."
            )

    @property
    def discount(self) -> float:
        return 1 - 1 / self.horizon

    @property
    def gives_priorities(self) -> bool:
        return bool(self.priosignal)
