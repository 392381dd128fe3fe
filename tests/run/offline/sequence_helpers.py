"""Settings and helpers of tests that train VTA on sequences."""

from __future__ import annotations

from reverie.run.config import resolve

TINY_VTA = {
    "device": "cpu",
    "logger.outputs": "jsonl",
    "run.steps": 4,
    "run.clock": "steps",
    "run.log_every": 2,
    "run.report_every": 2,
    "run.save_every": 2,
    "vta.batch_size": 3,
    "vta.world.context": 2,
    "vta.world.length": 4,
    "vta.world.belief": 8,
    "vta.world.state": 3,
    "vta.world.layers": 1,
    "sequences.chunk": 6,
    "sequences.evaluation": 5,
}


def vta_settings(logdir, *names, **flags):
    flags = {**TINY_VTA, "logdir": str(logdir), **flags}
    return resolve(names or ["vta_balls"], flags=flags)
