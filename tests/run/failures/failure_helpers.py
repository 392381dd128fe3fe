"""A training command whose environment can fail, for tests of failures."""

from __future__ import annotations

import json
from pathlib import Path

from reverie.cli.main import main
from reverie.replay.segment_files import listed_files
from reverie.run import checkpoint
from reverie.run.checkpoint import Checkpoints
from reverie.storage.array_file import find_corruption

ENV = '''
"""An environment whose images, speed and failures are set by files next to it."""
import os
import time
from pathlib import Path

import numpy as np

from reverie.spaces import STEP_KEYS, Space

HERE = Path(__file__).parent


class Env:
    act_space = {"action": Space(np.int32, (), 0, 3)}

    def __init__(self):
        self.steps = 0
        self.rng = np.random.default_rng(0)
        kinds = {"reward": np.float32}
        self.obs_space = {key: Space(kinds.get(key, bool)) for key in STEP_KEYS}
        if (HERE / "pixels").exists():
            self.obs_space["image"] = Space(np.uint8, (16, 16, 3))
        else:
            self.obs_space["vector"] = Space(np.float32, 4)

    def reset(self, seed=None):
        self.steps = 0
        return self.row(is_first=True)

    def step(self, action):
        self.steps += 1
        if (HERE / "slow").exists():
            time.sleep(0.002)
        if (HERE / "broken").exists():
            raise RuntimeError("the simulator is broken")
        if (HERE / "dying").exists():
            os._exit(3)
        endless = (HERE / "endless").exists()
        return self.row(is_last=not endless and self.steps >= 20)

    def row(self, is_first=False, is_last=False):
        row = {"reward": np.float32(1), "is_first": is_first, "is_last": is_last}
        for key, space in self.obs_space.items():
            if key not in STEP_KEYS:
                row[key] = space.sample(self.rng) if space.is_image else space.zeros()
        return {**row, "is_terminal": False}

    def close(self):
        pass

    def state_dict(self):
        file = HERE / "state_size"
        text = "x" * int(file.read_text()) if file.exists() else ""
        return {"steps": self.steps, "text": text}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def make_env():
    return Env()
'''


class TrainingCommand:
    """A training command with its own environment and run folder."""

    def __init__(self, folder: Path, capsys, **flags):
        self.folder = folder
        self.capsys = capsys
        self.logdir = folder / "run"
        self.module = f"env_{abs(hash(str(folder)))}"
        (folder / f"{self.module}.py").write_text(ENV)
        self.flags = {
            "agent": "random",
            "task": f"{self.module}:make_env",
            "logdir": self.logdir,
            "device": "cpu",
            "run.envs": 2,
            "run.clock": "steps",
            "run.log_every": 50,
            "run.save_every": 100,
            "run.report_every": 0,
            "replay.capacity": 160,
            "replay.storage": "ram",
            "logger.outputs": "jsonl",
            **flags,
        }
        if self.flags["agent"] != "random":  # which is not trained
            self.flags.setdefault("run.train_ratio", 1)

    def switch(self, name: str, text: str = "") -> None:
        """Write a file that changes the environment, such as `broken` (see `ENV`)."""
        (self.folder / name).write_text(text)

    def words(self, steps: int, command: str = "train", **more) -> list[str]:
        """Return the arguments of the command line."""
        flags = {**self.flags, "run.steps": steps, **more}
        pairs = [w for key, value in flags.items() for w in (f"--{key}", str(value))]
        return [command, "--configs", "debug", *pairs]

    def train(self, steps: int, **more) -> tuple[int, str]:
        """Run the command; return its exit code and what it printed to stderr."""
        code = main(self.words(steps, **more))
        error = self.capsys.readouterr().err
        assert "Traceback" not in error
        return code, error

    def newest(self) -> tuple[str, int]:
        """Return name and step of the newest checkpoint, after checking its files."""
        path = Checkpoints(self.logdir / "ckpt").newest()
        assert path
        index = checkpoint.read_part(path, "replay")["files"]
        if index is not None:
            for record in listed_files(index):
                assert not record.name or not find_corruption(
                    self.logdir / "replay", record
                )
        return path.name, checkpoint.read_manifest(path)["step"]

    def metrics(self) -> list[dict]:
        lines = (self.logdir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]
