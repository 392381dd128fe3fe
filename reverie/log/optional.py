"""Import of packages that only some sinks need."""

from __future__ import annotations

import importlib
from typing import Any

from reverie.api import UserError


def import_optional(module: str, extra: str) -> Any:
    """Import a module, or raise an error that names the extra to install."""
    package = module.split(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if getattr(error, "name", None) == package:
            problem = f"needs the {package} package, which is not installed"
        else:  # one of its dependencies is missing or incompatible
            problem = f"cannot import the {package} package ({error})"
        raise UserError(
            f"The log output {extra!r} {problem}.\n"
            f"  Fix: pip install 'reverie[{extra}]'"
        ) from error
