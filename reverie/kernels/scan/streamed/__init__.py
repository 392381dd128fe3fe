"""The posterior scan with five CUDA kernels per time step, forward and backward."""
