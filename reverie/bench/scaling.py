"""How the time of an update grows: with size, batch, length or image.

One config after another, or several brought up side by side in processes of their own:
most of the time goes into building kernels, which they do at once, while a lock on the
machine sees to it that a config is alone when libraries try which of their algorithms
are the fastest, and when it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from typing import Any

import numpy as np

from reverie.api import UserError
from reverie.bench.update import BenchConfig, subject_of, the_machine, write
from reverie.run.config import Config
from reverie.run.factory import MakeEnv
from reverie.run.folder import about
from reverie.run.sequences import watches

Resolve = Callable[[list[str], dict[str, Any]], Config]
"""The user's config with these blocks and settings on top."""

OFF_TREND = 1.3
"""How far a configuration may be from what its neighbours suggest."""

VARIANTS: dict[str, dict[int, tuple[list[str], dict[str, Any]]]] = {
    "size": {n: ([f"size{n}m"], {}) for n in (12, 25, 50, 100, 200, 400)},
    "batch": {n: ([], {r".*\.batch_size": n}) for n in (8, 16, 32, 64)},
    "length": {n: ([], {r".*\.batch_length": n}) for n in (32, 64, 96, 128)},
    "image": {n: ([], {"env.resize": (n, n)}) for n in (64, 80, 96, 112, 128)},
}
"""What can be varied (parameters in millions, sequences, steps of each, pixels): the
blocks and settings on top of the user's."""


def growth(
    resolve: Resolve, options: BenchConfig, make_env: MakeEnv | None = None
) -> dict[str, Any]:
    """Measure updates of a row of configs, print how they grow, and write the JSON."""
    name, variants = options.vary, VARIANTS[options.vary]
    configs = [resolve(*variant) for variant in variants.values()]
    if name != "batch" and watches(configs[0]):
        raise UserError(
            f"What is watched has no {name} to vary.\n  Fix: --bench.vary batch"
        )
    rows: list[dict[str, Any]] = []
    for label, row in zip(variants, _measured(configs, options, make_env), strict=True):
        rows.append({name: label, **row})
        print(f"  {name} {label:>5}: {row['update_ms']:9.3f} ms", flush=True)
    # sizes are named after round numbers, which grow unlike what they stand for
    along = "parameters" if name == "size" else name
    off = trend([row[along] for row in rows], [row["update_ms"] for row in rows])
    for row, factor in zip(rows, off, strict=True):
        row["off_trend"] = factor
    print(growth_table(name, rows))
    return write(configs[0], options, {"about": about(), "growth": rows})


def _measured(
    configs: Sequence[Config], options: BenchConfig, make_env: MakeEnv | None
) -> Iterator[dict[str, Any]]:
    if options.at_once == 1:
        yield from (measure(config, options, make_env) for config in configs)
        return
    with ProcessPoolExecutor(
        options.at_once, mp_context=get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        yield from pool.map(measure, configs, [options] * len(configs))


def measure(
    config: Config, options: BenchConfig, make_env: MakeEnv | None = None
) -> dict[str, Any]:
    """How long an update of this config takes, and what memory."""
    with ExitStack() as stack:
        with the_machine(alone=False):
            subject = stack.enter_context(subject_of(config, options, make_env))
            subject.warm_up()
        with the_machine(alone=True):
            update = subject.update()
        return {
            "parameters": subject.parameters(),
            "update_ms": update.mean,
            "update_ms_all": update.ms,
            **subject.memory(),
        }


def trend(sizes: Sequence[float], times: Sequence[float]) -> list[float]:
    """How far each time is from what its two neighbours suggest; 1 at the ends.

    Costs grow by powers, so the line between neighbours is one of logarithms.
    """
    x, y = np.log(sizes), np.log(times)
    off = np.zeros(len(x))
    for i in range(1, len(x) - 1):
        part = (x[i] - x[i - 1]) / (x[i + 1] - x[i - 1])
        off[i] = y[i] - (y[i - 1] + part * (y[i + 1] - y[i - 1]))
    return [float(factor) for factor in np.exp(off)]


def growth_table(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """How updates grow, for people; what is off the trend is marked."""
    lines = [f"{name:>8} {'params':>9} {'ms':>10} {'grows':>7} {'off trend':>10}"]
    before = None
    for row in rows:
        ms, off = row["update_ms"], row["off_trend"]
        grows = f"{ms / before:.2f}x" if before else ""
        bad = off > OFF_TREND or off < 1 / OFF_TREND
        mark = f"{off:.2f}x" + (" <--" if bad else "")
        params = f"{row['parameters'] / 1e6:.1f}M"
        lines.append(f"{row[name]:>8} {params:>9} {ms:>10.3f} {grows:>7} {mark:>10}")
        before = ms
    return "\n".join(lines)
