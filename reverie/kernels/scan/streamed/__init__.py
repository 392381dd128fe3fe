"""The posterior scan with five CUDA kernels per time step and direction."""
