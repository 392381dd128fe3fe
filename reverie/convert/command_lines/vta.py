"""VTA: the authors' taesupkim/vta, and its port with bouncing balls and Dreamer."""

from __future__ import annotations

from reverie.convert.command_lines.tables import (
    Flag,
    Original,
    Program,
    settings,
    without_equivalent,
)
from reverie.convert.vta.config import NAMES

PROGRAMS = (
    Program(r"(.*[/.])?train_balls(\.py)?", "train --configs vta_balls"),
    Program(r"(.*[/.])?train_maze(\.py)?", "train --configs vta_maze"),
    Program(r"(\./)?train\.py", "train --configs vta_maze vta_authors"),
    Program(r"(.*/)?train\.sh", "train --configs vta_balls", "", False),
    Program(
        r"(.*[/.])?visualize(\.py|\.sh)?",
        "draw boundaries LOGDIR --idx 0 --num-samples 10",
        "For the weights of the port, see docs/coming-from-vta.md.",
        False,
    ),
    Program(
        r"(.*[/.])?(generate_npz|make_dataset)(\.py)?",
        "data maze --out data/maze --train 1000 --test 100",
        "",
        False,
    ),
    Program(r"src_dreamerv3[/.]dreamer(\.py)?", "train_eval"),
)

FLAGS = (
    Flag("exp_name", "--logdir logdir/{value}"),
    Flag("work_dir", "", "The run folder is --logdir."),
    Flag("env(?:_type)? bouncing_balls", "--configs vta_balls"),
    Flag("env(?:_type)? 3d_maze", "--configs vta_maze"),
    *(
        Flag(f"{theirs.replace('_', '[-_]')}", f"--{ours} {{value}}")
        for theirs, ours in NAMES.items()
        if theirs != ours
    ),
    Flag("obs[-_]bit", "--vta.world.bits {value}"),
    Flag("loss[-_]type bce", "--vta.world.loss bernoulli"),
    Flag("loss[-_]type mse", "--vta.world.loss gaussian"),
    Flag("use_amp True", "--precision auto"),
    Flag("use_amp False", "--precision float32"),
    Flag("dynamics_type vta", "--dreamer.world vta"),
    Flag("dynamics_type rssm", "--dreamer.world rssm"),
    *settings(
        "dreamer.vta.",
        "vta_abs_belief=abs_belief",
        "vta_abs_stoch=abs_stoch",
        "vta_obs_belief=obs_belief",
        "vta_obs_stoch=obs_stoch",
        "vta_max_seg_len=max_segment",
        "vta_max_seg_num=max_segments",
        "vta_boundary_temp=temperature",
        "vta_boundary_force_scale=forced_logit",
        "vta_imag_type=imagination",
        "vta_imag_boundary=imagined_boundaries",
        "vta_boundary_rate=boundary_rate",
    ),
    Flag("vta_mask_scale", "--dreamer.loss_scales.boundary {value}"),
    Flag("vta_boundary_scale", "--dreamer.loss_scales.boundary_rate {value}"),
    *without_equivalent(
        "It follows from the data.", "action_size", "action_type", "data_root"
    ),
    *without_equivalent(
        "It has no effect in the port.",
        "data_mode",
        "horizon",
        "gamma",
        "loss_scale_.*",
    ),
)

ORIGINAL = Original("VTA", "docs/coming-from-vta.md", PROGRAMS, {}, FLAGS)
