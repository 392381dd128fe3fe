"""`reverie bench --devices N`: the time of an update on one and on N devices.

Both are measured in the same processes: first on rank 0 alone, while the other ranks
wait, then on all ranks. `--bench.process_group True` measures the overhead of
data-parallel code on one device.
"""

from __future__ import annotations

import os
from statistics import median
from typing import Any

import torch

from reverie.bench.table import format_rows
from reverie.bench.update import (
    BenchConfig,
    machine_lock,
    make_benchmark,
    write_results,
)
from reverie.distributed.collective import world_size
from reverie.run.config import Config
from reverie.run.factory import MakeEnv
from reverie.run.folder import system_info
from reverie.run.ranks import make_leader, run_on_one_rank

MIN_EFFICIENCY = 0.6
"""Speedup per device below which a message advises against more devices."""


def bench_devices(
    config: Config, options: BenchConfig, make_env: MakeEnv | None = None
) -> dict[str, Any]:
    """Measure updates on one and on all devices, and print the speedup."""
    ranks, threads = world_size(), torch.get_num_threads()
    with (
        machine_lock(exclusive=True),
        make_benchmark(config, options, make_env) as benchmark,
    ):
        if "OMP_NUM_THREADS" not in os.environ:  # the user does not limit the threads
            torch.set_num_threads(os.cpu_count() or 1)
        alone = benchmark.update()
        torch.set_num_threads(threads)
        leader = make_leader(
            config,
            benchmark.agent,
            benchmark.source,
            benchmark.device,
            benchmark.precision,
        )
        assert leader is not None
        together = benchmark.time(lambda: leader.train(benchmark.feed))[0]
        leader.close()
    rows = {"update on 1 device, ms": alone, f"update on {ranks} devices, ms": together}
    print(format_rows(rows.items()))
    speedup = median(alone) / median(together)
    print(describe_speedup(speedup, ranks))
    results = {"devices": ranks, "alone_ms": alone, "together_ms": together}
    return write_results(config, options, {"about": system_info(), **results})


def bench_process_group(
    config: Config, options: BenchConfig, make_env: MakeEnv | None = None
) -> dict[str, Any]:
    """Measure updates of one process, without and with a process group of one rank.

    With the group, every collective operation is called, but transfers nothing. Both
    are measured alternately, so that other load on the machine affects both.
    """

    def measure() -> tuple[list[float], list[float]]:
        """Return the milliseconds of updates without and with the group."""
        leader = make_leader(
            config, grouped.agent, grouped.source, grouped.device, grouped.precision
        )
        assert leader is not None
        for benchmark in (plain, grouped):  # fill the replay buffers
            benchmark.fill(benchmark.capacity)
        without, with_group = plain.time(
            lambda: plain.agent.train(plain.feed), lambda: leader.train(grouped.feed)
        )
        leader.close()
        return without, with_group

    with (
        machine_lock(exclusive=True),
        make_benchmark(config, options, make_env) as plain,
        make_benchmark(config, options, make_env) as grouped,
    ):
        without, with_group = run_on_one_rank(measure)
    rows = {
        "update without a process group, ms": without,
        "update in a process group of one rank, ms": with_group,
    }
    print(format_rows(rows.items()))
    overhead = median(with_group) / median(without) - 1
    print(f"The process group adds {overhead:.1%}.")
    results = {"without_group_ms": without, "with_group_ms": with_group}
    return write_results(config, options, {"about": system_info(), **results})


def describe_speedup(speedup: float, ranks: int) -> str:
    """Return a sentence about the speedup, and whether more devices would help."""
    text = f"{ranks} devices are {speedup:.2f} times as fast as one."
    if speedup >= MIN_EFFICIENCY * ranks:
        return text
    return (
        f"{text} More devices will not help with this config on this machine: larger "
        "networks or batches use them better."
    )
