"""File formats and atomic file writes shared by replay, datasets and checkpoints."""
