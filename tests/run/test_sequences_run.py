"""Runs that only watch: from the command to the pictures."""

from __future__ import annotations

import errno
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import reverie
from reverie.agents.vta.agent import VTAAgent
from reverie.api import UserError
from reverie.cli import main as cli
from reverie.datasets.sequences import SEQUENCE_DATASETS
from reverie.datasets.synthetic.balls import BouncingBalls, write_balls
from reverie.datasets.synthetic.maze import write_maze
from reverie.evaluation import boundaries
from reverie.evaluation.boundaries import compare_boundaries, measure_boundaries
from reverie.evaluation.draw import draw_boundaries
from reverie.render.video import can_write_mp4
from reverie.run import checkpoint
from reverie.run.config import resolve
from reverie.run.offline import offline
from reverie.run.sequences import Sequences, Watch, load_watcher
from reverie.run.train import train
from reverie.spaces import EVENT

TINY = {
    "device": "cpu",
    "logger.outputs": "jsonl",
    "run.steps": 4,
    "run.clock": "steps",
    "run.log_every": 2,
    "run.report_every": 2,
    "run.save_every": 2,
    "vta.batch_size": 3,
    "vta.world.context": 2,
    "vta.world.length": 4,
    "vta.world.belief": 8,
    "vta.world.state": 3,
    "vta.world.layers": 1,
    "sequences.chunk": 6,
    "sequences.evaluation": 5,
}


def agent_state(run):
    """Return the state of the agent in the newest checkpoint."""
    return checkpoint.read_part(checkpoint.find_checkpoint(run), "agent")


def settings(logdir, *names, **flags):
    flags = {**TINY, "logdir": str(logdir), **flags}
    return resolve(names or ["vta_balls"], flags=flags)


