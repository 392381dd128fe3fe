"""Hyperparameter search: many runs of a training command with different settings."""
