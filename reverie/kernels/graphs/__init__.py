"""CUDA graphs for training and acting."""
