"""The posterior scan of size12m: one CUDA kernel forward and one backward."""
