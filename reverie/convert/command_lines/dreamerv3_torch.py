"""NM512/dreamerv3-torch, and its fork with offline training and behavior cloning."""

from __future__ import annotations

from reverie.convert.command_lines.tables import (
    Block,
    Flag,
    Original,
    Program,
    settings,
    without_equivalent,
)

FRAMES = "It counts agent steps here, and simulator frames in the original."
EXPLORATION = "Exploration policies are not implemented."
OTHER_LOSS = "The networks and losses here are those of the final DreamerV3."

PROGRAMS = (
    Program(
        r"(.*[/.])?dreamer(\.py)?",
        "train_eval",
        "`reverie train_eval` evaluates regularly, as the original does.",
    ),
    Program(r"(.*[/.])?offline_train(\.py)?", "offline"),
    Program(r"(.*[/.])?BC_MLP_train(\.py)?", "bc"),
    Program(
        r"(.*[/.])?(BC_MLP_eval|lift_eval|WM_BC_eval)(\.py)?",
        "eval LOGDIR --task robosuite_Lift --episodes 50 --videos 3",
        "The settings of the run are read from its folder.",
        takes_arguments=False,
    ),
    Program(
        r"(.*[/.])?BC_Sweep(\.py)?",
        "sweep clone.yaml --logdir logdir/sweep",
        "The grid is part of a YAML file, see docs/sweep.md.",
        takes_arguments=False,
    ),
    Program(
        r"(.*[/.])?joint_eval(\.py)?",
        "eval LOGDIR",
        "It evaluates the predictions of vectors, too.",
        takes_arguments=False,
    ),
    Program(
        r"(.*[/.])?convert_robomimic_to_dreamer(\.py)?",
        "data convert FILE.hdf5 FOLDER --like robomimic",
        "Training reads HDF5 files directly, too.",
        takes_arguments=False,
    ),
    Program(
        r"(.*[/.])?inspect_hdf5(\.py)?",
        "data inspect FILE.hdf5",
        takes_arguments=False,
    ),
    Program(r"(.*[/.])?viewer(\.py)?", "data view PATH --out video.gif", "", False),
)

BLOCKS = {
    "defaults": Block("", "Defaults are always applied."),
    "MemoryMaze": Block("memorymaze"),
    "bc_defaults": Block("bc", "`reverie bc` applies it automatically."),
    "lift_env_eval": Block("lift"),
    "can_env_eval": Block("", "Use --task robosuite_PickPlaceCan."),
    "joint_train": Block(
        "", "Train the world model with `reverie offline`, then clone."
    ),
}

STEPS = "--run.clock steps --run.{0}_every {{value}}"

