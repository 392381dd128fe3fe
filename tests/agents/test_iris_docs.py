"""The settings that `docs/iris.md` names exist."""

from __future__ import annotations

import re
from pathlib import Path

from reverie import config as configs
from reverie.agents.iris.config import PARTS
from reverie.run.config import Config

PAGE = Path(__file__).parents[2] / "docs" / "iris.md"


def test_every_setting_that_is_named_exists():
    known = set(configs.setting_names(Config))
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    checked = 0
    for row in rows:
        ours, before = row.split(" | ")[-1], ""
        for name in re.findall(r"`([a-z_.<>*]+)`", ours):
            whole = before + name if name.startswith(".") else name
            if not whole.startswith(("iris.", "run.")) or name.endswith("*"):
                continue
            if not name.startswith("."):  # what follows may leave the beginning out
                before = name.rsplit(".", 1)[0]
            for part in PARTS if "<part>" in whole else [""]:
                full = whole.replace("<part>", part)
                if full == "iris.learn.actor_critic.length":
                    continue  # follows from the burn-in
                assert full in known, full
                checked += 1
    assert checked > 40
