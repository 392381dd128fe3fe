"""Steps an environment and its world model together, with the same actions.

A row is the dictionary of one step: observations, reward, flags and action. Real rows
come from the environment or from a recorded episode, imagined rows from rollouts of the
world model. In `agent-env` and `human-env`, actions are chosen from the real rows, and
`fork` starts rollouts at a real row. In `agent-model` and `human-model`, actions are
chosen from the imagined rows, and `fork` starts rollouts at an imagined row.

Threads and timing are in `session.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from reverie.api import Action, Obs, UserError
from reverie.capabilities import (
    InspectableWorldModelEnv,
    SeedablePolicy,
    StateInspection,
)
from reverie.datasets.action_units import make_action_converter
from reverie.play.history import History
from reverie.play.imagination import Imagination
from reverie.play.load import (
    AGENT_ENV,
    AGENT_MODEL,
    HUMAN_ENV,
    HUMAN_MODEL,
    MODES,
    RECORDED,
    LoadedRun,
)
from reverie.play.policy_state import PolicyState
from reverie.run.player import MAX_CONTEXT

IN_MODEL = (AGENT_MODEL, HUMAN_MODEL)
"""Modes in which actions are chosen from imagined rows."""
AGENT_MODES = (AGENT_ENV, AGENT_MODEL)
MAX_HISTORY = 3000
"""Maximum number of steps in memory, unless `Simulation.keep_all` is set."""
MAX_BYTES, MAX_SAVED_BYTES = 64 * 2**20, 2**30
"""Maximum size of the rows in memory in bytes, without and with `Simulation.keep_all`.
Recorded episodes are not limited: their files are read completely."""
MAX_ROLLOUTS = 8
"""Maximum number of imagined rollouts at the same time."""


class StepSnapshot(NamedTuple):
    """The data of one step that pages show."""

    step: int
    real: Obs | None
    """Row of the environment or recording; None after it has ended."""
    imagined: Obs | None
    """Rows `(N, ...)` of the rollouts; None if there are none at this step."""
    action: Action | None
    """Action that led to this step."""
    scalars: dict[str, float]
    """Values that the page plots over time, by name."""
    inspection: StateInspection


class Simulation:
    """An episode in one of the modes; `cursor` is the step that is shown."""

    def __init__(self, loaded: LoadedRun, seed: int = 0):
        self.loaded, self.seed = loaded, seed
        self.mode = RECORDED
        self.human = False  # True if a human chooses the actions
        self.rollouts = 1  # number of imagined rollouts
        self.fork_every = 50  # steps after which the rollouts start again; 0: never
        self.keep_all = False  # keep all rows, so that the episode can be saved
        self.episode = -1  # number of the episode since the seed was set
        self.imagination: Imagination | None = None
        if loaded.world_model_env is not None:
            to_env, _ = make_action_converter(
                loaded.world_model_env.act_space,
                loaded.act_space,
                "the world model",
                "the task",
            )
            self.imagination = Imagination(
                loaded.world_model_env,
                loaded.act_space,
                loaded.to_model_units,
                to_env,
                loaded.crop,
            )
        self._clear()

    def _clear(self) -> None:
        """Delete the steps of the previous episode."""
        self.rows = History()  # real rows
        self.imagined = History()  # rows (N, ...) of the rollouts
        self.step_data = History()  # (action, scalars, inspection) of each step
        self.cursor = 0
        # rows of a recording before `rows[0]`, as context; empty in an environment
        self._earlier_rows: list[Obs] = []
        self._env_ended = True
        self.policy_state = PolicyState(self.loaded)
        if self.imagination is not None:
            self.imagination.stop()

    # Episodes

    def start(self, mode: str, seed: int | None = None) -> None:
        """Start an episode in a mode; a `seed` also determines later episodes."""
        _check_possible(mode, self.loaded.unavailable_reasons()[mode])
        if seed is not None:
            self.seed, self.episode = seed, -1
        if mode == RECORDED:
            rng = np.random.default_rng(self._episode_seed())
            self.open_recorded(self.loaded.episodes.sample(rng))
            return
        self._clear()
        self.mode, self.human = mode, mode not in AGENT_MODES
        self.episode += 1
        if isinstance(self.loaded.agent, SeedablePolicy):
            self.loaded.agent.seed_policy(self._episode_seed())
        if self.loaded.env is not None:
            self._append(self.loaded.env.reset(self._episode_seed()))
            self._env_ended = False
        else:
            self._start_from_recording()
        self.fork()

    def open_recorded(self, episode: dict[str, np.ndarray]) -> None:
        """Show a recorded episode from its first row."""
        self._clear()
        self.mode, self.human = RECORDED, False
        self.episode += 1
        for index in range(len(episode["is_first"])):
            self.rows.append({key: value[index] for key, value in episode.items()})
        self._check_rows()
        self.fork()

    def _start_from_recording(self) -> None:
        """Use a random row of a recorded episode as the first row.

        The rows before it are kept as context of the policy and the world model.
        """
        rng = np.random.default_rng(self._episode_seed())
        episode = self.loaded.episodes.sample(rng)
        start = int(rng.integers(len(episode["is_first"]) - 1))
        first = max(0, start + 1 - MAX_CONTEXT)
        rows = [
            {key: value[index] for key, value in episode.items()}
            for index in range(first, start + 1)
        ]
        self._earlier_rows = rows[:-1]
        self.rows.append(rows[-1])
        self._check_rows()

    def _check_rows(self) -> None:
        """Raise if the first recorded row does not match the spaces of the agent."""
        row = self.rows[0]
        for key, space in self._needed_spaces().items():
            shape = np.shape(row[key]) if key in row else None
            if shape != space.shape:
                actual = "no such key" if shape is None else f"shape {shape}"
                raise UserError(
                    f"The agent needs {key!r} of shape {space.shape}, but the recorded "
                    f"episode has {actual}.\n  Fix: choose an episode of the same task."
                )

    def _needed_spaces(self) -> dict[str, Any]:
        """Return the spaces of the keys that a row must have."""
        spaces = {**self.loaded.run.spaces().obs_space, **self.loaded.act_space}
        return {key: s for key, s in spaces.items() if not key.startswith("log/")}

    def _episode_seed(self) -> int:
        """Return the seed of this episode, computed from `seed` and its number.

        Because of the large factor, the episodes of `seed` and `seed + 1` have
        different seeds.
        """
        return (self.seed * 100_003 + max(self.episode, 0)) % 2**31

    # Steps

    @property
    def end_reason(self) -> str:
        """Why the episode has ended; empty if it can continue."""
        if self.mode in IN_MODEL:
            row = self.imagined.get(self.cursor)
            if row is not None and self.cursor and bool(row["is_terminal"][0]):
                return "the world model predicts the end of the episode"
            return ""
        row = self.rows[self.cursor]
        if self.cursor < self.rows.stop - 1:
            return ""
        if self.mode == RECORDED:
            return "end of the recording"
        if bool(row["is_last"]):
            return "terminal state" if bool(row["is_terminal"]) else "time limit"
        return ""

    @property
    def is_live(self) -> bool:
        """True if the cursor is at the newest step."""
        history = self.imagined if self.mode in IN_MODEL else self.rows
        return self.cursor == history.stop - 1

    def step(self, get_human_action: Callable[[], Action]) -> None:
        """Advance by one step; `get_human_action` is called if a human acts.

        After `seek` to an earlier step, the stored steps are shown again.
        """
        assert not self.end_reason, "start another episode first"
        if self.mode in IN_MODEL:
            self._step_model(get_human_action)
        else:
            self._step_real(get_human_action)
        self._drop_oldest_steps()

    def _drop_oldest_steps(self) -> None:
        """Drop the oldest steps until their number and size are within the limits."""
        histories = [self.imagined, self.step_data]
        histories += [] if self.mode == RECORDED else [self.rows]
        limit = MAX_SAVED_BYTES if self.keep_all else MAX_BYTES
        first = 0 if self.keep_all else self.cursor + 1 - MAX_HISTORY
        for history in histories:
            history.drop_before(first)
        # limited also with `keep_all`: `step_data` is shown, but not saved
        self.step_data.drop_before(self.cursor + 1 - MAX_HISTORY)
        while sum(history.num_bytes for history in histories) > limit:
            first = min(h.start for h in histories if h.num_bytes) + 1
            if first > self.cursor:  # keep the step that is shown
                return
            for history in histories:
                history.drop_before(first)

    def _step_model(self, get_human_action: Callable[[], Action]) -> None:
        """Step the rollouts, and the environment with the same action."""
        imagination = self.imagination
        assert imagination is not None
        if not self.is_live:
            self.cursor += 1
            return
        action = get_human_action() if self.human else imagination.act()
        self._set_action(self.imagined[self.cursor], action)
        self.imagined.append(imagination.step(action))
        env = self.loaded.env
        if env is not None and not self._env_ended:
            self.rows[self.cursor].update(action)
            self._append(env.step(action))
            self._env_ended = bool(self.rows[-1]["is_last"])
        self.cursor += 1
        self._store_step(action)

    def _step_real(self, get_human_action: Callable[[], Action]) -> None:
        """Step the environment or recording, and the rollouts with the same action."""
        if self.imagination is not None and self.imagined.get(self.cursor) is None:
            self.fork()  # `seek` moved to a step without a rollout
        row, env = self.rows[self.cursor], self.loaded.env
        if self.is_live:
            assert env is not None
            self._advance_policy(self.cursor)
            action = (
                get_human_action() if self.human else self.policy_state.policy_action
            )
            assert action is not None
            row.update(action)
            self._append(env.step(action))
            self._env_ended = bool(self.rows[-1]["is_last"])
        action = {key: row[key] for key in self.loaded.act_space}
        self.cursor += 1
        imagination = self.imagination
        imagined_steps = 0
        if imagination is not None and imagination.is_running:
            if self.cursor == self.imagined.stop:
                self.imagined.append(imagination.step(action))
            imagined_steps = imagination.imagined_steps
        self._advance_policy(self.cursor)
        self._store_step(action)
        if 0 < self.fork_every <= imagined_steps and not self.end_reason:
            self.fork()

    def _append(self, obs: Obs) -> None:
        """Add a row of the environment, as a copy: its action is added later."""
        self.rows.append(dict(obs))

    def _set_action(self, rows: Obs, action: Action) -> None:
        """Add the same action to the rows of all rollouts."""
        for key, value in action.items():
            rows[key] = np.repeat(np.asarray(value)[None], len(rows["reward"]), 0)

    # Seeking and forks

    def seek(self, step: int) -> None:
        """Move to a step that was already shown, or to any step of a recording."""
        history = self.imagined if self.mode in IN_MODEL else self.rows
        self.cursor = min(max(step, history.start), history.stop - 1)

    def fork(self) -> None:
        """Start imagined rollouts at the current step."""
        if self.imagination is None:
            return
        context = self._context(self.cursor)
        self._advance_policy(self.cursor)
        carry = self.policy_state.carry
        # a different seed at every step, which does not depend on earlier forks
        seed = (self._episode_seed() + 7919 * self.cursor) % 2**31
        self.imagination.start_rollouts(context, carry, self.rollouts, seed)
        start = {
            key: np.repeat(np.asarray(value)[None], self.rollouts, 0)
            for key, value in context[-1].items()
        }
        if self.mode in IN_MODEL:
            self.imagined.truncate(self.cursor)
            self.step_data.truncate(self.cursor)
            # After a fork above step 0, the environment is not stepped: it cannot
            # return to an earlier step, and the rollouts start at an imagined row.
            if self.cursor:
                self.rows.truncate(self.cursor)
                self._env_ended = True
        else:
            self.imagined = History(self.cursor)
        self.imagined.append({**start, "is_terminal": np.zeros(self.rollouts, bool)})
        self._store_step(None)

    def set_human(self, human: bool) -> None:
        """Let a human or the agent choose the actions."""
        if self.mode == RECORDED:
            return
        mode = {
            (True, True): HUMAN_MODEL,
            (True, False): AGENT_MODEL,
            (False, True): HUMAN_ENV,
            (False, False): AGENT_ENV,
        }[self.mode in IN_MODEL, human]
        reason = self.loaded.unavailable_reasons()[mode]
        imagination = self.imagination
        if not human and self.mode in IN_MODEL and not reason:
            assert imagination is not None
            if not imagination.can_act:
                reason = "the rollouts were started without the state of the policy"
        _check_possible(mode, reason)
        self.mode, self.human = mode, human

    def _context(self, step: int) -> list[Obs]:
        """Return the last rows up to a step, at most `MAX_CONTEXT`, as one sequence.

        All rows have the same keys; actions that are not known yet are zero.
        """
        in_model = self.mode in IN_MODEL and step > 0
        history = self.imagined if in_model else self.rows
        steps = range(max(history.start, step + 1 - MAX_CONTEXT), step + 1)
        rows = [history[index] for index in steps]
        if in_model:
            rows = [{key: value[0] for key, value in row.items()} for row in rows]
        if steps.start == 0:
            rows = self._earlier_rows + rows
        rows = [dict(row) for row in rows[-MAX_CONTEXT:]]
        for number, row in enumerate(rows):
            row["is_first"] = np.bool_(number == 0)
            for flag in ("is_last", "is_terminal"):
                row[flag] = np.bool_(False)
            row["reward"] = np.float32(row["reward"])
            for key, space in self.loaded.act_space.items():
                row.setdefault(key, space.zeros())
        keys = set.intersection(*(set(row) for row in rows))
        return [{key: row[key] for key in keys} for row in rows]

    # The policy

    def _advance_policy(self, step: int) -> None:
        """Run the policy up to a step, to get its carry and its action there."""
        if self.mode in IN_MODEL and step:
            self.policy_state.run(self._context(step), step)
            return
        row = self.rows[step]
        before = self.rows.get(step - 1)
        if before is None or not self.policy_state.advance(before, row, step):
            self.policy_state.run(self._context(step), step)

    # Data that pages show

    def snapshot(self) -> StepSnapshot:
        """Return the data of the current step that pages show."""
        stored = self.step_data.get(self.cursor)
        action, scalars, inspection = stored or (None, {}, StateInspection())
        return StepSnapshot(
            self.cursor,
            self.rows.get(self.cursor),
            self.imagined.get(self.cursor),
            action,
            scalars,
            inspection,
        )

    def _store_step(self, action: Action | None) -> None:
        """Store action, scalars and inspection of the current step.

        `action` led to this step. After a fork it is None: the stored one is kept.
        """
        step = self.cursor
        if self.step_data.stop == self.step_data.start:
            self.step_data = History(step)
        if action is None and self.step_data.get(step) is not None:
            action = self.step_data[step][0]
        self.step_data.truncate(step)
        inspection = self._inspect()
        entry = (action, self._scalars(inspection), inspection)
        if self.step_data.stop == step:
            self.step_data.append(entry)
        else:
            self.step_data = History(step)
            self.step_data.append(entry)

    def _inspect(self) -> StateInspection:
        """Return the inspection of the state from which actions are chosen.

        That is the carry of the policy, or the first rollout in the world model.
        """
        model, imagination = self.loaded.world_model_env, self.imagination
        model_inspection = StateInspection()
        if imagination is not None and imagination.is_running:
            model_inspection = imagination.inspection
        if self.mode in IN_MODEL or self.policy_state.carry is None:
            return model_inspection
        if isinstance(model, InspectableWorldModelEnv):
            return model.inspect_policy(self.policy_state.carry)._replace(
                context=model_inspection.context
            )
        return model_inspection

    def _scalars(self, inspection: StateInspection) -> dict[str, float]:
        """Return the values of the current step that the page plots."""
        scalars: dict[str, float | None] = {}
        real, imagined = self.rows.get(self.cursor), self.imagined.get(self.cursor)
        if real is not None:
            scalars["reward"] = float(real["reward"])
        if imagined is not None and "cont" in imagined:
            scalars["predicted reward"] = float(imagined["reward"][0])
            scalars["continue"] = float(imagined["cont"][0])
        if self.mode not in IN_MODEL:
            scalars["KL"] = self.policy_state.kl
        scalars["value"] = inspection.value
        scalars["entropy"] = inspection.entropy
        scalars["boundary"] = inspection.boundary
        return {k: v for k, v in scalars.items() if v is not None and np.isfinite(v)}


def _check_possible(mode: str, reason: str) -> None:
    """Raise if there is a reason why a mode is not possible."""
    if reason:
        raise UserError(
            f"{MODES[mode].capitalize()} is not possible: {reason}.\n"
            "  Fix: choose another mode."
        )