FLAGS = (
    # loop
    Flag("steps", "--run.steps {value}", FRAMES),
    *settings("run.", "envs", "prefill", "train_ratio", "eval_episode_num=eval_eps"),
    Flag("eval_every", f"COMMAND:train_eval {STEPS.format('eval')}", FRAMES),
    Flag("log_every", STEPS.format("log"), FRAMES),
    Flag("traindir", "--run.episodes {value}"),
    Flag("evaldir", "", "Evaluation episodes are not stored in training."),
    Flag("dataset_size", "--replay.capacity {value}"),
    Flag("parallel True", "--env.vector.workers -1"),
    Flag("parallel False", "--env.vector.workers 0"),
    Flag("precision 16", "--precision float16", "`bfloat16` needs no loss scaling."),
    Flag("precision 32", "--precision float32"),
    Flag("compile True", "--compile auto"),
    Flag("compile False", "--compile none"),
    Flag("deterministic_run True", "--deterministic --run.clock steps"),
    Flag("deterministic_run False"),
    Flag("debug", "", "Use `--configs debug`."),
    Flag("eval_only True", "", "`reverie eval LOGDIR` evaluates the agent of a run."),
    Flag("eval_only False"),
    Flag("video_pred_log", "", "Videos are part of reports: --run.report_every."),
    Flag("resume_checkpoint", "--run.from_checkpoint {value}"),
    Flag("pretrain", "--run.pretrain {value}"),
    *without_equivalent("It is not implemented.", "reset_every", "eval_state_mean"),
    # environments
    Flag("task MemoryMaze_(.*)", r"--task memorymaze_\1"),
    Flag(r"size (\d+\D+\d+)", r"--{env}.size \1"),
    Flag(r"size (\d+\D+\d+)", r"--env.resize \1"),
    Flag("action_repeat", "--{env}.repeat {value}"),
    Flag("action_repeat", "--env.repeat {value}"),
    Flag("time_limit", "--env.length {value}", FRAMES),
    Flag("grayscale", "--env.atari.gray {value}"),
    Flag("stickey True", "--env.atari.sticky 0.25"),
    Flag("stickey False", "--env.atari.sticky 0"),
    Flag("actions needed", "--env.atari.actions minimal"),
    Flag("(lives|noops|actions)", r"--env.atari.\1 {value}"),
    Flag("resize", "", "Images of Atari are resized with Pillow."),
    Flag("break_speed", "--env.minecraft.break_speed {value}"),
    Flag("robosuite_task(?:_name)?", "--task robosuite_{value}"),
    *settings(
        "env.robosuite.",
        "robosuite_robots=robot",
        "robosuite_controller=controller",
        "robosuite_camera=cameras",
        "robosuite_reward_shaping=shaped",
        "robosuite_control_freq=control_freq",
        "robosuite_horizon=horizon",
        "robosuite_lowdim_keys=state",
        "camera_obs_keys=cameras",
    ),
    *without_equivalent(
        "Cameras are upright, and joint angles as sine and cosine are added.",
        "robosuite_add_joint_trig",
        "flip_camera_keys",
        "robosuite_render_device",
    ),
    # world model
    Flag("batch_(size|length)", r"--{agent}.batch_\1 {value}"),
    *settings(
        "dreamer.rssm.",
        "dyn_hidden=hidden",
        "dyn_deter=deter",
        "dyn_stoch=stoch",
        "dyn_discrete=classes",
        "kl_free=free_nats",
        "unimix_ratio=unimix",
    ),
    *settings(  # with the block `dreamerv3_torch`
        "dreamer.dreamerv3_torch.",
        "dyn_hidden=hidden",
        "dyn_deter=deter",
        "dyn_stoch=stoch",
        "dyn_discrete=classes",
    ),
    Flag("(dyn|rep)_scale", r"--dreamer.loss_scales.\1 {value}"),
    Flag("units", r"--dreamer\\..*\\.units {value}"),
    Flag("act", r"--dreamer\\..*\\.act {value}"),
    *settings(
        "dreamer.opt.",
        "model_lr=lr",
        "opt_eps=eps",
        "weight_decay=wd",
        note="One optimizer trains all networks.",
    ),
    *settings("dreamer.world_opt.", "model_lr=lr", "opt_eps=eps", "weight_decay=wd"),
    Flag("grad_clip", "", "Gradients are clipped adaptively: --dreamer.opt.agc."),
    *without_equivalent(
        OTHER_LOSS,
        r"dyn_(?:cell|input_layers|output_layers|rec_depth|shared|temp_post)",
        r"dyn_(?:mean_act|std_act|min_std)",
        "initial",
        "norm",
        "opt",
        "reward_EMA",
        "grad_heads",
        "imag_gradient(?:_mix)?",
        "expl_gifs",
    ),
    # behavior
    Flag(
        "discount",
        "",
        "The discount is 1 - 1 / dreamer.horizon: 0.997 is a horizon of 333.",
    ),
    Flag("discount_lambda", "--dreamer.imag_loss.lam {value}"),
    Flag("imag_horizon", "--dreamer.imag_length {value}"),
    Flag("actor_entropy", "--dreamer.imag_loss.actent {value}"),
    Flag("slow_target_fraction", "--dreamer.slowvalue.rate {value}"),
    Flag("slow_target_update", "--dreamer.slowvalue.every {value}"),
    *without_equivalent(EXPLORATION, "expl_.*", "disag_.*"),
    # offline training
    Flag("offline_traindir", "--offline.data {value}"),
    Flag("offline_evaldir", "--offline.eval_data {value}"),
    Flag(
        "offline_playdir", "", "Use one dataset, written with `reverie data convert`."
    ),
    Flag("offline_updates", "--run.steps {value}"),
    Flag("offline_(log)_every", r"--run.\1_every {value}"),
    Flag("offline_eval_every", "--run.report_every {value}"),
    Flag("offline_checkpoint_every", "--run.save_every {value}"),
    Flag("offline_eval_batches", "--offline.eval.episodes {value}"),
    Flag("offline_eval_video_batches", "", "One video shows several episodes."),
    Flag(
        "offline_eval_preserve_length True",
        "",
        "Episodes are evaluated in full length.",
    ),
    Flag("offline_eval_preserve_length False", "--offline.eval.length 64"),
    Flag(
        "image_standardize True",
        "--dreamer.enc.standard dataset --dreamer.dec.standard dataset",
        "`batch` instead of `dataset` uses the statistics of each batch.",
    ),
    Flag(
        "image_standardize(?:_dataset)? False",
        "",
        "Images are not standardized by default.",
    ),
    Flag(
        "image_standardize_dataset True",
        "",
        "`dataset` is a value of --dreamer.enc.standard.",
    ),
    Flag("image_std_min", "--dreamer.enc.minstd {value}"),
    Flag("image_crop_height", "--offline.images.crop {value} {image_crop_width}"),
    Flag("bc_crop_height", "--offline.images.crop {value} {bc_crop_width}"),
    Flag(
        "(?:image|bc)_crop_width",
        "",
        "Height and width are one setting: --offline.images.crop.",
    ),
    Flag("image_crop_random", "--offline.images.random {value}"),
    # behavior cloning
    Flag("checkpoint", "--bc.run {value}"),
    *settings(
        "bc.",
        "bc_batch_size=batch_size",
        "bc_lr=opt.lr",
        "bc_weight_decay=opt.wd",
        "bc_grad_clip=opt.clip",
        "bc_loss=head.loss",
    ),
    *settings(
        "offline.",
        "bc_epochs=epochs",
        "bc_eval_every=report_epochs",
        "bc_eval_split=split",
    ),
    Flag("bc_max_steps", "--run.steps {value}"),
    Flag("bc_(?:cnn|mlp)_keys_order", "--bc.keys {value}"),
    Flag("bc_use_layernorm True", "--bc.head.norm layer"),
    Flag("bc_use_layernorm False", "--bc.head.norm none"),
    Flag("scratch_encoder", "", "Without --bc.run, the encoder is a new one."),
    Flag("bc_(?:shuffle|save_path)", "", "Checkpoints are in the run folder."),
    *without_equivalent(
        "`reverie sweep` reads the search space from a YAML file.",
        "lr_grid",
        "weight_decay_grid",
        "sweep_(?:name|id)",
        "agent_count",
    ),
)

ORIGINAL = Original(
    "dreamerv3-torch", "docs/coming-from-dreamerv3-torch.md", PROGRAMS, BLOCKS, FLAGS
)
