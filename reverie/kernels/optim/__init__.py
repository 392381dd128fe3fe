"""The optimizer as fused kernels, and low-precision weights."""
