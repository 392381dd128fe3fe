"""Benchmark suites, one module each, found by `reverie.envs.registry`.

A module declares `SUITE = Suite(...)` (or a tuple `SUITES`) and imports its simulator
only when a task is built.
"""
