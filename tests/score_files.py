"""Small run folders with scores, and files of packages, for tests of results."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

PACKAGE_FILES = [
    "agent.json",
    "agent.safetensors",
    "config.json",
    "loop.json",
    "manifest.json",
    "results.json",
    "spaces.json",
]
"""The files of a package of an agent that was trained in an environment."""


def write_run(folder: Path, task="atari100k_pong", seed=0, lr=1e-4, offset=0.0, **more):
    """Write a run of 10 episodes that end every 40 frames with the scores 0 to 9."""
    folder.mkdir(parents=True)
    settings = {"task": task, "agent": "dreamer", "seed": seed, "logdir": str(folder)}
    settings |= {"dreamer": {"opt": {"lr": lr}}, "env": {"repeat": 1}, **more}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    lines = [
        {"step": 40 * (i + 1), "seconds": 360.0 * (i + 1), "episode/score": i + offset}
        for i in range(10)
    ]
    text = "\n".join(map(json.dumps, lines))
    (folder / "scores.jsonl").write_text(text + '\n{"step": 99')
    about = [{"commit": "abc", "command": ["x", "train", "--seed", str(seed)]}]
    (folder / "about.json").write_text(json.dumps(about))
    return folder
