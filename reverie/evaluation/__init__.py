"""Evaluate agents in environments, on recordings and by segment boundaries."""
