"""Benchmark suites, one module each; the simulator is imported when a task is made."""
