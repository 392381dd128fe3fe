"""Command lines of the original implementations get an answer whose fix is valid."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from reverie.api import UserError
from reverie.cli.arguments import parse_arguments, to_config
from reverie.cli.draw import FIGURES
from reverie.cli.evaluate import EvalOptions
from reverie.cli.main import COMMANDS, main
from reverie.cli.originals import explain_original
from reverie.cli.train import BASE_PRESETS, command_config
from reverie.config import presets
from reverie.convert.command_lines import originals

ROOT = Path(__file__).resolve().parents[2]


def check_fix(text: str) -> str:
    """Check that the command after `Fix:` is valid, and return it."""
    fix = text.rpartition("\n  Fix: reverie ")[2]
    command, *words = shlex.split(fix)
    assert command in COMMANDS, fix
    if command in BASE_PRESETS:
        words = [word for word in words if word not in ("--config", "CONFIG.json")]
        command_config(command, words)
    elif command == "eval":
        arguments = parse_arguments(words, max_positional=1)
        arguments.take_options(EvalOptions)
        to_config(arguments)
    elif command == "draw":
        assert words[0] in FIGURES
    elif command in ("bench", "config"):
        to_config(parse_arguments(words))
    else:
        assert command in (
            "campaign",
            "data",
            "play",
            "plot",
            "report",
            "sweep",
            "view",
        )
    return fix


def answer(line: str) -> str:
    text = explain_original(shlex.split(line), UserError("invalid"), COMMANDS)
    assert text is not None, line
    return text


def readme_commands() -> list[tuple[str, str]]:
    """Return the commands of the originals' documentation, and those of the answers."""
    text = (Path(__file__).parent / "original_commands.txt").read_text()
    return re.findall(r"^(?!#)(\S.*)\n    reverie (.*)$", text, re.M)


@pytest.mark.parametrize(("line", "expected"), readme_commands())
def test_command_of_a_readme_is_translated(line, expected):
    assert check_fix(answer(line)) == expected


def test_the_table_of_commands_is_complete():
    text = (Path(__file__).parent / "original_commands.txt").read_text()
    lines = [line for line in text.splitlines() if line and line[0] != "#"]
    assert len(lines) == 2 * len(readme_commands()) > 80


DREAMERV3 = """
batch_size 16 batch_length 64 report_length 32 consec_train 1 consec_report 1
replay_context 1 random_agent False replica 0 replicas 1 method name script train
clock_addr x clock_port x ipv6 False errfile False logger.user x
env.atari100k.size 64,64 env.atari100k.repeat 4 env.atari100k.sticky False
env.atari100k.gray False env.atari100k.actions needed env.atari100k.lives unused
env.atari100k.noops 30 env.atari100k.autostart False env.atari100k.resize pillow
env.atari100k.clip_reward False env.atari.sticky True env.atari.resize pillow
env.crafter.logs False replay.size 5e6 replay.priosignal model replay.chunksize 1024
run.duration 0 run.episode_timeout 180 run.actor_addr x run.replay_addr x
run.logger_addr x run.actor_batch -1 run.actor_threads 1 run.agent_process False
run.remote_replay False run.remote_envs False run.usage.psutil True run.debug True
jax.platform cuda jax.compute_dtype bfloat16 jax.policy_devices 0 jax.train_devices 0,1
jax.mock_devices 0 jax.prealloc True jax.jit True jax.debug False jax.expect_devices 0
jax.enable_policy True jax.coordinator_address x agent.loss_scales.rec 1.0
agent.opt.lr 4e-5 agent.opt.agc 0.3 agent.opt.warmup 1000 agent.ac_grads False
agent.dyn.typ rssm agent.dyn.rssm.deter 8192 agent.dyn.rssm.hidden 1024
agent.dyn.rssm.classes 64 agent.dyn.rssm.free_nats 1.0 agent.enc.typ simple
agent.enc.simple.depth 64 agent.enc.simple.units 1024 agent.dec.simple.bspace 8
agent.rewhead.units 1024 agent.policy.minstd 0.1 agent.value.layers 3
agent.imag_length 15 agent.horizon 333 agent.contdisc True agent.imag_loss.actent 3e-4
agent.slowvalue.rate 0.02 agent.retnorm.rate 0.01 agent.repval_loss True
encoder.mlp_keys .* decoder.cnn_keys image enc.spaces image run.num_envs 4
"""

