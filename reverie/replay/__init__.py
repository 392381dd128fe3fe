"""The replay buffer: storage of a run's experience and sampling from it."""
