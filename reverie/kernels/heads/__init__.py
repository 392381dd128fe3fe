"""Fast versions of distributions and returns."""