def lines(path, key):
    rows = [json.loads(x) for x in (path / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in rows if key in row]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(settings(tmp_path_factory.mktemp("watch") / "run"))


def test_a_run_logs_reports_and_saves(run):
    assert len(lines(run, "train/temperature")) == 2
    assert len(lines(run, "report/boundaries/exact/f1")) >= 2
    assert [p.name[:12] for p in sorted((run / "ckpt").iterdir())] == [
        "000000000002",
        "000000000004",
    ]


def test_the_best_checkpoint_is_the_one_with_the_lowest_loss(run):
    (best,) = (run / "best").iterdir()
    losses = lines(run, "report/loss")
    kept = checkpoint.read_part(best, "loop")["lowest"]
    assert kept == pytest.approx(min(losses), rel=1e-5)
    _, agent, feed = load_watcher(run / "best")
    assert float(agent.world.age) == int(best.name[:12])
    feed.close()


def test_a_run_that_goes_on_keeps_the_best_of_its_last_look(tmp_path, monkeypatch):
    """A run saves before its last look, whose result no checkpoint but `best` knows."""
    losses = iter([9.0, 5.0, 7.0, 4.0])
    real = Sequences.report

    def report(self, agent, feed):
        return {**real(self, agent, feed), "loss": torch.tensor(next(losses))}

    monkeypatch.setattr(Sequences, "report", report)
    kept = []
    for steps in (1, 2, 3, 4):
        flags = {"run.steps": steps, "run.report_every": 0, "run.save_every": 0}
        path = train(settings(tmp_path / "run", **flags))
        (best,) = (path / "best").iterdir()
        kept.append(int(best.name[:12]))
    assert kept == [1, 2, 2, 4]


def test_who_watches_cannot_be_asked_to_act(run, tmp_path, capsys):
    with pytest.raises(UserError, match=r"only watched(.|\n)*draw boundaries"):
        reverie.load(run)
    assert cli.main(["eval", str(run), "--videos", "2"]) == 2
    assert "remove --videos" in capsys.readouterr().err
    assert cli.main(["eval", str(run), "--task", "catch"]) == 2
    assert "In catch somebody has to act" in capsys.readouterr().err
    flags = {"bc.run": str(run), "offline.data": str(tmp_path)}
    with pytest.raises(UserError, match="run of dreamer or iris"):
        offline(resolve(["offline", "bc"], flags=flags))


def test_a_source_is_closed_once(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(BouncingBalls, "close", lambda self: closed.append(self))
    train(settings(tmp_path / "run", **{"run.steps": 1}))
    assert len(closed) == 1
    with pytest.raises(UserError, match="phases"):
        train(settings(tmp_path / "other", **{"run.clock": "phases"}))


def test_events_that_only_the_evaluation_knows_set_no_threshold(tmp_path):
    write_maze(tmp_path / "maze", train=2, test=2, length=40)
    for path in (tmp_path / "maze" / "train").iterdir():
        with np.load(path) as data:
            rows = {"video": data["video"], "actions": data["actions"]}
        np.savez(path, **rows)
    flags = {"sequences.folder": str(tmp_path / "maze"), "run.steps": 1}
    path = train(settings(tmp_path / "run", "vta_maze", **flags))
    _, agent, feed = load_watcher(path)
    report = agent.report(feed)
    feed.close()
    assert "boundaries/exact/f1" in report
    assert "baselines/periodic/exact/f1" in report
    assert "baselines/pixels/exact/f1" not in report


def test_a_run_in_two_parts_ends_where_one_in_a_single_part_does(tmp_path, run):
    train(settings(tmp_path / "run", **{"run.steps": 2}))
    path = train(settings(tmp_path / "run", **{"run.steps": 4}))
    ours, theirs = (agent_state(p) for p in (path, run))
    for key, value in theirs["world"].items():
        np.testing.assert_array_equal(ours["world"][key], value)


def test_a_run_in_two_parts_keeps_the_threshold_on_pixels(tmp_path):
    flags = {"sequences.refresh": 1, "run.steps": 2}
    path = train(settings(tmp_path / "run", **flags))
    (first,) = {*lines(path, "report/baselines/pixels/exact/f1")}
    train(settings(path, **flags | {"run.steps": 8}))
    assert {*lines(path, "report/baselines/pixels/exact/f1")} == {first}


def test_a_run_that_watched_has_no_episodes_to_export(tmp_path, run, capsys):
    assert cli.main(["data", "export", str(run), str(tmp_path / "npz")]) == 2
    assert "has no replay buffer" in capsys.readouterr().err


def test_weights_may_come_from_another_run(tmp_path, run):
    config = settings(tmp_path / "run", **{"run.from_checkpoint": str(run)})
    with Watch(config) as other:
        other.start()
        assert float(other.agent.world.age) == 4
        assert other.clock.step == 0


def test_damaged_checkpoints_are_not_trained_over(tmp_path):
    path = train(settings(tmp_path / "run", **{"run.keep_last": 1}))
    for part in (path / "ckpt").glob("*/agent.safetensors"):
        part.write_bytes(b"nothing")
    with (
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(UserError, match="damaged"),
    ):
        train(settings(tmp_path / "run"))


def test_pictures_are_written_with_every_report(tmp_path):
    flags = {"logger.outputs": ("jsonl", "media"), "run.steps": 1}
    path = train(settings(tmp_path / "run", **flags))
    names = {p.name.split("-")[1] for p in (path / "media").glob("report-*.png")}
    assert names == {"boundaries", "dream", "jumps"}


def test_the_maze_is_watched_with_its_actions(tmp_path):
    write_maze(tmp_path / "maze", train=2, test=2, length=12)
    flags = {"sequences.folder": str(tmp_path / "maze"), "run.steps": 2}
    path = train(settings(tmp_path / "run", "vta_maze", **flags))
    config, agent, feed = load_watcher(path)
    assert config.vta.world.loss == "gaussian"
    assert agent.world.actions.width == 3
    assert np.isfinite(lines(path, "report/loss")).all()
    feed.close()


def test_the_authors_watch_the_maze_without_actions(tmp_path):
    write_maze(tmp_path / "maze", train=2, test=2, length=12)
    flags = {"sequences.folder": str(tmp_path / "maze"), "run.steps": 2}
    both = ["vta_maze", "vta_authors"]
    path = train(settings(tmp_path / "run", *both, **flags))
    config, agent, feed = load_watcher(path)
    vta = config.vta.world
    assert (vta.loss, vta.levels, vta.bits, vta.bias) == (
        "gaussian",
        "spread",
        5,
        False,
    )
    assert agent.world.actions is None
    assert np.isfinite(lines(path, "report/loss")).all()
    feed.close()


def test_recorded_episodes_are_watched_with_their_actions(tmp_path, capsys):
    rng = np.random.default_rng(0)
    (tmp_path / "episodes").mkdir()
    for index in range(3):
        image = rng.integers(0, 256, (12, 16, 16, 1), np.uint8)
        rows = {"image": image, "action": rng.normal(size=(12, 2))}
        np.savez(tmp_path / "episodes" / f"e{index}.npz", **rows)
    folder = str(tmp_path / "episodes")
    flags = {"sequences.folder": folder, "logger.outputs": ("terminal", "jsonl")}
    path = train(settings(tmp_path / "run", "vta_episodes", **flags))
    assert "temperature" in capsys.readouterr().out
    assert cli.main(["eval", str(path), "--episodes", "3"]) == 0
    out = capsys.readouterr().out
    assert f"3 sequences set aside in {folder}" in out
    assert "F1" not in out  # nothing was rewarded, so there are no events


def test_a_task_brings_its_way_of_comparing_images_along():
    assert resolve(["vta_maze"]).vta.world.loss == "gaussian"
    assert resolve(["vta_balls"]).vta.world.loss == "bernoulli"
    mixed = resolve(["vta_balls"], flags={"task": "sequences_maze"})
    assert mixed.vta.world.loss == "gaussian"
    flags = {"vta.world.loss": "gaussian"}
    assert resolve(["vta_balls"], flags=flags).vta.world.loss == "gaussian"


def test_an_agent_that_acts_cannot_watch(tmp_path):
    with pytest.raises(UserError, match="--agent vta"):
        train(settings(tmp_path / "run", agent="dreamer"))


def test_some_checkpoints_are_kept_for_good(tmp_path):
    flags = {"run.save_every": 1, "run.keep_last": 1, "run.keep_every": 2}
    path = train(settings(tmp_path / "run", **flags, **{"run.steps": 5}))
    steps = sorted(int(p.name[:12]) for p in (path / "ckpt").iterdir())
    assert steps == [2, 4, 5]


def test_losses_and_pictures_are_written_for_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = {"logger.outputs": "tensorboard", "run.steps": 2}
    path = train(settings(tmp_path / "run", **flags))
    events = EventAccumulator(str(path), {"images": 0, "scalars": 0}).Reload()
    tags = events.Tags()
    assert {"train/loss/image", "train/temperature", "report/loss"} <= {
        *tags["scalars"]
    }
    assert {"report/boundaries", "report/dream", "report/jumps"} <= {*tags["images"]}


def test_the_temperature_is_in_the_progress_line(tmp_path, capsys):
    flags = {"logger.outputs": "terminal", "run.steps": 2}
    train(settings(tmp_path / "run", **flags))
    out = capsys.readouterr().out
    assert "temperature" in next(x for x in out.splitlines() if x.startswith("step"))


# Looking


def test_boundaries_are_drawn_on_their_own_frames(run, tmp_path):
    paths = draw_boundaries(run, 1, 3, tmp_path)
    film = "sequence_1.mp4" if can_write_mp4() else "sequence_1.gif"
    strips = {f"sequence_1{kind}.png" for kind in ("", "_dream", "_jumps")}
    assert {path.name for path in paths} == {film, *strips}
    assert all(path.stat().st_size for path in paths)
    assert cli.main(["draw", "boundaries", str(run), "--num-samples", "2"]) == 0
    assert (run / "boundaries" / "sequence_0_jumps.png").exists()


def test_frames_events_and_flags_of_a_picture_are_about_the_same_steps(
    run, tmp_path, monkeypatch
):
    drawn = {}

    def strip(truth, again, found, chance, events):
        drawn.update(truth=truth, found=found, chance=chance, events=events)
        return np.zeros((4, 4, 3), np.uint8)

    monkeypatch.setattr("reverie.evaluation.draw.boundary_strip", strip)
    draw_boundaries(run, 1, 3, tmp_path)
    config, agent, feed = load_watcher(run, evaluation=3)
    data = {key: value[1:2] for key, value in feed("report").items()}
    feed.close()
    context, length = config.vta.world.context, config.vta.world.length
    now = slice(context, context + length)
    np.testing.assert_array_equal(drawn["truth"], data["image"][:, now])
    np.testing.assert_array_equal(drawn["events"], data[EVENT][:, now])
    world = agent.world.eval()
    rng = agent.rng["report"]
    terms = world.elbo({"image": data["image"]}, rng)
    mask = terms.posterior.mask[..., 0].detach().numpy() > 0.5
    np.testing.assert_array_equal(drawn["found"], mask)
    # The detector's own logits of these very frames; the first one is forced.
    logits = terms.posterior.detector_logits[:, now].detach()
    chance = (logits / world.temperature).softmax(-1)[..., 0].numpy()
    np.testing.assert_allclose(drawn["chance"][:, 1:], chance[:, 1:], rtol=1e-5)
    assert drawn["chance"][0, 0] == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "choose from boundaries"),
        (["bounds"], "Did you mean 'boundaries'"),
        (["boundaries"], "needs the folder of a run"),
        (["boundaries", "RUN", "--idx", "3", "--num-samples", "3"], "no sequence 3"),
        (["boundaries", "RUN", "--index", "3"], "no setting 'index'"),
        (["boundaries", "RUN", "--idx", "one"], "idx must be a whole number"),
        (["boundaries", "RUN", "--out", "/proc/none"], "Cannot use /proc/none"),
    ],
)
def test_mistakes_in_looking_get_one_sentence(run, capsys, arguments, complaint):
    words = [str(run) if word == "RUN" else word for word in arguments]
    assert cli.main(["draw", *words]) == 2
    assert complaint in capsys.readouterr().err


