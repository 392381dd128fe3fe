"""Atari 2600 games on the Arcade Learning Environment (`ale-py`).

The defaults are those of DreamerV3 for 200 million frames; the preset `atari100k` sets
those of the 100k benchmark. One agent step repeats the action for `repeat` frames,
takes the maximum of the last two screens (some sprites are drawn in every second frame
only), resizes it with Pillow's bilinear filter and converts it to grayscale.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from reverie.api import Action, Obs, StateDict, UserError, VecEnv
from reverie.envs.seeding import SEED_RANGE, load_rng, save_rng
from reverie.envs.suite import Package, Suite
from reverie.envs.wrappers import resize
from reverie.spaces import Space, step_spaces, step_values

NOOP, FIRE = 0, 1  # action codes of the emulator
GRAY_WEIGHTS = np.array([0.299, 0.587, 1 - (0.299 + 0.587)])
"""Luminance of red, green and blue (ITU-R BT.601)."""

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
"""The 57 games of the benchmark; all other games of `ale-py` work as well."""

_NAMES_100K = """
alien amidar assault asterix bank_heist battle_zone boxing breakout chopper_command
crazy_climber demon_attack freeway frostbite gopher hero jamesbond kangaroo krull
kung_fu_master ms_pacman pong private_eye qbert road_runner seaquest up_n_down
"""
GAMES_100K: tuple[str, ...] = tuple(_NAMES_100K.split())
"""The 26 games of Atari 100k."""


@dataclass(frozen=True)
class AtariConfig:
    size: tuple[int, int] = (96, 96)
    """Height and width of the image in pixels."""
    repeat: int = 4
    """Frames per action (frame skip)."""
    sticky: float = 0.25
    """Sticky actions: probability per frame that the previous action is repeated."""
    gray: bool = True
    """Convert images to grayscale."""
    actions: Literal["all", "minimal"] = "all"
    """All 18 joystick actions, or only those that have an effect in the game."""
    lives: Literal["unused", "discount", "reset"] = "unused"
    """Effect of a lost life: `unused` has none, `discount` sets `is_terminal` but not
    `is_last`, `reset` ends the episode. With `reset`, the next episode continues the
    game after one no-op step, and `length` is the time limit of the whole game."""
    noops: int = 30
    """Maximum number of no-op frames at the start of a game."""
    min_noops: int = 0
    """Minimum number of no-op frames at the start of a game."""
    pooling: int = 2
    """Number of frames over which the pixelwise maximum is taken."""
    resize_first: bool = False
    """Resize frames before taking their maximum, as Δ-IRIS does."""
    clip_reward: bool = False
    """Replace rewards by their sign."""
    length: int = 108_000
    """Time limit of an episode in frames."""
    truncation_is_terminal: bool = True
    """Set `is_terminal` at the time limit, as DreamerV3 does; False sets only
    `is_last`, so that values are bootstrapped there."""
    autostart: bool = False
    """Press FIRE at the start of a game."""

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


class RepeatResult(NamedTuple):
    """Result of an action that was repeated for several frames."""

    reward: float = 0.0
    is_game_over: bool = False
    is_truncated: bool = False

    @property
    def done(self) -> bool:
        return self.is_game_over or self.is_truncated


class Atari:
    """One game; `action` is an index into its set of actions."""

    def __init__(self, name: str, config: AtariConfig | None = None, seed: int = 0):
        self.config = config = config or AtariConfig()
        from ale_py import ALEInterface, LoggerMode, roms

        ALEInterface.setLoggerMode(LoggerMode.Error)
        self._ale = ALEInterface()
        self._ale.setFloat("repeat_action_probability", config.sticky)
        self._rom: Any = roms.get_rom_path(find_game(name))
        self._start_emulator(seed)
        if config.actions == "all":
            actions = self._ale.getLegalActionSet()
        else:
            actions = self._ale.getMinimalActionSet()
        self._actions = [action.value for action in actions]
        self.action_names = tuple(action.name.lower() for action in actions)
        image = Space(np.uint8, (*config.size, 1 if config.gray else 3))
        self.obs_space = {"image": image, **step_spaces()}
        self.act_space = {"action": Space(np.int32, (), 0, len(actions))}
        # Latest screens, oldest first. Each step allocates new arrays instead of using
        # buffers of this environment: new arrays get memory that another environment
        # has just freed and that is still in the CPU cache.
        self._screens: list[np.ndarray] = []
        self._frames = 0
        self._lives = 0
        self._continue_game = False

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            self._start_emulator(seed)
        # after a lost life (`lives=reset`) the same game continues
        if not self._continue_game or self._act(NOOP).done:
            self._new_game()
        self._lives = self._ale.lives()
        return {"image": self._image(), **step_values(0.0, first=True)}

    def step(self, action: Action) -> Obs:
        config = self.config
        result = self._act(self._actions[int(action["action"])])
        lives = self._ale.lives()
        lost_life, self._lives = lives < self._lives, lives
        # The last life ends the episode only at game over: some games continue for a
        # while after it is lost.
        ended = result.is_game_over or (
            lost_life and lives > 0 and config.lives == "reset"
        )
        self._continue_game = ended and not result.done
        terminal = ended or (result.is_truncated and config.truncation_is_terminal)
        terminal = terminal or (lost_life and config.lives == "discount")
        reward = float(np.sign(result.reward)) if config.clip_reward else result.reward
        last = ended or result.is_truncated
        return {
            "image": self._image(),
            **step_values(reward, last=last, terminal=terminal),
        }

    def close(self) -> None:
        pass

    def state_dict(self) -> StateDict:
        emulator = self._ale.cloneState(include_rng=True).serialize()
        return {
            "rng": save_rng(self._rng),
            "emulator": np.frombuffer(emulator, np.uint8).copy(),
            "screens": np.stack(self._screens),
            "frames": self._frames,
            "lives": self._lives,
            "continue_game": self._continue_game,
        }

    def load_state_dict(self, state: StateDict) -> None:
        from ale_py import ALEState

        self._rng = load_rng(state["rng"])
        emulator = np.asarray(state["emulator"], np.uint8).tobytes()
        self._ale.restoreState(ALEState(emulator))
        self._screens = list(np.asarray(state["screens"]))
        self._frames, self._lives = int(state["frames"]), int(state["lives"])
        self._continue_game = bool(state["continue_game"])

    def _start_emulator(self, seed: int) -> None:
        """Load the game and seed the random generators."""
        self._rng = np.random.default_rng(seed)
        self._ale.setInt("random_seed", seed % SEED_RANGE)
        self._ale.loadROM(self._rom)
        self._continue_game = False

    def _act(self, action: int) -> RepeatResult:
        """Repeat an action for `repeat` frames, and store the last screens."""
        config, result = self.config, RepeatResult()
        for frame in range(config.repeat):
            reward = result.reward + self._ale.act(action)
            self._frames += 1
            truncated = bool(config.length) and self._frames >= config.length
            result = RepeatResult(reward, self._ale.game_over(), truncated)
            if result.done or frame >= config.repeat - config.pooling:
                self._screens.append(self._ale.getScreenRGB())
            if result.done:
                break
        return result

    def _new_game(self) -> None:
        """Start a game with a random number of no-op frames."""
        self._ale.reset_game()
        noops = int(self._rng.integers(self.config.min_noops, self.config.noops + 1))
        for action in [NOOP] * noops + [FIRE] * self.config.autostart:
            self._ale.act(action)
            if self._ale.game_over():
                self._ale.reset_game()
        self._frames = 0
        self._screens = [self._ale.getScreenRGB()]

    def _image(self) -> np.ndarray:
        """Return the observation: pooled, resized and converted to grayscale."""
        size, pooling = self.config.size, self.config.pooling
        screens = self._screens[-pooling:]
        if self.config.resize_first:
            resized = [resize(screen, size, "bilinear") for screen in screens]
            image = functools.reduce(np.maximum, resized)
        else:
            image = resize(functools.reduce(np.maximum, screens), size, "bilinear")
        # Keep the last screens: a step that ends the episode early adds fewer than
        # `pooling` screens.
        self._screens = self._screens[-max(1, pooling - 1) :]
        if self.config.gray:
            image = (image @ GRAY_WEIGHTS).astype(np.uint8)[..., None]
        return image


def is_installed_game(name: str) -> bool:
    """True if the installed `ale-py` has this game."""
    return name.replace("_", "") in installed_games()


def installed_games() -> dict[str, str]:
    """Return the games of the installed `ale-py` by their names without underscores."""
    from ale_py import roms

    return {game.replace("_", ""): game for game in roms.get_all_rom_ids()}


def find_game(name: str) -> str:
    """Return the name that `ale-py` uses for a game, such as `up_n_down`."""
    game = installed_games().get(name.replace("_", ""))
    if game is None:
        raise UserError(
            f"ale-py has no game {name!r}.\n  Fix: choose one of {', '.join(GAMES)}."
        )
    return game


def _make_native(*args: Any) -> VecEnv:
    from reverie.envs.suites.atari.native import make_native

    return make_native(*args)


_ATARI = Suite(
    name="atari",
    description="Atari 2600 games",
    make=Atari,
    config=AtariConfig,
    tasks=GAMES,
    accepts=is_installed_game,
    make_native=_make_native,
    package=Package(
        "ale_py", ("ale-py",), group="small", extra="atari", license="GPL-2.0"
    ),
)
SUITES = (
    _ATARI,
    replace(
        _ATARI,
        name="atari100k",
        config_name="atari",
        description="Atari 100k: Atari 2600 games with 400 thousand frames",
        benchmark=GAMES_100K,
    ),
)
