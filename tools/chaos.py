"""Inject faults into runs and check that nothing is lost.

    python tools/chaos.py SECTION [--trials 100] [--seed 0] [--minutes 10] [--only 17]

Runs short trainings with faults: killed processes, full or broken disks, environments
that fail, signals, damaged and hostile files, random command lines. Prints a table of
class, trials and failures, and exits with 1 if a trial has failed. A section that needs
root, a C compiler or mounts is skipped without them, and the table has the reason.
`python tools/chaos.py --help` lists the sections; docs/reliability.md lists the checks.
A trial depends only on seed, section and index.
"""

from __future__ import annotations

import sys

from chaos.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
