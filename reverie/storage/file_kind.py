"""Recognize the format of a file by its first bytes, for error messages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from reverie.storage.limits import InvalidFile, open_regular, open_zip

TEXT, UNKNOWN = "a text file", "a file of an unknown format"
TORCH, OLD_TORCH = "a file of torch.save", "a file of PyTorch before version 1.6"
PICKLE = "a pickle"

_SIGNATURES = {
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.": OLD_TORCH,  # pickled magic number
    b"PK": "a ZIP archive",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file",
    b"\x93NUMPY": "a NumPy array",
    b"\x1f\x8b": "a gzip archive",
    b"\x28\xb5\x2f\xfd": "a Zstandard archive",
    b"BZh": "a bzip2 archive",
    b"\xfd7zXZ": "an xz archive",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"\x1aE\xdf\xa3": "a video",
    b"RIFF": "a video or sound file",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"SQLite format 3": "an SQLite database",
    b"%PDF": "a PDF document",
    b"\x7fELF": "a program",
    b"\x80": PICKLE,
    b"(dp": PICKLE,  # a dict in protocol 0 or 1
    b"}q": PICKLE,
    b"{": "a JSON file",
    b"<": "an HTML or XML page",
}
_LATER_SIGNATURES = (
    (4, b"ftyp", "a video"),
    (21, b"\x1a\rbrain.Event:", "a TensorBoard event file"),
    (257, b"ustar", "a TAR archive"),
)
"""Signatures after the start of a file: position, bytes, format."""
_ONNX = re.compile(rb"\x08[\x01-\x20](\x12[\x01-\x40][ -~]+)?[\x1a:]")
"""Start of an ONNX model: format version, program that wrote it, graph."""


def file_kind(path: str | Path) -> str:
    """Return the format of a file, such as "an HDF5 file"; raise `OSError` or
    `InvalidFile`."""
    with open_regular(Path(path)) as file:
        start = file.read(300)
    if not start:
        return "an empty file"
    # 8 bytes with the length of the header, the upper 5 of which are 0, then JSON
    if start[8:10] == b'{"' and start[3:8] == bytes(5):
        return "a safetensors file"
    kinds = (kind for magic, kind in _SIGNATURES.items() if start.startswith(magic))
    kind = next(kinds, "")
    if kind == "a ZIP archive":
        try:
            with open_zip(Path(path)) as archive:
                return zip_kind(archive.namelist())
        except InvalidFile:
            return "a ZIP archive that is incomplete or damaged"
    for position, magic, name in _LATER_SIGNATURES:
        if not kind and start[position:].startswith(magic):
            kind = name
    if kind:
        return kind
    if _ONNX.match(start):
        return "an ONNX model"
    is_text = all(32 <= byte < 127 or byte in b"\t\r\n" for byte in start)
    return TEXT if is_text else UNKNOWN


def zip_kind(names: Iterable[str]) -> str:
    """Return the format of a ZIP archive with members of these names."""
    filenames = {name.rpartition("/")[2] for name in names}
    if "policy.pth" in filenames:
        return "a model of Stable-Baselines3"
    if "data.pkl" in filenames:
        return "a TorchScript model" if "constants.pkl" in filenames else TORCH
    is_npz = any(name.endswith(".npy") for name in filenames)
    return "an NPZ file" if is_npz else "a ZIP archive"