DREAMERV3_TORCH = """
traindir x evaldir x offline_traindir x offline_evaldir x offline_playdir x
deterministic_run False steps 1e6 parallel False eval_every 1e4 eval_episode_num 10
log_every 1e4 reset_every 0 compile True precision 32 debug False video_pred_log True
size 64,64 envs 1 action_repeat 2 time_limit 1000 grayscale False prefill 2500
reward_EMA True dyn_hidden 512 dyn_deter 512 dyn_stoch 32 dyn_discrete 32
dyn_rec_depth 1 dyn_mean_act none dyn_std_act sigmoid2 dyn_min_std 0.1 units 512
norm True image_standardize False image_standardize_dataset True image_std_min 1e-3
image_crop_height 78 image_crop_width 78 image_crop_random False dyn_scale 0.5
rep_scale 0.1 kl_free 1.0 weight_decay 0.0 unimix_ratio 0.01 initial learned
batch_size 16 batch_length 64 train_ratio 512 pretrain 100 model_lr 1e-4 opt_eps 1e-8
grad_clip 1000 dataset_size 1000000 opt adam discount 0.997 discount_lambda 0.95
imag_horizon 15 imag_gradient dynamics imag_gradient_mix 0.0 eval_state_mean False
expl_behavior Plan2Explore expl_until 0 disag_models 10 stickey False lives unused
noops 30 resize opencv actions needed break_speed 100 offline_updates 100000
offline_log_every 1000 offline_eval_every 1000 offline_checkpoint_every 10000
offline_eval_batches 5 offline_eval_video_batches 5 offline_eval_preserve_length True
eval_only True resume_checkpoint x checkpoint x bc_epochs 20 bc_batch_size 256
bc_lr 1e-4 bc_weight_decay 0.0 bc_eval_every 50 bc_eval_split 0.1 bc_grad_clip 100
bc_shuffle True bc_loss mse bc_save_path x bc_crop_height 78 bc_crop_width 78
bc_max_steps 100 bc_mlp_keys_order a,b actor_entropy 3e-4 slow_target_fraction 0.02
robosuite_task_name Lift robosuite_robots Panda robosuite_camera agentview
robosuite_reward_shaping True robosuite_control_freq 20 lr_grid 1e-4 sweep_name x
save_every 10000 wm_random_crop False wm_loss_scale 0.01 expert_data_fraction 0.5
eval_episodes 50 num_workers 0 replay_use_npz False
"""

DELTA_IRIS = """
common.epochs 600 common.device cpu common.do_checkpoint True common.seed 0
common.resume False initialization.path_to_checkpoint x
initialization.load_tokenizer True collection.path_to_static_dataset x
collection.train.num_envs 1 collection.train.stop_after_epochs 491
collection.train.num_episodes_to_save 10 collection.train.config.epsilon 0.01
collection.train.config.should_sample True collection.train.config.temperature 1.0
collection.train.config.num_steps 200 collection.train.config.num_steps_first_epoch 2000
collection.test.num_envs 8 collection.test.config.num_episodes 32
collection.test.config.epsilon 0.0 training.should True training.learning_rate 0.0001
training.tokenizer.sequence_length 21 training.tokenizer.batch_num_samples 16
training.tokenizer.grad_acc_steps 1 training.tokenizer.max_grad_norm 10.0
training.tokenizer.priority_alpha 1 training.tokenizer.weight_decay 0.0
training.tokenizer.start_after_epochs 5 training.tokenizer.steps_first_epoch 400
training.tokenizer.steps_per_epoch 200 training.world_model.sequence_length 20
training.actor_critic.batch_num_samples 64 training.actor_critic.sequence_length 6
evaluation.should True evaluation.every 25 evaluation.tokenizer.batch_num_samples 1
tokenizer.image_channels 3 tokenizer.image_size 64 tokenizer.num_tokens 4
tokenizer.decoder_act_channels 4 tokenizer.codebook_size 1024 tokenizer.codebook_dim 64
tokenizer.max_codebook_updates_with_revival 400 tokenizer.encoder_config.num_channels 64
tokenizer.decoder_config.num_channels 64 tokenizer.frame_cnn_config.latent_dim 16
world_model.latents_weight 0.1 world_model.two_hot_rews False
world_model.transformer_config.num_layers 3 world_model.transformer_config.num_heads 4
world_model.transformer_config.embed_dim 256
world_model.transformer_config.max_blocks 26
world_model.frame_cnn_config.latent_dim 4 actor_critic.burn_in_length 5
actor_critic.imagination_horizon 15 actor_critic.gamma 0.995 actor_critic.lambda_ 0.95
actor_critic.entropy_weight 0.002 actor_critic.two_hot_rets False
actor_critic.model.frame_encoder_config.num_channels 32 wandb.mode offline
wandb.project x wandb.name x hydra.run.dir x env.test.noop_max 1
"""

