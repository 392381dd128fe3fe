"""Benchmarks of updates, whole runs and environments on this machine."""
