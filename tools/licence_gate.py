"""Fail when the core depends on anything that is not under a permissive licence.

    python tools/licence_gate.py [PACKAGE]

Walks the dependencies of the package, and theirs, as they are installed here; extras
are the user's own choice and are not walked.
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

# What packages wrote before licences had identifiers, at the start of their field.
SPELLINGS = [
    (r"(the )?mit\b", "MIT"),
    (r"apache( software)?( license)?,?( version)? ?(v?2(\.0)?)?", "Apache-2.0"),
    (r"(new |modified |3-clause |bsd-?3)?.{0,3}bsd", "BSD-3-Clause"),
    (r"isc\b", "ISC"),
    (r"python software foundation", "PSF-2.0"),
    (r"historical permission notice", "HPND"),
]

RUNTIMES = re.compile(r"(nvidia|cuda)-")
"""Drivers' libraries that CUDA builds of torch bring along: torch's choice, not ours,
and absent from its CPU build."""


def problems(
    package: str, distribution: Callable[[str], metadata.Distribution]
) -> tuple[list[str], list[str]]:
    """The names walked, and a sentence for each that may not be there."""
    wrong: list[str] = []
    seen: set[str] = set()
    waiting = [(package, "")]
    while waiting:
        name, extra = waiting.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if (key, extra) in seen or RUNTIMES.match(key):
            continue
        seen.add((key, extra))
        try:
            found = distribution(name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{name} is needed and not installed, so nobody knows.")
            continue
        licence = licence_of(found)
        if not is_permissive(licence):
            wrong.append(f"{name} is under {licence or 'no licence it names'}.")
        for text in found.requires or []:
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                waiting += [(need.name, asked) for asked in ["", *need.extras]]
    return sorted({key for key, _ in seen}), sorted(set(wrong))


def licence_of(found: metadata.Distribution) -> str:
    """The SPDX expression of a package, from whichever field has it."""
    about = found.metadata
    if about.get("License-Expression"):
        return about["License-Expression"]
    classifiers = [
        text.split("::")[-1].strip()
        for text in about.get_all("Classifier") or []
        if text.startswith("License ::")
    ]
    for text in [*classifiers, (about.get("License") or "").strip()]:
        if text in PERMISSIVE:
            return text
        for pattern, identifier in SPELLINGS:
            if re.match(pattern, text, re.IGNORECASE):
                return identifier
    return "; ".join([*classifiers, (about.get("License") or "")[:60]]).strip("; ")


def is_permissive(expression: str) -> bool:
    """Whether an SPDX expression can be met with permissive licences alone."""
    inner = re.search(r"\(([^()]*)\)", expression)
    while inner:  # innermost brackets first
        verdict = "MIT" if is_permissive(inner[1]) else "not-permissive"
        expression = expression[: inner.start()] + verdict + expression[inner.end() :]
        inner = re.search(r"\(([^()]*)\)", expression)
    return any(
        all(part.strip() in PERMISSIVE for part in re.split(r"\bAND\b", choice))
        for choice in re.split(r"\bOR\b", expression)
    )


def main(argv: list[str]) -> int:
    package = argv[0] if argv else "reverie"
    names, wrong = problems(package, metadata.distribution)
    if wrong:
        print(f"{package} may only stand on permissive licences:", *wrong, sep="\n  ")
        return 1
    print(f"{len(names)} packages, all under permissive licences: {', '.join(names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
