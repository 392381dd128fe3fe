"""Fast versions of normalization layers."""
