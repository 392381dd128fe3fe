"""One update of the imported agent against an independent computation.

The checkpoint includes optimizers that have already taken steps, so the test also
covers their import.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from dreamer_helpers import FLAGS, RandomFeed
from dreamerv3_torch_helpers import make_torch
from dreamerv3_torch_networks import make_options, make_state, with_copies
from dreamerv3_torch_reference import FixedDraws, Reference, make_optimizers

from reverie.convert.dreamerv3_torch.weights import import_state, new_names
from reverie.spaces import Space

LRS = (1e-3, 2e-3, 3e-3)
OBS = {
    "image": Space(np.uint8, (12, 12, 1)),
    "vector": Space(np.float32, (3,)),
    **FLAGS,
}
DISCRETE = {"action": Space(np.int32, (), 0, 4)}
CONTINUOUS = {"action": Space(np.float32, (2,), -1, 1)}
CASES = {
    "onehot_reinforce": (DISCRETE, "reinforce", 0.0, 3),
    "onehot_dynamics": (DISCRETE, "dynamics", 0.0, 3),
    "onehot_both": (DISCRETE, "both", 0.3, 3),
    "normal_dynamics": (CONTINUOUS, "dynamics", 0.0, 3),
    "normal_both": (CONTINUOUS, "both", 0.7, 3),
    "gaussian_dynamics": (CONTINUOUS, "dynamics", 0.0, 0),
    "gaussian_reinforce": (DISCRETE, "reinforce", 0.0, 0),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def make_agent(act_space, gradient, mix, classes):
    agent = make_torch(act_space, imag_gradient=gradient, mix=mix, classes=classes)
    agent.rng["train"] = FixedDraws()
    return agent


def save(path, state, optimizers, compiled=False):
    content = {
        "agent_state_dict": with_copies(state, compiled),
        "optims_state_dict": optimizers,
    }
    torch.save(content, path)
    return path


def relative_error(actual, expected):
    size = torch.linalg.vector_norm(expected)
    return float(torch.linalg.vector_norm(actual - expected) / size)


def find_momentum(optimizers, name):
    found = [opt["mu"][name] for opt in optimizers.values() if name in opt["mu"]]
    assert len(found) == 1, name
    return found[0]


@pytest.mark.extended_except("onehot_*-False", "gaussian_*-False")
@pytest.mark.parametrize("compiled", [False, True])
def test_one_update(case, compiled, tmp_path):
    act_space, gradient, mix, classes = case
    space = act_space["action"]
    count = space.classes if space.is_discrete else space.shape[0]
    actor = {} if space.is_discrete else {"dist": "normal", "std": "learned"}
    options = make_options(dyn_discrete=classes, actor=actor)
    shapes = {"image": OBS["image"].shape, "vector": OBS["vector"].shape}
    state = make_state(options, shapes, count)
    optimizers = make_optimizers(state, LRS, compiled=compiled)
    path = save(tmp_path / "latest.pt", state, optimizers, compiled)

    agent = make_agent(*case)
    config = agent.config
    for name, lr in zip(("world", "actor", "critic"), LRS, strict=True):
        opt = agent.opt[name]
        opt.rule.config = opt.config = replace(getattr(config, f"{name}_opt"), lr=lr)
    template = agent.state_dict()
    imported = import_state(path, template)
    agent.load_state_dict(imported)
    feed = RandomFeed(agent, OBS, act_space)
    feed.change["is_first"] = lambda x: torch.cat(
        [torch.ones_like(x[:, :1]), x[:, 1:]], 1
    )
    metrics = agent.train(feed)

    batch = dict(feed.batches[0])
    action = batch["action"]
    if space.is_discrete:
        action = torch.nn.functional.one_hot(action.long(), count).float()
    batch["action"] = torch.cat([torch.zeros_like(action[:, :1]), action[:, :-1]], 1)
    reference = Reference(
        state,
        optimizers,
        options,
        shapes,
        gradient=gradient,
        mix=mix,
        lrs=LRS,
    )
    losses = reference.update(batch, agent.config.imag_length + 1)
    for name, loss in losses.items():
        assert float(metrics[f"loss/{name}"]) == pytest.approx(loss, rel=2e-5), name

    after = agent.state_dict()
    names = new_names(state, template)
    assert len(names) == len(state) - 1  # all but the percentiles
    for old, (component, new) in names.items():
        error = relative_error(after[component][new], reference.state[old].detach())
        assert error < 2e-5, (old, error)
        if old in reference.momentum:  # an average of gradients
            actual = find_momentum(after["opt"], f"{component}.{new}")
            error = relative_error(actual, reference.momentum[old])
            assert error < 2e-5, (old, error)
    assert len(reference.momentum) == len(agent.opt.names)
    ema = torch.stack([after["retnorm"]["lo"], after["retnorm"]["hi"]])
    expected = reference.state["_task_behavior.ema_vals"]
    assert relative_error(ema, expected) < 2e-5
    assert float(after["opt"]["world"]["step"]) == 6