def test_boundaries_are_measured_on_sequences_that_no_part_of_the_run_saw(run, capsys):
    assert cli.main(["eval", str(run), "--episodes", "6"]) == 0
    out = capsys.readouterr().out
    assert "6 fresh sequences" in out
    assert "periodic" in out
    assert "at a missed event" in out
    assert "Brier score" in out
    assert "nan" not in out
    assert "NaN" not in (run / "boundaries.json").read_text()
    result = json.loads((run / "boundaries.json").read_text())
    assert result["sequences"] == 6
    assert 0 <= result["boundaries/exact/f1"] <= 1
    _, _, held = load_watcher(run, evaluation=6)
    _, _, fresh = load_watcher(run, 1_000_000, evaluation=6)
    assert not np.array_equal(held("report")["image"], fresh("report")["image"])
    held.close()
    fresh.close()


def test_a_folder_shows_and_measures_as_many_sequences_as_it_holds(tmp_path, capsys):
    write_balls(tmp_path / "balls", train=6, test=2, length=8)
    flags = {"sequences.folder": str(tmp_path / "balls"), "run.steps": 1}
    path = train(settings(tmp_path / "run", **flags))
    assert cli.main(["eval", str(path), "--episodes", "6"]) == 0
    assert f"2 sequences set aside in {tmp_path / 'balls'}" in capsys.readouterr().out
    assert json.loads((path / "boundaries.json").read_text())["sequences"] == 2
    assert cli.main(["eval", str(path), str(path), "--episodes", "6"]) == 0
    assert "2 sequences set aside" in capsys.readouterr().out
    assert cli.main(["draw", "boundaries", str(path), "--idx", "2"]) == 2
    assert "has 2 to show" in capsys.readouterr().err


