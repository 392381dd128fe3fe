"""vmicheli/delta-iris: Δ-IRIS, configured with Hydra (`NAME=VALUE`)."""

from __future__ import annotations

from reverie.convert.command_lines.tables import Flag, Original, Program

RESUME = "The same command with the same --logdir resumes a run."
PLAY = "There is no interactive window; `reverie eval` writes videos."
PARAMS = r"(?:params\.)?"
COMPONENTS = "tokenizer|world_model|actor_critic"

PROGRAMS = (
    Program(r"(.*/)?src/main\.py", "train"),
    Program(r"(.*/)?resume\.sh", "train --logdir LOGDIR", RESUME, False),
    Program(r"(.*/)?play\.(sh|py)", "eval LOGDIR --videos 3", PLAY, False),
    Program(
        r"(.*/)?make_reconstructions\.py",
        "eval LOGDIR --videos 3",
        "Reports of a run contain reconstructions, in its folder `media`.",
        False,
    ),
)


def _training(theirs: str, here: str) -> Flag:
    name = rf"{PARAMS}training\.({COMPONENTS})\.{theirs}"
    return Flag(name, rf"--iris.training.\1.{here} {{value}}")


def _params(theirs: str, here: str) -> Flag:
    return Flag(PARAMS + theirs.replace(".", r"\."), f"--iris.{here} {{value}}")


CNNS = r"(encoder|decoder|frame)(?:_cnn|_encoder)?_config"

