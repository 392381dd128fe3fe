"""Fault injection for whole runs; see `tools/chaos.py`."""
