"""Import checkpoints of the original Δ-IRIS."""
