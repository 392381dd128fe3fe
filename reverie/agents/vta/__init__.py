"""VTA: a world model that is trained on sequences and does not act."""
