"""Sentences as fixed vectors: what an agent reads of an instruction.

Every word has a random vector that never changes, found by its checksum; words with the
same checksum share one. A sentence is the vectors of its first words, one after the
other, so that an agent needs no vocabulary and any text has the same shape.
"""

from __future__ import annotations

import functools
import re
import zlib

import numpy as np

WORDS, WIDTH, BUCKETS = 32, 32, 65_536
PATTERN = re.compile(r"[a-z_]+|[^a-z_ ]+")


def embed(text: str) -> np.ndarray:
    """The words of a sentence, float32 of `WORDS * WIDTH`; short ones are filled up."""
    words = PATTERN.findall(text.lower())[:WORDS]
    buckets = [zlib.crc32(word.encode()) % BUCKETS for word in words]
    return _vectors()[buckets + [0] * (WORDS - len(words))].reshape(-1)


@functools.cache
def _vectors() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.normal(0.0, 1.0, (BUCKETS, WIDTH)).astype(np.float32)
