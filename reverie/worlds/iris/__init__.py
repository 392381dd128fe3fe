"""The world of Δ-IRIS: a tokenizer of changes, and a transformer that foresees them.

`world.py` is what an agent uses; `tokenizer.py` (with `quantizer.py`) and `dynamics.py`
are its two halves, trained apart.
"""
