"""The command line: every command parses its arguments and calls one function."""
