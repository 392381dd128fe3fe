"""VTA trained on sequences, without acting."""
