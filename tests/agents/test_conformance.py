"""Every agent meets `api.Agent` and the optional protocols that it declares.

The example agent is imported as a plug-in, from a folder outside the package.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import dreamer_helpers
import dreamerv3_torch_helpers
import iris_helpers
import numpy as np
import pytest
import torch
from protocol_checks import check_members

from reverie import agents
from reverie.agents.bc.agent import BCConfig
from reverie.agents.bc.head import BCHeadConfig
from reverie.agents.explore import ExploreConfig
from reverie.agents.options import BuildOptions
from reverie.agents.random import RandomConfig
from reverie.agents.vta.agent import VTAAgentConfig
from reverie.api import Agent, LatentWorld, Mode, Schedule, UserError, World
from reverie.capabilities import (
    AgentConfig,
    ConfiguresBase,
    FindsBoundaries,
    HasBase,
    HasEpisodeLosses,
    HasParameterCount,
    HasWorld,
    HasWorldModelEnv,
    KeyStatistics,
    NeedsStatistics,
    PolicyWorldModelEnv,
    Profilable,
)
from reverie.datasets.sequences import SequenceConfig
from reverie.datasets.sequences.feed import SequenceFeed
from reverie.datasets.synthetic.balls import BouncingBalls
from reverie.nets.ensemble import EnsembleConfig
from reverie.nets.tree import tree_map
from reverie.rows import Window
from reverie.spaces import Space, agent_obs_space
from reverie.worlds.vta.config import RecurrentVTAConfig, VTAConfig

EXAMPLES = Path(__file__).parents[2] / "examples"
PLUGIN = "random_shooting:RandomShooting"
SIZES = (1, 3)
"""Batch sizes of the policy."""


@dataclass(frozen=True)
class Case:
    """An agent with the spaces it is built for."""

    name: str
    config: Callable[[], AgentConfig]
    obs_space: dict[str, Space]
    act_space: dict[str, Space]
    modes: tuple[str, ...] = ("train", "eval", "greedy")
    """Modes in which the policy acts; in others it raises a `UserError`."""
    base: str = ""
    """Case of the agent whose world model it uses."""
    explore: ExploreConfig = ExploreConfig()  # noqa: RUF009 (frozen)

    def make(self, seed: int = 0) -> Any:
        return agents.make(
            self.name,
            self.obs_space,
            self.act_space,
            self.config(),
            BuildOptions(
                torch.device("cpu"),
                seed=seed,
                base=CASES[self.base].make() if self.base else None,
                explore=self.explore,
            ),
        )

    def make_feed(self, agent: Any) -> Any:
        if self.name == "vta":
            return SequenceFeed(balls(), torch.device("cpu"))
        return EpisodeFeed(agent, self)

    def observations(self, count: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        obs = {key: space.sample(rng, count) for key, space in self.obs_space.items()}
        flags = ("is_first", "is_last", "is_terminal")
        return {**obs, **{key: np.zeros(count, bool) for key in flags}}


class EpisodeFeed(dreamer_helpers.RandomFeed):
    """Random batches of whole episodes, with all keys that an agent may use."""

    def __init__(self, agent, case):
        super().__init__(agent, case.obs_space, case.act_space)

    def __call__(self, name, out=None):
        batch = super().__call__(name)
        for key in ("is_first", "is_last", "is_terminal"):
            batch[key][:] = False
        batch["is_first"][:, 0] = batch["is_last"][:, -1] = True
        return {**batch, "mask": torch.ones_like(batch["is_first"])}

    def count_uses(self, name, on):
        assert name in self.agent.windows


def balls() -> BouncingBalls:
    settings = SequenceConfig(chunk=8, refresh=0, evaluation=6)
    return BouncingBalls(settings, vta().sequence_window, 0)


def vta() -> VTAAgentConfig:
    world = VTAConfig(context=2, length=6, belief=8, state=3, layers=1)
    return VTAAgentConfig(batch_size=4, world=world)


def bc(**settings) -> BCConfig:
    head = BCHeadConfig(layers=1, units=8)
    enc = dreamer_helpers.TINY.enc
    return BCConfig(batch_size=4, length=3, enc=enc, head=head, **settings)


def random_shooting() -> AgentConfig:
    config: type = agents.find_class(PLUGIN).Config
    return config(candidates=4, horizon=2, model=dreamer_helpers.TINY)


def dreamer(**settings) -> AgentConfig:
    return replace(dreamer_helpers.TINY, **settings)


OBS, ACT = dreamer_helpers.OBS, dreamer_helpers.ACT
ARM = {**ACT, "arm": Space(np.float32, (2,), -1, 1)}
CATCH = iris_helpers.make_env()
MODES = typing.get_args(Mode)
EXPLORE = ExploreConfig("plan2explore", ensemble=EnsembleConfig(3, 1, 8))
SMALL_VTA = RecurrentVTAConfig(8, 3, 8, 4, 6)
CASES = {
    "bc": Case("bc", bc, OBS, ARM, ("eval", "greedy")),
    "bc_encoder": Case(
        "bc", partial(bc, run_agent="dreamer"), OBS, ACT, ("eval", "greedy"), "dreamer"
    ),
    "bc_state": Case(
        "bc",
        partial(bc, run_agent="dreamer", features="state", normalize="bounds"),
        OBS,
        ACT,
        ("eval", "greedy"),
        "dreamer",
    ),
    "dreamer": Case("dreamer", dreamer, OBS, ACT),
    "dreamer_vta": Case(
        "dreamer", partial(dreamer, world="vta", vta=SMALL_VTA), OBS, ARM
    ),
    "dreamerv3_torch": Case(
        "dreamer", partial(dreamerv3_torch_helpers.settings), OBS, ACT
    ),
    "dreamerv3_torch_gaussian": Case(
        "dreamer", partial(dreamerv3_torch_helpers.settings, classes=0), OBS, ARM
    ),
    "dreamerv3_torch_context": Case(
        "dreamer",
        partial(dreamerv3_torch_helpers.settings, replay_context=1),
        OBS,
        ARM,
    ),
    "dreamer_plan2explore": Case("dreamer", dreamer, OBS, ACT, MODES, "", EXPLORE),
    "dreamer_vta_plan2explore": Case(
        "dreamer",
        partial(dreamer, world="vta", vta=SMALL_VTA),
        OBS,
        ARM,
        MODES,
        "",
        replace(EXPLORE, action_conditioned=True, target="embed"),
    ),
    "dreamerv3_torch_plan2explore": Case(
        "dreamer",
        partial(dreamerv3_torch_helpers.settings, "dynamics"),
        OBS,
        ARM,
        MODES,
        "",
        replace(EXPLORE, extrinsic=0.5, target="feat"),
    ),
    "iris": Case("iris", iris_helpers.settings, CATCH.obs_space, CATCH.act_space),
    "iris_plan2explore": Case(
        "iris",
        iris_helpers.settings,
        CATCH.obs_space,
        CATCH.act_space,
        MODES,
        "",
        replace(EXPLORE, extrinsic=0.5),
    ),
    "random": Case("random", RandomConfig, OBS, ARM, MODES),
    "random_shooting": Case(PLUGIN, random_shooting, OBS, ACT, MODES),
    "vta": Case("vta", vta, balls().obs_space, {}, ()),
}


EXTENDED = {name for name in CASES if "explore" in name or "_torch_" in name}
"""Variants of agents that `make test-extended` checks."""


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.extended if name in EXTENDED else ())
        for name in CASES
    ],
    autouse=True,
)
def case(request, monkeypatch) -> Case:
    monkeypatch.syspath_prepend(EXAMPLES)
    yield CASES[request.param]
    sys.modules.pop("random_shooting", None)


@pytest.fixture
def agent(case) -> Any:
    return case.make()


def test_all_agents_are_checked(case):
    assert {case.name for case in CASES.values()} == {*agents.AGENTS, PLUGIN}


def test_it_has_all_members_of_the_protocol(case, agent):
    check_members(agent, Agent)
    if agent.schedule is not None:
        check_members(agent.schedule, Schedule)
    assert isinstance(case.config(), AgentConfig)
    assert all(isinstance(x, Window) for x in agent.windows.values())
    assert all(isinstance(x, Space) for x in agent.extras.values())


@pytest.mark.parametrize("count", SIZES)
def test_the_policy_returns_actions_and_extras_of_the_spaces(case, agent, count):
    for mode in MODES:
        obs, carry = case.observations(count), agent.initial(count)
        if mode in case.modes:
            check_policy(case, agent, mode, obs, carry)
        else:
            with pytest.raises(UserError, match="Fix:"):
                agent.policy(carry, obs, mode)


def check_policy(case: Case, agent: Any, mode: Mode, obs: Any, carry: Any) -> None:
    shapes, count = shapes_of(carry), len(obs["is_first"])
    for first in (True, False):
        obs["is_first"][:] = first
        carry, action, extras = agent.policy(carry, obs, mode)
        assert shapes_of(carry) == shapes, mode
        for values, spaces in ((action, case.act_space), (extras, agent.extras)):
            assert values.keys() == spaces.keys(), mode
            for key, space in spaces.items():
                assert isinstance(values[key], np.ndarray)
                assert len(values[key]) == count
                value = values[key]
                if not space.is_discrete:  # environments clip continuous actions
                    value = np.clip(value, space.low, space.high)
                assert all(space.problem(row) is None for row in value), mode


def shapes_of(carry: Any) -> Any:
    return tree_map(lambda x: (tuple(x.shape), x.dtype), carry)


def test_train_and_report_return_metrics(case, agent):
    feed = case.make_feed(agent)
    for metrics in (agent.train(feed), agent.report(feed)):
        for name, value in metrics.items():
            assert isinstance(name, str)
            assert is_metric(value), f"{name} is {type(value)}"
    assert agent.nonfinite() == []


def is_metric(value: Any) -> bool:
    """True for scalars, images (h w c uint8) and videos (t h w c uint8)."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and not value.requires_grad
    array = np.asarray(value)
    is_image = array.dtype == np.uint8 and array.ndim in (3, 4)
    return is_image or (array.ndim == 0 and array.dtype.kind in "biuf")


