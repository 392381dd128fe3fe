"""A whole posterior scan as one kernel that stays on the GPU, compiled at first use."""
