"""Recorded episodes: readers, transforms, statistics, splits and batches."""
