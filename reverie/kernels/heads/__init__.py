"""Fused kernels for distributions, heads and lambda-returns."""