FLAGS = (
    Flag(r"(?:env|params)=? ?crafter", "--configs iris_crafter"),
    Flag(r"(?:env|params)=? ?atari", "--configs iris_atari"),
    Flag(
        r"env\.(?:train\.)?id (?:ALE/)?(\w+?)(?:NoFrameskip)?-v\d",
        r"--task atari_{snake:\1}",
    ),
    Flag(r"env\.(?:train\.)?id CrafterReward-v1", "--task crafter_reward"),
    Flag(r"env\.train\.size", "--env.atari.size {value} {value}"),
    Flag(r"env\.train\.max_episode_steps", "--env.atari.length {value}"),
    Flag(r"env\.train\.noop_max", "--env.atari.noops {value}"),
    Flag(r"env\.train\.frame_skip", "--env.atari.repeat {value}"),
    Flag(r"env\.train\.done_on_life_loss True", "--env.atari.lives reset"),
    Flag(r"env\.train\.done_on_life_loss False", "--env.atari.lives unused"),
    Flag(r"env\.train\.clip_reward", "--env.atari.clip_reward {value}"),
    Flag(
        r"env\.test\..*", "", "--run.eval_configs sets the environments of evaluation."
    ),
    Flag(r"env\.keymap", "", PLAY),
    Flag(PARAMS + r"common\.(device|seed)", r"--\1 {value}"),
    Flag(PARAMS + r"common\.resume", "", RESUME),
    Flag(PARAMS + r"common\.do_checkpoint False", "--run.save_every 0"),
    Flag(PARAMS + r"common\.do_checkpoint True"),
    _params("common.epochs", "schedule.epochs"),
    Flag(
        PARAMS + r"initialization\.path_to_checkpoint", "--run.from_checkpoint {value}"
    ),
    Flag(
        PARAMS + r"initialization\.load_.*",
        "",
        "--run.from_components is a regular expression of the components to load.",
    ),
    Flag(
        PARAMS + r"collection\.path_to_static_dataset",
        "COMMAND:offline --offline.data {value}",
    ),
    Flag(PARAMS + r"collection\.train\.num_envs", "--run.envs {value}"),
    Flag(PARAMS + r"collection\.test\.num_envs", "--run.eval_envs {value}"),
    Flag(
        PARAMS + r"collection\.test\.config\.num_episodes",
        "COMMAND:train_eval --run.eval_eps {value}",
    ),
    Flag(
        PARAMS + r"collection\.\w+\.num_episodes_to_save",
        "",
        "Videos are part of reports.",
    ),
    _params("collection.train.stop_after_epochs", "schedule.collect_epochs"),
    _params("collection.train.config.epsilon", "acting.epsilon"),
    _params("collection.train.config.should_sample", "acting.sample"),
    _params("collection.train.config.temperature", "acting.temperature"),
    _params("collection.test.config.epsilon", "acting.eval_epsilon"),
    _params("collection.test.config.should_sample", "acting.eval_sample"),
    _params("collection.test.config.temperature", "acting.eval_temperature"),
    _params("collection.train.config.num_steps", "schedule.steps"),
    _params("collection.train.config.num_steps_first_epoch", "schedule.first_steps"),
    Flag(
        PARAMS + r"training\.learning_rate",
        "--iris.training.tokenizer.opt.lr {value} --iris.training.world_model.opt.lr "
        "{value} --iris.training.actor_critic.opt.lr {value}",
    ),
    Flag(
        PARAMS + r"training\.should",
        "",
        "`reverie eval LOGDIR` evaluates without training.",
    ),
    Flag(
        PARAMS + r"training\.actor_critic\.sequence_length",
        "",
        "It is --iris.actor_critic.burn_in + 1.",
    ),
    _training("sequence_length", "length"),
    _training("batch_num_samples", "batch"),
    _training("grad_acc_steps", "accumulate"),
    _training("max_grad_norm", "opt.clip"),
    _training("priority_alpha", "alpha"),
    _training("weight_decay", "opt.wd"),
    _training("start_after_epochs", "start_after"),
    _training("steps_first_epoch", "first_steps"),
    _training("steps_per_epoch", "steps"),
    Flag(PARAMS + r"evaluation\.every", "COMMAND:train_eval --run.eval_every {value}"),
    Flag(PARAMS + r"evaluation\.should False", "COMMAND:train"),
    Flag(PARAMS + r"evaluation\.should True", "COMMAND:train_eval"),
    Flag(PARAMS + r"evaluation\..*", "", "Reports use the batch sizes of training."),
    _params("tokenizer.num_tokens", "tokenizer.tokens"),
    _params("tokenizer.decoder_act_channels", "tokenizer.action_planes"),
    _params("tokenizer.codebook_size", "tokenizer.quantizer.codes"),
    _params("tokenizer.codebook_dim", "tokenizer.quantizer.width"),
    _params(
        "tokenizer.max_codebook_updates_with_revival",
        "tokenizer.quantizer.revive_until",
    ),
    Flag(PARAMS + r"tokenizer\.image_size", "--env.resize {value} {value}"),
    Flag(
        PARAMS + rf"({COMPONENTS})\.(?:model\.)?{CNNS}\.num_channels",
        r"--iris.\1.\2.channels {value}",
    ),
    Flag(
        PARAMS + rf"({COMPONENTS})\.(?:model\.)?{CNNS}\.latent_dim",
        r"--iris.\1.\2.latent {value}",
    ),
    Flag(
        PARAMS + rf"({COMPONENTS})\.(?:model\.)?{CNNS}\.mult",
        r"--iris.\1.\2.mults {value}",
    ),
    Flag(
        PARAMS + rf"({COMPONENTS})\.(?:model\.)?{CNNS}\.down",
        r"--iris.\1.\2.halve {value}",
    ),
    Flag(
        PARAMS + r"world_model\.(latents|rewards|ends)_weight",
        r"--iris.world_model.\1_scale {value}",
    ),
    _params("world_model.two_hot_rews", "world_model.two_hot_rewards"),
    _params(
        "world_model.transformer_config.num_layers", "world_model.transformer.layers"
    ),
    _params(
        "world_model.transformer_config.num_heads", "world_model.transformer.heads"
    ),
    _params(
        "world_model.transformer_config.embed_dim", "world_model.transformer.width"
    ),
    _params(
        "world_model.transformer_config.max_blocks", "world_model.transformer.blocks"
    ),
    _params(
        "world_model.transformer_config.attention", "world_model.transformer.attention"
    ),
    _params("actor_critic.burn_in_length", "actor_critic.burn_in"),
    _params("actor_critic.imagination_horizon", "actor_critic.horizon"),
    _params("actor_critic.gamma", "actor_critic.discount"),
    _params("actor_critic.lambda_", "actor_critic.lam"),
    _params("actor_critic.entropy_weight", "actor_critic.entropy_scale"),
    _params("actor_critic.two_hot_rets", "actor_critic.two_hot_values"),
    Flag(
        PARAMS + rf"({COMPONENTS})\..*(?:_target_|num_actions|image_channels|pdrop|"
        r"vocab_size|image_size|tokens_per_block)",
        "",
        "It follows from the environment and the other settings.",
    ),
    Flag(r"wandb\.mode disabled", "", "W&B is off by default."),
    Flag(
        r"wandb\.mode offline",
        "--logger.outputs+ wandb",
        "Set WANDB_MODE=offline, too.",
    ),
    Flag(r"wandb\.mode online", "--logger.outputs+ wandb"),
    Flag(
        r"wandb\.(project|entity)",
        "",
        "Set the variables WANDB_PROJECT and WANDB_ENTITY.",
    ),
    Flag(r"wandb\..*", "", "The name of a run is that of its folder, --logdir."),
    Flag(r"hydra\.run\.dir", "--logdir {value}"),
    Flag(r"hydra\..*", "", "Hydra is not used."),
)

ORIGINAL = Original(
    "Δ-IRIS",
    "docs/coming-from-delta-iris.md",
    PROGRAMS,
    {},
    FLAGS,
    hydra_block="iris_crafter",
)
