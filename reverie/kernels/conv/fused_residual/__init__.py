"""CUDA kernels for residual blocks: convolutions fused with the norms around them."""
