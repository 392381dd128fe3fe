"""Check that all dependencies of the package have permissive licences.

    python tools/check_licences.py [PACKAGE]

Follows the installed dependencies recursively. Optional dependencies (extras) of the
package are not checked.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import metadata

from packaging.requirements import Requirement

PERMISSIVE = {
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "HPND",
    "ISC",
    "MIT",
    "MIT-0",
    "MIT-CMU",
    "PSF-2.0",
    "Python-2.0",
    "Unlicense",
    "Zlib",
}

# Licence fields of packages that do not use SPDX identifiers, and their identifier.
LEGACY_NAMES = [
    (r"(the )?mit\b", "MIT"),
    (r"apache( software)?( license)?,?( version)? ?(v?2(\.0)?)?", "Apache-2.0"),
    (r"(new |modified |3-clause |bsd-?3)?.{0,3}bsd", "BSD-3-Clause"),
    (r"isc\b", "ISC"),
    (r"python software foundation", "PSF-2.0"),
    (r"historical permission notice", "HPND"),
]

SKIPPED = re.compile(r"(nvidia|cuda)-")
"""Libraries that only CUDA builds of torch depend on."""


def check_licences(
    package: str, distribution: Callable[[str], metadata.Distribution]
) -> tuple[list[str], list[str]]:
    """Return the names of all dependencies, and a message for each forbidden one."""
    messages: list[str] = []
    seen: set[str] = set()
    queue = [(package, "")]
    while queue:
        name, extra = queue.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if (key, extra) in seen or SKIPPED.match(key):
            continue
        seen.add((key, extra))
        try:
            installed = distribution(name)
        except metadata.PackageNotFoundError:
            messages.append(
                f"{name} is required but not installed, so its licence is unknown."
            )
            continue
        licence = licence_of(installed)
        if not is_permissive(licence):
            messages.append(f"{name} has the licence {licence or '(none)'}.")
        for text in installed.requires or []:
            required = Requirement(text)
            marker = required.marker
            if marker is None or marker.evaluate({"extra": extra}):
                queue += [(required.name, x) for x in ("", *required.extras)]
    return sorted({key for key, _ in seen}), sorted(set(messages))


def licence_of(installed: metadata.Distribution) -> str:
    """Return the SPDX expression of a package, from its metadata."""
    fields = installed.metadata
    if fields.get("License-Expression"):
        return fields["License-Expression"]
    classifiers = [
        text.split("::")[-1].strip()
        for text in fields.get_all("Classifier") or []
        if text.startswith("License ::")
    ]
    for text in [*classifiers, (fields.get("License") or "").strip()]:
        if text in PERMISSIVE:
            return text
        for pattern, identifier in LEGACY_NAMES:
            if re.match(pattern, text, re.IGNORECASE):
                return identifier
    return "; ".join([*classifiers, (fields.get("License") or "")[:60]]).strip("; ")


def is_permissive(expression: str) -> bool:
    """True if an SPDX expression can be satisfied with permissive licences only."""
    inner = re.search(r"\(([^()]*)\)", expression)
    while inner:  # innermost brackets first
        result = "MIT" if is_permissive(inner[1]) else "not-permissive"
        expression = expression[: inner.start()] + result + expression[inner.end() :]
        inner = re.search(r"\(([^()]*)\)", expression)
    return any(
        all(part.strip() in PERMISSIVE for part in re.split(r"\bAND\b", choice))
        for choice in re.split(r"\bOR\b", expression)
    )


def main(argv: list[str]) -> int:
    package = argv[0] if argv else "reverie"
    names, messages = check_licences(package, metadata.distribution)
    if messages:
        print(
            f"{package} may only depend on packages with permissive licences:",
            *messages,
            sep="\n  ",
        )
        return 1
    print(f"{len(names)} packages, all with permissive licences: {', '.join(names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
