"""Presets and settings of the small runs that tests play."""

from __future__ import annotations

COMMON = {"task": "catch", "device": "cpu", "logger.outputs": ["jsonl"]}
RUNS = {
    "dreamer": (["debug"], {"run.steps": 40}),
    "vta": (["debug", "vta"], {"run.steps": 40}),
    "dreamerv3_torch": (["dreamerv3_torch", "debug"], {"run.steps": 40}),
    "random": (["random"], {"run.steps": 40, "run.envs": 1}),
    "two groups": (["debug"], {"run.steps": 20, "task": "play_tasks:make_groups"}),
    "sliders": (["debug"], {"run.steps": 20, "task": "play_tasks:make_continuous"}),
    "iris": (
        ["iris_tiny"],
        {
            "run.envs": 1,
            "iris.schedule.epochs": 1,
            "iris.schedule.collect_epochs": 1,
            "iris.schedule.first_steps": 30,
            "iris.training.tokenizer.batch": 2,
            "iris.training.tokenizer.first_steps": 1,
            "iris.training.world_model.batch": 2,
            "iris.training.world_model.first_steps": 1,
            "iris.training.actor_critic.batch": 2,
            "iris.training.actor_critic.first_steps": 1,
            "iris.actor_critic.horizon": 2,
            "iris.world_model.transformer.layers": 1,
        },
    ),
}
