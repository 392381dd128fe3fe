"""The Δ-IRIS tokenizer compared with the original."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from iris_comparisons import (
    by_original_name,
    close,
    close_gradients,
    close_update,
    nearly_same_frames,
)
from iris_world_recording import (
    TOKENIZER,
    RecordedSamples,
    as_bytes,
    as_recorded,
    load,
    segment,
    tiny_world,
    under,
)

from reverie.nets.optim.adam import AdamConfig
from reverie.nets.optim.optimizer import dense_weights
from reverie.nets.residual import set_recompute
from reverie.nets.transformer import Dense
from reverie.worlds.iris.config import QuantizerConfig
from reverie.worlds.iris.quantizer import Quantizer, entropy_bits

IO = load("tokenizer_io")
NAMES = {
    "l1": "reconstruction_loss_l1",
    "l2": "reconstruction_loss_l2",
    "worst": "reconstruction_loss_l2_worst_pixel",
    "commit": "commitment_loss",
}


@pytest.fixture(scope="module")
def world():
    return tiny_world()


def flat(data):
    """Return frames, actions and next frames of all recorded transitions."""
    images = as_bytes(data["in/observations"])
    actions = torch.tensor(data["in/actions"])[:, :-1]
    return images[:, :-1].flatten(0, 1), actions.flatten(), images[:, 1:].flatten(0, 1)


def test_features_of_transitions(world):
    tokenizer = world.tokenizer
    image, action, after = flat(IO)
    features = tokenizer.encode(image, action, after)
    close(features.view(IO["eval/token_features"].shape), IO["eval/token_features"])
    maps = as_recorded(tokenizer.unpatchify(features))
    close(maps.reshape(IO["eval/encoder_output"].shape), IO["eval/encoder_output"])


def test_tokens_and_their_features(world):
    quantizer = world.tokenizer.quantizer
    features = torch.tensor(IO["eval/token_features"])
    q = quantizer(features)
    assert np.array_equal(q.tokens, IO["eval/tokens"])
    close(q.vectors, IO["eval/unit_vectors"])
    close(q.features, IO["eval/q"])
    close(quantizer.embed(q.tokens, torch.float32), IO["eval/embed_tokens"])
    maps = as_recorded(world.tokenizer.unpatchify(q.features.flatten(0, 1)))
    close(maps.reshape(IO["eval/q_map"].shape), IO["eval/q_map"])


def test_tokens_of_segments(world):
    images, actions = as_bytes(IO["in/observations"]), torch.tensor(IO["in/actions"])
    tokens = world.tokenizer.tokenize(images, actions)
    assert np.array_equal(tokens, IO["eval/tokens"])
    assert np.array_equal(tokens, IO["eval/burn_in_tokens"])


def test_decoding_the_next_frame(world):
    tokenizer = world.tokenizer
    image, action, _ = flat(IO)
    shape = IO["eval/decoded"].shape
    features = as_recorded(tokenizer.frame(image / 255))
    close(
        features.reshape(IO["eval/frame_cnn_output"].shape), IO["eval/frame_cnn_output"]
    )
    tokens = torch.tensor(IO["eval/tokens"]).flatten(0, 1)
    features = tokenizer.quantizer.embed(tokens, torch.float32)
    decoded = as_recorded(tokenizer.decode(image, action, features))
    close(decoded.reshape(shape), IO["eval/decoded"])
    decoded_frames = tokenizer.decode_tokens(image, action, tokens)
    nearly_same_frames(
        decoded_frames, IO["eval/decoded_clamped"].reshape(-1, *shape[2:])
    )


def test_reconstructions(world):
    images, actions = as_bytes(IO["in/observations"]), torch.tensor(IO["in/actions"])
    decoded_frames = world.reconstruct(images, actions)
    assert torch.equal(decoded_frames[:, 0], images[:, 0])
    nearly_same_frames(decoded_frames[:, 1:], IO["eval/encode_decode"])


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("save_memory", [False, True])
def test_losses(mode, save_memory):
    world = tiny_world()
    set_recompute(world, save_memory)
    out = world.tokenizer.loss(
        segment(IO), RecordedSamples(), update_codebook=mode == "train"
    )
    rows, length = IO["in/actions"].shape
    total = 0.0
    for name, original in NAMES.items():
        assert out.losses[name].shape == (rows, length - 1)
        mean = out.losses[name].mean()
        close(mean, IO[f"{mode}/loss/{original}"])
        total += mean
    close(total, IO[f"{mode}/loss_total"])
    assert set(out.losses) == set(NAMES)
    assert np.array_equal(out.states, IO["eval/tokens"])


def test_a_training_batch_updates_the_codebook(world):
    world = tiny_world()
    before = world.tokenizer.quantizer.codebook.clone()
    evaluated = world.tokenizer.loss(
        segment(IO), RecordedSamples(), update_codebook=False
    )
    assert torch.equal(world.tokenizer.quantizer.codebook, before)
    assert not evaluated.metrics
    out = world.tokenizer.loss(segment(IO), RecordedSamples())
    quantizer = world.tokenizer.quantizer
    close(quantizer.codebook, IO["train/codebook_after"])
    close(quantizer.usage, IO["train/codewords_freqs_after"])
    assert int(quantizer.updates) == IO["train/num_updates_after"]
    close(out.metrics["codebook_entropy"], IO["train/metric/codebook_entropy"])
    assert int(out.metrics["codes_revived"]) == IO["train/metric/codewords_revived"]


@pytest.mark.parametrize("save_memory", [False, True])
def test_gradients_and_one_update(save_memory):
    recorded = load("tokenizer_grads")
    world = tiny_world()
    set_recompute(world, save_memory)
    module = world.tokenizer
    theirs = under(recorded, "grad/")
    out = world.tokenizer.loss(segment(IO), RecordedSamples())
    loss = torch.stack([x.mean() for x in out.losses.values()]).sum()
    grads = torch.autograd.grad(loss, list(module.parameters()))
    norm = float(recorded["opt/grad_norm_before_clip"])
    ours = by_original_name(module, grads, TOKENIZER, theirs)
    close_gradients(ours, theirs, norm)
    close_update(module, TOKENIZER, theirs, recorded, AdamConfig(wd=0.01), list(grads))


def test_weight_decay_groups(world):
    recorded, module = load("tokenizer_grads"), world.tokenizer
    names = [*recorded["opt/names_decay"], *recorded["opt/names_no_decay"]]
    decays = set(dense_weights(module))
    flags = [torch.tensor([k in decays]) for k, _ in module.named_parameters()]
    ours = by_original_name(module, flags, TOKENIZER, map(str, names))
    assert len(ours) == len(flags)
    assert {k for k, yes in ours.items() if yes} == set(recorded["opt/names_decay"])


CASES = load("codebook_revival")


@pytest.mark.parametrize("case", sorted({key.split("/")[0] for key in CASES}))
def test_revival(case):
    c = under(CASES, f"{case}/")
    limit = int(c["max_updates"])
    codes, width = c["codebook_before"].shape
    quantizer = Quantizer(
        3, QuantizerConfig(codes, width, None if limit < 0 else limit)
    )
    quantizer.codebook.copy_(torch.tensor(c["codebook_before"]))
    quantizer.usage.copy_(torch.tensor(c["freqs_before"]))
    quantizer.updates.fill_(int(c["num_updates_before"]))
    orders = [c[f"permutation{i}"] for i in range(int(c["num_permutations"]))]
    metrics = quantizer.update_codebook(
        torch.tensor(c["vectors"]),
        torch.tensor(c["tokens"]),
        RecordedSamples(shuffles=orders),
    )
    close(quantizer.codebook, c["codebook_after"], 1e-5)
    close(quantizer.usage, c["freqs_after"], 1e-5)
    assert int(metrics["codes_revived"]) == c["codewords_revived"]
    close(metrics["codebook_entropy"], c["entropy_after"], 1e-5)
    close(entropy_bits(quantizer.usage), c["entropy_after"], 1e-5)
    assert int(quantizer.updates) == c["num_updates_before"] + 1


def test_dense_layers_of_the_tokenizer_are_the_projections(world):
    dense = [m for m in world.tokenizer.modules() if isinstance(m, Dense)]
    assert len(dense) == 2
