"""The model card of a trained agent: metadata, results, and how to use it."""

from __future__ import annotations

from typing import Any

import yaml

from reverie.results.report import format_number

TYPE = "reinforcement-learning"
"""Name of this kind of task on the Hugging Face Hub."""


def model_card(repository: str, results: dict[str, Any], video: str = "") -> str:
    """Return the README.md of a repository; `video` is the file name of its video."""
    task, agent = results["task"], results["agent"]
    metadata = {
        "library_name": "reverie",
        "pipeline_tag": TYPE,
        "tags": [TYPE, "world-models", "reverie", agent, task],
    }
    if entries := _metrics(results):
        metadata["model-index"] = [
            {
                "name": repository.partition("/")[2],
                "results": [
                    {
                        "task": {"type": TYPE, "name": TYPE},
                        "dataset": {"type": task, "name": task},
                        "metrics": entries,
                    }
                ],
            }
        ]
    parts = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---",
        f"# {agent} on {task}",
        f"An agent `{agent}`, trained on the task `{task}` with Reverie for "
        f"{results['step']:,} steps ({results['updates']:,} updates, seed "
        f"{results['seed']}).",
    ]
    if video.endswith(".gif"):
        parts.append(f"![An episode of this agent]({video})")
    elif video:
        parts.append(f"An episode of this agent is in `{video}`.")
    parts += ["## Results", _results_table(results)]
    if results.get("command"):
        parts += ["## Training", f"```\n{results['command']}\n```", _origin(results)]
    parts += [
        "## Use",
        f"```\nreverie eval hf://{repository}\nreverie play hf://{repository}\n```",
        f'```python\nimport reverie\n\nagent = reverie.load("hf://{repository}")\n'
        "action = agent.act(observation)\n```",
        "Only JSON and safetensors files are read. `hf://"
        f"{repository}@COMMIT` selects a commit.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _metrics(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the metrics in the format that leaderboards of the Hub read."""
    evaluation, training = results.get("evaluation", {}), results.get("training", {})
    values = {}
    if "score" in evaluation:
        values["mean_reward"] = format_number(evaluation["score"])
        if "score_std" in evaluation:
            values["mean_reward"] += f" +/- {format_number(evaluation['score_std'])}"
    elif "score" in training:
        values["mean_reward"] = format_number(training["score"])
    if "success" in evaluation:
        values["success_rate"] = format_number(evaluation["success"])
    return [
        {"type": name, "name": name, "value": value, "verified": False}
        for name, value in values.items()
    ]


def _results_table(results: dict[str, Any]) -> str:
    """Return a Markdown table with the scores of training and evaluation."""
    rows = []
    if training := results.get("training"):
        score = format_number(training["score"])
        rows.append(f"| training, {training['window']} | {score} |")
    if evaluation := results.get("evaluation"):
        count = evaluation["episodes"]
        for key, value in evaluation.items():
            if isinstance(value, int | float) and key != "episodes":
                text = format_number(float(value))
                rows.append(f"| evaluation, {count} episodes, {key} | {text} |")
    if not rows:
        return "No episode had ended when this agent was uploaded."
    return "\n".join(["| result | value |", "| --- | --- |", *rows])


def _origin(results: dict[str, Any]) -> str:
    """Return a sentence with the commit, versions and GPU of the training."""
    facts = [f"commit {results['commit']} of Reverie"] if "commit" in results else []
    versions = results.get("versions")
    if isinstance(versions, dict):
        facts += [f"{k} {v}" for k, v in versions.items() if v != "unknown"]
    facts += [str(results["gpu"])] if "gpu" in results else []
    return f"Trained with {', '.join(facts)}." if facts else ""
