"""Behavior cloning."""
