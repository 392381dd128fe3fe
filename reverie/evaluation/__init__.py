"""Evaluation of trained agents; every evaluation writes `eval.json` to the run folder.

`episodes.py` plays episodes in the environment, `recordings.py` evaluates on held-out
recorded episodes, and `boundaries.py` evaluates the segment boundaries of agents that
train on sequences. Videos and figures are written to `eval/` in the run folder.
"""
