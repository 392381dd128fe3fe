"""danijar/dreamerv3: DreamerV3 in JAX, also with the names of older versions."""

from __future__ import annotations

from reverie.convert.command_lines.tables import (
    Block,
    Flag,
    Original,
    Program,
    without_equivalent,
)

ONE_DEVICE = "One run uses one device; `reverie sweep` distributes runs over GPUs."
ONE_PROCESS = "One process trains; environments run in worker processes."
ALL_OUTPUTS = "TensorBoard and W&B are outputs of the log: --logger.outputs."

PROGRAMS = (
    Program(r"(.*/)?example\.py", "train"),
    Program(r"(.*[/.])?dreamerv3[/.](main|train)(\.py)?|main\.py", "train"),
)

BLOCKS = {
    "defaults": Block("", "Defaults are always applied."),
    "multicpu": Block("", ONE_DEVICE),
    "nethack": Block("", "There is no NetHack suite; `reverie envs` lists the suites."),
    "xsmall": Block("size12m", "Sizes are named by the number of parameters."),
    "small": Block("size12m", "Sizes are named by the number of parameters."),
    "medium": Block("size50m", "Sizes are named by the number of parameters."),
    "large": Block("size100m", "Sizes are named by the number of parameters."),
    "xlarge": Block("size200m", "Sizes are named by the number of parameters."),
    "dmc": Block("dmc_vision"),
    "gymnasium": Block("", "Use --task gym_ID, for example --task gym_CartPole-v1."),
}

FLAGS = (
    *(
        Flag(rf"({name})", r"--{agent}.\1 {value}")
        for name in ("batch_size", "batch_length", "report_length", "replay_context")
    ),
    *(Flag(rf"({n})", r"--{agent}.\1 {value}") for n in ("consec_(?:train|report)",)),
    Flag(r"(?:run\.)?script train", ""),
    Flag(r"(?:run\.)?script train_eval", "COMMAND:train_eval"),
    Flag(
        r"(?:run\.)?script (eval_only|sample|train_holdout|train_save)",
        "",
        "`reverie eval LOGDIR` evaluates the agent of a run.",
    ),
    Flag(r"(?:run\.)?script parallel.*", "--env.vector.workers -1", ONE_PROCESS),
    Flag(r"random_agent True", "--agent random"),
    Flag(r"random_agent False", ""),
    # JAX
    Flag(r"jax\.platform cpu", "--device cpu"),
    Flag(r"jax\.platform (cuda|gpu)", "--device cuda"),
    Flag(r"jax\.platform tpu", "", "TPUs are not supported."),
    Flag(
        r"jax\.(?:compute_dtype|precision) (bfloat16|float16|float32)",
        r"--precision \1",
    ),
    Flag(r"jax\.jit False", "--compile none"),
    Flag(r"jax\.(?:policy|train)_devices \[?(\d)\]?", r"--device cuda:\1"),
    Flag(r"jax\.(?:policy|train)_devices .*", "", ONE_DEVICE),
    Flag(r"jax\.prealloc", "", "PyTorch allocates GPU memory as it is needed."),
    Flag(r"jax\.(?:mock_devices|expect_devices|coordinator_address)", "", ONE_DEVICE),
    Flag(r"jax\..*", "", "JAX is not used; --compile selects the acceleration."),
    # replay and run
    Flag(r"replay\.size|replay_size", "--replay.capacity {value}"),
    Flag(r"replay\.priosignal", "--dreamer.priosignal {value}"),
    Flag(r"replay\.chunksize", "--replay.segment {value}"),
    Flag(
        r"run\.duration", "", "A run ends after --run.steps; Ctrl-C stops and saves it."
    ),
    Flag(r"run\.episode_timeout", "--env.vector.timeout {value}"),
    Flag(r"run\.from_checkpoint_regex", "--run.from_components {value}"),
    Flag(r"run\.(?:expl|train)_until|run\.actor_.*", "", ONE_PROCESS),
    Flag(
        r"run\.(?:agent_process|remote_.*|.*_addr|.*_batch|driver_parallel)",
        "",
        ONE_PROCESS,
    ),
    Flag(
        r"run\.(?:debug|usage\..*|timer)",
        "",
        "Usage and timer metrics are always logged.",
    ),
    Flag(
        r"run\.log_(?:keys|zeros|video).*",
        "",
        "Observations `log/NAME` are logged as metrics.",
    ),
    Flag(r"run\.num_envs(?:_eval)?", "--run.envs {value}"),
    Flag(r"(?:envs|run)\.amount", "--run.envs {value}"),
    Flag(r"envs\.parallel none", "--env.vector.workers 0"),
    Flag(r"envs\.parallel .*", "--env.vector.workers -1"),
    # environments
    Flag(r"env\.atari100k\.size", "--env.atari.size {value}"),
    Flag(r"env\.atari100k\.actions needed", "--env.atari.actions minimal"),
    Flag(r"env\.atari\.actions needed", "--env.atari.actions minimal"),
    Flag(r"env\.atari(?:100k)?\.sticky True", "--env.atari.sticky 0.25"),
    Flag(r"env\.atari(?:100k)?\.sticky False", "--env.atari.sticky 0"),
    Flag(
        r"env\.atari100k\.(repeat|gray|lives|noops|autostart|clip_reward)",
        r"--env.atari.\1 {value}",
    ),
    Flag(
        r"env\.\w+\.(?:resize|aggregate|logs|use_seed)", "", "It is not an option here."
    ),
    # agent
    Flag(r"agent\.dyn\.rssm\.(\w+)", r"--dreamer.rssm.\1 {value}"),
    Flag(r"(?:dyn\.)?rssm\.(\w+)", r"--dreamer.rssm.\1 {value}"),
    Flag(r"(?:agent\.)?(enc|dec)\.simple\.(\w+)", r"--dreamer.\1.\2 {value}"),
    Flag(
        r"(?:agent\.)?(?:enc|dec|dyn)\.typ", "", "The world model is --dreamer.world."
    ),
    Flag(r"encoder\.(mlp|cnn)_keys", r"--dreamer.enc.\1_keys {value}"),
    Flag(r"decoder\.(mlp|cnn)_keys", r"--dreamer.dec.\1_keys {value}"),
    Flag(
        r"(?:agent\.)?(enc|dec)\.spaces",
        r"--dreamer.\1.cnn_keys {value} --dreamer.\1.mlp_keys {value}",
        "Images and vectors have a pattern each.",
    ),
    Flag(r"agent\.([\w.]+)", r"--dreamer.\1 {value}"),
    Flag(
        r"((?:enc|dec|rewhead|conhead|policy|value|slowvalue|opt|loss_scales|imag_loss|"
        r"repl_loss|retnorm|valnorm|advnorm)\.\w+)",
        r"--dreamer.\1 {value}",
    ),
    Flag(r"(imag_length|imag_last|horizon|contdisc|ac_grads)", r"--dreamer.\1 {value}"),
    # others
    *without_equivalent(
        "A run is one process on one machine.",
        r"replicas?",
        r"clock_(?:addr|port)",
        r"ipv6",
        r"errfile",
    ),
    Flag(r"method", "", "Name the run by its folder: --logdir."),
    Flag(r"logger\.user", "", ALL_OUTPUTS),
)

ORIGINAL = Original(
    "danijar/dreamerv3", "docs/coming-from-dreamerv3.md", PROGRAMS, BLOCKS, FLAGS
)
