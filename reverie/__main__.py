"""`python -m reverie` is the `reverie` command."""

import sys

from reverie.cli.main import main

sys.exit(main())
