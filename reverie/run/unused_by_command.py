"""Settings that each command does not use, with the reason and what to type instead.

Entries are `UnusedSetting(name, reason, instead)`. A name that ends with a dot is a
group of settings. In `instead`, `{value}` is the value that the user gave.
"""

from __future__ import annotations

from reverie.capabilities import UnusedSetting

COLLECTS = "`reverie train` collects its own data"
NO_TRAINING = "an evaluation does not train"
NO_ENVS = "it trains on recorded data, without environments"
SEQUENCE_DATASET = "the task is a sequence dataset, not recorded episodes"
"""These four are reasons in messages: `--flag has no effect in this run: REASON.`"""

ONLINE = (
    UnusedSetting(
        "offline.data",
        COLLECTS,
        "--run.episodes {value} adds recorded episodes to the replay, and `reverie "
        "offline --offline.data {value}` trains on them alone.",
    ),
    UnusedSetting(
        "sequences.folder",
        "the task is an environment",
        "--configs vta_maze --sequences.folder {value}",
    ),
    UnusedSetting(
        "sequences.", "the task is an environment", "add --configs vta_balls."
    ),
)
"""Settings that training in environments does not use."""

WITHOUT_EVALUATION = tuple(
    UnusedSetting(
        name,
        "`reverie train` does not evaluate",
        "`reverie train_eval`, with the same arguments.",
    )
    for name in ("run.eval_every", "run.eval_eps")
)
"""Settings that `reverie train` does not use, but `reverie train_eval` does."""

ACTORS = (
    UnusedSetting("run.envs", "actors step the environments", "--actors.envs {value}"),
    UnusedSetting("run.overlap", "actors collect while the agent trains"),
    UnusedSetting("run.policy_devices", "actors act on the CPU"),
    UnusedSetting("replay.ranks", "actors send their steps to the replay of rank 0"),
)
"""Settings that runs with actors do not use."""

EVALUATION = (
    UnusedSetting("devices", NO_TRAINING),
    UnusedSetting("run.eval_eps", NO_TRAINING, "--episodes {value}"),
    UnusedSetting("run.envs", NO_TRAINING, "--run.eval_envs {value}"),
    *(
        UnusedSetting(name, NO_TRAINING)
        for name in (
            *("run.steps", "run.train_ratio", "run.prefill", "run.pretrain"),
            *("run.clock", "run.log_every", "run.report_every", "run.save_every"),
            *("run.eval_every", "run.report_batches", "run.episodes"),
            *("run.keep_last", "run.keep_every", "run.keep_epochs", "replay."),
            *("actors.", "run.rank_timeout", "run.train_devices"),
            "run.policy_devices",
        )
    ),
)
"""Settings that `reverie eval` does not use."""

BENCH = (
    UnusedSetting("actors.", "a benchmark has no actors"),
    UnusedSetting("run.policy_devices", "a benchmark uses one device for each process"),
    UnusedSetting(
        "run.train_devices", "a benchmark uses the first GPUs", "--devices 2"
    ),
    UnusedSetting(
        "replay.ranks", "a benchmark of several devices trains on one replay"
    ),
)
"""Settings that `reverie bench` does not use."""

BENCH_UPDATES = tuple(
    UnusedSetting(
        name,
        "the benchmark measures updates without a training loop",
        f"remove --{name}, or add --end-to-end to measure a whole run.",
    )
    for name in (
        *("run.steps", "run.clock", "run.train_ratio", "run.log_every"),
        *("run.save_every", "run.report_every", "run.eval_every"),
    )
)
"""Settings of the training loop, which only `reverie bench --end-to-end` uses."""

IN_ENVIRONMENT = tuple(
    UnusedSetting(name, "the agent is evaluated in an environment")
    for name in ("offline.", "sequences.", "explore.")
)
"""Settings that `reverie eval` does not use in an environment. The first entry is
`offline.` (see `unused_in_environment`)."""

TRAINING_SETTINGS = (
    *("opt.", "batch_size", "batch_length", "loss_scales.", "priosignal"),
    *("representation", "draw", "harmony", "harmony_opt."),
)
"""Settings of agents that only affect training. Not every agent has all of them."""

OFFLINE = (
    UnusedSetting("run.episodes", NO_ENVS, "--offline.data {value}"),
    UnusedSetting("run.eval_every", NO_ENVS, "--run.report_every {value}"),
    UnusedSetting("run.eval_eps", NO_ENVS, "--offline.eval.episodes {value}"),
    UnusedSetting("run.train_ratio", NO_ENVS, "--run.steps sets the number of updates"),
    UnusedSetting("run.report_batches", NO_ENVS, "--offline.eval.episodes {value}"),
    UnusedSetting("run.keep_epochs", NO_ENVS, "--run.keep_every {value}"),
    *(
        UnusedSetting(name, NO_ENVS)
        for name in (
            *("run.envs", "run.prefill", "run.pretrain", "run.overlap"),
            *("replay.", "actors.", "run.policy_devices"),
        )
    ),
)
"""Settings that training on recorded data does not use."""

WITHOUT_ENV = (
    UnusedSetting("env.resize", NO_ENVS, "--offline.read.size {value}"),
    UnusedSetting("env.", NO_ENVS),
    UnusedSetting("run.eval_envs", NO_ENVS),
    UnusedSetting("run.eval_configs", NO_ENVS),
)
"""Settings that offline training does not use if the task is not an environment. If it
is one, `reverie eval` evaluates the agent in it."""

WITHOUT_RECORDINGS = tuple(
    UnusedSetting(f"offline.{name}", SEQUENCE_DATASET, instead)
    for name, instead in {
        "data": "--sequences.folder {value}",
        "eval_data": "",
        "read.": "",
        "split": "--sequences.evaluation sets the number of evaluation sequences.",
        "keys": "",
        "images.": "",
        "cache.": "",
        "stats": "",
        "eval.episodes": "--sequences.evaluation {value}",
        "eval.": "",
        "epochs": "--run.steps sets the number of updates.",
        "report_epochs": "--run.report_every sets the interval of evaluations.",
    }.items()
)
"""Settings of recorded episodes, which sequence datasets do not use."""
