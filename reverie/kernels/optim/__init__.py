"""Optimizer with fused kernels, and low-precision copies of the weights."""