def test_settings_may_change_for_a_look_but_not_by_mistake(run, tmp_path, capsys):
    write_balls(tmp_path / "balls", train=6, test=2, length=8)
    words = ["--sequences.folder", str(tmp_path / "balls")]
    assert cli.main(["eval", str(run), *words]) == 0
    assert "2 sequences set aside" in capsys.readouterr().out
    assert cli.main(["draw", "boundaries", str(run), "--idx", "3", *words]) == 2
    assert "has 2 to show" in capsys.readouterr().err
    for places in ([str(run)], [str(run), str(run)]):
        assert cli.main(["eval", *places, "--sorce.folder", "x"]) == 2
        assert "no setting 'sorce.folder'" in capsys.readouterr().err


def test_without_events_nothing_is_said_about_boundaries(tmp_path, capsys):
    for name in ("train", "test"):
        path = tmp_path / "balls" / f"{name}.npz"
        path.parent.mkdir(exist_ok=True)
        image = np.zeros((6, 8, 32, 32, 3), np.uint8)
        np.savez(path, image=image, event=np.zeros((6, 8), bool))
    flags = {"sequences.folder": str(tmp_path / "balls"), "run.steps": 1}
    path = train(settings(tmp_path / "run", **flags))
    assert cli.main(["eval", str(path), "--episodes", "6"]) == 0
    out = capsys.readouterr().out
    assert "no events" in out
    assert "F1" not in out


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_runs_in_folders_that_cannot_be_written_are_measured(run, monkeypatch, code):
    def refuse(path, data):
        raise OSError(code, "no", str(path))

    monkeypatch.setattr(boundaries, "write_json", refuse)
    assert measure_boundaries(run, 3)["sequences"] == 3


