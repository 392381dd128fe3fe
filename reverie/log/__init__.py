"""Logging: averages metrics and writes them to sinks, one file per sink.

Sinks are the terminal, `metrics.jsonl` and `scores.jsonl`, a folder of images and
videos, TensorBoard, Weights & Biases, and Scope. Choose them with `logger.outputs`.
"""
