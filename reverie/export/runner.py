"""Run the exported policy in this folder: `Policy().act(obs)`. See `policy.json`."""

import json
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent


class Policy:
    """With `batch`, arrays have a batch axis. `load` is a function like `load_onnx`."""

    def __init__(self, path: Any = HERE, batch: int = 0, seed: int = 0, load: Any = 0):
        self.info = json.loads((Path(path) / "policy.json").read_text())
        self.run = (load or load_onnx)(Path(path) / self.info["file"], self.info)
        self.rng, self.is_first = np.random.default_rng(seed), np.ones(batch or 1, bool)
        self.batch, self.state = batch, self.arrays("state", lambda x: np.zeros)

    def reset(self, mask: Any = True) -> None:  # start an episode
        self.is_first = self.is_first | mask  # the step resets the state where True

    def act(self, obs: Any, noise: Any = None) -> Any:
        noise = noise or self.arrays("noise", lambda x: getattr(self.rng, x["sampler"]))
        inputs = {x["name"]: self.observe(x, obs) for x in self.info["observations"]}
        outputs = self.run({**inputs, **self.state, **noise, "is_first": self.is_first})
        self.state = {name: outputs[f"next.{name}"] for name in self.state}
        self.is_first = np.zeros_like(self.is_first)
        return self.nest(self.info["action"], outputs)

    def observe(self, spec: Any, obs: Any) -> Any:  # return one input of the step
        for key in spec["path"] if isinstance(obs, dict | tuple) else ():
            obs = obs[key]
        array = np.asarray(obs, spec["dtype"], order="C")
        return array if self.batch else array[None]

    def arrays(self, name: str, make: Any) -> Any:  # make(x) is a function for input x
        count, infos = len(self.is_first), self.info[name]
        return {x["name"]: make(x)([count, *x["shape"]], x["dtype"]) for x in infos}

    def nest(self, names: Any, outputs: Any) -> Any:  # return the environment's action
        if isinstance(names, dict):
            return {key: self.nest(x, outputs) for key, x in names.items()}
        if isinstance(names, list):
            return tuple(self.nest(x, outputs) for x in names)
        return outputs[names] if self.batch else outputs[names][0]


def load_onnx(path: Any, info: Any) -> Any:
    import onnxruntime as ort

    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda x: dict(zip(info["output_names"], session.run(None, x), strict=True))
