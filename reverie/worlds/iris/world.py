"""The world of Δ-IRIS as its agent sees it.

It is learned in two parts, each with a loss and an optimizer of its own:

    world.tokenizer_loss(segment, rng)     trains `world.tokenizer`
    world.dynamics_loss(segment)            trains `world.dynamics`

and then dreamt in, without gradients:

    state = world.begin(image, action)      # b + 1 real frames and b actions
    step = world.step(state, action, rng)  # step.state, .image, .reward, .end

Nothing in `begin`, `step` and the losses asks the device for anything, so loops over
them can be captured in CUDA graphs. Where a dream stands (how full the cache of the
transformer is, what is yet to be fed to it) is the same for all its rows and known as
plain numbers.

How it fits `api.World`: `imagine`, `decode`, `features`, `image_keys` and `width` are
those verbs, on `View`s instead of whole states (a state holds a cache, which nobody
wants once per time step), and a `View` has the outcome already. `initial` and `observe`
have no counterpart, since a dream begins from frames. `capabilities.WorldModelEnv` fits
both kinds of worlds (`agents/world_model_env.py`).

Shapes: `K` tokens of a transition, `N` rows of a dream.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn

from reverie.api import Obs, Rollout, UserError, WorldLoss
from reverie.nets.blocks import Kernel
from reverie.nets.distributions import softmax
from reverie.nets.residual import recompute
from reverie.nets.rng import Rng
from reverie.nets.streams import Lane, beside, catch_up
from reverie.nets.transformer import Cache, Embedding
from reverie.spaces import Space
from reverie.worlds.iris.dynamics import Dynamics, DynamicsConfig
from reverie.worlds.iris.segment import Segment, pixels
from reverie.worlds.iris.tokenizer import SEEN, Tokenizer, TokenizerConfig

__all__ = [
    "DynamicsConfig",
    "IrisWorld",
    "Segment",
    "State",
    "Step",
    "TokenizerConfig",
    "View",
]


FRAME, OUTCOME = Lane("frame", hurry=1), Lane("outcome")
"""Lanes: in one a frame is looked at (see `look`), in one outcomes are foreseen."""


class State(NamedTuple):
    """Where a dream stands.

    `step` writes on in the tensors of the cache: to go on twice from one state, `fork`
    it first.
    """

    image: UInt8[Tensor, "N h w c"]  # the newest frame
    frame: Float[Tensor, "N E"] | None  # its I-token, if it was looked at
    last: Int[Tensor, " N"] | None  # the newest Δ-token, if it is yet to be fed
    cache: Cache
    frame_is_fed: bool
    seen: Float[Tensor, "N r s c2"] | None = None  # of the frame, to draw the next one

    def fork(self) -> State:
        return self._replace(cache=self.cache.fork())


class Step(NamedTuple):
    """What an action led to, and what the world expected on the way."""

    state: State
    image: UInt8[Tensor, "N h w c"]
    reward: Float[Tensor, " N"]
    end: Bool[Tensor, " N"]
    tokens: Int[Tensor, "N K"]
    latent_logits: Float[Tensor, "N K C"]
    reward_logits: Float[Tensor, "N R"]
    end_logits: Float[Tensor, "N two"]


class View(NamedTuple):
    """What a policy may know of a state: the frame, and what arriving there brought."""

    image: UInt8[Tensor, "*b h w c"]
    reward: Float[Tensor, "*b"]
    end: Bool[Tensor, "*b"]


Policy = Callable[[View], Int[Tensor, " N"]]


class IrisWorld(nn.Module):
    """See the top of this file. `dtype` is what networks compute in."""

    def __init__(
        self,
        image: Space,
        actions: int,
        *,
        tokenizer: TokenizerConfig,
        dynamics: DynamicsConfig,
        dtype: torch.dtype = torch.float32,
        key: str = "image",
    ):
        super().__init__()
        if not image.is_image:
            raise UserError(
                f"Δ-IRIS sees one image (uint8, h w c); {key!r} is {image.dtype.name} "
                f"of shape {image.shape}.\n  Fix: choose an environment with images, "
                "or another agent."
            )
        self.key, self.shape, self.actions, self.dtype = (
            key,
            image.shape,
            actions,
            dtype,
        )
        check_size(image.shape, tokenizer, dynamics)
        self.tokenizer = Tokenizer(image.shape, actions, tokenizer)
        codes = tokenizer.quantizer.codes
        self.dynamics = Dynamics(
            image.shape, actions, tokenizer.tokens, codes, dynamics
        )

    def initialize(self, generator: torch.Generator) -> None:
        """Fill every layer from one generator, on the CPU, in the order made."""
        for layer in self.modules():
            if layer is not self and hasattr(layer, "initialize"):
                layer.initialize(generator)  # type: ignore[operator]

    def save_memory(self, yes: bool = True) -> None:
        """Have training remember less of residual blocks, and make it again."""
        recompute(self, yes)

    # learning

    def tokenizer_loss(
        self, segment: Segment, rng: Rng, learn: bool = True
    ) -> WorldLoss:
        """Losses `l1`, `l2`, `worst` and `commit`, each `(B, L - 1)` and scaled.

        The total is the sum of their means. `.states` are the tokens. With `learn`
        the codebook follows the batch and says how it fares in `.metrics`; without, the
        call has no side effects (evaluation).
        """
        return self.tokenizer.loss(segment, rng, self.dtype, learn)

    def dynamics_loss(self, segment: Segment) -> WorldLoss:
        """Losses `latents` `(B, L - 1)`, `rewards` and `ends` `(B, L)`, scaled.

        The total is the sum of their means. Tokens come from the tokenizer, without
        gradient.
        """
        tokens = self.tokenize(segment.image, segment.action)
        return self.dynamics.loss(segment, tokens, self.dtype)

    def tokenize(
        self, image: UInt8[Tensor, "B L h w c"], action: Int[Tensor, "B any"]
    ) -> Int[Tensor, "B T K"]:
        """Δ-tokens of the L - 1 transitions of stretches of frames."""
        return self.tokenizer.tokenize(image, action, self.dtype)

    @torch.no_grad()
    def reconstruct(
        self, image: UInt8[Tensor, "B L h w c"], action: Int[Tensor, "B any"]
    ) -> UInt8[Tensor, "B L h w c"]:
        """Each frame drawn from the *true* one before it; the first is copied."""
        tokens, steps = self.tokenize(image, action), image.shape[1] - 1
        drawn = self.tokenizer.draw(
            image[:, :-1].flatten(0, 1),
            action[:, :steps].flatten(),
            tokens.flatten(0, 1),
            self.dtype,
        )
        drawn = drawn.view(len(image), steps, *self.shape)
        return torch.cat([image[:, :1], drawn], 1)

    # dreaming

    @torch.no_grad()
    def begin(
        self, image: UInt8[Tensor, "N L h w c"], action: Int[Tensor, "N T"]
    ) -> State:
        """A dream that goes on from the last of some real frames.

        `action` are those between the frames, one fewer; with one frame there are none.
        Frames before the first of an episode are black, with action 0.
        """
        rows, steps = len(image), image.shape[1] - 1
        assert action.shape[1] == steps, (action.shape, image.shape)
        dynamics, dtype = self.dynamics, self.dtype
        cache = dynamics.transformer.cache(rows, dtype)
        with beside(image, FRAME):
            frames = dynamics.embed_frames(image, dtype)
        tokens = self.tokenize(image, action) if steps else None
        catch_up(image, FRAME)
        sequence = frames[:, -1:]
        if tokens is not None:
            blocks = dynamics.blocks(frames[:, :-1], action, tokens)
            sequence = torch.cat([blocks, sequence], 1)
        _, filled = dynamics(sequence, cache)
        assert filled is not None
        return State(image[:, -1], None, None, filled, frame_is_fed=True)

    @torch.no_grad()
    def step(self, state: State, action: Int[Tensor, " N"], rng: Rng) -> Step:
        """One step of a dream.

        Draws, in this order: the reward's sign (if that is what is known), the end, and
        the Δ-tokens. When the transformer has no room for another time step, it
        forgets everything but the newest frame.
        """
        dynamics, dtype = self.dynamics, self.dtype
        cache, last, is_fed = state.cache, state.last, state.frame_is_fed
        if cache.room <= dynamics.block:
            cache, last, is_fed = cache.forget(), None, False
        fed = [] if last is None else [dynamics.latent(last, dtype)]
        fed += [] if is_fed else [self._frame(state)]
        fed.append(dynamics.action(action, dtype))
        outputs, cache = self._feed(torch.stack(fed, 1), cache)
        at_action = outputs[:, -1]
        with beside(action, OUTCOME):
            reward_logits = dynamics.rewards(at_action)
            end_logits = dynamics.ends(at_action)
            reward = dynamics.reward(reward_logits, rng)
            end = rng.categorical(softmax(end_logits)) == 1

        logits: list[Tensor] = [dynamics.latents(at_action)]
        tokens: list[Tensor] = []
        for k in range(dynamics.tokens):
            if k:
                embedded = dynamics.latent(tokens[-1], dtype)[:, None]
                outputs, cache = self._feed(embedded, cache)
                logits.append(dynamics.latents(outputs[:, -1]))
            tokens.append(rng.categorical(softmax(logits[-1])))
        delta = torch.stack(tokens, 1)
        catch_up(action, OUTCOME)
        if state.seen is not None:
            catch_up(state.image, SEEN)
        image = self.tokenizer.draw(state.image, action, delta, dtype, state.seen)
        after = State(image, None, tokens[-1], cache, frame_is_fed=False)
        expected = (torch.stack(logits, 1), reward_logits, end_logits)
        return Step(after, image, reward, end, delta, *expected)

    @torch.no_grad()
    def look(self, state: State) -> State:
        """Look at the newest frame now, beside whatever comes before the next step."""
        image, frame, seen = state.image, state.frame, state.seen
        if frame is None and not state.frame_is_fed:
            with beside(image, FRAME):
                frame = self.dynamics.embed_frames(image, self.dtype)
        if seen is None:
            with beside(image, SEEN):
                seen = self.tokenizer.see(image, self.dtype)
        return state._replace(frame=frame, seen=seen)

    def imagine(self, state: State, policy: Policy, horizon: int, rng: Rng) -> Rollout:
        """Go on for `horizon` steps; `policy` maps a `View` to actions `(N,)`.

        WorldModelEnv do not stop at an end; whoever learns from them looks no further.
        The states of the dream are `View`s `(N, H + 1)`; reward and end belong to
        *arriving* there, so the first has none.
        """
        none = torch.zeros(len(state.image), device=state.image.device)
        views = [View(state.image, none, none.bool())]
        state = self.look(state) if horizon else state
        actions = [policy(views[-1])]
        for left in reversed(range(horizon)):
            step = self.step(state, actions[-1], rng)
            state = self.look(step.state) if left else step.state
            views.append(View(step.image, step.reward, step.end))
            actions.append(policy(views[-1]))
        stacked = View(*(torch.stack(parts, 1) for parts in zip(*views, strict=True)))
        return Rollout(stacked, {"action": torch.stack(actions, 1)})

    # looking

    @property
    def width(self) -> int:
        """Size of the features: all pixels."""
        height, width, colours = self.shape
        return int(height * width * colours)

    @property
    def image_keys(self) -> tuple[str, ...]:
        return (self.key,)

    def features(self, states: View) -> Float[Tensor, "*b F"]:
        """Pixels in [0, 1]; all that the actor-critic of Δ-IRIS sees."""
        return pixels(states.image, self.dtype).flatten(-3)

    def decode(self, states: View) -> Obs:
        return {self.key: pixels(states.image, torch.float32)}

    def frozen_copy(self, dtype: torch.dtype) -> IrisWorld:
        """A twin for dreaming, with weights already in `dtype` (see `refresh`).

        Within a phase of the actor-critic the world stands still, so that its weights
        need to be converted once, and not at every use.
        """
        twin = copy.deepcopy(self).requires_grad_(False).eval()
        twin.dtype = dtype
        for layer in twin.modules():  # norms compute in float32 and keep it
            if isinstance(layer, Kernel | Embedding):
                layer.to(dtype)
        return twin

    @torch.no_grad()
    def refresh(self, twin: IrisWorld) -> None:
        """Bring a frozen copy up to date, in place."""
        mine, its = ([*w.parameters(), *w.buffers()] for w in (self, twin))
        torch._foreach_copy_(its, mine)
        for layer in twin.modules():
            if hasattr(layer, "prepare"):  # what can be made of weights beforehand
                layer.prepare()  # type: ignore[operator]

    def _frame(self, state: State) -> Tensor:
        """The I-token of the newest frame."""
        if state.frame is None:
            return self.dynamics.embed_frames(state.image, self.dtype)
        catch_up(state.image, FRAME)
        return state.frame

    def _feed(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        outputs, cache_after = self.dynamics(x, cache)
        assert cache_after is not None
        return outputs, cache_after


def check_size(
    shape: tuple[int, ...], tokenizer: TokenizerConfig, dynamics: DynamicsConfig
) -> None:
    """Raise unless images of this shape suit both networks, saying which would."""
    height, width, _ = shape
    grid, halvings = math.isqrt(tokenizer.tokens), sum(tokenizer.encoder.halve)
    divisor = grid * tokenizer.encoder.shrink
    side = _fitting_side(divisor, dynamics)
    resize = "--configs iris_small, which makes them 32x32, or "
    if side and 4 * side >= min(height, width):  # smaller ones would show nothing
        resize = (
            f"--env.resize {side} {side} (of recordings --offline.read.size {side} "
            f"{side}), or "
        )
    if height % divisor or width % divisor:
        raise UserError(
            f"Images of {height}x{width} cannot be halved {halvings} times and then "
            f"cut into {grid}x{grid} tokens.\n  Fix: {resize}use images whose sides "
            f"are multiples of {divisor}."
        )
    area = dynamics.frame.side(height) * dynamics.frame.side(width)
    latent, embed = dynamics.frame.latent, dynamics.transformer.width
    if area * latent == embed:
        return
    heads = dynamics.transformer.heads
    others = range(1, embed // area + heads + 1)
    latents = [n for n in others if area * n % heads == 0]
    better = min(latents, key=lambda n: abs(area * n - embed))
    other = (
        f"--iris.world_model.frame.latent {better} "
        f"--iris.world_model.transformer.width {area * better}"
    )
    if area * better > 8 * embed:
        other = "halve them more often: `mults` and `halve` of each network, all alike"
    raise UserError(
        f"Images of {height}x{width} become I-tokens of size {area} * {latent}, but "
        f"the transformer has width {embed}.\n  Fix: {resize}{other}"
    )


def _fitting_side(divisor: int, dynamics: DynamicsConfig) -> int | None:
    """The side of square images that suit all settings as they are."""
    area, rest = divmod(dynamics.transformer.width, dynamics.frame.latent)
    side = math.isqrt(area) * dynamics.frame.shrink
    exact = not rest and math.isqrt(area) ** 2 == area
    return side if exact and side % divisor == 0 else None
