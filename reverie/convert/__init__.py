"""Importers of checkpoints and configs of other implementations."""
