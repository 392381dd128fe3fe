"""CUDA kernels whose thread blocks work in clusters and see each other's memory."""
