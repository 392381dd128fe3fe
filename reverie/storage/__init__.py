"""Atomic, checksummed files, read without running code: segments and episodes."""
