"""The posterior scan as one CUDA kernel per direction, for size12m."""
