"""Import checkpoints and configs of the original DreamerV3."""
