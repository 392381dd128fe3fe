"""CUDA group norm in clusters: thread blocks that access each other's shared memory."""
