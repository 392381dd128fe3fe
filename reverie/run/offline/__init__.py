"""Offline training: on recorded episodes and sequences, without an environment."""
