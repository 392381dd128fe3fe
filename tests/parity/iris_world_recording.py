"""Recordings of the original Δ-IRIS, and worlds with its weights.

A recording is a folder of npz files. Sizes are read from the arrays, so any recording
of the same format will do.
"""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch

from reverie.convert.delta_iris.names import (
    TOKENIZER,
    WORLD_MODEL,
    copy_weights,
)
from reverie.nets.residual import FrameConfig
from reverie.nets.rng import Rng
from reverie.nets.transformer import TransformerConfig
from reverie.spaces import Space
from reverie.worlds.iris.config import (
    DynamicsConfig,
    QuantizerConfig,
    TokenizerConfig,
)
from reverie.worlds.iris.segment import EpisodeSegment
from reverie.worlds.iris.world import IrisWorld

HERE = Path(__file__).parent
FOLDER = (
    Path(os.environ.get("REVERIE_PARITY_DIR", HERE.parent / "fixtures")) / "delta_iris"
)
REVIVE_UNTIL = 10
"""Setting of the recorded run, which is not stored in the arrays."""
SCALES = {"": (1.0, 1.0, 1.0), "classes/": (0.1, 1.0, 0.1)}
"""Loss scales of latents, rewards and ends, with two-hot rewards and with signs."""
SIZES = ("crafter", "atari")


@cache
def load(name: str) -> dict[str, np.ndarray]:
    """Load one file, or all files into which it was split."""
    data: dict[str, np.ndarray] = {}
    paths = [FOLDER / f"{name}.npz", *sorted(FOLDER.glob(f"{name}_part*.npz"))]
    for path in paths:
        if path.exists():
            with np.load(path) as arrays:
                data |= {key: arrays[key] for key in arrays.files}
    assert data, f"{FOLDER} has no {name}"
    return data


def has(name: str) -> bool:
    return any(FOLDER.glob(f"{name}*.npz"))


def under(data: Mapping, prefix: str) -> dict:
    return {k[len(prefix) :]: v for k, v in data.items() if k.startswith(prefix)}


def tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {key: torch.tensor(array) for key, array in arrays.items()}


def as_bytes(frames: np.ndarray) -> torch.Tensor:
    """Convert recorded frames (..., c, h, w) to uint8 (..., h, w, c)."""
    frames = np.moveaxis(frames, -3, -1)
    if frames.dtype != np.uint8:
        scaled = frames * 255
        assert np.abs(scaled - np.round(scaled)).max() < 1e-3
        frames = np.round(scaled).astype(np.uint8)
    return torch.tensor(np.ascontiguousarray(frames))


def as_recorded(frames: torch.Tensor) -> np.ndarray:
    """Convert frames (..., h, w, c) to the recorded layout (..., c, h, w)."""
    return np.moveaxis(frames.detach().numpy(), -1, -3)


def segment(data: Mapping[str, np.ndarray]) -> EpisodeSegment:
    frames = data.get("in/observations", data.get("in/observations_uint8"))
    return EpisodeSegment(
        as_bytes(frames),
        torch.tensor(data["in/actions"]),
        torch.tensor(data["in/rewards"]),
        torch.tensor(data["in/ends"]).bool(),
        torch.tensor(data["in/mask_padding"]),
    )


class RecordedSamples(Rng):
    """Returns recorded samples in order, and stores the log-probabilities."""

    def __init__(self, draws=(), shuffles=()) -> None:
        self.draws, self.shuffles = list(draws), list(shuffles)
        self.logprobs: list[torch.Tensor] = []

    def categorical(self, probs):
        draw = torch.as_tensor(self.draws.pop(0))
        assert draw.shape == probs.shape[:-1], (draw.shape, probs.shape)
        self.logprobs.append(torch.log(probs))
        return draw.long()

    def permutation(self, marked):
        order = self.shuffles.pop(0) if self.shuffles else None
        yes, no = torch.nonzero(marked)[:, 0], torch.nonzero(~marked)[:, 0]
        if order is not None:
            yes = yes[torch.as_tensor(order)]
        return torch.cat([yes, no])