def test_more_sequences_than_memory_holds_are_not_asked_for(run, capsys):
    assert cli.main(["eval", str(run), "--episodes", str(10**12)]) == 2
    assert "not enough memory" in capsys.readouterr().err


def test_boundaries_of_two_runs_are_compared_on_the_same_sequences(
    run, tmp_path, capsys, monkeypatch
):
    other = train(settings(tmp_path / "other", seed=1))
    few = train(settings(tmp_path / "few", **{"vta.batch_size": 2}))
    longer = train(settings(tmp_path / "longer", **{"vta.world.length": 5}))
    small = train(settings(tmp_path / "small", **{"sequences.side": 16}))
    seen = []

    def watch(self, data):
        """One that marks some sequences, whichever they are."""
        seen.append(data["image"])
        marks = torch.zeros(len(data["image"]), 4, dtype=torch.bool)
        marks[self.config.batch_size :, 2] = True
        return SimpleNamespace(boundary=marks)

    monkeypatch.setattr(VTAAgent, "watch", watch)
    assert cli.main(["eval", str(run), str(other), "--episodes", "6"]) == 0
    assert "agree to 1.000" in capsys.readouterr().out
    torch.testing.assert_close(*seen, rtol=0, atol=0)
    found = compare_boundaries(run, few, 6)
    assert found["rates"] == pytest.approx([3 / 18, 4 / 18])
    assert 0 < found["agreement"] < 1
    for different in (longer, small):
        assert cli.main(["eval", str(run), str(different)]) == 2
        assert "different kinds or lengths" in capsys.readouterr().err


def test_runs_that_act_have_no_sequences_to_show(tmp_path, capsys):
    flags = {"run.steps": 4, "run.envs": 2, "logger.outputs": "jsonl"}
    config = resolve(["random"], flags={"logdir": str(tmp_path / "run"), **flags})
    path = train(config)
    with pytest.raises(UserError, match="by acting"):
        load_watcher(path)
    assert cli.main(["eval", str(path), str(path)]) == 2
    assert "cannot be compared" in capsys.readouterr().err


# Making data


