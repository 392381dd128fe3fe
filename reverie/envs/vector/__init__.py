"""Vectorized environments, in this process or in worker processes."""