VTA = """
exp_name x work_dir x env bouncing_balls seq_size 20 init_size 5 state_size 8
belief_size 128 num_layers 3 obs_std 1.0 obs_bit 5 learn_rate 5e-4 max_iters 10000
seg_num 5 seg_len 8 max_beta 1.0 min_beta 0.1 beta_anneal 100 use_amp True
loss_type bce epoch_data_size 2000 maze_data_dir x action_size 0 data_mode fixed
vta_max_seg_len 50 vta_boundary_temp 1.0 vta_mask_scale 1.0
vta_train_boundary_mode fixed vta_train_fixed_k 20 ckpt_every 25000
"""


def pairs(text: str) -> list[tuple[str, str]]:
    words = text.split()
    return list(zip(words[::2], words[1::2], strict=True))


PRESET_OF_FLAG = {"robosuite": "robosuite_lift", "break": "minecraft"}
"""Presets whose suite has the setting; the others are tried on Atari."""


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "value"), [*pairs(DREAMERV3), *pairs(DREAMERV3_TORCH)]
)
def test_flag_of_dreamer_has_an_answer(name, value):
    preset = PRESET_OF_FLAG.get(name.split("_")[0], "atari100k")
    text = answer(f"train --configs {preset} --{name} {value}")
    assert f"--{name}" in text
    check_fix(text)


@pytest.mark.extended
@pytest.mark.parametrize(("name", "value"), pairs(DELTA_IRIS))
def test_hydra_argument_has_an_answer(name, value):
    for prefix in ("", "params."):
        if prefix and name.split(".")[0] in ("wandb", "hydra", "env"):
            continue
        text = answer(f"train {prefix}{name}={value}")
        assert "Δ-IRIS" in text
        fix = check_fix(text)
        assert "=" not in fix


@pytest.mark.parametrize(("name", "value"), pairs(VTA))
def test_flag_of_vta_has_an_answer(name, value):
    preset = "--configs atari100k vta" if name[:4] == "vta_" else "--configs vta_balls"
    text = answer(f"train {preset} --{name} {value}")
    assert f"--{name}" in text
    check_fix(text)


def test_every_preset_has_valid_replacements_and_is_not_one_of_this_package():
    for original in originals():
        assert (ROOT / original.page).is_file(), original.page
        for name, preset in original.presets.items():
            assert name not in presets()
            assert set(preset.new.split()) <= set(presets())
            assert preset.new or preset.note


@pytest.mark.parametrize(
    "line",
    [
        "train --foo 3",
        "data convert SRC DST --size 32",
        "eval LOGDIR --checkpoint x",
        "tarin --batch_size 3",
        "train --task catch",
    ],
)
def test_other_errors_are_left_as_they_are(line):
    assert explain_original(line.split(), UserError("invalid"), COMMANDS) is None


