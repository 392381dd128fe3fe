"""`reverie view --export`: a static page of runs that needs no server.

The page contains its scripts, styles and data, and can be opened as a file. For every
run that can be played, it contains recorded sessions: the agent in the environment with
open-loop predictions, and the agent in the world model.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from reverie.api import Action, UserError
from reverie.log.messages import print_message
from reverie.play.controls import describe_action
from reverie.play.load import AGENT_ENV, AGENT_MODEL, MODES, LoadedRun, load_run
from reverie.play.pane_images import PaneRenderer
from reverie.play.runs import RunIndex
from reverie.play.server import page_files
from reverie.play.session import DEFAULT_FPS
from reverie.play.simulation import Simulation
from reverie.render.video import encode_png
from reverie.storage.atomic import write_file

SCRIPTS = (
    "dom.js",
    "socket.js",
    "panes.js",
    "traces.js",
    "keys.js",
    "play.js",
    "charts.js",
    "recording.js",
    "view.js",
    "main.js",
)
"""Scripts of the page, each after those that it imports."""
SESSION_STEPS = 100
"""Steps of a recorded session."""
MAX_MEDIA = 6
"""Maximum number of images and videos of one run."""
METRICS = re.compile(r"score|length|loss|return")
"""Pattern of the metrics that are exported."""


def export(runs: RunIndex, target: Path) -> Path:
    """Write the page to a folder; return its path."""
    if target.suffix.lower() in (".html", ".htm"):
        raise UserError(
            f"The page is written to a folder, but {target.name} is the name of a file."
            f"\n  Fix: --export {target.with_suffix('')}"
        )
    data: dict[str, Any] = {"runs": runs.summaries(), "details": {}, "series": {}}
    if not data["runs"]:
        raise UserError(
            f"There are no runs in {runs.folder}.\n"
            "  Fix: pass the folder of a run, or a folder that contains runs."
        )
    target.mkdir(parents=True, exist_ok=True)
    for index, run in enumerate(data["runs"], 1):
        name = run["id"]
        print_message(f"exporting run {index} of {len(data['runs'])}: {run['name']}")
        run["metrics"] = [key for key in run["metrics"] if METRICS.search(key)]
        series = {key: runs.series(name, key) for key in run["metrics"]}
        data["series"][name] = series
        details = runs.details(name)
        details["media"] = details["media"][:MAX_MEDIA]
        for number, entry in enumerate(details["media"]):
            entry["file"] = f"media/{name}-{number}.{entry['kind']}"
            (target / "media").mkdir(exist_ok=True)
            shutil.copyfile(runs.media(name, number), target / entry["file"])
        details["sessions"] = _record_sessions(runs.folder_of(name))
        data["details"][name] = details
    page = target / "index.html"
    write_file(page, make_page(data).encode(), sync=False)
    return page


def make_page(data: dict[str, Any]) -> str:
    """Return the page with its styles, scripts and data."""
    files = {name: content.decode() for name, content in page_files().items()}
    # escaped, so that no `</script>` in the data ends the script
    data_json = json.dumps(data, allow_nan=False).replace("</", "<\\/")
    code = "\n".join(_without_imports(files[name]) for name in SCRIPTS)
    script = (
        f"<script>\nwindow.REVERIE_EXPORT = {data_json};\n(() => {{\n{code}\n}})();\n"
    )
    html = files["index.html"]
    style = f"<style>\n{files['style.css']}</style>"
    html = html.replace('<link rel="stylesheet" href="style.css">', style)
    html = html.replace('<script type="module" src="main.js"></script>\n', "")
    return html.replace("</body>", f"{script}</script>\n</body>")


def _without_imports(code: str) -> str:
    """Remove the imports and exports of a module, to make it part of one script."""
    code = re.sub(r"^import .*;\n", "", code, flags=re.MULTILINE)
    return re.sub(r"^export ", "", code, flags=re.MULTILINE)


def _record_sessions(folder: Path) -> list[dict[str, Any]]:
    """Record the agent of a run in each available mode; none if it cannot be loaded."""
    try:
        loaded = load_run(folder, [("device", "cpu")])
    except UserError as error:
        print_message(f"{folder.name} is exported without sessions: {error}")
        return []
    reasons = loaded.unavailable_reasons()
    try:
        return [
            record_session(loaded, mode)
            for mode in (AGENT_ENV, AGENT_MODEL)
            if not reasons[mode]
        ]
    finally:
        loaded.close()


def record_session(
    loaded: LoadedRun, mode: str, steps: int = SESSION_STEPS
) -> dict[str, Any]:
    """Record `steps` steps of the agent, in several episodes if they are short.

    Return its title, rate, panes and steps. The frames of each pane are concatenated
    vertically to one image (a sprite sheet); `shown` says which panes have a frame.
    """
    simulation = Simulation(loaded)
    predicted = (
        list(loaded.world_model_env.predicted_keys) if loaded.world_model_env else []
    )
    renderer = PaneRenderer(loaded.obs_space, predicted, loaded.crop)
    simulation.start(mode)
    step_table: list[dict[str, Any]] = []
    frames: list[dict[str, np.ndarray]] = []
    while len(step_table) < steps:
        snapshot = simulation.snapshot()
        # reversed, so that the first one of several images of a pane is used
        frame = {p.pane: p.image for p in reversed(renderer.render(snapshot))}
        action = ""
        if snapshot.action is not None:
            action = describe_action(loaded.controls, snapshot.action)
        scalars = {key: round(value, 4) for key, value in snapshot.scalars.items()}
        step_table.append({"step": snapshot.step, "action": action, "scalars": scalars})
        frames.append(frame)
        if simulation.end_reason:
            simulation.start(mode)
        else:
            simulation.step(_no_human)
    panes, sprite_sheets = [], []
    for kind, label in (
        ("real", "real"),
        ("model", "imagined"),
        ("difference", "difference"),
    ):
        images = [frame[kind] for frame in frames if kind in frame]
        if not images:
            continue
        blank = np.zeros_like(images[0])
        height, width = blank.shape[:2]
        panes.append({"kind": kind, "label": label, "width": width, "height": height})
        sheet = np.concatenate([frame.get(kind, blank) for frame in frames])
        content = base64.b64encode(encode_png(sheet)).decode()
        sprite_sheets.append(f"data:image/png;base64,{content}")
        for entry, frame in zip(step_table, frames, strict=True):
            entry.setdefault("shown", []).append(kind in frame)
    for entry in step_table:
        entry.setdefault("shown", [])
    return {
        "title": MODES[mode],
        "fps": loaded.fps or DEFAULT_FPS,
        "panes": panes,
        "sprite_sheets": sprite_sheets,
        "steps": step_table,
    }


def _no_human() -> Action:
    raise AssertionError("the agent acts in recorded sessions")
