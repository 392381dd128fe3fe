"""Recordings of the original DreamerV3, and an agent set up to replay them.

A recording is a folder of npz files; sizes, spaces and options are read from it, so any
recording of the same format will do.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from reverie.agents.dreamer.agent import Dreamer
from reverie.agents.options import BuildOptions
from reverie.convert.dreamerv3.config import config_from_original
from reverie.convert.dreamerv3.weights import from_original
from reverie.distributed.collective import local_sequences, set_batch
from reverie.nets.rng import Rng
from reverie.spaces import RESERVED, STEP_KEYS, Space

HERE = Path(__file__).parent
FOLDER = (
    Path(os.environ.get("REVERIE_PARITY_DIR", HERE.parent / "fixtures")) / "dreamerv3"
)
VARIANTS = sorted(p.name[: -len("_meta.json")] for p in FOLDER.glob("*_meta.json"))


def load(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name}.npz") as data:
        return {key: data[key] for key in data.files}


def has(name: str) -> bool:
    return (FOLDER / f"{name}.npz").exists()


def under(data: dict, prefix: str) -> dict:
    return {k[len(prefix) :]: v for k, v in data.items() if k.startswith(prefix)}


class RecordedSamples(Rng):
    """Hands out recorded draws in the order in which they are asked for.

    A rank of a data-parallel update gets the rows of its own sequences.
    """

    def __init__(self) -> None:
        self.draws: list[torch.Tensor] = []

    def categorical(self, probs):
        draw = self._next(len(probs))
        assert draw.shape == probs.shape[:-1], (draw.shape, probs.shape)
        return draw.long()

    def normal(self, mean, std):
        draw = self._next(len(mean))
        assert draw.shape == mean.shape, (draw.shape, mean.shape)
        return draw

    def _next(self, rows: int) -> torch.Tensor:
        draw, own = self.draws.pop(0), local_sequences()
        if own is None:
            return draw
        start = rows // own.size * own.start
        return draw[start : start + rows]

    def state_dict(self):
        return {}


class Recording:
    """One variant: its agent, and what each of its calls should give."""

    def __init__(self, variant: str):
        self.variant = variant
        meta = json.loads((FOLDER / f"{variant}_meta.json").read_text())
        self.config = config_from_original(meta["config"])
        self.params = load(f"{variant}_params")
        first = load(f"{variant}_call0")
        self.obs_space, self.act_space = self._spaces(first)
        self.rng = RecordedSamples()

    def make_agent(self) -> Dreamer:
        agent = Dreamer(
            self.obs_space,
            self.act_space,
            self.config,
            BuildOptions(torch.device("cpu")),
        )
        agent.load_state_dict(from_original(self.params, agent.state_dict()))
        agent.rng = dict.fromkeys(agent.rng, self.rng)
        return agent

    def _spaces(self, first: dict) -> tuple[dict, dict]:
        """Spaces from the arrays, and class counts from the layers that read them."""
        data = under(first, "data/")
        action_keys = list(under(first, "out/img/act/"))
        obs, act = {}, {}
        for key, array in data.items():
            if key in ("consec", "stepid") or key.startswith("dyn/"):
                continue
            shape, dtype = array.shape[2:], array.dtype
            high = None
            is_class = dtype.kind in "iu" and len(shape) < 3
            if key in action_keys:
                if is_class:
                    high = self.params[f"pol/head/{key}/logits/bias"].size
                    high //= max(1, int(np.prod(shape)))
                act[key] = Space(dtype, shape, 0 if is_class else None, high)
            else:
                if is_class and key not in RESERVED:
                    high = self.params[f"dec/vec/{key}/logits/bias"].size
                    high //= max(1, int(np.prod(shape)))
                obs[key] = Space(dtype, shape, 0 if high else None, high)
        assert all(key in obs for key in STEP_KEYS)
        return obs, act

    def batch(self, data: dict) -> dict[str, torch.Tensor]:
        """The recorded batch as our feed would serve it: choices by index."""
        batch = {key: torch.tensor(array) for key, array in data.items()}
        if "dyn/stoch" in batch:
            batch["dyn/stoch"] = index_of(data["dyn/stoch"]).to(torch.uint8)
        return batch

    def queue_train_draws(self, call: dict) -> None:
        post = index_of(call["out/stoch"])  # (B, T, S)
        self.rng.draws = list(post.unbind(1))
        imagined = index_of(call["out/img/stoch"])  # (N, H, S)
        steps = imagined.shape[1]
        for h in range(steps + 1):
            for key in self.act_space:
                self.rng.draws.append(torch.tensor(call[f"out/img/act/{key}"][:, h]))
            if h < steps:
                self.rng.draws.append(imagined[:, h])


def index_of(onehot: np.ndarray) -> torch.Tensor:
    """The class of each one-hot, which must really be one."""
    index = onehot.argmax(-1)
    exact = np.eye(onehot.shape[-1], dtype=onehot.dtype)[index]
    assert np.abs(exact - onehot).max() < 1e-5
    return torch.tensor(index)


class Feed:
    """Serves one recorded batch and keeps what is written back.

    A rank of a data-parallel update gets its own sequences.
    """

    def __init__(self, batch: dict[str, torch.Tensor]):
        self.batch = batch
        self.updates: list[tuple] = []
        self.priorities: list[tuple] = []

    def __call__(self, name: str):
        own = set_batch(len(self.batch["is_first"]))
        return {key: x[own.start : own.stop] for key, x in self.batch.items()}

    def ready(self, name: str) -> bool:
        return True

    def write_back(self, stepid, extras) -> None:
        self.updates.append((stepid, extras))

    def prioritize(self, stepid, priority) -> None:
        self.priorities.append((stepid, priority))

    def count_uses(self, name, on) -> None:
        raise AssertionError("Dreamer chooses no episodes")


class Spy:
    """Keeps what modules and functions of an agent answered, in order."""

    def __init__(self, agent: Dreamer):
        self.agent = agent
        self.calls: dict[str, list] = defaultdict(list)
        parts = agent.components()
        watched = {name: parts[name] for name in ("enc", "dec", "rew", "con", "pol")}
        watched |= {"val": parts["val"], "slowval": parts["slowval"]}
        watched["obslogit"] = parts["dyn"].obslogit
        watched["priorlogit"] = parts["dyn"].priorlogit
        for name, module in watched.items():
            module.register_forward_hook(self._hook(name))
        self._wrap(agent, "loss")
        self._wrap(agent.actor_critic, "imag_loss")
        self._wrap(agent.actor_critic, "repl_loss")
        apply = agent.opt.apply

        def before_apply(loss, grads):
            # heads that the recording looks at and the update does not need; called by
            # `forward`, so that no hook takes them for part of it
            self.calls["total"].append(loss)
            self.calls["grads"].append([grad.clone() for grad in grads])
            states = self.calls["loss"][-1].states
            feat = agent.world.features(states).detach()
            self.calls["replay_pol"].append(agent.actor_critic.pol.forward(feat))
            self.calls["replay_val"].append(agent.actor_critic.val.forward(feat))
            return apply(loss, grads)

        agent.opt.apply = before_apply

    def clear(self) -> None:
        self.calls.clear()

    def _hook(self, name: str):
        def hook(module, args, output):
            self.calls[name].append(output)

        return hook

    def _wrap(self, owner, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*args, **kwargs):
            result = original(*args, **kwargs)
            self.calls[name].append(result)
            self.calls[f"{name}_args"].append(args)
            return result

        setattr(owner, name, wrapped)
