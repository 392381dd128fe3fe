"""Text tables of benchmark results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import Any


def format_table(results: dict[str, Any]) -> str:
    """Format the results of one config."""
    title = (
        f"{results['agent']} on {results['task']}: {results['parameters'] / 1e6:.1f}M "
        f"parameters, {results['device']}, {results['precision']}, "
        f"--compile {results['compile']}"
    )
    rows: list[tuple[str, Any]] = [
        ("process start to first update, s", results["first_update_s"]),
        *((f"{name}, ms", ms) for name, ms in _timings(results)),
    ]
    if results["sections_ms"]:
        total = sum(fmean(ms) for ms in results["sections_ms"].values())
        rows.append(("sum of the sections, ms", total))
    rows.append(("updates per second", 1000 / fmean(results["update_ms"])))
    if "env_steps_per_s" in results:
        rows.append(("environment steps per second", results["env_steps_per_s"]))
    for operation, rate in results.get("replay_mb_per_s", {}).items():
        rows.append((f"replay {operation}, MB/s", rate))
    if "sequences_per_s" in results:
        rows.append(("loaded sequences per second", results["sequences_per_s"]))
    for name, peak in results["sections_gb"].items():
        rows.append((f"peak GPU memory of {name}, GB", peak))
    labels = {
        "peak_gb": "peak memory, GB",
        "gpu_peak_gb": "peak GPU memory, GB",
        "gpu_replay_gb": "replay buffer on the GPU, GB",
    }
    rows += [(label, results[key]) for key, label in labels.items() if key in results]
    return title + "\n" + format_rows(rows)


def format_end_to_end(results: dict[str, Any]) -> str:
    """Format the seconds of each part by phase of a run, and rates during training."""
    phases = results["phases"]
    training = phases["training"]["seconds"]
    names = list(phases)
    lines = [
        f"{results['agent']} on {results['task']}: {results['device']}, "
        f"{results['precision']}, --compile {results['compile']}, environments step "
        f"{'while' if results['overlap'] else 'before'} the agent trains",
        "".join([f"  {'seconds':<24}", *(f"{x:>10}" for x in names), "  of training"]),
    ]
    parts = dict.fromkeys(part for name in names for part in phases[name]["parts_s"])
    for part in parts:
        seconds = [phases[name]["parts_s"].get(part, 0.0) for name in names]
        share = phases["training"]["parts_s"].get(part, 0.0) / training
        lines.append(
            f"  {part:<24}"
            + "".join(f"{x:>10.3f}" for x in seconds)
            + f"{share:>12.1%}"
        )
    totals = "".join(f"{phases[name]['seconds']:>10.3f}" for name in names)
    lines.append(f"  {'total':<24}{totals}{1:>12.1%}")
    rows = [
        ("process start to first update, s", results["first_update_s"]),
        ("process start to end, s", results["seconds"]),
        ("agent steps per second", results["agent_steps_per_s"]),
        ("updates per second", results["updates_per_s"]),
    ]
    if "gpu_busy" in results:
        rows.append(("GPU busy, share of training", results["gpu_busy"]))
        rows.append(("GPU time per update, ms", results["gpu_ms_per_update"]))
    return "\n".join(lines) + "\n" + format_rows(rows)


def _timings(results: dict[str, Any]) -> Iterator[tuple[str, list[float]]]:
    """Yield labels and repeated measurements in milliseconds."""
    yield "update", results["update_ms"]
    for name, ms in results["sections_ms"].items():
        yield f"  {name}", ms
    if "batch_ms" in results:
        yield "loading a batch", results["batch_ms"]
    for envs, ms in results.get("policy_ms", {}).items():
        yield f"policy, {envs} env{'s' if envs != '1' else ''}", ms


def format_rows(rows: Iterable[tuple[str, Any]]) -> str:
    """Format one row per value; repeated measurements as mean ± half their range."""
    lines = []
    for name, value in rows:
        repeated = isinstance(value, list)
        mean = fmean(value) if repeated else value
        spread = f" ± {(max(value) - min(value)) / 2:.3f}" if repeated else ""
        lines.append(f"  {name:<32} {mean:>12.3f}{spread}")
    return "\n".join(lines)
