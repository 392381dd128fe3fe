"""The agent's half of Δ-IRIS against numbers of the original.

Sizes are read from the files: the actor-critic in both forms of its values, returns,
and how sequences are chosen and padded.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from iris_comparisons import by_original_name, close_gradients, close_update
from iris_world_recording import (
    RecordedSamples,
    as_bytes,
    frame_config,
    has,
    load,
    shapes_of,
    tensors,
    under,
)

from reverie.agents.iris.actor_critic import PixelActorCritic, PixelActorCriticConfig
from reverie.agents.iris.batches import to_segment
from reverie.agents.iris.report import episode_losses
from reverie.agents.returns import lambda_return
from reverie.api import WorldLoss
from reverie.convert.delta_iris.names import copy_weights, find_targets
from reverie.convert.delta_iris.weights import ACTOR_CRITIC
from reverie.nets.optim.adam import AdamConfig
from reverie.replay.buffer import Replay
from reverie.replay.config import ReplayConfig
from reverie.replay.episode_sampler import EpisodeIndex, EpisodeSampler
from reverie.rows import Window
from reverie.spaces import Space
from reverie.storage.episode_windows import episode_probabilities, window_start
from reverie.worlds.iris.segment import EpisodeSegment
from reverie.worlds.iris.world import IrisFrames, IrisWorld

FORMS = [form for form in ("two_hot", "mse") if has(f"actor_critic_{form}_io")]
CONSTANTS = {"discount": 0.997, "lam": 0.95, "entropy_scale": 0.001}
"""Not among the arrays; the folder's description says so."""


def build(form: str) -> PixelActorCritic:
    params, recorded = load(f"actor_critic_{form}_params"), recording(form)
    online = under(params, "model.")
    colours, height, width = recorded["in/observations"].shape[2:]
    config = PixelActorCriticConfig(
        frame=frame_config(shapes_of(online), "cnn.0.encoder"),
        width=online["lstm.weight_hh"].shape[1],
        burn_in=recorded["in/observations"].shape[1] - 1,
        horizon=recorded["imagine/actions"].shape[1],
        two_hot_values=len(online["critic_linear.bias"]) > 1,
        **CONSTANTS,
    )
    actions = len(online["actor_linear.bias"])
    nets = PixelActorCritic((height, width, colours), actions, config)
    for net, prefix in ((nets.online, "model."), (nets.target, "target_model.")):
        state = copy_weights(
            tensors(under(params, prefix)), ACTOR_CRITIC, net.state_dict()
        )
        net.load_state_dict(state)
    return nets


def recording(form: str) -> dict[str, np.ndarray]:
    return load(f"actor_critic_{form}_io")


def loss_of(form: str, nets: PixelActorCritic):
    r = recording(form)
    context, frames = as_bytes(r["in/observations"]), as_bytes(r["frames"])
    none = torch.zeros(len(context), 1)
    imagined = IrisFrames(
        torch.cat([context[:, -1:], frames], 1),
        torch.cat([none, torch.tensor(r["imagine/rewards"])], 1),
        torch.cat([none, torch.tensor(r["imagine/ends"])], 1).bool(),
    )
    actions = torch.tensor(r["imagine/actions"])
    return nets.loss(context[:, :-1], imagined, actions)


def close(ours, theirs, tolerance=2e-4, name=""):
    ours = np.asarray(ours.detach() if isinstance(ours, torch.Tensor) else ours)
    scale = max(np.abs(theirs).max(initial=0), 1e-3)
    worst = np.abs(ours - theirs).max(initial=0)
    assert worst <= tolerance * scale, f"{name}: off by {worst}, of {scale}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("which", ["online", "target"])
def test_outputs_step_by_step(form, which):
    nets, r = build(form), recording(form)
    wanted = under(r, f"unroll/{which}/")
    net = getattr(nets, which)
    frames = torch.cat([as_bytes(r["in/observations"]), as_bytes(r["frames"])], 1)
    with torch.no_grad():
        features = net.features(frames)
        close(features, wanted["features"], name="features")
        state, states = net.initial(len(frames)), []
        for t in range(frames.shape[1]):
            state, _ = net.run_lstm(state, features[:, t : t + 1])
            states.append(state)
        close(torch.stack([x.hidden for x in states], 1), wanted["hx"], name="hx")
        close(torch.stack([x.cell for x in states], 1), wanted["cx"], name="cx")
        _, output = net(net.initial(len(frames)), frames)
    close(output.policy, wanted["logits_actions"], name="policy")
    close(output.value, wanted["logits_values"], name="value")


