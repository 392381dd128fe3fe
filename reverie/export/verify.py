"""Compare exported steps with the agent, over many steps with the same random numbers.

Rounding errors can change a sampled or most probable class if two classes are almost
equally probable (a tie). This changes the state by much more than rounding does, so
ties are counted separately, and the exported step continues from the agent's state.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from reverie.export.env_step import env_space
from reverie.export.runner import Policy
from reverie.export.steps import NEXT, FlatStep, GivenNoise, RecordedNoise
from reverie.run.player import Player
from reverie.spaces import Spaces, agent_obs_space, get_leaf, to_nested

STEPS = 100
"""Recurrent steps of the comparison."""
BATCH = 4
"""Batch size of the comparison."""
TOLERANCE = 1e-4
"""Largest allowed difference; relative for values above 1."""
TIE = 1e-5
"""Largest margin of a decision that counts as a tie; see `DecisionMargins`."""
REPEATS = 50
"""Number of timed steps of each policy; `REPEATS // 5` steps before are not timed."""
RESET_RATE = 0.05
"""Probability that an episode starts in a step."""

aten = torch.ops.aten
Arrays = dict[str, np.ndarray]
ExportedStep = Callable[[Arrays], Arrays]
"""An exported step: a function from inputs to outputs, arrays by name."""
LoadStep = Callable[[Path, dict[str, Any]], ExportedStep]
"""Loads a step from a file, given its description in `policy.json`."""


class Comparison(NamedTuple):
    """Differences of an exported step to the agent."""

    error: float = 0.0
    """Largest difference, except for ties; relative for values above 1."""
    ties: int = 0
    """Number of batch elements whose exported step chose another class at a tie."""
    steps: int = 0
    output: str = ""
    """Name of the output with the largest difference; empty if there is none."""

    def add(self, error: float, ties: int, output: str) -> Comparison:
        if error <= self.error:
            error, output = self.error, self.output
        return Comparison(error, self.ties + ties, self.steps + 1, output)

    def to_json(self) -> dict[str, Any]:
        return {"error": self.error, "ties": self.ties, "steps": self.steps}


class DecisionMargins(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records how close a step was to another discrete result, per batch element.

    `margins` is the smallest difference of compared numbers, of the two largest values
    of an argmax, and of a rounded number to the nearest rounding threshold.
    """

    def __init__(self, batch: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self.margins = np.full(batch, np.inf)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is aten.argmax.default and len(args) > 1 and args[0].shape[args[1]] > 1:
            top = args[0].float().topk(2, args[1]).values.unbind(args[1])
            self._record(top[0] - top[1])
        elif func in COMPARISONS and all(isinstance(x, Tensor) for x in args[:2]):
            if args[0].is_floating_point():
                self._record((args[0] - args[1]).abs())
        elif func is aten.round.default:
            self._record(0.5 - (args[0] - result).abs())
        return result

    def _record(self, margin: Tensor) -> None:
        batch = len(self.margins)
        if margin.ndim and margin.shape[0] == batch:
            smallest = margin.reshape(batch, -1).amin(1).cpu().numpy()
            self.margins = np.minimum(self.margins, smallest)


COMPARISONS = (aten.le.Tensor, aten.lt.Tensor, aten.ge.Tensor, aten.gt.Tensor)


def compare_policy(
    player: Player, step: FlatStep, folder: Path, load: LoadStep
) -> Comparison:
    """Compare an exported policy with its step in PyTorch.

    The actions of the step are also compared with those of `player.act`. All get the
    same random observations and noise.
    """
    policy, rng = Policy(folder, BATCH, load=load), np.random.default_rng(0)
    obs_space, info = agent_obs_space(player.obs_space), policy.info
    state, result = dict(policy.state), Comparison()
    player.reset()
    for seed in range(STEPS):
        obs = to_nested(obs_space, sample_values(obs_space, rng, BATCH))
        policy.reset(rng.random(BATCH) < RESET_RATE)
        inputs = {x["name"]: policy.observe(x, obs) for x in info["observations"]}
        inputs |= {"is_first": policy.is_first, **state}
        noise = RecordedNoise(seed)
        reference = run_step(step, inputs, noise)
        player.agent.seed_policy(seed)  # type: ignore[attr-defined]
        action = player.act(obs, info["greedy"], is_first=policy.is_first)
        _check_actions(_actions_by_name(info, action), reference)
        action = policy.act(obs, name_noise(step, noise) or None)
        exported = {**_actions_by_name(info, action), **_to_next_state(policy.state)}
        error, tied, output = compare(step, inputs, noise, reference, exported)
        state = {name: reference[f"{NEXT}{name}"] for name in state}
        for name, value in state.items():  # continue from the agent's state after ties
            policy.state[name][tied] = value[tied]
        result = result.add(error, int(tied.sum()), output)
    return result


def compare_world(
    steps: dict[str, FlatStep],
    exported_steps: dict[str, ExportedStep],
    spaces: dict[str, Spaces],
) -> dict[str, Comparison]:
    """Compare the exported steps of a world model with those in PyTorch.

    `spaces` are the inputs of each step. `observe` is recurrent; `imagine` and `decode`
    start from the states that it infers.
    """
    rng, observe = np.random.default_rng(0), steps["observe"]
    shapes = {x.name: (BATCH, *x.shape) for x in observe.state}
    dtypes = {x.name: x.dtype for x in observe.state}
    state = {name: np.zeros(shape, dtypes[name]) for name, shape in shapes.items()}
    exported_state, results = state, {name: Comparison() for name in steps}
    for seed in range(STEPS):
        for name, step in steps.items():
            values = {k: x.sample(rng, BATCH) for k, x in spaces[name].items()}
            if "is_first" in values:
                values["is_first"] = (rng.random(BATCH) < RESET_RATE) | (seed == 0)
            noise = RecordedNoise(seed)
            inputs = {**values, **state}
            reference = run_step(step, inputs, noise)
            start = exported_state if name == "observe" else state
            tensors = {**values, **start, **name_noise(step, noise)}
            exported = exported_steps[name](tensors)
            error, tied, output = compare(step, inputs, noise, reference, exported)
            results[name] = results[name].add(error, int(tied.sum()), output)
            if name == "observe":
                state = {key: reference[f"{NEXT}{key}"] for key in state}
                mask = {
                    k: tied.reshape(-1, *[1] * (x.ndim - 1)) for k, x in state.items()
                }
                exported_state = {
                    k: np.where(mask[k], x, exported[f"{NEXT}{k}"])
                    for k, x in state.items()
                }
    return results


def compare(
    step: FlatStep,
    inputs: Arrays,
    noise: RecordedNoise,
    reference: Arrays,
    exported: Arrays,
) -> tuple[float, np.ndarray, str]:
    """Return the largest difference of batch elements without ties, a mask of the batch
    elements with ties, and the name of the output with the largest difference.

    A number that is NaN or infinite in only one of the steps is an infinite difference.
    """
    errors: Arrays = {}
    for name, expected in reference.items():
        is_image = expected.dtype == np.uint8  # rounded, so one level may differ
        value = exported[name].astype(float).reshape(BATCH, -1)
        expected = expected.astype(float).reshape(BATCH, -1)
        with np.errstate(invalid="ignore"):
            error = np.maximum(np.abs(value - expected) - is_image, 0)
            error /= np.maximum(1, np.abs(expected))
        error[np.isnan(error)] = np.inf
        is_same = (value == expected) | (np.isnan(value) & np.isnan(expected))
        errors[name] = np.where(is_same, 0, error).max(1, initial=0)
    differs = np.max(list(errors.values()), 0) > TOLERANCE
    tied = np.zeros_like(differs)
    if differs.any():
        with DecisionMargins(BATCH) as decisions:
            run_step(step, inputs, GivenNoise(noise.noise))
        tied = differs & (decisions.margins < TIE)
    largest = {name: float(x[~tied].max(initial=0)) for name, x in errors.items()}
    output = max(largest, key=largest.__getitem__)
    return largest[output], tied, output


def run_step(step: FlatStep, inputs: Arrays, rng: GivenNoise) -> Arrays:
    """Run a step in PyTorch, on arrays by name."""
    names = [x.name for x in (*step.inputs, *step.state)]
    with torch.no_grad():
        outputs = step.run([torch.tensor(inputs[name]) for name in names], rng)
    arrays = [x.numpy() for x in outputs]
    return dict(zip(step.output_names, arrays, strict=True))


def name_noise(step: FlatStep, noise: RecordedNoise) -> Arrays:
    """Return recorded noise by the names of the noise inputs."""
    pairs = zip(step.noise, noise.noise, strict=True)
    return {info.name: tensor.contiguous().numpy() for info, tensor in pairs}


def sample_values(spaces: Spaces, rng: np.random.Generator, batch: int) -> Arrays:
    """Return random values in the environment's own dtypes and shapes."""
    return {key: env_space(space).sample(rng, batch) for key, space in spaces.items()}


def measure_latency(player: Player, folder: Path, load: LoadStep) -> dict[str, float]:
    """Return the median milliseconds of one step with batch size 1."""
    policy, rng = Policy(folder, load=load), np.random.default_rng(0)
    obs_space = agent_obs_space(player.obs_space)
    values = sample_values(obs_space, rng, 1)
    obs = to_nested(obs_space, {key: value[0] for key, value in values.items()})
    greedy = policy.info["greedy"]
    player.reset()
    functions: dict[str, Callable[[], Any]] = {
        "exported": lambda: policy.act(obs),
        "agent": lambda: player.act(obs, greedy),
    }
    return {name: _median_ms(run) for name, run in functions.items()}


def _median_ms(run: Callable[[], Any]) -> float:
    """Return the median duration of a call in milliseconds, after a warm-up."""
    for _ in range(REPEATS // 5):
        run()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1000 * float(np.median(times))


def _check_actions(action: Arrays, reference: Arrays) -> None:
    """Raise unless the step in PyTorch has chosen the actions of the agent."""
    for name, value in action.items():
        if not np.allclose(value, reference[name], TOLERANCE, TOLERANCE):
            raise RuntimeError(
                f"`export_policy` of the agent and its `policy` differ in {name}."
            )


def _actions_by_name(info: dict[str, Any], action: Any) -> Arrays:
    return {
        x["name"]: np.asarray(get_leaf(action, tuple(x["path"])))
        for x in info["actions"]
    }


def _to_next_state(state: Arrays) -> Arrays:
    return {f"{NEXT}{name}": value for name, value in state.items()}
