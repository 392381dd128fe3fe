"""Layers, encoders, decoders, heads, distributions and optimizers, without RL code.

The attributes `fast_version` (GPU) and `fast_cpu_version` of a module name the class in
`kernels` that replaces it (`kernels/accelerate.py`).
"""
