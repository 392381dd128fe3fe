"""A session: one simulation that is stepped in a thread at a fixed rate.

The web pages of `reverie play` send commands, which the server passes to `send`; the
thread applies them between steps. After every step and most commands it calls its
listeners with a `View`. Only this thread uses the environment and the world model;
listeners encode and send views.
"""

from __future__ import annotations

import contextvars
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reverie.api import Action, UserError
from reverie.envs.wrappers import RENDERED
from reverie.log.messages import print_message
from reverie.play.controls import (
    chosen_values,
    describe_action,
    human_action,
    probabilities,
)
from reverie.play.load import AGENT_ENV, MODES, RECORDED, LoadedRun
from reverie.play.pane_images import PaneImage, PaneRenderer, concat_images
from reverie.play.recording import complete_rows, save_episode
from reverie.play.simulation import IN_MODEL, MAX_ROLLOUTS, Simulation

DEFAULT_FPS = 8.0
"""Steps per second at speed 1, if the environment does not declare its own."""
SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
END_SECONDS = 0.8
"""How long the last step of an episode is shown before the next episode starts."""
MESSAGE_SECONDS = 4.0
"""How long a message about the episode is shown while it continues."""
MAX_HELD = 32
"""Maximum number of keys that can be held at once."""
MAX_FORK_EVERY = 10_000
"""Maximum number of steps after which rollouts start again."""


class View(NamedTuple):
    """What pages show of one step."""

    number: int  # counts the views of a session
    data: dict[str, Any]
    """Everything but the images: mode, step, scalars, state of the controls."""
    images: list[PaneImage]


Listener = Callable[[View], None]


