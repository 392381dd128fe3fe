"""Compare exported steps with the agent, over many steps with the same random numbers.

Rounding errors can change a sampled or most probable class if two classes are almost
equally probable (a tie). This changes the state by much more than rounding does, so
ties are counted separately, and the exported step continues from the agent's state.

Some outputs are sums of large numbers that nearly cancel, for example the reward of a
two-hot distribution that is not trained yet. Rounding errors of the agent itself change
them by more than the tolerance, so they are compared with an estimate of these errors.
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
from torch.utils._pytree import tree_map_only

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
ROUNDED_STEPS = 8
"""Number of repetitions of a step, with random rounding, that estimate the rounding
errors of its outputs."""
ROUNDING_FACTOR = 4.0
"""Largest allowed difference of an output, in standard deviations of its rounding."""
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
    """Differences between an exported step and the agent."""

    error: float = 0.0
    """Largest difference, without ties and `rounding`; relative for values above 1."""
    ties: int = 0
    """Number of batch elements whose exported step chose another class at a tie."""
    steps: int = 0
    output: str = ""
    """Name of the output with the largest difference; empty if there is none."""
    rounding: float = 0.0
    """Largest difference above `TOLERANCE` within the rounding errors of the agent."""

    def add(self, step: StepComparison) -> Comparison:
        error, output = self.error, self.output
        if step.error > error:
            error, output = step.error, step.output
        ties = self.ties + int(step.tied.sum())
        rounding = max(self.rounding, step.rounding)
        return Comparison(error, ties, self.steps + 1, output, rounding)

    def to_json(self) -> dict[str, Any]:
        data = {"error": self.error, "ties": self.ties, "steps": self.steps}
        return {**data, "rounding": self.rounding}


class StepComparison(NamedTuple):
    """Differences between one exported step and the agent; see `Comparison`."""

    error: float
    tied: np.ndarray
    """Mask of the batch elements with ties."""
    output: str
    rounding: float = 0.0


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


class RandomRounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Changes the result of every operation by a random relative error.

    The error is plus or minus `torch.finfo(dtype).eps`, such as 2^-23 for float32. This
    simulates another order of operations, as in other libraries.
    """

    def __init__(self, seed: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.is_mutable:
            return result
        return tree_map_only(Tensor, self._round, result)

    def _round(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        signs = torch.randint(0, 2, x.shape, generator=self.generator) * 2 - 1
        return x * (1 + torch.finfo(x.dtype).eps * signs.to(x))


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
        compared = compare(step, inputs, noise, reference, exported)
        state = {name: reference[f"{NEXT}{name}"] for name in state}
        for name, value in state.items():  # continue from the agent's state after ties
            policy.state[name][compared.tied] = value[compared.tied]
        result = result.add(compared)
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
            compared = compare(step, inputs, noise, reference, exported)
            results[name] = results[name].add(compared)
            if name == "observe":
                state = {key: reference[f"{NEXT}{key}"] for key in state}
                exported_state = {k: exported[f"{NEXT}{k}"].copy() for k in state}
                for k, x in state.items():  # as in `compare_policy`
                    exported_state[k][compared.tied] = x[compared.tied]
    return results


def compare(
    step: FlatStep,
    inputs: Arrays,
    noise: RecordedNoise,
    reference: Arrays,
    exported: Arrays,
) -> StepComparison:
    """Compare the outputs of one step with those of the agent.

    A number that is NaN or infinite in only one of the steps is an infinite difference.
    """
    errors, rounding = _differences(reference, exported), 0.0
    largest_errors = np.max(list(errors.values()), 0)
    differs = largest_errors > TOLERANCE
    tied = np.zeros_like(differs)
    if differs.any():
        with DecisionMargins(BATCH) as decisions:
            run_step(step, inputs, GivenNoise(noise.noise))
        tied = differs & (decisions.margins < TIE)
    if (differs & ~tied & np.isfinite(largest_errors)).any():
        for name, allowed in _rounding_errors(step, inputs, noise, reference).items():
            accepted = (errors[name] > TOLERANCE) & (errors[name] <= allowed) & ~tied
            accepted &= np.isfinite(errors[name])
            rounding = max(rounding, errors[name][accepted].max(initial=0))
            errors[name][accepted] = 0
    largest = {name: float(x[~tied].max(initial=0)) for name, x in errors.items()}
    output = max(largest, key=largest.__getitem__)
    return StepComparison(largest[output], tied, output, float(rounding))


def _differences(reference: Arrays, other: Arrays) -> Arrays:
    """Return the largest difference of each output, for each batch element.

    Differences are relative for values above 1.
    """
    errors: Arrays = {}
    for name, expected in reference.items():
        is_image = expected.dtype == np.uint8  # rounded, so one level may differ
        value = other[name].astype(float).reshape(BATCH, -1)
        expected = expected.astype(float).reshape(BATCH, -1)
        with np.errstate(invalid="ignore"):
            error = np.maximum(np.abs(value - expected) - is_image, 0)
            error /= np.maximum(1, np.abs(expected))
        error[np.isnan(error)] = np.inf
        is_same = (value == expected) | (np.isnan(value) & np.isnan(expected))
        errors[name] = np.where(is_same, 0, error).max(1, initial=0)
    return errors


def _rounding_errors(
    step: FlatStep, inputs: Arrays, noise: RecordedNoise, reference: Arrays
) -> Arrays:
    """Estimate the rounding errors of each output, for each batch element.

    The step is repeated with random rounding (`RandomRounding`). The result is the
    largest allowed difference, `ROUNDING_FACTOR` times the root mean square change.
    """
    rng, changes = np.random.default_rng(0), []
    for _ in range(ROUNDED_STEPS):
        with RandomRounding(int(rng.integers(2**31))):
            rounded = run_step(step, inputs, GivenNoise(noise.noise))
        changes.append(_differences(reference, rounded))
    return {
        name: ROUNDING_FACTOR * np.sqrt(np.mean([x[name] ** 2 for x in changes], 0))
        for name in reference
    }


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
