"""Recorded episodes of other programs: readers, transforms, statistics, splits, batches."""
