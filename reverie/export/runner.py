"""Run the exported policy in this folder: `policy = Policy()`, `policy.act(obs)`.

`policy.reset()` starts the next episode. The arrays of `Policy(batch=8)` have a batch
axis; its `reset(mask)` starts episodes where the mask is True. See `policy.json`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent


class Policy:
    def __init__(
        self, folder: Any = FOLDER, batch: Any = None, seed: int = 0, load: Any = None
    ) -> None:
        self.info = json.loads((Path(folder) / "policy.json").read_text())
        self.run = (load or load_onnx)(Path(folder) / self.info["file"], self.info)
        self.batch, self.rng = batch, np.random.default_rng(seed)
        self.is_first, state = np.ones(batch or 1, bool), self.info["state"]
        self.state = {x["name"]: np.zeros(self.shape(x), x["dtype"]) for x in state}

    def reset(self, mask: Any = True) -> None:
        self.is_first = self.is_first | mask  # the policy resets its state there

    def act(self, obs: Any, noise: Any = None) -> Any:
        inputs = {x["name"]: self.observe(x, obs) for x in self.info["observations"]}
        inputs |= noise or {x["name"]: self.sample(x) for x in self.info["noise"]}
        outputs = self.run({**inputs, **self.state, "is_first": self.is_first})
        self.state = {name: outputs[f"next.{name}"] for name in self.state}
        self.is_first = np.zeros_like(self.is_first)
        return self.nest(self.info["action"], outputs)

    def observe(self, x: Any, obs: Any) -> Any:
        for key in x["path"] if isinstance(obs, dict | tuple) else ():
            obs = obs[key]
        array = np.asarray(obs, x["dtype"], order="C")
        return array if self.batch else array[None]

    def sample(self, x: Any) -> Any:
        return getattr(self.rng, x["sampler"])(self.shape(x), x["dtype"])

    def shape(self, x: Any) -> Any:
        return [len(self.is_first), *x["shape"]]

    def nest(self, form: Any, outputs: Any) -> Any:
        if isinstance(form, dict):
            return {key: self.nest(x, outputs) for key, x in form.items()}
        if isinstance(form, list):
            return tuple(self.nest(x, outputs) for x in form)
        return outputs[form] if self.batch else outputs[form][0]


def load_onnx(path: Any, info: Any) -> Any:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = info["output_names"]
    return lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))
