"""Generated video datasets with known segment boundaries."""
