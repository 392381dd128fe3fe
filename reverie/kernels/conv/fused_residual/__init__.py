"""CUDA kernels that convolve tiles of a map, with the norms around on the way."""
