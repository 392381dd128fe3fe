"""Atari 2600 games, straight on the Arcade Learning Environment (`ale-py`).

The defaults are those of DreamerV3 on 200 million frames; the block `atari100k` sets
those of the 100k benchmark. One agent step holds an action for `repeat` frames, takes
the maximum of the last two screens (the console draws some sprites on every other one
only), resizes it with Pillow's bilinear filter and grays it afterwards.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from reverie.api import Action, Obs, StateDict, UserError
from reverie.envs.seeding import SEED_RANGE, load_rng, save_rng
from reverie.envs.wrappers import resize
from reverie.spaces import Space, Spaces

NOOP, FIRE = 0, 1
GRAY = np.array([0.299, 0.587, 1 - (0.299 + 0.587)])

_NAMES = """
alien amidar assault asterix asteroids atlantis bank_heist battle_zone beam_rider
berzerk bowling boxing breakout centipede chopper_command crazy_climber defender
demon_attack double_dunk enduro fishing_derby freeway frostbite gopher gravitar hero
ice_hockey jamesbond kangaroo krull kung_fu_master montezuma_revenge ms_pacman
name_this_game phoenix pitfall pong private_eye qbert riverraid road_runner robotank
seaquest skiing solaris space_invaders star_gunner surround tennis time_pilot tutankham
up_n_down venture video_pinball wizard_of_wor yars_revenge zaxxon
"""
GAMES: tuple[str, ...] = tuple(_NAMES.split())
"""The 57 games of the benchmark; every other game of `ale-py` works as well."""


@dataclass(frozen=True)
class AtariConfig:
    size: tuple[int, int] = (96, 96)
    """Height and width of the image in pixels."""
    repeat: int = 4
    """Frames each action is held."""
    sticky: float = 0.25
    """Chance that the console repeats the last action instead, per frame."""
    gray: bool = True
    """One channel instead of three."""
    actions: Literal["all", "minimal"] = "all"
    """All 18 joystick actions, or only those the game knows."""
    lives: Literal["unused", "discount", "reset"] = "unused"
    """What a lost life means: nothing, the end of the return (`is_terminal` without
    `is_last`), or the end of the episode. Then the next one is the rest of the game,
    after one idle step, and `length` counts frames of the game."""
    noops: int = 30
    """A new game begins with up to so many idle frames."""
    min_noops: int = 0
    """And with at least so many."""
    pooling: int = 2
    """Screens the image is the maximum of."""
    resize_first: bool = False
    """Make screens smaller before their maximum is taken, as Δ-IRIS does."""
    clip_reward: bool = False
    """Only the sign of the reward."""
    length: int = 108_000
    """Frames after which an episode is cut."""
    truncation_is_terminal: bool = True
    """Call an episode cut by `length` terminal, as DreamerV3 does; False is right."""
    autostart: bool = False
    """Press fire at the beginning of a game."""

    def __post_init__(self) -> None:
        if self.repeat < 1 or not 1 <= self.pooling <= self.repeat:
            raise ValueError(
                "atari needs repeat >= 1 and 1 <= pooling <= repeat, got "
                f"repeat={self.repeat} and pooling={self.pooling}"
            )
        if not 0 <= self.min_noops <= self.noops:
            raise ValueError(
                "atari needs 0 <= min_noops <= noops, got "
                f"min_noops={self.min_noops} and noops={self.noops}"
            )


class Held(NamedTuple):
    """What came of holding an action."""

    reward: float = 0.0
    over: bool = False
    cut: bool = False
    """Whether the game was stopped for its length."""

    @property
    def done(self) -> bool:
        return self.over or self.cut


class Atari:
    """One game; `action` indexes its action set."""

    def __init__(self, name: str, config: AtariConfig | None = None, seed: int = 0):
        self.config = config = config or AtariConfig()
        from ale_py import ALEInterface, LoggerMode, roms

        ALEInterface.setLoggerMode(LoggerMode.Error)
        self._ale = ALEInterface()
        self._ale.setFloat("repeat_action_probability", config.sticky)
        self._rom: Any = roms.get_rom_path(find_game(name))
        self._load(seed)
        if config.actions == "all":
            known = self._ale.getLegalActionSet()
        else:
            known = self._ale.getMinimalActionSet()
        self._actions = [action.value for action in known]
        # Oldest first, and new arrays for every step: memory that environments hand to
        # each other stays in the cache, memory that each keeps for itself does not.
        self._screens: list[np.ndarray] = []
        self._frames = 0
        self._lives = 0
        self._game_on = False

    @property
    def obs_space(self) -> Spaces:
        shape = (*self.config.size, 1 if self.config.gray else 3)
        flag = Space(np.dtype(bool))
        return {
            "image": Space(np.dtype(np.uint8), shape),
            "reward": Space(np.dtype(np.float32)),
            "is_first": flag,
            "is_last": flag,
            "is_terminal": flag,
        }

    @property
    def act_space(self) -> Spaces:
        return {"action": Space(np.dtype(np.int32), (), 0, len(self._actions))}

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            self._load(seed)
        # where only a life was lost, the game goes on
        if not self._game_on or self._hold(NOOP).done:
            self._new_game()
        self._lives = self._ale.lives()
        return self._obs(0.0, first=True)

    def step(self, action: Action) -> Obs:
        config = self.config
        held = self._hold(self._actions[int(action["action"])])
        lives = self._ale.lives()
        died, self._lives = lives < self._lives, lives
        # without any life left, some games go on for a while
        ended = held.over or (died and lives > 0 and config.lives == "reset")
        self._game_on = ended and not held.done
        terminal = ended or (held.cut and config.truncation_is_terminal)
        terminal = terminal or (died and config.lives == "discount")
        reward = float(np.sign(held.reward)) if config.clip_reward else held.reward
        return self._obs(reward, last=ended or held.cut, terminal=terminal)

    def close(self) -> None:
        pass

    def state_dict(self) -> StateDict:
        console = self._ale.cloneState(include_rng=True).serialize()
        return {
            "rng": save_rng(self._rng),
            "console": np.frombuffer(console, np.uint8).copy(),
            "screens": np.stack(self._screens),
            "slot": len(self._screens) - 1,
            "frames": self._frames,
            "lives": self._lives,
            "game_on": self._game_on,
        }

    def load_state_dict(self, state: StateDict) -> None:
        from ale_py import ALEState

        self._rng = load_rng(state["rng"])
        console = np.asarray(state["console"], np.uint8).tobytes()
        self._ale.restoreState(ALEState(console))
        newest = int(state["slot"])
        self._screens = list(np.roll(np.asarray(state["screens"]), -1 - newest, 0))
        self._frames = int(state["frames"])
        self._lives, self._game_on = int(state["lives"]), bool(state["game_on"])

    def _load(self, seed: int) -> None:
        """Switch the console on; its random numbers begin here."""
        self._rng = np.random.default_rng(seed)
        self._ale.setInt("random_seed", seed % SEED_RANGE)
        self._ale.loadROM(self._rom)
        self._game_on = False

    def _hold(self, action: int) -> Held:
        """One step of the console's: an action for some frames."""
        config, held = self.config, Held()
        for frame in range(config.repeat):
            reward = held.reward + self._ale.act(action)
            self._frames += 1
            cut = bool(config.length) and self._frames >= config.length
            held = Held(reward, self._ale.game_over(), cut)
            if held.done or frame >= config.repeat - config.pooling:
                self._screens.append(self._ale.getScreenRGB())
            if held.done:
                break
        return held

    def _new_game(self) -> None:
        self._ale.reset_game()
        for _ in range(
            self._rng.integers(self.config.min_noops, self.config.noops + 1)
        ):
            self._ale.act(NOOP)
            if self._ale.game_over():
                self._ale.reset_game()
        if self.config.autostart:
            self._ale.act(FIRE)
            if self._ale.game_over():
                self._ale.reset_game()
        self._frames = 0
        self._screens = [self._ale.getScreenRGB()]

    def _obs(
        self,
        reward: float,
        first: bool = False,
        last: bool = False,
        terminal: bool = False,
    ) -> Obs:
        size, pooling = self.config.size, self.config.pooling
        screens = self._screens[-pooling:]
        if self.config.resize_first:
            small = [resize(screen, size, "bilinear") for screen in screens]
            image = functools.reduce(np.maximum, small)
        else:
            image = resize(functools.reduce(np.maximum, screens), size, "bilinear")
        # An episode that ends within a step is shown with screens of the one before.
        self._screens = self._screens[-max(1, pooling - 1) :]
        if self.config.gray:
            image = (image @ GRAY).astype(np.uint8)[..., None]
        return {
            "image": image,
            "reward": np.float32(reward),
            "is_first": np.bool_(first),
            "is_last": np.bool_(last),
            "is_terminal": np.bool_(terminal),
        }


def is_installed_game(name: str) -> bool:
    """Whether the installed `ale-py` has a game the benchmark does not."""
    return name.replace("_", "") in installed_games()


def installed_games() -> dict[str, str]:
    """The games of the installed `ale-py`, by name with and without underscores."""
    from ale_py import roms

    games = {game: game for game in roms.get_all_rom_ids()}
    return {**{game.replace("_", ""): game for game in games}, **games}


def find_game(name: str) -> str:
    """What `ale-py` calls a game."""
    games = installed_games()
    game = games.get(name) or games.get(name.replace("_", ""))
    if game is None:
        raise UserError(
            f"ale-py has no game {name!r}.\n  Fix: pick one of {', '.join(GAMES)}."
        )
    return game
