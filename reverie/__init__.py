"""Agents that learn inside a world model."""
