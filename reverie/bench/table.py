"""What a bench found, for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any


def table(found: dict[str, Any]) -> str:
    """The results of one config, for people."""
    head = (
        f"{found['agent']} on {found['task']}: {found['parameters'] / 1e6:.1f}M "
        f"parameters, {found['device']}, {found['precision']}, "
        f"--compile {found['compile']}"
    )
    rows: list[tuple[str, Any]] = [
        ("first update, s from the start", found["first_update_s"]),
        *((f"{name}, ms", ms) for name, ms in _times(found)),
    ]
    whole, pieces = _mean(found["update_ms"]), found["parts_ms"].values()
    if pieces:
        rows.append(("sum of the parts, ms", sum(_mean(ms) for ms in pieces)))
    rows.append(("updates per second", 1000 / whole))
    if "env_steps_per_s" in found:
        rows.append(("environment steps per second", found["env_steps_per_s"]))
    for verb, rate in found.get("replay_mb_per_s", {}).items():
        rows.append((f"replay {verb}, MB/s", rate))
    if "sequences_per_s" in found:
        rows.append(("sequences per second", found["sequences_per_s"]))
    for name, most in found["parts_gb"].items():
        rows.append((f"GPU memory of {name}, GB", most))
    for key in ("peak_gb", "gpu_peak_gb", "gpu_replay_gb"):
        if key in found:
            label = {"peak_gb": "memory", "gpu_peak_gb": "GPU memory"}
            rows.append((f"{label.get(key, 'of it replay')}, GB", found[key]))
    return head + "\n" + rows_of(rows)


def _times(found: dict[str, Any]) -> Iterator[tuple[str, list[float]]]:
    yield "update", found["update_ms"]
    for name, ms in found["parts_ms"].items():
        yield f"  {name}", ms
    if "batch_ms" in found:
        yield "batch", found["batch_ms"]
    for envs, ms in found.get("policy_ms", {}).items():
        yield f"policy, {envs} env{'s' if envs != '1' else ''}", ms


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def rows_of(rows: Iterable[tuple[str, Any]]) -> str:
    """Names and numbers; of several measurements their mean and half their range."""
    lines = []
    for name, value in rows:
        many = isinstance(value, list)
        mean = _mean(value) if many else value
        spread = f" ± {(max(value) - min(value)) / 2:.3f}" if many else ""
        lines.append(f"  {name:<32} {mean:>12.3f}{spread}")
    return "\n".join(lines)
