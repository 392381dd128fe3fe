"""CUDA group norm in thread block clusters, which share their shared memory."""
