"""Import of checkpoints of the original VTA and its port, with recorded weights."""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from reverie.agents.options import BuildOptions
from reverie.agents.vta.agent import VTAAgent, VTAAgentConfig
from reverie.api import UserError
from reverie.convert.vta.weights import import_state, read_checkpoint
from reverie.run.config import resolve
from reverie.run.factory import load_initial_weights

sys.path.append(str(Path(__file__).parents[1] / "parity"))
from vta_recording import MODELS, VTARecording, tensors

models = pytest.mark.parametrize("name", MODELS)


def original(recording: VTARecording) -> OrderedDict:
    found = OrderedDict()
    for kind in ("param/", "buffer/"):
        found |= tensors(recording.data, kind)
    return found


def make_agent(recording: VTARecording, **changes) -> VTAAgent:
    vta = replace(recording.make_world().config, **changes)
    return VTAAgent(
        recording.obs_space,
        recording.act_space,
        VTAAgentConfig(world=vta),
        BuildOptions(torch.device("cpu")),
    )


@models
def test_a_run_starts_from_a_file_of_either_implementation(name, tmp_path):
    recording = VTARecording(name)
    file = tmp_path / "model_best.pt"
    torch.save(original(recording), file)
    vta = make_agent(recording)
    before = vta.state_dict()["world"]["temperature"].clone()
    config = resolve(["vta_balls"], flags={"run.from_checkpoint": str(file)})
    assert load_initial_weights(vta, config) == f"Loaded weights of world from {file}."
    found, wanted = vta.world.state_dict(), recording.make_world().state_dict()
    assert found.keys() == wanted.keys()
    for key in wanted.keys() - {"updates", "temperature"}:
        assert torch.equal(found[key], wanted[key]), key
    assert (found["updates"], found["temperature"]) == (0, before)
    noise = recording.rng("eval/noise_")
    with torch.no_grad():
        terms = vta.world.eval().elbo(recording.batch, noise)
    flags = torch.tensor(recording.data["eval/mask_data"])[..., 0]
    assert torch.equal(terms.posterior.mask[..., 0], flags)


@models
@pytest.mark.parametrize(
    "other", ["belief", "state", "layers", "bias", "static_lower_belief"]
)
def test_other_sizes_are_an_error_with_matching_settings(name, other, tmp_path):
    recording = VTARecording(name)
    torch.save(original(recording), tmp_path / "x.pt")
    config = recording.make_world().config
    now = getattr(config, other)
    change = {other: not now if isinstance(now, bool) else now + 1}
    vta = make_agent(recording, **change)
    with pytest.raises(UserError, match="differs from that of this run") as caught:
        import_state(tmp_path / "x.pt", vta.state_dict())
    fix = str(caught.value).partition("Fix: ")[2]
    assert fix == f"--vta.world.{other} {now}"


def test_other_actions_are_an_error_with_matching_settings(tmp_path):
    with_actions, without_actions = (
        VTARecording("model_main_mse_act"),
        VTARecording("model_main_bce"),
    )
    for file, run, fix in (
        (without_actions, with_actions, "--sequences.actions False"),
        (
            with_actions,
            without_actions,
            f"actions have {with_actions.sizes['action_size']} entries",
        ),
    ):
        torch.save(original(file), tmp_path / "x.pt")
        template = make_agent(run, **_sizes(file)).state_dict()
        with pytest.raises(UserError, match=f"Fix: .*{fix}"):
            import_state(tmp_path / "x.pt", template)


def _sizes(recording: VTARecording) -> dict:
    config = recording.make_world().config
    return {key: getattr(config, key) for key in ("belief", "state", "layers", "bias")}


@models
def test_an_incomplete_file_is_an_error(name, tmp_path):
    recording = VTARecording(name)
    complete = original(recording)
    vta = make_agent(recording)
    parts = "abs_post_bwd prior_obs_state.std prior_boundary enc_obs.network.0 abs_feat"
    for removed in parts.split():
        part = {k: v for k, v in complete.items() if removed not in k}
        assert len(part) < len(complete)
        torch.save(part, tmp_path / "x.pt")
        with pytest.raises(UserError, match=r"(?s)x\.pt.*Fix: "):
            import_state(tmp_path / "x.pt", vta.state_dict())


@pytest.mark.parametrize(
    "other",
    [{"weights": torch.ones(2)}, {0: torch.ones(2)}, torch.ones(2), [1], {}],
)
def test_other_files_are_errors(other, tmp_path):
    torch.save(other, tmp_path / "x.pt")
    with pytest.raises(UserError, match=r"has no VTA model\.\n  Fix: use model_best"):
        read_checkpoint(tmp_path / "x.pt")
