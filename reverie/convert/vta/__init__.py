"""Import checkpoints and config files of the original VTA."""
