"""Logging: averages metrics and writes them to sinks, one module per sink.

Sinks are the terminal, `metrics.jsonl` and `scores.jsonl`, a folder of images and
videos, TensorBoard, Weights & Biases, and Scope. `logger.outputs` selects them.
"""
