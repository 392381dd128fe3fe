"""Benchmarks of updates and environments on this machine."""
