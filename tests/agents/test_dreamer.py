"""DreamerV3: model sizes, acting, reports, checkpoints and errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from dreamer_helpers import (
    ACT,
    BOOL,
    CPU,
    F32,
    FLAGS,
    I32,
    OBS,
    TINY,
    U8,
    RandomFeed,
    changed,
    flatten,
    make,
    observations,
)

from reverie import agents
from reverie.agents.dreamer.actor_critic import ActorCritic
from reverie.agents.dreamer.agent import DreamerConfig
from reverie.agents.dreamer.factory import make_world
from reverie.agents.options import BuildOptions
from reverie.agents.weights import size_preset_of, size_presets
from reverie.api import UserError
from reverie.render.open_loop import GAP, LABELS, MARKER, TITLE
from reverie.run.config import resolve
from reverie.spaces import Space

# Sizes


WALKER = {
    "height": Space(F32),
    "orientations": Space(F32, (14,)),
    "velocity": Space(F32, (9,)),
    **FLAGS,
}
TASKS = {
    "crafter": ({"image": Space(U8, (64, 64, 3)), **FLAGS}, Space(I32, (), 0, 17)),
    "atari": ({"image": Space(U8, (96, 96, 1)), **FLAGS}, Space(I32, (), 0, 18)),
    "walker": (WALKER, Space(F32, (6,), -1, 1)),
}
COUNTS = {
    "size1m": (687_875, 769_762, 640_867),
    "size12m": (10_498_259, 11_808_850, 9_738_019),
    "size25m": (23_495_475, 26_444_402, 21_782_947),
    "size50m": (41_658_259, 46_900_882, 38_612_003),
    "size100m": (93_480_531, 105_276_626, 86_622_499),
    "size200m": (165_965_075, 186_936_082, 153_769_507),
    "size400m": (372_920_979, 420_106_130, 345_473_059),
}
COMPONENT_COUNTS = {
    ("crafter", "size12m"): {
        "dyn": 5_982_464,
        "enc": 220_416,
        "dec": 1_272_003,
        "rew": 721_407,
        "con": 656_129,
        "pol": 792_337,
        "val": 853_503,
    },
    ("walker", "size1m"): {
        "dyn": 364_416,
        "enc": 10_112,
        "dec": 51_096,
        "rew": 57_663,
        "con": 41_153,
        "pol": 50_316,
        "val": 66_111,
    },
}


def sized(size: str) -> DreamerConfig:
    """Return the defaults with the values of a size preset."""
    preset = size_presets()[size]
    value = {
        key.rstrip("$").rsplit(".", 1)[-1].strip("\\"): v for key, v in preset.items()
    }
    config = DreamerConfig()
    names = ("deter", "hidden", "classes")
    config = replace(
        config, rssm=replace(config.rssm, **{name: value[name] for name in names})
    )
    conv = {"depth": value["depth"], "units": value["units"]}
    config = replace(
        config, enc=replace(config.enc, **conv), dec=replace(config.dec, **conv)
    )
    heads = ("rewhead", "conhead", "policy", "value")
    return replace(
        config,
        **{
            name: replace(getattr(config, name), units=value["units"]) for name in heads
        },
    )


def count_parameters(task, config):
    obs, act = TASKS[task]
    with torch.device("meta"):
        world = make_world(config, obs, {"action": act}, torch.float32)
        actor_critic = ActorCritic(world.width, {"action": act}, config)
    return {
        name: sum(p.numel() for p in part.parameters() if p.requires_grad)
        for name, part in (*world.named_children(), *actor_critic.named_children())
    }


@pytest.mark.parametrize("size", COUNTS)
def test_parameter_counts(size):
    for task, expected in zip(TASKS, COUNTS[size], strict=True):
        counts = count_parameters(task, sized(size))
        assert sum(counts.values()) == expected
        for part, count in COMPONENT_COUNTS.get((task, size), {}).items():
            assert counts[part] == count


def test_the_default_is_size200m():
    assert sized("size200m") == DreamerConfig()


# Acting


def test_actions_are_in_the_action_space():
    act = {
        "move": Space(np.dtype("int64"), (), 0, 3),
        "tool": Space(I32, (2,), [1, 0], [3, 5]),
        "jump": Space(BOOL),
        "arm": Space(F32, (2,), -1, 1),
    }
    agent = make(act=act)
    carry, action, extras = agent.policy(agent.initial(2), observations())
    for key, space in act.items():
        assert action[key].dtype == space.dtype
        assert action[key].shape == (2, *space.shape)
    assert action["tool"][:, 0].min() >= 1
    for key, space in agent.extras.items():
        assert space.problem(extras[key][0]) is None
    carry, action, extras = agent.policy(carry, observations())
    metrics = agent.train(RandomFeed(agent, act=act))
    assert {"ent/move", "ent/arm", "rand/move"} <= set(metrics)
    assert "rand/tool" not in metrics


def test_the_carry_is_reset_at_the_start_of_an_episode():
    obs = observations()
    agent, new = make(), make()
    carry = agent.initial(2)
    for seed in range(3):
        carry, _, _ = agent.policy(carry, observations(seed=seed))
    obs["is_first"][:] = True
    agent.rng["policy"].load_state_dict(new.rng["policy"].state_dict())
    (reset, _), *_ = agent.policy(carry, obs)
    (expected, _), *_ = new.policy(new.initial(2), obs)
    torch.testing.assert_close(reset.deter, expected.deter)


def test_evaluation_samples_with_its_own_generator():
    agent, other = make(), make()
    obs = observations(count=64)
    actions = agent.policy(agent.initial(64), obs, "eval")[1]["action"]
    assert len(set(actions.tolist())) == 4
    actual = agent.policy(agent.initial(64), obs)[1]["action"]
    expected = other.policy(other.initial(64), obs)[1]["action"]
    np.testing.assert_array_equal(actual, expected)


def test_extra_observation_keys_are_ignored():
    plain = make(random_heads=True)
    agent = make(obs={**OBS, "log/score": Space(F32)}, random_heads=True)
    seen = observations(count=64)
    extra = {**seen, "log/score": np.arange(64, dtype=np.float32)}
    np.testing.assert_array_equal(
        agent.policy(agent.initial(64), extra)[1]["action"],
        plain.policy(plain.initial(64), seen)[1]["action"],
    )


# Reporting


def test_reports_have_all_losses_and_a_video_and_change_nothing():
    agent = make()
    feed = RandomFeed(agent)
    trained = agent.train(feed)
    before = flatten(agent.state_dict())
    report = agent.report(feed)
    after = flatten(agent.state_dict())
    changed_keys = {key for key in before if not torch.equal(before[key], after[key])}
    assert all(key.startswith(("rng/report", "carry/report")) for key in changed_keys)
    missing = [k for k in trained if not k.startswith("opt/") and k not in report]
    assert missing == []
    video = report["openloop/image"]
    assert video.dtype == np.uint8
    side = 4 * 12  # tiny frames are enlarged
    height = TITLE + MARKER + 2 + 3 * (side + GAP)
    assert video.shape == (5 + 5, height, LABELS + 3 * (side + GAP), 3)


def test_reports_of_gradient_norms():
    agent = make(replace(TINY, report_gradnorms=True))
    before = flatten(agent.state_dict())
    report = agent.report(RandomFeed(agent))
    assert float(report["gradnorm/image"]) > 0
    assert {"gradnorm/policy", "gradnorm/repval"} <= set(report)
    assert "dyn" not in changed(before, flatten(agent.state_dict()))


def test_metrics_need_no_gradient():
    agent = make()
    metrics = agent.train(RandomFeed(agent))
    assert not any(getattr(x, "requires_grad", False) for x in metrics.values())


# Checkpoints


def test_runs_depend_on_the_seed_only():
    def run(seed):
        agent = make(seed=seed)
        feed = RandomFeed(agent)
        agent.train(feed)
        agent.policy(agent.initial(2), observations())
        return flatten(agent.state_dict())

    assert changed(run(0), run(0)) == set()
    assert "pol" in changed(run(0), run(1))


def test_a_restored_agent_continues_identically():
    agent = make()
    feed = RandomFeed(agent)
    for _ in range(2):
        agent.train(feed)
    agent.report(feed)
    saved = agent.state_dict()
    saved = dict(clone(saved).items())
    restored = make(seed=7)
    restored.load_state_dict(saved)
    assert changed(flatten(saved), flatten(restored.state_dict())) == set()
    other_feed = RandomFeed(restored)
    feed.rng = np.random.default_rng(5)
    other_feed.rng = np.random.default_rng(5)
    one, two = agent.train(feed), restored.train(other_feed)
    assert {k: float(v) for k, v in one.items()} == {
        k: float(v) for k, v in two.items()
    }
    assert changed(flatten(agent.state_dict()), flatten(restored.state_dict())) == set()


def clone(tree):
    if isinstance(tree, dict):
        return {k: clone(v) for k, v in tree.items()}
    return tree.clone() if isinstance(tree, torch.Tensor) else tree


def test_state_dicts_have_tensors_and_numbers():
    for value in flatten(make().state_dict()).values():
        assert isinstance(value, torch.Tensor)


def test_loading_some_components():
    source, agent = make(seed=1), make(seed=2)
    before = flatten(agent.state_dict())
    agent.load_weights(source.state_dict(), "enc|dyn")
    assert changed(before, flatten(agent.state_dict())) == {"enc", "dyn"}
    with pytest.raises(UserError, match="No component"):
        agent.load_weights(source.state_dict(), "unknown")


def test_averages_that_are_not_loaded_are_copied_from_the_loaded_weights():
    config = replace(TINY, representation="prototypes")
    source, agent = make(config, seed=1), make(config, seed=2)
    agent.load_weights(source.state_dict(), "enc|val")
    assert_equal(agent.actor_critic.slowval, source.actor_critic.val)
    loss = agent.world.representation
    assert_equal(loss.slow_encoder, source.world.enc)
    assert_equal(loss.slow_from_embed, loss.from_embed)
    with torch.no_grad():
        for module in (source.world.enc, agent.actor_critic.val):
            for weight in module.parameters():
                weight += 1
    agent.load_weights(source.state_dict(), "dec|rew")
    assert_equal(agent.actor_critic.slowval, source.actor_critic.val)
    agent.load_weights(source.state_dict())
    assert_equal(loss.slow_encoder, source.world.representation.slow_encoder)


def assert_equal(module, other):
    for tensor, expected in zip(
        module.state_dict().values(), other.state_dict().values(), strict=True
    ):
        assert torch.equal(tensor, expected)


def test_errors_for_weights_of_another_size_suggest_the_preset():
    preset = sized("size1m")
    config = replace(TINY, rssm=preset.rssm, value=preset.value)
    obs = {"vector": OBS["vector"], **FLAGS}
    state = make(config, obs=obs).state_dict()
    assert size_preset_of(state) == "size1m"
    agent = make(obs=obs)
    before = flatten(agent.state_dict())
    with pytest.raises(UserError, match=r"(?s)\(.*\).*\(.*\).*--configs size1m"):
        agent.load_state_dict(state)
    assert changed(before, flatten(agent.state_dict())) == set()


def test_weights_of_a_size_without_preset_are_an_error():
    other = make(replace(TINY, rssm=replace(TINY.rssm, hidden=16)))
    with pytest.raises(UserError, match="this agent expects shape"):
        make().load_state_dict(other.state_dict())


# Invalid inputs


def test_invalid_inputs_are_errors():
    with pytest.raises(UserError, match="encoder has no inputs"):
        make(obs=FLAGS)
    with pytest.raises(UserError, match="sides of"):
        make(obs={"image": Space(U8, (64, 200, 3)), **FLAGS})
    with pytest.raises(UserError, match="no policy supports"):
        make(act={"action": Space(U8, (4, 4, 3))})
    with pytest.raises(UserError, match="bfloat16"):
        make(precision="half")
    with pytest.raises(UserError, match="reserved"):
        make(obs={**OBS, "value": Space(F32)})
    with pytest.raises(UserError, match="rssm"):
        make(replace(TINY, world="sphere"))
    with pytest.raises(UserError, match="dreamer"):
        agents.make("dreamr", OBS, ACT, TINY, BuildOptions(CPU))


def test_weights_of_a_deeper_network_are_an_error():
    deeper = replace(TINY, policy=replace(TINY.policy, layers=TINY.policy.layers + 1))
    with pytest.raises(UserError, match="which this agent does not have"):
        make().load_weights(make(deeper).state_dict())


def test_an_invalid_component_pattern_is_an_error():
    with pytest.raises(UserError, match="No component"):
        make().load_weights(make().state_dict(), "enc|dyn(")


WORLD_WITH_A_PARAMETER = """
import torch
from reverie.worlds.rssm.config import RSSMConfig
from reverie.worlds.rssm.world import RSSM

class ScaledRSSM(RSSM):
    Config = RSSMConfig

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.register_buffer("constant", torch.ones(2), persistent=False)
        self.scale = torch.nn.Parameter(torch.ones(2))
"""


def test_parameters_outside_of_submodules_of_a_world_are_an_error(
    tmp_path, monkeypatch
):
    (tmp_path / "scaled_rssm.py").write_text(WORLD_WITH_A_PARAMETER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = "scaled_rssm:ScaledRSSM"
    config = resolve(["debug"], flags={"task": "catch", "dreamer.world": name}).dreamer
    with pytest.raises(UserError, match="'scale' as a direct attribute"):
        make(config)
