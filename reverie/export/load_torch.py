"""Load a step exported with `--format torch`: `Policy(load=load_torch)`."""

from typing import Any

import torch


def load_torch(path: Any, info: Any) -> Any:
    """Return the step as a function from inputs to outputs, by name."""
    step = torch.export.load(path).module()

    def run(inputs: Any) -> Any:
        outputs = step(*(torch.tensor(inputs[name]) for name in info["input_names"]))
        values = [x.detach().numpy() for x in outputs]
        return dict(zip(info["output_names"], values, strict=True))

    return run
