"""Distributions, heads and lambda-returns as single kernels."""
