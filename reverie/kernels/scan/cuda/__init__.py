"""CUDA and host code shared by the persistent and the streamed posterior scan."""
