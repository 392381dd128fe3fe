"""Regular evaluation during a training run, saved and restored with it."""

from __future__ import annotations

from collections.abc import Callable

from reverie.api import Agent, StateDict, VecEnv
from reverie.evaluation.episodes import PlayedEpisode, play_episodes
from reverie.replay.feed import ReplayFeed


class Evaluator:
    """Plays evaluation episodes in its own environments and stores them in `feed`.

    The environments are part of the checkpoint, so a resumed run plays the episodes
    that an uninterrupted one would have played.
    """

    def __init__(self, envs: VecEnv, feed: ReplayFeed, episodes: int):
        self.envs, self.feed, self.episodes = envs, feed, episodes
        self._has_state = False
        """True if the environments have a state to save: after a call of `play`, unless
        it raised an error."""

    def play(self, agent: Agent, stop: Callable[[], bool]) -> list[PlayedEpisode]:
        """Play the episodes; return an empty list if `stop` returns True meanwhile."""
        self._has_state = False
        replay = self.feed.replay
        played = play_episodes(agent, self.envs, self.episodes, replay, stop=stop)
        self._has_state = True
        return played

    def state_dict(self) -> StateDict:
        """Return the state of the environments; the replay is saved by the run."""
        return {"envs": self.envs.state_dict() if self._has_state else None}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore the environments, if their number is the same."""
        envs = state["envs"]
        if envs is not None and len(envs["envs"]) == len(self.envs):
            self.envs.load_state_dict(envs)
            self._has_state = True
