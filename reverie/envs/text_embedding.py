"""Fixed embeddings of instructions: text to a float vector of constant size.

Each word is hashed (CRC32) to one row of a fixed random table; words with the same hash
share a row. The embedding of a sentence concatenates the rows of its first `WORDS`
words, so any text has the same shape and no vocabulary is needed.
"""

from __future__ import annotations

import functools
import re
import zlib

import numpy as np

from reverie.spaces import Space

WORDS, WIDTH, BUCKETS = 32, 32, 65_536
"""Words per text, numbers per word, and rows of the table."""
WORD_PATTERN = re.compile(r"[a-z_]+|[^a-z_ ]+")
"""Matches a word, or digits and punctuation between words."""
EMBEDDING_SPACE = Space(np.float32, (WORDS * WIDTH,))


def embed_text(text: str) -> np.ndarray:
    """Embed the first `WORDS` words; missing words use row 0 of the table."""
    words = WORD_PATTERN.findall(text.lower())[:WORDS]
    buckets = [zlib.crc32(word.encode()) % BUCKETS for word in words]
    return _table()[buckets + [0] * (WORDS - len(words))].reshape(-1)


@functools.cache
def _table() -> np.ndarray:
    """Return the table of random rows, which is the same in every process."""
    rng = np.random.default_rng(0)
    return rng.normal(0.0, 1.0, (BUCKETS, WIDTH)).astype(np.float32)
