"""Fast versions of convolutional networks."""
