"""Data-parallel training: several processes (ranks) train on parts of one batch."""
