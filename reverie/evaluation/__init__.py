"""Evaluate trained agents in environments, on recordings and by their boundaries."""
