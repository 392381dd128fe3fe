"""Recorded episodes and sequence datasets: readers, transforms, statistics, batches."""