def test_a_restored_agent_has_the_same_state_and_trains_the_same(case, agent):
    feed = case.make_feed(agent)
    agent.train(feed)
    agent.report(feed)
    state = leaves(agent.state_dict())
    for value in state.values():
        kinds = (torch.Tensor, np.ndarray, int, float, str, bool, type(None))
        assert isinstance(value, kinds)
    restored = case.make(seed=1)
    restored.load_state_dict(copied(agent.state_dict()))
    assert_same(leaves(restored.state_dict()), state)
    feeds = [case.make_feed(agent) for _ in range(2)]
    one, two = agent.train(feeds[0]), restored.train(feeds[1])
    assert {k: float(x) for k, x in one.items()} == {
        k: float(x) for k, x in two.items()
    }


def leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return a copy of all values of nested dicts and lists, by path."""
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        parts = [leaves(value, f"{prefix}/{key}") for key, value in items]
        return {key: value for part in parts for key, value in part.items()}
    return {prefix: copied(tree)}


def copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    return tree.clone() if isinstance(tree, torch.Tensor) else tree


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor | np.ndarray):
            assert torch.equal(*map(torch.as_tensor, (actual[key], value))), key
        else:
            assert actual[key] == value, key


AVERAGES = {
    "val": ["slowval"],
    "explore_val": ["explore_slowval"],
    "enc": ["representation"],
}
"""Components with moving averages of the weights of a component. They become copies of
weights that are loaded without them."""


def test_single_components_can_be_loaded(case, agent):
    source = case.make(seed=1).state_dict()
    names = agent.load_weights(source)
    for name in names:
        other = case.make(seed=2)
        before = leaves(other.state_dict())
        assert other.load_weights(source, name) == [name]
        after = leaves(other.state_dict())
        changed = {k for k in before if not equal(before[k], after[k])}
        assert {key.split("/")[1] for key in changed} <= {name, *AVERAGES.get(name, ())}
        assert_same(leaves(other.state_dict()[name]), leaves(source[name]))
    if names:
        with pytest.raises(UserError, match="Fix:"):
            agent.load_weights(source, "unknown")


def equal(one: Any, two: Any) -> bool:
    tensors = isinstance(one, torch.Tensor)
    return torch.equal(one, two) if tensors else bool(np.all(one == two))


# Optional protocols


def test_needs_statistics(case, agent):
    if not isinstance(agent, NeedsStatistics):
        return
    check_members(agent, NeedsStatistics)
    spaces = {**agent_obs_space(case.obs_space), **case.act_space}
    ones = {key: np.ones(space.shape, np.float32) for key, space in spaces.items()}
    agent.set_statistics({k: KeyStatistics(x, x, x - 1, x) for k, x in ones.items()})
    agent.train(case.make_feed(agent))


def test_episode_losses(case, agent):
    if not isinstance(agent, HasEpisodeLosses):
        return
    check_members(agent, HasEpisodeLosses)
    batch = case.make_feed(agent)(next(iter(agent.windows)))
    losses, mask = agent.episode_losses(batch)
    assert losses
    assert mask.dtype == torch.bool
    assert mask.shape == batch["mask"].shape
    for loss in losses.values():
        assert loss.shape == mask.shape
        assert not loss.requires_grad
        assert loss[mask].isfinite().all()


def test_sections(case, agent):
    if not isinstance(agent, Profilable):
        return
    check_members(agent, Profilable)
    for section in agent.sections(case.make_feed(agent)).values():
        section()
        section()


def test_parameter_count(agent):
    if isinstance(agent, HasParameterCount):
        check_members(agent, HasParameterCount)
        assert agent.parameter_count() > 0


def test_its_world_meets_the_protocol(agent):
    if isinstance(agent, HasWorld):
        latent = isinstance(agent.world, LatentWorld)
        assert isinstance(agent.world, LatentWorld if latent else World)


def test_world_model_env(case, agent):
    if not isinstance(agent, HasWorldModelEnv):
        return
    env = agent.world_model_env(seed=3)
    check_members(env, PolicyWorldModelEnv)
    assert set(env.predicted_keys) <= set(env.obs_space)
    batch = case.make_feed(agent)(next(iter(agent.windows)))
    context = {key: x.numpy() for key, x in batch.items() if "dyn/" not in key}
    state, count = env.begin(context), len(context["is_first"])
    rng = np.random.default_rng(0)
    for _ in range(2):
        action = {key: x.sample(rng, count) for key, x in env.act_space.items()}
        state, rows = env.step(state, action)
        assert rows["reward"].shape == rows["is_terminal"].shape == (count,)
        for key, space in env.obs_space.items():
            assert all(space.problem(row) is None for row in rows[key])


def test_base_agents(case, agent):
    if not case.base:
        return
    check_members(agent, HasBase)
    assert isinstance(agent.config, ConfiguresBase)
    assert agent.config.with_base_agent("iris").base_agent == "iris"
    trained = CASES[case.base].make(seed=5)
    agent.load_base(trained.state_dict())
    loaded, expected = agent.base.state_dict()["enc"], trained.state_dict()["enc"]
    assert_same(leaves(loaded), leaves(expected))


def test_boundaries(case, agent):
    if not isinstance(agent, FindsBoundaries):
        return
    check_members(agent, FindsBoundaries)
    data = case.make_feed(agent)("report")
    rows, key = agent.modeled_rows, agent.image_key
    evaluation = agent.evaluate(data)
    assert evaluation.boundary.shape == data[key][:, rows].shape[:2]
    inputs = {k: x for k, x in data.items() if not k.startswith("log/")}
    for by_segment in (False, True):
        images, boundaries = agent.imagine(inputs, by_segment)
        assert images.shape == data[key][:, rows].shape
        assert boundaries.shape == images.shape[:2]
