"""Upload trained agents to the Hugging Face Hub: package, model card and video."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from reverie.api import UserError
from reverie.evaluation.episodes import play_episodes
from reverie.evaluation.recorders import VideoRecorder
from reverie.log.messages import print_message
from reverie.plugins import install_command
from reverie.render.video import FPS, video_suffix
from reverie.results.model_card import model_card
from reverie.results.pack import open_for_package, write_package
from reverie.run.config import for_evaluation
from reverie.run.factory import FIRST_EVAL_ENV, make_envs
from reverie.run.hub import endpoint, explain, import_hub, parse_name
from reverie.run.load import SavedRun
from reverie.spaces import Arrays

CARD, VIDEO = "README.md", "replay"
"""Model card, and video without suffix; the Hub shows `replay.mp4` on its page."""
MAX_FRAMES = 1000
"""Maximum number of frames of the video, from the start of the episode."""


def push(logdir: Path, name: str, private: bool = False, video: bool = True) -> str:
    """Upload a run to the repository `user/name`; return its name with the commit."""
    hub, (repository, revision) = import_hub(), parse_name(name)
    if revision:
        raise UserError(
            f"`reverie push` always commits to the branch main, not to {revision!r}.\n"
            f"  Fix: reverie push {logdir} {repository}"
        )
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_repository(logdir, name, folder, video)
        api = hub.HfApi(endpoint=endpoint())
        try:
            api.create_repo(repository, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repository,
                folder_path=folder,
                commit_message="Upload an agent trained with Reverie",
            )
        except Exception as error:
            raise explain(error, name) from error
    return f"hf://{repository}@{commit.oid}"


def write_repository(
    logdir: Path, name: str, folder: Path, video: bool = True
) -> list[str]:
    """Write the files of a repository to a folder, and return their names."""
    repository = parse_name(name).repository
    run = open_for_package(logdir)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(
            f"{folder} is not empty.\n  Fix: give a folder that does not exist."
        )
    folder.mkdir(parents=True, exist_ok=True)
    results = write_package(run, folder)
    video_name = _write_video(run, folder) if video else ""
    (folder / CARD).write_text(model_card(repository, results, video_name))
    return sorted(path.name for path in folder.iterdir())


def _write_video(run: SavedRun, folder: Path) -> str:
    """Record an episode as MP4, or as GIF without an encoder; return its file name.

    If that is not possible, print the reason and return an empty string.
    """
    name = f"{VIDEO}.{video_suffix()}"
    try:
        with TemporaryDirectory() as temporary:
            shutil.move(_record(run, Path(temporary)), folder / name)
    except UserError as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        print_message(f"There is no {name}: {reason}.")
        return ""
    if name.endswith(".gif"):
        print_message(
            f"The video is {name}: {VIDEO}.mp4 needs imageio with ffmpeg.\n"
            f"  Fix: {install_command('video')}"
        )
    return name


def _record(run: SavedRun, folder: Path) -> Path:
    """Record one episode of the agent as a video in this folder; return its path."""
    config = for_evaluation(run.config)
    config = replace(config, env=replace(config.env, render=True))
    run = replace(run, config=config)
    envs: Any = make_envs(config, 1, FIRST_EVAL_ENV)
    with contextlib.closing(envs):
        fps = envs.render_fps or FPS
        recorder = StartRecorder(folder, envs.obs_space, 1, 1, fps)
        play_episodes(run.load_policy(envs), envs, 1, recorders=[recorder])
    return recorder.paths[0]


class StartRecorder(VideoRecorder):
    """Writes the first `MAX_FRAMES` of an episode."""

    def write(self, episode: Arrays, number: int, failed: bool) -> Path:
        start = {key: value[:MAX_FRAMES] for key, value in episode.items()}
        return super().write(start, number, failed)