def frame_config(shapes: Mapping[str, tuple], net: str, decoder=False) -> FrameConfig:
    """Infer the config of a convolutional network from the shapes of its tensors."""
    inside = under(shapes, f"{net}.")
    last = max(int(name.split(".")[0]) for name in inside)
    blocks: list[list[int]] = []  # channels (decoder: input channels), and downsampling
    doubling = 0
    for i in range(1, last - 2):
        if f"{i}.conv.weight" in inside:
            if decoder:
                doubling = 1
            else:
                blocks[-1][1] = 1
        else:
            units, inputs = inside[f"{i}.f.2.weight"][:2]
            blocks.append([inputs if decoder else units, doubling])
            doubling = 0
    channels = inside[f"{last}.weight" if decoder else "0.weight"][1 if decoder else 0]
    if decoder:
        blocks.reverse()
    latent = 1 if decoder else inside[f"{last}.weight"][0]
    mults = tuple(units // channels for units, _ in blocks)
    return FrameConfig(channels, latent, mults, tuple(halve for _, halve in blocks))


def make_world(
    token_shapes: Mapping[str, tuple],
    model_shapes: Mapping[str, tuple],
    image: tuple[int, int, int],
    heads: int,
    *,
    tokens: int,
    two_hot: bool = True,
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0),
    attention: str = "causal",
    revive_until: int | None = REVIVE_UNTIL,
) -> IrisWorld:
    encoder = frame_config(token_shapes, "encoder.encoder")
    codes, code_width = token_shapes["quantizer.codebook"]
    actions, planes = token_shapes["decoder_act_emb.weight"]
    area = math.prod(side // encoder.downsampling for side in image[:2])
    positions, width = model_shapes["transformer.pos_emb.weight"]
    layers = {name.split(".")[2] for name in model_shapes if ".blocks." in name}
    return IrisWorld(
        Space(np.uint8, image),
        actions,
        tokenizer=TokenizerConfig(
            tokens=tokens,
            action_planes=planes // area,
            encoder=encoder,
            frame=frame_config(token_shapes, "frame_cnn.encoder"),
            decoder=frame_config(token_shapes, "decoder.decoder", decoder=True),
            quantizer=QuantizerConfig(codes, code_width, revive_until),
        ),
        dynamics=DynamicsConfig(
            transformer=TransformerConfig(
                len(layers), heads, width, positions // (tokens + 2), attention
            ),
            frame=frame_config(model_shapes, "frame_cnn.0.encoder"),
            two_hot_rewards=two_hot,
            latents_scale=scales[0],
            rewards_scale=scales[1],
            ends_scale=scales[2],
        ),
    )


def shapes_of(arrays: Mapping[str, np.ndarray]) -> dict[str, tuple]:
    return {name: array.shape for name, array in arrays.items()}


def tiny_world(variant: str = "", heads: int | None = None, attention="causal"):
    """Return the small recorded world; `variant` is "" or "classes/"."""
    tokenizer = load("tokenizer_params")
    model = dict(load("world_model_params"))
    others = under(model, "classes/")
    model = {k: v for k, v in model.items() if not k.startswith("classes/")}
    if variant:
        model |= others
    recorded = load("tokenizer_io")
    colours, height, width = recorded["in/observations"].shape[2:]
    world = make_world(
        shapes_of(tokenizer),
        shapes_of(model),
        (height, width, colours),
        heads or tiny_heads(),
        tokens=recorded["eval/tokens"].shape[-1],
        two_hot=not variant,
        scales=SCALES[variant],
        attention=attention,
    )
    fill(world, tensors(tokenizer), tensors(model))
    return world


@cache
def tiny_heads() -> int:
    """Find the number of heads, which the shapes do not determine, by trial."""
    recorded = load("world_model_io")
    wanted = torch.tensor(recorded["output_sequence"])

    def distance(heads: int) -> float:
        world = tiny_world(heads=heads)
        with torch.no_grad():
            outputs, _ = world.dynamics(torch.tensor(recorded["sequence"]))
        return float((outputs - wanted).abs().max())

    width = wanted.shape[-1]
    return min((n for n in range(1, width + 1) if width % n == 0), key=distance)


def fill(world: IrisWorld, tokenizer: dict, model: dict) -> None:
    ours = world.tokenizer
    ours.load_state_dict(copy_weights(tokenizer, TOKENIZER, ours.state_dict()))
    other = world.dynamics
    other.load_state_dict(copy_weights(model, WORLD_MODEL, other.state_dict()))


def full_world(size: str) -> tuple[IrisWorld, dict[str, np.ndarray]]:
    """Return a world of the default sizes, with the weights of the recording's rule."""
    data = load(f"fullsize_{size}")
    seed = int(data["rule_seed"])
    filled: dict[str, dict[str, torch.Tensor]] = {}
    for part in ("tokenizer", "world_model"):
        names = [str(name) for name in data[f"{part}/state_dict_names"]]
        found = [str(shape) for shape in data[f"{part}/state_dict_shapes"]]
        filled[part] = {}
        for i, (name, shape) in enumerate(zip(names, found, strict=True)):
            dims = tuple(int(n) for n in re.findall(r"\d+", shape))
            value = by_rule(part, name, dims, seed)
            if value is not None:
                filled[part][name] = torch.tensor(value)
                total = float(data[f"{part}/param_checksums"][i])
                assert abs(value.sum(dtype=np.float64) - total) < 1e-2, name
    colours, height, width = data["in/observations_uint8"].shape[2:]
    model = {k: tuple(v.shape) for k, v in filled["world_model"].items()}
    world = make_world(
        {k: tuple(v.shape) for k, v in filled["tokenizer"].items()},
        model,
        (height, width, colours),
        heads=model["transformer.pos_emb.weight"][1] // 64,
        tokens=data["tokenizer/tokens"].shape[-1],
        two_hot=model["head_rewards.head_module.2.bias"][0] > 3,
        scales=SCALES["" if size == "crafter" else "classes/"],
    )
    filled["tokenizer"]["quantizer.num_codebook_updates"] = torch.zeros((), dtype=int)
    fill(world, filled["tokenizer"], filled["world_model"])
    return world, data


def by_rule(part: str, name: str, shape: tuple, seed: int) -> np.ndarray | None:
    if re.search(r"(indices|\.sa\.mask|num_codebook_updates)$", name):
        return None
    key = (zlib.crc32(f"{part}.{name}".encode()) + seed) % 2**32
    noise = np.random.RandomState(key).standard_normal(shape).astype(np.float32)
    if name.endswith("codewords_freqs"):
        value = np.full(shape, 1 / shape[0], np.float32)
    elif name.endswith("codebook"):
        value = noise / np.linalg.norm(noise, axis=-1, keepdims=True)
    elif len(shape) == 1 and name.endswith("weight"):
        value = 1 + 0.1 * noise
    elif len(shape) == 1:
        value = 0.05 * noise
    elif "_emb." in name:
        value = 0.1 * noise
    else:
        value = noise / np.sqrt(np.prod(shape[1:]))
    if name == "decoder.decoder.11.bias":
        value = value + 0.5
    return value.astype(np.float32)