@pytest.mark.parametrize("form", FORMS)
def test_losses_of_imagined_rollouts(form):
    nets, r = build(form), recording(form)
    loss = loss_of(form, nets)
    close(loss.output.policy, r["imagine/logits_actions"], name="policy")
    value = loss.output.value
    value = value if nets.config.two_hot_values else value[..., 0]
    close(value, r["imagine/logits_values"], name="value")
    close(loss.values[:, :-1], r["imagine/target_values"], name="target")
    close(loss.values[:, -1], r["imagine/value_bootstrap"], name="bootstrap")
    close(loss.returns, r["lambda_returns"], 1e-4, "returns")
    np.testing.assert_array_equal(loss.mask, r["mask"])
    means = {name: x.mean() for name, x in loss.losses.items()}
    for name, mean in means.items():
        close(mean, r[f"loss/loss_{name}"], name=name)
    close(sum(means.values()), r["loss_total"], name="total")
    close(loss.metrics["policy_entropy"], r["metric/policy_entropy"], name="entropy")


@pytest.mark.parametrize("form", FORMS)
def test_gradients_and_the_step_they_lead_to(form):
    nets, r = build(form), recording(form)
    loss = loss_of(form, nets)
    total = torch.stack([x.mean() for x in loss.losses.values()]).sum()
    grads = torch.autograd.grad(total, list(nets.online.parameters()))
    wanted = under(r, "grad/model.")
    ours = by_original_name(nets.online, grads, ACTOR_CRITIC, wanted)
    close_gradients(ours, wanted, float(r["opt/grad_norm_before_clip"]))
    nets.update_target()
    slow = dict(nets.target.named_parameters())
    after = under(r, "target_after/")
    for name, target in find_targets(after | wanted, ACTOR_CRITIC).items():
        if name in after:
            close(target.view(slow), after[name], 1e-6, name)
    config = AdamConfig(wd=0.0)
    close_update(nets.online, ACTOR_CRITIC, wanted, r, config, list(grads))


def test_lambda_returns():
    r = under(load("functions"), "lambda/")
    none = torch.zeros(len(r["rewards"]), 1)
    reward = torch.cat([none, torch.tensor(r["rewards"])], 1)
    ends = torch.cat([none, torch.tensor(r["ends"]).float()], 1)
    values = np.concatenate([r["values"], r["bootstrap"][:, None]], 1)
    cases = [key for key in r if key.endswith("gamma_lambda")]
    assert cases
    for key in cases:
        discount, lam = (float(x) for x in r[key])
        found = lambda_return(
            reward, torch.tensor(values), torch.zeros_like(ends), ends, discount, lam
        )
        wanted = r[key.replace("gamma_lambda", "returns")]
        np.testing.assert_allclose(found, wanted, atol=1e-5, err_msg=key)


def test_rows_count_up_to_the_first_end():
    ends = torch.tensor(load("functions")["lambda/ends"])
    arrivals = torch.cat([torch.zeros(len(ends), 1), ends], 1)
    mask = arrivals[:, :-1].cumsum(1) == 0
    np.testing.assert_array_equal(mask, load("functions")["mask_after_first_done"])


def test_priorities():
    r = under(load("functions"), "priority/")
    for key in r:
        if key.startswith("probabilities_alpha_"):
            alpha = float(key.rsplit("_", 1)[1])
            found = episode_probabilities(r["counts"], alpha)
            np.testing.assert_allclose(found, r[key], atol=1e-6, err_msg=key)


PADS = {"beyond_end": "both", "within_end": "left"}


@pytest.mark.parametrize("kind", PADS)
def test_segments_drawn_with_the_same_numbers(kind):
    """The original's draws, in its order, give the original's segments."""
    functions = load("functions")
    r = under(functions, f"sampler/{kind}/")
    lengths, length = functions["sampler/lengths"], int(r["sequence_length"])
    rng = np.random.RandomState(int(functions["sampler/numpy_seed"]))
    wanted = r["segments"]
    probabilities = functions["priority/probabilities_alpha_1"].astype(np.float64)
    count = len(wanted)
    ids = rng.choice(len(lengths), count, p=probabilities / probabilities.sum())
    step = rng.randint(0, lengths[ids])
    offset = rng.randint(0, length, count)
    start = window_start(step, offset, lengths[ids], length, PADS[kind])
    np.testing.assert_array_equal(np.stack([ids, start, start + length], 1), wanted)


class FakeStepIndex:
    """Rows lie one after the other; an episode has one row more than transitions."""

    first = 0

    def ids_at(self, starts, offsets):
        return starts[:, None] + offsets


