"""Update time by algorithm, or by the size of model, batch, sequences or images.

Configs are measured one after another, or prepared at the same time in several
processes, because most of the time is spent on building kernels. A lock ensures that a
config is alone on the machine when it is measured and when libraries choose their
fastest algorithms by timing them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from typing import Any

import numpy as np

from reverie.api import UserError
from reverie.bench.update import (
    BenchConfig,
    machine_lock,
    make_benchmark,
    write_results,
)
from reverie.run.config import Config
from reverie.run.factory import MakeEnv
from reverie.run.folder import system_info
from reverie.run.offline.datasets import trains_on_sequences

Resolve = Callable[..., Config]
"""`resolve(presets, settings, base=())` returns the config of the user with additional
presets and settings; the presets `base` come before those of the user."""

MAX_DEVIATION = 1.3
"""Times with `deviations` above this factor, or below its inverse, are marked."""

ALGORITHM = "algorithm"
VARIANTS: dict[str, dict[int, tuple[list[str], dict[str, Any]]]] = {
    "size": {n: ([f"size{n}m"], {}) for n in (12, 25, 50, 100, 200, 400)},
    "batch": {n: ([], {r".*\.batch_size": n}) for n in (8, 16, 32, 64)},
    "length": {n: ([], {r".*\.batch_length": n}) for n in (32, 64, 96, 128)},
    "image": {n: ([], {"env.resize": (n, n)}) for n in (64, 80, 96, 112, 128)},
}
"""Values of each quantity (million parameters, sequences, steps, pixels), with the
presets and settings that set them."""
ALGORITHMS: dict[str, tuple[list[str], dict[str, Any], list[str]]] = {
    "default": ([], {}, []),
    "plan2explore": (["plan2explore"], {}, []),
    "curious_replay": (["curious_replay"], {}, []),
    "harmony": ([], {"dreamer.harmony": True}, []),
    "barlow": ([], {"dreamer.representation": "barlow"}, []),
    "infonce": ([], {"dreamer.representation": "infonce"}, []),
    "prototypes": ([], {"dreamer.representation": "prototypes"}, []),
    "dreamerv3_torch": ([], {}, ["dreamerv3_torch"]),
}
"""Algorithms that `vary` compares, with the arguments of `Resolve`."""


def bench_scaling(
    resolve: Resolve, options: BenchConfig, make_env: MakeEnv | None = None
) -> dict[str, Any]:
    """Measure updates of several configs, print a table, and write the results."""
    name = options.vary
    configs = (
        algorithm_configs(resolve)
        if name == ALGORITHM
        else {value: resolve(*x) for value, x in VARIANTS[name].items()}
    )
    first = next(iter(configs.values()))
    if name != "batch" and trains_on_sequences(first):
        raise UserError(
            f"{name} cannot be varied for agents that train on sequence datasets.\n"
            "  Fix: --bench.vary batch"
        )
    rows: list[dict[str, Any]] = []
    results = _measure_all(list(configs.values()), options, make_env)
    for value, row in zip(configs, results, strict=True):
        rows.append({name: value, **row})
        print(f"  {name} {value:>5}: {row['update_ms']:9.3f} ms", flush=True)
    if name == ALGORITHM:
        print(algorithm_table(rows))
        return write_results(first, options, {"about": system_info(), name: rows})
    # the names of the size presets are not proportional to their parameters
    x = "parameters" if name == "size" else name
    factors = deviations([row[x] for row in rows], [row["update_ms"] for row in rows])
    for row, factor in zip(rows, factors, strict=True):
        row["deviation"] = factor
    print(scaling_table(name, rows))
    return write_results(first, options, {"about": system_info(), "scaling": rows})


def algorithm_configs(resolve: Resolve) -> dict[str, Config]:
    """Return the configs by algorithm, without duplicates."""
    configs: dict[str, Config] = {}
    for name, variant in ALGORITHMS.items():
        try:
            config = resolve(*variant)
        except UserError:  # the agent does not have this algorithm
            if not configs:  # the first one is the user's own config
                raise
            continue
        parts = [(c.agent_config, c.explore.policy) for c in configs.values()]
        if (config.agent_config, config.explore.policy) not in parts:
            configs[name] = config
    return configs


def _measure_all(
    configs: Sequence[Config], options: BenchConfig, make_env: MakeEnv | None
) -> Iterator[dict[str, Any]]:
    """Yield the measurements of all configs; several jobs ignore `make_env`."""
    if options.jobs == 1:
        yield from (measure_update(config, options, make_env) for config in configs)
        return
    with ProcessPoolExecutor(
        options.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        yield from pool.map(measure_update, configs, [options] * len(configs))


def measure_update(
    config: Config, options: BenchConfig, make_env: MakeEnv | None = None
) -> dict[str, Any]:
    """Measure time and memory of an update, and count the parameters."""
    with ExitStack() as stack:
        with machine_lock(exclusive=False):
            benchmark = stack.enter_context(make_benchmark(config, options, make_env))
            benchmark.warm_up()
        with machine_lock(exclusive=True):
            update_ms = benchmark.update()
        return {
            "parameters": benchmark.parameters(),
            "update_ms": sum(update_ms) / len(update_ms),
            "update_ms_all": update_ms,
            **benchmark.memory(),
        }


def deviations(sizes: Sequence[float], times: Sequence[float]) -> list[float]:
    """Return each time divided by the time interpolated from its two neighbors.

    A factor far from 1 is unusually slow or fast for its size. First and last are 1.
    The interpolation is linear in logarithms, because times grow as powers of sizes.
    """
    x, y = np.log(sizes), np.log(times)
    logs = np.zeros(len(x))
    for i in range(1, len(x) - 1):
        fraction = (x[i] - x[i - 1]) / (x[i + 1] - x[i - 1])
        logs[i] = y[i] - (y[i - 1] + fraction * (y[i + 1] - y[i - 1]))
    return [float(factor) for factor in np.exp(logs)]


def algorithm_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a text table of algorithms, with their times relative to the first."""
    lines = [f"{ALGORITHM:>16} {'params':>9} {'ms':>10} {'ratio':>7}"]
    for row in rows:
        ms, params = row["update_ms"], f"{row['parameters'] / 1e6:.1f}M"
        ratio = f"{ms / rows[0]['update_ms']:.2f}x"
        lines.append(f"{row[ALGORITHM]:>16} {params:>9} {ms:>10.3f} {ratio:>7}")
    return "\n".join(lines)


def scaling_table(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return a text table in which large deviations are marked with an arrow."""
    lines = [f"{name:>8} {'params':>9} {'ms':>10} {'growth':>7} {'deviation':>10}"]
    previous = None
    for row in rows:
        ms, factor = row["update_ms"], row["deviation"]
        growth = f"{ms / previous:.2f}x" if previous else ""
        is_marked = factor > MAX_DEVIATION or factor < 1 / MAX_DEVIATION
        deviation = f"{factor:.2f}x" + (" <--" if is_marked else "")
        params = f"{row['parameters'] / 1e6:.1f}M"
        lines.append(
            f"{row[name]:>8} {params:>9} {ms:>10.3f} {growth:>7} {deviation:>10}"
        )
        previous = ms
    return "\n".join(lines)
