"""Run the exported policy in this folder: `Policy().act(obs)`. See `policy.json`."""

import json
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent


class Policy:
    """`reset()` starts an episode. Arrays of `Policy(batch=8)` have a batch axis."""

    def __init__(self, folder=FOLDER, batch=None, seed=0, load=None):
        self.info = json.loads((Path(folder) / "policy.json").read_text())
        self.run = (load or load_onnx)(Path(folder) / self.info["file"], self.info)
        self.batch, self.rng = batch, np.random.default_rng(seed)
        self.is_first = np.ones(batch or 1, bool)
        self.state = self.arrays("state", lambda x: np.zeros)

    def reset(self, mask=True):
        self.is_first = self.is_first | mask  # the exported step resets the state

    def act(self, obs, noise=None):
        noise = noise or self.arrays("noise", lambda x: getattr(self.rng, x["sampler"]))
        inputs = {x["name"]: self.observe(x, obs) for x in self.info["observations"]}
        outputs = self.run({**inputs, **self.state, **noise, "is_first": self.is_first})
        self.state = {name: outputs[f"next.{name}"] for name in self.state}
        self.is_first = np.zeros_like(self.is_first)
        return self.nest(self.info["action"], outputs)

    def observe(self, spec, obs):
        for key in spec["path"] if isinstance(obs, dict | tuple) else ():
            obs = obs[key]
        array = np.asarray(obs, spec["dtype"], order="C")
        return array if self.batch else array[None]

    def arrays(self, name, make):
        count, infos = len(self.is_first), self.info[name]
        return {x["name"]: make(x)([count, *x["shape"]], x["dtype"]) for x in infos}

    def nest(self, names, outputs):
        if isinstance(names, dict):
            return {key: self.nest(x, outputs) for key, x in names.items()}
        if isinstance(names, list):
            return tuple(self.nest(x, outputs) for x in names)
        return outputs[names] if self.batch else outputs[names][0]


def load_onnx(path, info):
    import onnxruntime as ort

    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda x: dict(zip(info["output_names"], session.run(None, x), strict=True))