def test_data_commands_write_what_their_tasks_read(tmp_path, capsys):
    few = ["--train", "3", "--test", "3", "--length", "12"]
    for name in ("balls", "maze"):
        folder = str(tmp_path / name)
        assert cli.main(["data", name, "--out", folder, *few]) == 0
        assert (
            f"--task sequences_{name} --sequences.folder {folder}"
            in capsys.readouterr().out
        )
        flags = {"sequences.folder": folder, "run.steps": 1}
        config = settings(tmp_path / f"run_{name}", f"vta_{name}", **flags)
        assert (train(config) / "ckpt").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["data", "balls"], "needs an output folder"),
        (["data", "balls", "--out"], "--out needs a value.\n  Fix: --out VALUE"),
        (
            ["data", "maze", "--out", "x", "--train", "-1"],
            "--train must be above 0",
        ),
        (["data", "maze", "--uot", "x"], "no option --uot"),
        (["data", "maze", "--out", "x", "--length", "0"], "--length must be above 0"),
        (["data", "balls", "--out", "x", "--train", "0"], "--train must be above 0"),
        (
            ["data", "balls", "--out", "x", "--dt", "nan"],
            "--dt must be above 0",
        ),
        (["train", "--configs", "vta_balls", "--sequences.dt", "inf"], "dt must be"),
        (["train", "--configs", "vta_balls", "--vta.world.anneal", "-1"], "anneal"),
        (["train", "--configs", "vta_balls", "--vta.world.obs_std", "nan"], "finite"),
        (["train", "--configs", "vta_balls", "--vta.world.length", "1"], "length 2"),
        (["train", "--configs", "vta_balls", "--vta.world.levels", "spread"], "spre"),
        (["data", "mazes"], "Did you mean 'maze'"),
        (
            ["train", "--configs", "vta_maze", "--sequences.folder", "x"],
            "data maze --out x",
        ),
        (["train", "--task", "sequences_bals"], "sequences_balls"),
        (["train", "--agent", "vta"], "--task sequences_balls"),
        (["train_eval", "--agent", "vta", "--task", "gym_CartPole-v1"], "to act"),
        (
            ["offline", "--agent", "vta", "--offline.data", "x"],
            "--configs vta_episodes --sequences.folder x",
        ),
        (["bench", "--configs", "vta_balls", "--agent", "dreamer"], "--agent vta"),
        (["check-env", "sequences_balls"], "has no environment"),
    ],
)
def test_mistakes_in_making_data_get_one_sentence(
    tmp_path, monkeypatch, capsys, arguments, complaint
):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*arguments]) == 2
    assert complaint in capsys.readouterr().err


# Files of another program


def write_json(path, **keys):
    path.write_text(json.dumps(keys))
    return path


def test_files_of_the_port_become_settings_of_ours(tmp_path):
    path = write_json(
        tmp_path / "bouncing_balls.json",
        env_type="bouncing_balls",
        exp_name="first",
        work_dir=str(tmp_path),
        max_iters=50000,
        batch_size=128,
        epoch_data_size=24000,
        beta_anneal=75,
        seg_len=9,
        learn_rate=1e-3,
        use_amp=False,
        obs_bit=None,
    )
    config = resolve(files=[path])
    assert (config.agent, config.task) == ("vta", "sequences_balls")
    assert (config.run.steps, config.seed) == (50000, 111)
    assert config.logdir == f"{tmp_path}/first"
    assert config.precision == "float32"
    assert (config.sequences.chunk, config.sequences.refresh) == (24000, 0)
    vta = config.vta
    assert (vta.batch_size, vta.opt.lr) == (128, 1e-3)
    vta = vta.world
    assert (vta.anneal, vta.max_segment, vta.max_segments) == (75, 9, 5)
    assert (vta.loss, vta.levels) == ("bernoulli", "all")


def test_files_of_the_port_are_trained_with_from_the_command_line(tmp_path, capsys):
    path = write_json(
        tmp_path / "a.json",
        env_type="bouncing_balls",
        seq_size=4,
        init_size=2,
        belief_size=8,
        batch_size=3,
        epoch_data_size=6,
        max_iters=2,
        gamma=0.99,
    )
    run = tmp_path / "run"
    words = ["--sequences.evaluation", "5", "--logger.outputs", "jsonl"]
    words += ["--device", "cpu", "--logdir", str(run)]
    with pytest.warns(UserWarning, match="gamma"):
        assert cli.main(["train", "--config", str(path), *words]) == 0
    world = agent_state(run)["world"]
    assert world["foresee.weight"].shape == (2, 8)
    assert float(world["age"]) == 2


def test_what_those_files_leave_out_has_their_defaults(tmp_path):
    config = resolve(files=[write_json(tmp_path / "a.json", env_type="3d_maze")])
    assert (config.task, config.run.steps) == ("sequences_maze", 10000)
    assert (config.vta.batch_size, config.sequences.chunk) == (64, 2000)
    vta = config.vta.world
    assert (vta.loss, vta.levels, vta.bits) == ("gaussian", "floor", 5)


