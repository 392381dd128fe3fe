"""Each command reads its own arguments and calls one function of `run/`."""
