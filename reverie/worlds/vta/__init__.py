"""Variational temporal abstraction (VTA): a world model with learned segments.

`world.py` models windows of recorded sequences, as in the paper; `recurrent.py` is the
variant that replaces the RSSM in Dreamer. Paper: Kim, Ahn and Bengio, "Variational
Temporal Abstraction", 2019, arXiv 1910.00775.
"""
