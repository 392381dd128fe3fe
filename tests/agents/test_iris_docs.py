"""The settings named in `docs/coming-from-delta-iris.md` exist."""

from __future__ import annotations

import re
from pathlib import Path

from reverie import config as configs
from reverie.agents.iris.config import COMPONENTS
from reverie.run.config import Config

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-delta-iris.md"


def test_all_named_settings_exist():
    existing = set(configs.settings_of(Config))
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    checked = 0
    for row in rows:
        column, prefix = row.split(" | ")[-1], ""
        for name in re.findall(r"`([a-z_.<>*]+)`", column):
            setting = prefix + name if name.startswith(".") else name
            if not setting.startswith(("iris.", "run.")) or name.endswith("*"):
                continue
            if not name.startswith("."):  # the next settings may omit the prefix
                prefix = name.rsplit(".", 1)[0]
            for component in COMPONENTS if "<component>" in setting else [""]:
                full = setting.replace("<component>", component)
                if full == "iris.training.actor_critic.length":
                    continue  # is the burn-in
                assert full in existing, full
                checked += 1
    assert checked > 40