class Session:
    """Runs a simulation until `close` is called.

    `mode` is one of `MODES`: the agent or a human acts in the environment or in the
    world model, or recorded episodes are shown. With `ask_to_save`, the page asks at
    the end of each episode whether to save it: the view of the last step has
    `awaits_save_answer` set, and the session waits for the command `save_episode`. The
    command `ask_to_save` turns this on or off. With `show_header`, the page shows step,
    action, reward and other values above the images.
    """

    def __init__(
        self,
        loaded: LoadedRun,
        mode: str = AGENT_ENV,
        seed: int = 0,
        ask_to_save: bool = False,
        show_header: bool = False,
    ):
        self.loaded, self.show_header = loaded, show_header
        self.ask_to_save = ask_to_save
        self.simulation = Simulation(loaded, seed)
        self.simulation.keep_all = ask_to_save  # all steps of an episode are saved
        predicted = (
            list(loaded.world_model_env.predicted_keys)
            if loaded.world_model_env
            else []
        )
        self.renderer = PaneRenderer(loaded.obs_space, predicted, loaded.crop)
        self.fps = loaded.fps or DEFAULT_FPS
        self.speed, self.paused = 1.0, False
        self._is_idle = False  # no page is connected
        self.awaits_save_answer = False  # the page asks whether to save this episode
        self.message, self._message_end = "", 0.0  # text, and when it is removed
        self.listeners: list[Listener] = []
        self.view: View | None = None
        self._return = self._imagined_return = 0.0  # sums of rewards so far
        self._held: list[str] = []  # codes of the keys that are held
        self._tapped: list[str] = []  # pressed and released since the last step
        self._sliders: dict[int, float] = {}  # values by number of the control
        self._input_timestamp: float | None = None  # of the newest input, for latency
        self._step_times: deque[float] = deque(maxlen=60)  # to measure the rate
        self._num_views = 0
        self._commands: queue.Queue[dict[str, Any] | None] = queue.Queue(256)
        # The modules that may be imported (`reverie/run/trust.py`) are a context
        # variable, whose value a new thread gets only with a copy of the context.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name="session", daemon=True
        )
        self._first_mode = mode

    # Methods for other threads

    def start(self) -> None:
        self._thread.start()

    def send(self, command: dict[str, Any]) -> None:
        """Queue a command for the thread; it is dropped if the queue is full."""
        try:
            self._commands.put_nowait(command)
        except queue.Full:
            return

    def close(self) -> None:
        """Stop the thread and close the environment."""
        if self._thread.is_alive():
            self._commands.put(None)
            self._thread.join(timeout=30)
        self.loaded.close()

    def describe(self) -> dict[str, Any]:
        """Return the message to a new page: what stays the same during a session."""
        config = self.loaded.run.config
        modes = [
            {"name": name, "label": MODES[name], "reason": reason}
            for name, reason in self.loaded.unavailable_reasons().items()
        ]
        return {
            "type": "hello",
            "task": config.task,
            "agent": config.agent,
            "logdir": self.loaded.run.folder.name,
            "checkpoint": self.loaded.run.checkpoint.name,
            "modes": modes,
            "controls": [asdict(control) for control in self.loaded.controls],
            "speeds": SPEEDS,
            "max_rollouts": MAX_ROLLOUTS if self.simulation.imagination else 0,
            "show_header": self.show_header,
        }

    # Loop of the thread

    def _run(self) -> None:
        """Step the simulation at its rate, and apply commands between steps."""
        self._apply({"type": "mode", "mode": self._first_mode})
        next_step = time.perf_counter()
        while True:
            now = time.perf_counter()
            can_step = self._can_step
            # None waits for a command without a limit; 0.0 does not wait
            wait = max(0.0, next_step - now) if can_step else None
            try:
                command = self._commands.get(timeout=wait) if wait != 0.0 else None
                if wait != 0.0 and command is None:  # `close` was called
                    return
                if command is not None:
                    self._apply(command)
                    continue
            except queue.Empty:
                pass
            # apply all queued commands, so that keys are sampled right before the step
            while not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    return
                self._apply(command)
            if not self._can_step:
                continue
            if self.simulation.end_reason:
                self._guard(self._next_episode)
                next_step = time.perf_counter()
            period = 1 / (self.fps * self.speed)
            self._guard(self._step)
            if self.simulation.end_reason:
                period += END_SECONDS / self.speed
            next_step = max(next_step + period, time.perf_counter())

    @property
    def _can_step(self) -> bool:
        return not (self.paused or self.awaits_save_answer or self._is_idle)

    def _guard(self, function: Callable[[], None]) -> None:
        """Call a function; pause and show the error if it fails."""
        try:
            function()
        except UserError as error:
            self._fail(str(error).replace("\n  Fix:", " Fix:"))
        except Exception as error:
            print_message(traceback.format_exc())
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, message: str) -> None:
        """Pause, and show an error until the next step."""
        self.paused, self.message = True, message
        self._message_end = 0.0
        self._publish()

    def _show_message(self, message: str) -> None:
        """Show a message for some seconds."""
        self.message = message
        self._message_end = time.perf_counter() + MESSAGE_SECONDS

    def _apply(self, command: dict[str, Any]) -> None:
        """Apply one command; invalid ones are ignored."""
        handler = getattr(self, f"_on_{command.get('type')}", None)
        if handler is not None:
            self._guard(lambda: handler(command))

    # Commands

    def _on_keys(self, command: dict[str, Any]) -> None:
        held = [str(key) for key in command.get("held", ())][:MAX_HELD]
        self._tapped += [key for key in held if key not in self._held]
        del self._tapped[:-MAX_HELD]
        self._held = held
        self._store_timestamp(command)

    def _on_slider(self, command: dict[str, Any]) -> None:
        number, value = int(command["number"]), float(command["value"])
        if 0 <= number < len(self.loaded.controls) and np.isfinite(value):
            self._sliders[number] = value
        self._store_timestamp(command)

    def _store_timestamp(self, command: dict[str, Any]) -> None:
        """Store when the page sent this input, if the command says so."""
        timestamp = command.get("timestamp")
        self._input_timestamp = (
            float(timestamp) if isinstance(timestamp, int | float) else None
        )

    def _on_idle(self, command: dict[str, Any]) -> None:
        """Stop stepping while no page is connected. The server sends this command."""
        self._is_idle = bool(command["on"])

    def _on_mode(self, command: dict[str, Any]) -> None:
        self._start(str(command["mode"]))

    def _on_restart(self, command: dict[str, Any]) -> None:
        """Start another episode; stay paused, except for recorded episodes."""
        paused = self.paused and self.simulation.mode != RECORDED
        self._start(self.simulation.mode, self._seed_of(command), paused)

    def _on_pause(self, command: dict[str, Any]) -> None:
        self.paused = bool(command.get("on", not self.paused))
        self._publish()

    def _on_step(self, command: dict[str, Any]) -> None:
        self.paused = True
        if self.awaits_save_answer:
            return
        if self.simulation.end_reason:
            self._next_episode(paused=True)
        else:
            self._step()

    def _on_speed(self, command: dict[str, Any]) -> None:
        self.speed = min(max(float(command["speed"]), SPEEDS[0]), SPEEDS[-1])
        self._publish()

    def _on_fork(self, command: dict[str, Any]) -> None:
        """Start imagined rollouts at a step; by default, the one that is shown."""
        self._seek(command)
        self.simulation.fork()
        self._publish()

    def _on_rollouts(self, command: dict[str, Any]) -> None:
        count = min(max(int(command["count"]), 1), MAX_ROLLOUTS)
        self.simulation.rollouts = count
        self.simulation.fork()
        self._publish()

    def _on_fork_every(self, command: dict[str, Any]) -> None:
        self.simulation.fork_every = min(max(int(command["steps"]), 0), MAX_FORK_EVERY)
        self._publish()

    def _on_seek(self, command: dict[str, Any]) -> None:
        self.paused = True
        self._seek(command)
        self._publish()

    def _on_human(self, command: dict[str, Any]) -> None:
        self.simulation.set_human(bool(command["on"]))
        self._publish()

    def _on_ask_to_save(self, command: dict[str, Any]) -> None:
        """Set whether the page asks at the end of each episode whether to save it."""
        self.ask_to_save = self.simulation.keep_all = bool(command["on"])
        self._publish()

    def _on_save_episode(self, command: dict[str, Any]) -> None:
        """Save the episode or discard it, as the user answered; start the next one."""
        if not self.awaits_save_answer:
            return
        self.awaits_save_answer = False
        if bool(command["on"]):
            paths = self._save_episode()
            names = ", ".join(path.name for path in paths)
            self._show_message(f"Saved {names}.")
        self._next_episode()

    def _on_open(self, command: dict[str, Any]) -> None:
        source, number = str(command["source"]), int(command["number"])
        self.simulation.open_recorded(self.loaded.episodes.read(source, number))
        self._show_first_step()

    # Steps

    def _start(self, mode: str, seed: int | None = None, paused: bool = False) -> None:
        """Start an episode and publish its first step; ignore unknown modes."""
        if mode not in MODES:
            return
        self.simulation.start(mode, seed)
        self._show_first_step(paused)

    def _show_first_step(self, paused: bool = False) -> None:
        """Reset what belongs to the previous episode, and publish the first step."""
        self.awaits_save_answer = False
        self.paused = paused
        # the message about a saved episode stays while the next episode starts
        if not self.message.startswith("Saved"):
            self.message = ""
        self._return = self._imagined_return = 0.0
        self._publish()

    def _next_episode(self, paused: bool = False) -> None:
        """Start the next episode in the same mode; pause at the end of a recording."""
        if self.simulation.mode == RECORDED:
            self.paused = True
            self._publish()
            return
        self._start(self.simulation.mode, paused=paused)

    def _step(self) -> None:
        """Advance the simulation by one step, and publish it."""
        simulation = self.simulation
        if simulation.end_reason:
            return
        was_live = simulation.is_live  # False while stored steps are shown again
        imagination = simulation.imagination
        resets = imagination.context_resets if imagination else 0
        simulation.step(self._human_action)
        scalars = simulation.snapshot().scalars
        # stored steps that are shown again do not count; those of a recording do
        if was_live or simulation.mode == RECORDED:
            self._return += scalars.get("reward", 0.0)
            self._imagined_return += scalars.get("predicted reward", 0.0)
        if time.perf_counter() >= self._message_end:
            self.message = ""
        if imagination and imagination.context_resets > resets:
            self._show_message(
                "The context of the world model was full and was cleared: the rollouts "
                "continue from their newest frame, without the earlier ones."
            )
        self._step_times.append(time.perf_counter())
        if simulation.end_reason and self.ask_to_save and simulation.mode != RECORDED:
            self.awaits_save_answer = was_live
        self._publish()

    def _human_action(self) -> Action:
        """Return the action of the held keys, those tapped since the last step, and the
        sliders."""
        held = self._held + [key for key in self._tapped if key not in self._held]
        self._tapped.clear()
        return human_action(
            self.loaded.controls, self.loaded.act_space, held, self._sliders
        )

    def _seek(self, command: dict[str, Any]) -> None:
        """Show the step of a command, if it has one."""
        if isinstance(command.get("step"), int):
            self.simulation.seek(command["step"])

    def _seed_of(self, command: dict[str, Any]) -> int | None:
        """Return the seed of a command, clipped to 31 bits; None if it has none."""
        seed = command.get("seed")
        return min(max(int(seed), 0), 2**31 - 1) if seed is not None else None

    def _save_episode(self) -> list[Path]:
        """Write the episode, or its first rollout, as data and video."""
        simulation, loaded = self.simulation, self.loaded
        imagined = simulation.mode in IN_MODEL
        history = simulation.imagined if imagined else simulation.rows
        rows = [history[step] for step in range(history.start, history.stop)]
        if imagined:
            rows = [{key: value[0] for key, value in row.items()} for row in rows]
        obs_space = (
            loaded.world_model_env.obs_space
            if imagined and loaded.world_model_env
            else None
        )
        rows = complete_rows(rows, loaded.act_space, bool(rows[-1]["is_terminal"]))
        renderer = self.renderer
        keys = renderer.predicted_keys if imagined else renderer.image_keys
        frames = [concat_images(row, keys or [RENDERED]) for row in rows]
        return save_episode(
            loaded.run.folder,
            rows,
            obs_space or loaded.obs_space,
            loaded.act_space,
            [frame for frame in frames if frame is not None],
            imagined,
            self.fps,
        )

    # Views

    def _publish(self) -> None:
        """Make a view of the current step and send it to all listeners."""
        simulation = self.simulation
        if simulation.episode < 0:  # no episode could be started
            self._send_view({"type": "view", "error": self.message}, [])
            return
        snapshot = simulation.snapshot()
        inspection = snapshot.inspection
        history = (
            simulation.imagined if simulation.mode in IN_MODEL else simulation.rows
        )
        imagination = simulation.imagination
        data: dict[str, Any] = {
            "type": "view",
            "mode": simulation.mode,
            "human": simulation.human,
            "episode": simulation.episode,
            "step": snapshot.step,
            "first": history.start,  # first and last step that can be shown
            "last": history.stop - 1,
            # step at which the rollouts were started
            "fork": simulation.imagined.start
            if snapshot.imagined is not None
            else None,
            # number of imagined steps since the last real step
            "imagined_steps": imagination.imagined_steps if imagination else None,
            "context_resets": imagination.context_resets if imagination else 0,
            "context": inspection.context,
            "rollouts": simulation.rollouts,
            "fork_every": simulation.fork_every,
            "seed": simulation.seed,
            "end_reason": simulation.end_reason,
            "awaits_save_answer": self.awaits_save_answer,
            "ask_to_save": self.ask_to_save,
            "paused": self.paused,
            "speed": self.speed,
            "fps": round(self._measured_fps(), 1),
            "target_fps": self.fps * self.speed,
            "message": self.message,
            "return": round(self._return, 4),
            "imagined_return": round(self._imagined_return, 4),
            "scalars": {k: round(v, 5) for k, v in snapshot.scalars.items()},
            "vectors": self.renderer.observation_vectors(snapshot),
            "timestamp": self._input_timestamp,
        }
        controls = self.loaded.controls
        if snapshot.action is not None:
            data["action"] = describe_action(controls, snapshot.action)
            data["chosen"] = chosen_values(controls, snapshot.action)
        data["probs"] = probabilities(controls, inspection.probs)
        if inspection.latents is not None:
            data["latents"] = inspection.latents.tolist()
            data["classes"] = inspection.classes
        self._send_view(data, self.renderer.render(snapshot))

    def _send_view(self, data: dict[str, Any], images: list[PaneImage]) -> None:
        self._num_views += 1
        data["number"] = self._num_views
        self.view = View(self._num_views, data, images)
        for listener in list(self.listeners):
            listener(self.view)

    def _measured_fps(self) -> float:
        """Return the rate of the last steps; 0 while paused."""
        if len(self._step_times) < 2 or self.paused:
            return 0.0
        return (len(self._step_times) - 1) / max(
            self._step_times[-1] - self._step_times[0], 1e-6
        )
