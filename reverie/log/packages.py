"""Import a sink's package, or say how to get it."""

from __future__ import annotations

import importlib
from typing import Any

from reverie.api import UserError


def need(module: str, extra: str) -> Any:
    """The module, which the extra of that name installs."""
    package = module.split(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if getattr(error, "name", None) == package:
            problem = f"needs the {package} package, which is not installed"
        else:  # it is there, but something it stands on is missing or does not fit
            problem = f"cannot use the {package} package ({error})"
        raise UserError(
            f"The log output {extra!r} {problem}.\n"
            f"  Fix: pip install 'reverie[{extra}]'"
        ) from error
