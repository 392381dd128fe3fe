"""Recognize the format of a file by its first bytes, to name a wrong file in errors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from reverie.storage.limits import InvalidFile, open_regular, open_zip

TEXT, UNKNOWN = "a text file", "a file of an unknown format"
TORCH, OLD_TORCH = "a file of torch.save", "a file of PyTorch before version 1.6"

_SIGNATURES = {
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.": OLD_TORCH,  # a constant, pickled
    b"PK": "a ZIP archive",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file",
    b"\x93NUMPY": "a NumPy array",
    b"\x1f\x8b": "a gzip archive",
    b"\x28\xb5\x2f\xfd": "a Zstandard archive",
    b"BZh": "a bzip2 archive",
    b"\xfd7zXZ": "an xz archive",
    b"\x89PNG": "a PNG image",
    b"\x7fELF": "a program",
    b"\x80": "a pickle",
    b"{": "a JSON file",
    b"<": "an HTML or XML page",
}


def file_kind(path: str | Path) -> str:
    """Return what a file is ("an HDF5 file"); raises `OSError` or `InvalidFile`."""
    with open_regular(Path(path)) as file:
        start = file.read(64)
    if not start:
        return "an empty file"
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
    if kind:
        return kind
    is_text = all(32 <= byte < 127 or byte in b"\t\r\n" for byte in start)
    return TEXT if is_text else UNKNOWN


def zip_kind(names: Iterable[str]) -> str:
    """Return what a ZIP archive with members of these names is."""
    endings = {name.rpartition("/")[2] for name in names}
    if "data.pkl" in endings:
        return "a TorchScript model" if "constants.pkl" in endings else TORCH
    is_npz = any(name.endswith(".npy") for name in endings)
    return "an NPZ file" if is_npz else "a ZIP archive"
