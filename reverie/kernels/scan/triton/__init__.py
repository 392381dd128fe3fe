"""The posterior scan with five Triton kernels per time step, forward and backward."""