def test_answers_exit_with_2_and_name_the_page(capsys):
    assert main(["train", "--batch_size", "16"]) == 2
    error = capsys.readouterr().err
    assert error.endswith(  # a status line may precede it on a slow machine
        "reverie: `--batch_size` of danijar/dreamerv3 is `--dreamer.batch_size` in "
        "Reverie.\n"
        "  See docs/coming-from-dreamerv3.md.\n"
        "  Fix: reverie train --dreamer.batch_size 16\n"
    )
    assert main(["train", "env=atari", "params=atari"]) == 2
    assert "iris_atari" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "batch_size: 8",
            r"`batch_size` of danijar/dreamerv3 is `dreamer\.batch_size`",
        ),
        ("jax: {prealloc: False}", r"`jax\.prealloc` .* is not needed in Reverie"),
        (
            "common: {epochs: 3}",
            r"`common\.epochs` of Δ-IRIS is `iris\.schedule\.epochs`",
        ),
        ("offline_traindir: x", r"dreamerv3-torch is `offline\.data`"),
        ("epochs: ${params.epochs}", r"\$\{params\.epochs\}, a reference of Hydra"),
    ],
)
def test_keys_of_config_files_have_an_answer(tmp_path, capsys, text, message):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert main(["train", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert "config.yaml" in error
    assert "\n  Fix: " in error


def test_invalid_task_in_a_translated_command_is_named():
    text = answer("dreamer.py --configs pinpad --task pinpad_eight --steps 4e4")
    assert "Suite 'pinpad' has no task 'eight'" in text


def test_unknown_flags_of_a_program_are_left_out_and_named():
    text = answer("dreamer.py --configs dmc_vision --foo 3 --compile False")
    assert "Unknown in Reverie, and left out: `--foo`." in text
    assert check_fix(text).endswith("--compile none")
    text = answer("src/main.py +experiment=x common.do_checkpoint=true")
    assert "left out: `+experiment=x`." in text
    assert check_fix(text) == "train --configs iris_crafter"


OLDER_NAMES = """
reward_layers 2 cont_layers 2 value_layers 2 actor_layers 2 encoder.cnn_depth 32
encoder.minres 4 encoder.mlp_layers 2 decoder.image_dist mse value_head symlog_disc
reward_scale 1.0 action_unimix_ratio 0.01 value_lr 3e-5 actor_grad_clip 100
actor_dist normal actor_min_std 0.1 slow_value_target True eval_noise 0.0
actor.dist normal actor.lr 3e-5 actor.temp 0.1 critic.layers 2 critic.slow_target True
reward_head.loss_scale 1.0 cont_head.outscale 1.0
"""
"""Options of `configs.yaml`, of current and older versions of dreamerv3-torch."""


@pytest.mark.extended
@pytest.mark.parametrize("program", ["train", "dreamer.py --configs dmc_vision"])
def test_options_of_all_versions_of_dreamerv3_torch_are_answered(program):
    words = OLDER_NAMES.split()
    for name, value in zip(words[::2], words[1::2], strict=True):
        text = answer(f"{program} --{name} {value}")
        assert f"`--{name}" in text
        assert "left out" not in text
        check_fix(text)


@pytest.mark.parametrize("flag", ["--env CartPole-v1", "--env-id=CartPole-v1"])
def test_flag_of_an_environment_names_the_task(flag):
    text = answer(f"train --configs tiny {flag} --run.steps 30")
    assert check_fix(text) == (
        "train --task gym_CartPole-v1 --configs tiny --run.steps 30"
    )
    assert "`--task`" in text


def test_programs_that_are_not_implemented_say_so():
    text = answer("python -m src_director.dreamer --configs crafter")
    assert "Director" in text
    assert "not implemented" in text
    text = answer("train --vta_train_boundary_mode fixed")
    assert "`--vta_train_boundary_mode` of VTA has no equivalent in Reverie" in text


UNUSED = """
train --env.atari100k.gray False | env.atari.gray | the task 'catch' is not in the suite
train --lives unused | env.atari.lives | the task 'catch' is not in the suite 'atari'
train --configs vta_balls --vta_imag_type full | dreamer.vta.imagination | not of 'vta'
train --agent random --batch_size 4 | dreamer.batch_size | not of 'random'
offline --envs 3 | run.envs | it trains on recorded data
bc --num_envs 3 | run.envs | it trains on recorded data
"""


@pytest.mark.parametrize("case", UNUSED.strip().splitlines())
def test_flag_without_effect_is_named_and_left_out(case):
    line, name, reason = case.split(" | ")
    text = answer(line)
    assert f"is `--{name}` in Reverie. It has no effect in this run: " in text
    assert reason in text
    assert check_fix(text) == " ".join(line.split()[:-2])


def test_notes_are_sentences():
    assert "in Reverie. TensorBoard and W&B are" in answer("train --logger.user x")
    text = answer("train --env.nethack.size 64 64")
    assert "has no equivalent in Reverie. There is no NetHack suite" in text
