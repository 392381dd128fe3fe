"""The Δ-IRIS transformer and imagination compared with the original."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from einops import rearrange
from iris_comparisons import (
    by_original_name,
    close,
    close_gradients,
    close_update,
    nearly_same_frames,
)
from iris_world_recording import (
    SCALES,
    WORLD_MODEL,
    RecordedSamples,
    as_bytes,
    load,
    segment,
    tiny_world,
    under,
)

from reverie.nets.blocks import symlog
from reverie.nets.distributions import DeltaIrisTwoHot, symlog_bins
from reverie.nets.optim.adam import AdamConfig
from reverie.nets.optim.optimizer import dense_weights

IO = load("world_model_io")
FUNCTIONS = load("functions")


@pytest.fixture(scope="module")
def world():
    return tiny_world()


def sequence(world, frames=None):
    tokens = torch.tensor(IO["latent_tokens"])
    filled = torch.nn.functional.pad(tokens, (0, 0, 0, 1))
    batch = segment(IO)
    i_tokens = world.dynamics.embed_frames(batch.image)
    return world.dynamics.embed_sequence(i_tokens, batch.action, filled)


def test_embeddings(world):
    batch = segment(IO)
    frames = world.dynamics.embed_frames(batch.image)
    close(frames[:, :, None], IO["frames_emb"])
    close(sequence(world), IO["sequence"])
    assert np.array_equal(
        world.tokenizer.tokenize(batch.image, batch.action), IO["latent_tokens"]
    )


def test_outputs_and_logits(world):
    outputs, _ = world.dynamics(torch.tensor(IO["sequence"]))
    close(outputs, IO["output_sequence"])
    logits = world.dynamics.predict(outputs)
    close(logits.latents, IO["logits_latents"])
    close(logits.rewards, IO["logits_rewards"])
    close(logits.ends, IO["logits_ends"])


def test_sign_rewards():
    world = tiny_world("classes/")
    outputs, _ = world.dynamics(torch.tensor(IO["sequence"]))
    close(world.dynamics.predict(outputs).rewards, IO["classes/logits_rewards"])
    labels = torch.sign(torch.tensor(IO["in/rewards"])).long() + 1
    assert np.array_equal(labels, IO["classes/reward_labels"])


def test_block_causal_attention():
    world = tiny_world(attention="block_causal")
    outputs, _ = world.dynamics(torch.tensor(IO["sequence"]))
    close(outputs, IO["block_causal/output_sequence"])
    logits = world.dynamics.predict(outputs)
    close(logits.latents, IO["block_causal/logits_latents"])


@pytest.mark.parametrize("variant", SCALES)
def test_losses(variant):
    world = tiny_world(variant)
    out = world.dynamics_loss(segment(IO))
    total = 0.0
    for name in ("latents", "rewards", "ends"):
        mean = out.losses[name].mean()
        close(mean, IO[f"{variant}loss/loss_{name}"])
        total += mean
    close(total, IO[f"{variant}loss_total"])
    close(out.metrics["latent_accuracy"], IO["metric/latent_accuracy"])


def test_reward_targets(world):
    rewards = torch.tensor(IO["in/rewards"])
    close(two_hot(rewards), IO["two_hot_reward_targets"], 1e-5)


def two_hot(x):
    bins = symlog_bins(255)
    below, share = DeltaIrisTwoHot(torch.zeros(*x.shape, 255), bins).two_hot(x)
    target = torch.zeros(*x.shape, 255)
    target.scatter_(-1, below[..., None], 1 - share[..., None])
    return target.scatter_(-1, below[..., None] + 1, share[..., None])


def test_two_hot_functions():
    c = under(FUNCTIONS, "twohot/")
    x = torch.tensor(c["x"])
    close(symlog(x), c["symlog"], 1e-6)
    close(two_hot(x), c["target"], 1e-5)
    logits = torch.tensor(c["logits"])
    out = DeltaIrisTwoHot(logits, symlog_bins(255))
    np.testing.assert_allclose(out.pred(), c["expectation"], rtol=1e-4, atol=1e-5)
    probs = logits.softmax(-1)
    close(symlog(out.pred()), c["expectation_symlog"], 1e-5)
    y = x[: len(logits)]
    wanted = -(two_hot(y) * probs.log()).sum(-1)
    torch.testing.assert_close(out.loss(y), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", SCALES)
def test_gradients_and_one_update(variant):
    recorded = load("world_model_grads")
    world = tiny_world(variant)
    module = world.dynamics
    theirs = under(recorded, f"{variant}grad/")
    out = world.dynamics_loss(segment(IO))
    loss = torch.stack([x.mean() for x in out.losses.values()]).sum()
    grads = torch.autograd.grad(loss, list(module.parameters()))
    norm = float(recorded["opt/grad_norm_before_clip"])
    ours = by_original_name(module, grads, WORLD_MODEL, theirs)
    close_gradients(ours, theirs, norm)
    if variant:
        return
    assert len(theirs) == len(grads) + 4 * len(module.transformer.layers)  # q, k, v
    config = AdamConfig(wd=0.01)
    close_update(module, WORLD_MODEL, theirs, recorded, config, list(grads))


def test_weight_decay_groups(world):
    recorded, module = load("world_model_grads"), world.dynamics
    names = [*recorded["opt/names_decay"], *recorded["opt/names_no_decay"]]
    decays = set(dense_weights(module))
    flags = [torch.tensor([k in decays] * 3) for k, _ in module.named_parameters()]
    ours = by_original_name(module, flags, WORLD_MODEL, map(str, names))
    assert {k for k, v in ours.items() if v.any()} == set(recorded["opt/names_decay"])


def head_positions(head, length, before, block):
    """Indices of the tokens that a head reads, after `before` cached tokens."""
    positions = range(1, block - 1) if head == "latents" else (1,)
    return [i for i in range(length) if (before + i) % block in positions]


def apply_heads(dynamics, outputs, before):
    def rows(head):
        indices = head_positions(
            head, outputs.shape[1], before, dynamics.tokens_per_step
        )
        return getattr(dynamics, head)(outputs[:, indices])

    return [rows(head) for head in ("latents", "rewards", "ends")]


PLANS = sorted({key.split("/")[1] for key in IO if key.startswith("kv/")})


@pytest.mark.parametrize("plan", PLANS)
def test_cached_steps_equal_the_full_forward(world, plan):
    c, dynamics = under(IO, f"kv/{plan}/"), world.dynamics
    sequence, start, pieces, heads = torch.tensor(IO["sequence"]), 0, [], []
    cache = dynamics.transformer.cache(len(sequence), torch.float32)
    for i, new in enumerate(c["chunk_sizes"]):
        outputs, cache = dynamics(sequence[:, start : start + new], cache)
        logits = apply_heads(dynamics, outputs, start)
        rows = [x.shape[1] for x in logits]
        assert rows == c["head_rows_per_chunk"][i].tolist()
        pieces.append(outputs)
        heads.append(logits)
        start += int(new)
        assert cache.size == start
    full, _ = dynamics(sequence[:, :start])
    outputs = torch.cat(pieces, 1)
    torch.testing.assert_close(outputs, full, rtol=0, atol=1e-5)
    latents, rewards, ends = (torch.cat(parts, 1) for parts in zip(*heads, strict=True))
    close(latents[:, : IO["logits_latents"].shape[1]], IO["logits_latents"])
    close(rewards, IO["logits_rewards"])
    close(ends, IO["logits_ends"])
    assert cache.free / dynamics.tokens_per_step == pytest.approx(
        float(c["blocks_left"])
    )
    if "output_sequence" not in c:
        return
    close(outputs, c["output_sequence"])
    close(latents, c["logits_latents"])
    close(ends, c["logits_ends"])
    for i in range(len(dynamics.transformer.layers)):
        for ours, name in ((cache.keys, "keys"), (cache.values, "values")):
            flat = rearrange(ours[i][:, :, :start], "b h l d -> b l (h d)")
            close(flat, c[f"layer{i}/{name}"])


@pytest.mark.parametrize("case", sorted(under(FUNCTIONS, "slicer/")))
def test_head_positions(case):
    head, counts = case.split("/")
    new, before = (int(n) for n in counts.removeprefix("new").split("_prev"))
    rows = head_positions(head, new, before, block=6)
    assert rows == FUNCTIONS[f"slicer/{case}"].tolist()


@pytest.mark.parametrize("variant", ["two_hot", "classes"])
def test_imagination_when_the_cache_is_cleared(variant):
    recorded = load("world_model_env")
    c = under(recorded, f"{variant}/")
    world = tiny_world("" if variant == "two_hot" else "classes/")
    outputs = []
    world.dynamics.transformer.register_forward_hook(
        lambda module, args, out: outputs.append(out[0])
    )
    state = world.state_from_frames(
        as_bytes(recorded["in/observations"]), torch.tensor(recorded["in/actions"])
    )
    (burned_in,) = outputs
    close(burned_in, c["burn_in_wm_output"])
    flushes, images = 0, []
    for t in range(c["actions"].shape[1]):
        assert state.cache.size == c["cache_before"][t]
        signs = [c["reward_samples"][:, t]] if "reward_samples" in c else []
        dones = c["dones"][:, t].astype(int)
        rng = RecordedSamples([*signs, dones, *c["tokens"][:, t].T])
        outputs.clear()
        step = world.step(state, torch.tensor(c["actions"][:, t]), rng)
        assert not rng.draws
        assert len(outputs) == world.dynamics.tokens
        assert step.state.cache.size == c["cache_after"][t]
        flushes += step.state.cache.size < state.cache.size
        close(outputs[-1][:, -1], c["wm_output_last"][:, t])
        close(torch.log_softmax(step.latent_logits, -1), c["latent_log_probs"][:, t])
        close(torch.log_softmax(step.end_logits, -1), c["end_log_probs"][:, t])
        if signs:
            wanted = c["reward_log_probs"][:, t]
            close(torch.log_softmax(step.reward_logits, -1), wanted)
        np.testing.assert_allclose(
            step.state.reward, c["rewards"][:, t], rtol=1e-4, atol=1e-5
        )
        assert np.array_equal(step.state.end, c["dones"][:, t])
        assert np.array_equal(step.tokens, c["tokens"][:, t])
        images.append(step.state.image)
        frame = as_bytes(
            c["frames"][:, t]
        )  # so that rounding differences do not accumulate
        embedded = world.dynamics.embed_frames(frame)
        state = step.state._replace(image=frame, i_token=embedded)
    assert flushes == 1
    nearly_same_frames(torch.stack(images, 1), c["frames"])
