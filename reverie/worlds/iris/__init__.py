"""The world model of Δ-IRIS: a tokenizer of frame changes and a transformer.

`world.py` is the interface for agents; `tokenizer.py` (with `quantizer.py`) and
`dynamics.py` are its two networks, trained separately. Paper: Micheli, Alonso and
Fleuret, "Efficient World Models with Context-Aware Tokenization", 2024. "The original"
in this package is the authors' code, github.com/vmicheli/delta-iris.
"""
