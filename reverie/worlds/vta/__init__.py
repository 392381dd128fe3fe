"""Variational temporal abstraction (VTA): a hierarchical world model with segments."""
