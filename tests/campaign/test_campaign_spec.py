"""Campaign files and flags: the runs that they define, and invalid ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reverie.api import UserError
from reverie.campaign.gpu_sharing import (
    GpuSharing,
    GpuUsage,
    read_gpu_usage,
    runs_per_gpu,
)
from reverie.campaign.queue import RunStatus
from reverie.campaign.spec import (
    CampaignConfig,
    check_extends,
    load_spec,
    parse_seeds,
)
from reverie.cli.campaign import find_campaign
from reverie.cli.main import main
from reverie.cli.train import command_config


def load(words="", file=None):
    return load_spec(file, words.split(), command_config)


def test_runs_are_all_combinations_of_task_method_and_seed(tmp_path):
    flags = load(
        "--tasks catch,memory --seeds 2 --configs debug --configs catch tiny "
        "--run.steps 50 --workers 2"
    )
    names = [run.name for run in flags.runs]
    assert len(names) == len({*names}) == 8
    assert names[:3] == [
        *("catch-debug-seed0", "catch-debug-seed1"),
        "catch-catch+tiny-seed0",
    ]
    command = "train --configs catch tiny --run.steps 50 --task catch --seed 0"
    assert " ".join(flags.runs[2].command) == command
    assert flags.runs[2].frames == 50
    file = tmp_path / "campaign.yaml"
    file.write_text(
        "tasks: [catch, memory]\nseeds: 2\nconfigs: [debug, [catch, tiny]]\n"
        "settings: {run: {steps: 50}}\nworkers: 2\n"
    )
    assert load(file=file) == flags
    saved = tmp_path / "saved.yaml"  # as in the folder of the campaign
    saved.write_text(flags.to_yaml())
    assert load(file=saved).runs == flags.runs
    more = load("--seeds 5,7 --run.steps 60", file)
    assert {run.seed for run in more.runs} == {5, 7}
    assert "60" in more.runs[0].command


def test_suite_means_the_tasks_of_its_benchmark():
    spec = load("--tasks atari100k --configs size12m")
    assert len(spec.runs) == 26
    assert spec.runs[0].name == "atari100k_alien-size12m-seed0"
    assert spec.runs[0].frames == 440_000


def test_size_is_chosen_once_and_saved(tmp_path):
    spec = load("--tasks memory,gym_CartPole-v1 --device cpu")
    assert spec.size == "size1m"
    assert spec.runs[1].command[1:3] == ["--configs", "size1m"]
    file = tmp_path / "campaign.yaml"
    file.write_text(spec.to_yaml().replace("size1m", "size12m"))
    assert load(file=file).runs[1].command[1:3] == ["--configs", "size12m"]


def test_seeds():
    assert parse_seeds("3") == [0, 1, 2]
    assert parse_seeds("3,5") == [3, 5]
    assert parse_seeds("3,") == [3]
    for text in ("", "x", "0", "1.5", "1" * 5000, "1000000000", "1," * 10_001):
        with pytest.raises(UserError, match="Fix: --seeds"):
            parse_seeds(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--seeds 2", "A campaign needs tasks"),
        ("--tasks cach", "Unknown task 'cach'. Did you mean catch"),
        ("--tasks gym", "cannot be listed"),
        ("--tasks catch --run.stepz 3", "run.stepz"),
        ("--tasks catch --configs debug --configs size7", "Task catch with size7"),
        ("--tasks catch --dreamer.imag_length x", "Task catch"),
        ("--tasks catch,memory --env.catch.size 8 8", "Task memory"),
        ("--tasks catch --task memory", "sets task"),
        ("--tasks catch --seed 3", "--seeds"),
        ("--tasks catch --per-gpu 0", "--per-gpu auto"),
        ("--tasks catch --retries -1", "retries"),
        ("--tasks catch --stale-seconds 5", "not 5, .*\n  Fix: --stale-seconds 20"),
        ("--tasks catch --stale-seconds nan", "at least 20, not nan"),
        ("--tasks catch --worker 2", "the flag --worker.* Did you mean --workers,"),
        ("--tasks catch --retry 2", "Did you mean --retries, .*\n  Fix: .* --help"),
        ("--tasks catch --per-gp 2", "Did you mean --per-gpu,"),
        ("--tasks catch --env.worker 2", "Did you mean 'env.vector.workers'"),
        ("--tasks catch --eps 2", r"Did you mean '.*\.eps'"),
        ("--tasks catch --configs debug --devices 99", "cannot be divided among 99"),
        ("--tasks catch catch --configs debug --configs debug", "Two runs"),
    ],
)
def test_invalid_campaign_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        load(words)


def test_unknown_keys_of_a_file_are_refused(tmp_path):
    file = tmp_path / "campaign.yaml"
    file.write_text("tasks: [catch]\nseedz: 3\n")
    with pytest.raises(UserError, match=r"Unknown key 'seedz'.* Did you mean"):
        load(file=file)
    file.write_text("tasks: [catch]\nrun.steps: 3\n")
    with pytest.raises(UserError, match="below `settings:`"):
        load(file=file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: [catch]", "Unknown key 'task' in .*\n  Fix: tasks: "),
        ("tasks: [catch]\nseed: 3", "Unknown key 'seed' in .*\n  Fix: seeds: 3"),
        ("tasks: {a: catch}", "tasks in .* cannot be {'a': 'catch'}"),
        ("tasks: [{name: catch}]", "Fix: tasks: "),
        ("tasks: [null]", "Fix: tasks: "),
        ("tasks:", "tasks in .* cannot be None"),
        ("tasks: [catch]\nseeds: []", r"seeds in .* cannot be \[\]"),
        ("tasks: [catch]\nseeds: {a: 1}", "Fix: seeds: 3"),
        ("tasks: [catch]\nconfigs: [{a: debug}]", "must list the presets"),
        ("tasks: [catch]\nrun: {steps: 3}", "'run' in .* is a setting of runs"),
        ("tasks: [catch]\nstatus: true", "status in .* has no effect"),
        ("tasks: [catch]\nstatuz: true", "Unknown key 'statuz'"),
        ("tasks: [catch]\nsize: size1m\nconfigs: [debug]", "size1m has no effect"),
        ("tasks: [catch]\ntasks: [memory]", r"the key 'tasks' twice \(line 2\)"),
    ],
)
def test_mistakes_in_a_file_are_refused(text, message, tmp_path):
    file = tmp_path / "campaign.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        load(file=file)


def test_options_that_change_how_runs_are_retried_are_saved(tmp_path):
    file = tmp_path / "campaign.yaml"
    flags = "--retries 5 --stale-seconds 90 --workers 2 --per-gpu 3"
    file.write_text(load(f"--tasks catch --configs debug {flags}").to_yaml())
    saved = load(file=file).config
    assert (saved.retries, saved.stale_seconds) == (5, 90.0)
    assert (saved.workers, saved.per_gpu) == (0, "auto")  # depend on the machine
    assert load("--retries 3", file).config.retries == 3
    assert "retries" not in load("--retries 2", file).to_yaml()  # the default


def test_flags_that_status_does_not_use_are_refused(tmp_path, capsys):
    (tmp_path / "campaign.yaml").write_text("tasks: [catch]\n")
    (tmp_path / "queue").mkdir()
    assert main(["campaign", str(tmp_path), "--status", "--tasks", "memory"]) == 2
    assert "--tasks has no effect with --status" in capsys.readouterr().err
    for words in (["--status"], ["--status", "TRUE"], ["--status=true"]):
        assert main(["campaign", str(tmp_path), *words]) == 0


def test_a_setting_that_differs_between_runs_is_refused_with_its_source(tmp_path):
    file = tmp_path / "campaign.yaml"
    file.write_text("tasks: [catch]\nsettings: {seed: 3}\n")
    with pytest.raises(UserError, match=r"campaign\.yaml sets seed,"):
        load(file=file)
    file.write_text("tasks: [catch]\n")
    with pytest.raises(UserError, match=r"^the command line sets seed,"):
        load("--seed 3", file)


def test_folder_that_is_no_campaign_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"it has no campaign\.yaml"):
        find_campaign([str(tmp_path)])
    with pytest.raises(UserError, match="needs tasks, a YAML file, or the folder"):
        find_campaign([])
    saved = tmp_path / "campaign.yaml"
    saved.write_text("tasks: [catch]\n")
    assert find_campaign([str(tmp_path)])[0] == saved
    assert find_campaign(["--logdir", str(tmp_path)])[0] == saved
    with pytest.raises(UserError, match="resumed in another folder, but --logdir"):
        find_campaign([str(tmp_path), "--logdir", "other"])


def test_code_in_a_campaign_of_others_is_not_imported(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "others_env.py").write_text("raise SystemExit('imported')")
    folder = tmp_path / "campaign"
    (folder / "queue").mkdir(parents=True)
    (folder / "campaign.yaml").write_text("tasks: ['others_env:make']\n")
    assert main(["campaign", str(folder)]) == 2
    assert "add --trust" in capsys.readouterr().err


def test_missing_code_of_tasks_is_found_before_the_first_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "box_campaign_env.py").write_text("def make_env(): ...\n")
    assert len(load("--tasks box_campaign_env:make_env,catch").runs) == 2
    with pytest.raises(UserError, match="there is no module 'box_campaing_env'"):
        load("--tasks box_campaign_env:make_env,box_campaing_env:make_env")
    with pytest.raises(UserError, match=r"has no 'make'.\n  Fix: did you mean"):
        load("--tasks box_campaign_env:make")


def test_commands_in_messages_are_quoted_for_a_shell(tmp_path):
    folder = tmp_path / "my campaign"
    folder.mkdir()
    (folder / "campaign.yaml").write_text("tasks: [catch]\n")
    with pytest.raises(UserError) as error:
        find_campaign([str(folder), "--logdir", "other"])
    assert str(error.value).endswith(f"Fix: reverie campaign '{folder}'")
    (run,) = load("--tasks catch").runs
    command = [*run.command, "--config", "my settings.yaml"]
    old = RunStatus(replace(run, command=command))
    with pytest.raises(UserError) as error:
        check_extends(folder, [run], [old])
    assert "--config 'my settings.yaml'`" in str(error.value)
    assert f"Fix: reverie campaign '{folder}' to resume" in str(error.value)


def test_processes_and_device_of_the_runs():
    spec = load("--tasks catch --configs size1m --configs size1m multicpu")
    assert (spec.processes, spec.gpus_per_run, spec.device) == (2, 1, "auto")
    spec = load("--tasks catch --configs debug --devices 3 --device cpu")
    assert (spec.processes, spec.gpus_per_run, spec.device) == (3, 1, "cpu")
    spec = load("--tasks catch --configs size1m --devices 3")
    assert (spec.processes, spec.gpus_per_run, spec.device) == (3, 3, "auto")


def test_number_of_runs_per_gpu(monkeypatch, tmp_path):
    module = "reverie.campaign.gpu_sharing"
    monkeypatch.setattr(f"{module}.visible_gpus", lambda: [])
    assert GpuSharing(CampaignConfig(workers=3)).num_slots == 3
    with pytest.raises(UserError, match="--per-gpu 3 has no effect"):
        GpuSharing(CampaignConfig(per_gpu="3"))
    monkeypatch.setattr(f"{module}.visible_gpus", lambda: ["0", "1"])
    assert GpuSharing(CampaignConfig(per_gpu="3")).num_slots == 6
    assert GpuSharing(CampaignConfig(), "cpu").num_slots == 1
    with pytest.raises(UserError, match="--mps False has no effect"):
        GpuSharing(CampaignConfig(mps=False, per_gpu="1"))
    with pytest.raises(UserError, match="--workers 3 has no effect"):
        GpuSharing(CampaignConfig(workers=3))
    assert GpuSharing(CampaignConfig(per_gpu="3"), gpus_per_run=2).num_slots == 3
    with pytest.raises(UserError, match="Each run has 3 processes"):
        GpuSharing(CampaignConfig(), gpus_per_run=3)
    assert GpuSharing(CampaignConfig(), "cpu", gpus_per_run=3).num_slots == 1
    assert runs_per_gpu([GpuUsage(9.0, None)], 24.0, 16) == 2  # memory
    assert runs_per_gpu([GpuUsage(30.0, None)], 24.0, 16) == 1
    assert runs_per_gpu([GpuUsage(1.0, 0.9)], 140.0, 16) == 2  # utilization
    assert runs_per_gpu([GpuUsage(1.0, 0.9)], 140.0, 16, with_mps=True) == 4
    assert runs_per_gpu([GpuUsage(1.0, 0.2)], 140.0, 6) == 3  # cores
    assert runs_per_gpu([GpuUsage(1.0, 0.2)], 140.0, 64) == 4
    line = '{{"step": 1, "usage/gpu_reserved_gb": {}, "usage/gpu": {}}}\n'
    text = "".join(line.format(i, 0.1 * i) for i in (1, 3, 2))
    (tmp_path / "metrics.jsonl").write_text(text[: -len(line)])
    assert read_gpu_usage(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text(text)
    assert read_gpu_usage(tmp_path) == GpuUsage(3.0, pytest.approx(0.25))
