"""Format of replay segment files, shared by the replay and the reader of its episodes.

A segment holds consecutive steps as `<first step id>-<count>-<checksum>.safetensors`;
`<first step id>-<count>-extras-<checksum>.safetensors` has newer values of the agent's
extras.
"""

from __future__ import annotations

import re

STREAM = "#stream"
"""Array with the number of the stream (uninterrupted steps of one environment) of each
row."""

POSITION = "#position"
"""Array with the position of each row in its stream."""

ORDER = "#order"
"""Array with the step id of each row, relative to the first of the segment."""


def segment_stem(first: int, count: int) -> str:
    """Return the file name of a segment up to its checksum."""
    return f"{first:012d}-{count}"


SEGMENT_NAME = re.compile(r"\d{12,}-\d+(-extras)?-[0-9a-f]{8}\.safetensors")
"""Names of segment files; a replay opens, moves and deletes no other files."""
