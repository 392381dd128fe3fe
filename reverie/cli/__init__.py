"""The command line: every command parses its arguments and calls one function.

`argv` is the list of strings after the name of the command, as in `sys.argv`.
"""
