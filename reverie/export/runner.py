"""Runs the exported policy in this folder, with numpy and onnxruntime.

    policy = Policy()
    action = policy.act(obs)    # an observation and an action of the environment
    policy.reset()              # before the first observation of the next episode

With `Policy(batch=8)`, all arrays have a batch axis of size 8, and `reset(mask)` starts
new episodes where the mask is True. `policy.json` describes all inputs and outputs.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent


class Policy:
    def __init__(
        self, folder: Any = FOLDER, batch: int | None = None, seed: int = 0
    ) -> None:
        self.info = json.loads((Path(folder) / "policy.json").read_text())
        self.run = load(Path(folder) / self.info["file"], self.info)
        self.is_single, self.batch = batch is None, batch or 1
        self.rng = np.random.default_rng(seed)
        self.reset()

    def reset(self, where: Any = None) -> None:
        if where is None:
            where = np.ones(self.batch, bool)
            self.state = {x["name"]: self.zeros(x) for x in self.info["state"]}
            self.is_first = where
        self.is_first = self.is_first | where

    def act(self, obs: Any, noise: Any = None) -> Any:
        inputs = {x["name"]: self.observe(x, obs) for x in self.info["observations"]}
        noise = noise or {x["name"]: self.sample(x) for x in self.info["noise"]}
        outputs = self.run({**inputs, "is_first": self.is_first, **self.state, **noise})
        self.state = {name: outputs[f"next.{name}"] for name in self.state}
        self.is_first = np.zeros(self.batch, bool)
        actions = {tuple(x["path"]): outputs[x["name"]] for x in self.info["actions"]}
        return nest(actions, 0 if self.is_single else slice(None))

    def zeros(self, x: Any) -> Any:
        return np.zeros(
            [self.batch] * x.get("has_batch", True) + x["shape"], x["dtype"]
        )

    def sample(self, x: Any) -> Any:
        draw: Any = {
            "uniform": self.rng.random,
            "normal": self.rng.standard_normal,
            "exponential": self.rng.standard_exponential,
        }
        return draw[x["distribution"]](self.zeros(x).shape, x["dtype"])

    def observe(self, x: Any, obs: Any) -> Any:
        for part in x["path"] if isinstance(obs, dict | tuple) else ():
            obs = obs[part]
        array = np.asarray(obs, x["dtype"])
        return np.ascontiguousarray(array[None] if self.is_single else array)


def nest(values: Any, index: Any) -> Any:
    """Return actions by path as the environment's dicts and tuples."""
    if () in values:
        return values[()][index]
    tree: Any = {path[0]: {} for path in values}
    for path, value in values.items():
        tree[path[0]][path[1:]] = value
    tree = {key: nest(inner, index) for key, inner in tree.items()}
    return tuple(tree.values()) if isinstance(next(iter(tree)), int) else tree


def load(path: Path, info: Any) -> Any:
    """Return a function from inputs to outputs by name; PyTorch runs a `.pt2` file."""
    names = info["output_names"]
    if path.suffix == ".pt2":
        import torch

        step, inputs = torch.export.load(path).module(), info["input_names"]

        def run(feed: Any) -> Any:
            outputs = step(*(torch.tensor(feed[name]) for name in inputs))
            return [x.detach().numpy() for x in outputs]
    else:
        import onnxruntime

        providers = ["CPUExecutionProvider"]
        session = onnxruntime.InferenceSession(path, providers=providers)

        def run(feed: Any) -> Any:
            return session.run(names, feed)

    return lambda feed: dict(zip(names, run(feed), strict=True))
