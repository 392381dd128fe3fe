"""Exported step functions: lists of tensors in and out, random numbers as inputs.

An agent provides a step function of dicts and trees of tensors, such as one step of its
policy (`capabilities.ExportStep`). `FlatStep` wraps it as a function of a flat list of
tensors, which `TensorInfo` describes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from reverie.capabilities import ExportStep
from reverie.nets.rng import Rng
from reverie.nets.tree import tree_leaves

BATCH = 3
"""Batch size of the example inputs."""
NEXT = "next."
"""Prefix of the outputs with the next state."""
SAMPLERS = {
    "uniform": "random",
    "normal": "standard_normal",
    "exponential": "standard_exponential",
}
"""Methods of `numpy.random.Generator` for the distributions of noise."""


class GivenNoise(Rng):
    """Returns the given random numbers, one tensor per call, instead of sampling."""

    def __init__(self, noise: Iterable[Tensor]):
        self._noise = iter(noise)

    def draw(self, distribution: str, like: Tensor) -> Tensor:
        """Return random numbers of a distribution, in the shape of `like`."""
        return next(self._noise)

    def categorical(self, probs: Float[Tensor, "*b K"]) -> Int[Tensor, "*b"]:
        """Sample class indices as `Rng` does on a CPU: the inverse of the CDF."""
        cdf = probs.cumsum(-1)
        point = self.draw("uniform", cdf[..., -1:])
        index = (cdf <= point * cdf[..., -1:]).sum(-1)
        return index.clamp(max=probs.shape[-1] - 1)

    def exponential(self, like: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        return self.draw("exponential", like)

    def normal(
        self, mean: Float[Tensor, "*b"], std: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b"]:
        return mean + std * self.draw("normal", mean)

    def uniform(self, like: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return self.draw("uniform", like)


class RecordedNoise(GivenNoise):
    """Draws the same random numbers as `Rng` with this seed, and records them."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.noise: list[Tensor] = []
        self.distributions: list[str] = []

    def draw(self, distribution: str, like: Tensor) -> Tensor:
        sample = getattr(torch.empty_like(like), f"{distribution}_")
        self.noise.append(sample(generator=self.generator))
        self.distributions.append(distribution)
        return self.noise[-1]


class TensorInfo(NamedTuple):
    """Name, dtype and shape of an input or output, without the batch axis."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    has_batch: bool = True
    distribution: str = ""
    """Of a noise input: `uniform` (in [0, 1)), `normal` or `exponential`."""

    @classmethod
    def of(cls, name: str, tensor: Tensor, distribution: str = "") -> TensorInfo:
        """Describe an example with the batch size `BATCH`."""
        has_batch = tensor.ndim > 0 and tensor.shape[0] == BATCH
        shape = tuple(tensor.shape[1:] if has_batch else tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(name, dtype, shape, has_batch, distribution)

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
        }
        if self.distribution:
            data |= {
                "distribution": self.distribution,
                "sampler": SAMPLERS[self.distribution],
            }
        return data


class FlatStep(nn.Module):
    """A step whose arguments are tensors: inputs, then state, then noise.

    It returns outputs, then the next state. Prefixes are added to the tensor names.
    """

    def __init__(
        self,
        step: ExportStep,
        input_prefix: str = "",
        output_prefix: str = "",
        state_prefix: str = "",
    ):
        super().__init__()
        self.inner, self.keys = step.module, list(step.inputs)
        self._state = step.initial(BATCH)  # example, for the structure
        inputs = {
            key: torch.as_tensor(space.zeros(BATCH))
            for key, space in step.inputs.items()
        }
        rng = RecordedNoise(0)  # records which random numbers the step needs
        with torch.no_grad():
            outputs, after = self.inner(inputs, self._state, rng)
        # copies, because torch.export merges inputs that are the same tensor
        self.examples = [
            x.clone() for x in (*inputs.values(), *tree_leaves(self._state), *rng.noise)
        ]
        self.inputs = [
            TensorInfo.of(key if key == "is_first" else f"{input_prefix}{key}", x)
            for key, x in inputs.items()
        ]
        self.state = [
            TensorInfo.of(name, x)
            for name, x in zip(
                leaf_names(self._state, state_prefix),
                tree_leaves(self._state),
                strict=True,
            )
        ]
        self.noise = [
            TensorInfo.of(f"noise.{i}", x, distribution)
            for i, (x, distribution) in enumerate(
                zip(rng.noise, rng.distributions, strict=True)
            )
        ]
        self.output_keys = list(outputs)
        self.outputs = [
            TensorInfo.of(f"{output_prefix}{key}", x) for key, x in outputs.items()
        ]
        self.has_next_state = bool(tree_leaves(after))

    @property
    def input_names(self) -> list[str]:
        return [info.name for info in (*self.inputs, *self.state, *self.noise)]

    @property
    def output_names(self) -> list[str]:
        state = self.state if self.has_next_state else []
        names = [f"{NEXT}{info.name}" for info in state]
        return [*(info.name for info in self.outputs), *names]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        rng = GivenNoise(tensors[len(self.inputs) + len(self.state) :])
        return self.run(tensors, rng)

    def run(self, tensors: Sequence[Tensor], rng: Rng) -> tuple[Tensor, ...]:
        """Run the step with random numbers from `rng` instead of the noise inputs."""
        count = len(self.keys)
        inputs = dict(zip(self.keys, tensors[:count], strict=True))
        leaves = tensors[count : count + len(self.state)]
        outputs, state = self.inner(inputs, unflatten(self._state, leaves), rng)
        return (*(outputs[key] for key in self.output_keys), *tree_leaves(state))


def leaf_names(tree: Any, prefix: str = "") -> list[str]:
    """Return the names of all tensors of a tree, joined by dots."""
    if isinstance(tree, Tensor):
        return [prefix]
    if isinstance(tree, dict):
        items = list(tree.items())
    else:
        fields = getattr(tree, "_fields", range(len(tree)))
        items = list(zip(fields, tree, strict=True))
    start = f"{prefix}." if prefix else ""
    return [name for key, x in items for name in leaf_names(x, f"{start}{key}")]


def unflatten(tree: Any, leaves: Sequence[Tensor]) -> Any:
    """Return a tree with the same structure and these tensors."""
    remaining = iter(leaves)

    def build(node: Any) -> Any:
        if isinstance(node, Tensor):
            return next(remaining)
        if isinstance(node, dict):
            return {key: build(value) for key, value in node.items()}
        values = [build(value) for value in node]
        return type(node)(*values) if hasattr(node, "_fields") else tuple(values)

    return build(tree)
