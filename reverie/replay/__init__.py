"""The replay buffer: what a run has experienced, and how batches are sampled from it.
"""