def test_blocks_lie_over_what_the_port_does_by_itself_but_not_over_its_file(tmp_path):
    path = write_json(tmp_path / "a.json", env_type="bouncing_balls", seg_num=7)
    vta = resolve(["vta_still"], files=[path]).vta.world
    assert (vta.static_lower_belief, vta.anneal, vta.max_segment) == (True, 5, 20)
    assert vta.max_segments == 7
    config = resolve(["vta_maze"], files=[path])
    assert (config.task, config.vta.world.loss) == ("sequences_balls", "bernoulli")


def test_the_maze_of_the_port_is_looked_for_where_it_keeps_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_json(tmp_path / "a.json", env_type="3d_maze")
    assert resolve(files=[path]).sequences.folder == "data/3d_maze_default"
    (tmp_path / "3d_maze_default").mkdir()
    assert resolve(files=[path]).sequences.folder == "3d_maze_default"
    (tmp_path / "mine" / "3d_maze_default").mkdir(parents=True)
    path = write_json(tmp_path / "b.json", env_type="3d_maze", data_root="mine")
    assert resolve(files=[path]).sequences.folder == "mine/3d_maze_default"
    path = write_json(tmp_path / "d.json", env_type="bouncing_balls", maze_data_dir="m")
    assert resolve(files=[path]).sequences.folder == ""  # not used by balls
    path = write_json(tmp_path / "c.json", env_type="3d_maze", maze_data_dir="there")
    assert resolve(files=[path]).sequences.folder == "there"


def test_unknown_keys_of_those_files_are_reported_and_flags_still_win(tmp_path):
    path = write_json(
        tmp_path / "a.json", env_type="bouncing_balls", colour="blue", horizon=15
    )
    with pytest.warns(UserWarning, match="colour, horizon"):
        config = resolve(files=[path], flags={"vta.batch_size": 7})
    assert config.vta.batch_size == 7


def test_unknown_keys_of_other_files_stay_errors(tmp_path):
    path = write_json(tmp_path / "a.json", agent="vta", colour="blue")
    with pytest.raises(UserError, match="no setting 'colour'"):
        resolve(files=[path])


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"env_type": "pong"}, "bouncing_balls or 3d_maze"),
        ({"env_type": None}, "bouncing_balls or 3d_maze"),
        ({"env_type": ["3d_maze"]}, "bouncing_balls or 3d_maze"),
        ({"loss_type": "l1"}, "bce or mse"),
        ({"use_amp": "false"}, "true or false"),
        ({"exp_name": ["a"]}, "not a path"),
        ({"env_type": "3d_maze", "data_root": {}}, "not a path"),
        ({"seq_size": "many"}, "whole number"),
    ],
)
def test_values_of_those_files_that_mean_nothing_are_refused(tmp_path, keys, complaint):
    path = write_json(tmp_path / "a.json", **{"env_type": "bouncing_balls", **keys})
    with pytest.raises(UserError, match=complaint):
        resolve(files=[path])


def test_a_temperature_that_those_files_do_not_anneal_stays(tmp_path):
    keys = {"env_type": "bouncing_balls", "beta_anneal": None}
    path = write_json(tmp_path / "a.json", **keys)
    assert resolve(files=[path]).vta.world.anneal == 0


def test_files_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"env_type": "bouncing_balls"}')
    assert resolve(files=[path]).task == "sequences_balls"


def test_a_source_of_ones_own_is_watched(tmp_path, monkeypatch):
    from reverie.datasets.synthetic.balls import BouncingBalls

    class Dim(BouncingBalls):
        loss = "gaussian"

        def batch(self, step):
            rows = super().batch(step)
            return {**rows, "image": rows["image"] // 2}

    module = type(sys)("dim_source")
    module.Dim = Dim
    monkeypatch.setitem(sys.modules, "dim_source", module)
    monkeypatch.setitem(SEQUENCE_DATASETS, "dim", "dim_source:Dim")
    config = settings(tmp_path / "run", task="sequences_dim", **{"run.steps": 1})
    assert config.vta.world.loss == "gaussian"
    assert (train(config) / "ckpt").exists()