@pytest.mark.parametrize("kind", PADS)
def test_segments_are_spread_like_the_original_s(kind):
    functions = load("functions")
    r = under(functions, f"sampler/{kind}/")
    lengths, counts = functions["sampler/lengths"], functions["priority/counts"]
    begin = np.cumsum(np.append(0, lengths + 1))[:-1]
    episodes = EpisodeIndex.__new__(EpisodeIndex)
    episodes.index = FakeStepIndex()
    episodes._size, episodes._first, episodes.num_removed = len(lengths), 0, 0
    episodes._table = {"begin": begin, "rows": lengths + 1}
    draws = int(r["episode_histogram"].sum())
    length = int(r["sequence_length"])
    window = Window(
        draws, length + 1, select="episodes", pad=PADS[kind], alpha=1.0, online=False
    )
    sampler = EpisodeSampler(episodes, window)
    sampler._counts = counts.copy()
    ids, mask = sampler.sample(np.random.default_rng(0))
    chosen = np.searchsorted(begin, ids[:, 0], "right") - 1
    alike(np.bincount(chosen, minlength=len(lengths)), r["episode_histogram"])
    mine = chosen == 7
    first = np.argmax(mask[mine], 1)  # rows before it stick out
    start = np.where(first > 0, -first, ids[mine, 0] - begin[7])
    histogram = np.bincount(start + 10, minlength=len(r["start_histogram_episode7"]))
    alike(histogram, r["start_histogram_episode7"])


def alike(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Two histograms of one distribution: a chi-square test of homogeneity."""
    used = (ours + theirs) > 0
    a, b = ours[used].astype(float), theirs[used].astype(float)
    ka, kb = np.sqrt(b.sum() / a.sum()), np.sqrt(a.sum() / b.sum())
    chi = (np.square(ka * a - kb * b) / (a + b)).sum()
    freedom = used.sum() - 1
    assert chi < freedom + 5 * np.sqrt(2 * freedom), (chi, freedom)


def test_time_is_shifted_at_the_border():
    """Our rows of one episode become the original's padded segments, all of them."""
    r = under(load("functions"), "segment/")
    frames = as_bytes(r["episode_observations"]).numpy()
    steps = len(frames)
    rows = steps + 1  # the final observation is ours alone
    image = np.concatenate([frames, np.full_like(frames[:1], 77)])
    reward = np.append(0, r["episode_rewards"]).astype(np.float32)
    last = np.append(0, r["episode_ends"]).astype(bool)
    spaces = {
        "image": Space(np.uint8, image.shape[1:]),
        "action": Space(np.int32, (), 0, 18),
        "reward": Space(np.float32),
        **{k: Space(bool) for k in ("is_first", "is_last", "is_terminal")},
    }
    for low, high in r["ranges"].tolist():
        window = Window(1, high - low + 1, select="episodes")
        replay = Replay(
            spaces,
            {},
            ReplayConfig(storage="ram"),
            capacity=100,
            num_envs=1,
            windows={"w": window},
            directory=None,
            seed=0,
        )
        replay.add_episode(
            {
                "image": image,
                "action": np.append(r["episode_actions"], 0).astype(np.int32),
                "reward": reward,
                "is_first": np.arange(rows) == 0,
                "is_last": last,
                "is_terminal": last,
            }
        )
        wanted = {k.split("/")[1]: v for k, v in r.items() if f"{low}_{high}/" in k}
        for _ in range(1000):
            batch = {k: torch.tensor(v) for k, v in replay.sample("w").items()}
            segment = to_segment(batch, "image", "action", 0)
            same = np.array_equal(segment.real.numpy(), wanted["mask_padding"])
            if same and int(batch["stepid"][batch["mask"]][0]) == max(low, 0):
                break
        else:
            pytest.fail(f"the segment {low}:{high} never came")
        np.testing.assert_array_equal(segment.image, as_bytes(wanted["observations"]))
        np.testing.assert_array_equal(segment.action, wanted["actions"])
        np.testing.assert_array_equal(segment.reward, wanted["rewards"])
        np.testing.assert_array_equal(segment.end, wanted["ends"].astype(bool))


class ZeroLossWorld(IrisWorld):
    """A world whose losses are zero."""

    def __init__(self):
        torch.nn.Module.__init__(self)

    def dynamics_loss(self, segment):
        return WorldLoss({"rewards": torch.zeros_like(segment.reward)}, None, {})


def test_episode_losses_use_the_chunks_of_the_original():
    functions = load("functions")
    lengths = functions["sampler/lengths"].tolist()
    _, length = functions["traverse/batch_size_chunk"].tolist()
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    image = torch.zeros(*real.shape, 1, 1, 3, dtype=torch.uint8)
    segment = EpisodeSegment(image, real.long() * 0, real * 0.0, real & False, real)
    lengths = {"world_model": length}
    _, counts = episode_losses(ZeroLossWorld(), segment, lengths, RecordedSamples())
    wanted = torch.zeros_like(real)
    for row in functions["traverse/rows_batch_episode_start_stop"].tolist():
        _, episode, start, stop = row
        wanted[episode, start:stop] = True
    assert torch.equal(counts, wanted)
