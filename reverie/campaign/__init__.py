"""Campaigns: many runs of tasks × methods × seeds, shared by workers (`worker.py`)."""
