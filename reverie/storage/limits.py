"""Limits for untrusted files: unpacked size, nesting depth, file names and links.

Formats that can describe more data than the file has (ZIP archives, YAML aliases,
nested JSON, pickles, HDF5) are read with these functions, which raise `InvalidFile`
before the memory is allocated. This limits the time too: it is proportional to the size
of the file, or to `ALWAYS_ALLOWED_BYTES` for a small file.
"""

from __future__ import annotations

import errno
import io
import json
import os
import select
import stat
import struct
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from reverie.storage.system import open_flags

ALWAYS_ALLOWED_BYTES = 256 << 20
"""Every file may unpack to this many bytes, however small it is."""
MAX_RATIO = 100
"""A file may unpack to this many times its own size."""
MAX_DIRECTORY_BYTES = 32 << 20
"""Maximum size of the list of members of a ZIP archive."""
PART_BYTES = 1 << 20  # read or unpacked at once
MAX_JSON_BYTES = 256 << 20
MAX_YAML_BYTES = 1 << 20
MAX_DEPTH = 64
"""Maximum depth of nested values."""
MAX_VALUES = 300_000
"""Maximum number of nested values; a value that is referenced twice counts twice."""
MAX_YAML_NODES = 100_000
"""Maximum number of keys and values in YAML after aliases are expanded."""
MAX_DIGITS = 100
"""Maximum digits of a number in YAML; the time to convert it is quadratic."""
MAX_KEY_DIGITS = 18
"""Maximum digits of a number that is a key; larger ones may share one hash value."""
NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
MAX_NAME_BYTES = 255
PIPE_SECONDS = 30  # maximum time to wait for the end of a pipe
SHELL_PIPES = ("/dev/fd", "/proc/self/fd")
"""Folders of the pipes that a shell creates for `<(command)`."""
_pipe_contents: dict[int, bytes] = {}  # contents that were read, by inode of the pipe

MERGE_TAG = "tag:yaml.org,2002:merge"  # of the key `<<`
YamlLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The parser of libyaml if PyYAML was built with it; it is ten times as fast."""


class InvalidFile(ValueError):
    """A file that is damaged, too large, or has contents that are not allowed.

    The message is the end of a sentence that begins with the path.
    """


class Budget:
    """A limit in bytes on the total size of parts of a file, named `what` in errors."""

    def __init__(self, limit: int, what: str):
        self.limit, self.remaining, self.what = limit, limit, what

    def take(self, size: int) -> None:
        """Subtract the size of a part; raise `InvalidFile` if it exceeds the limit."""
        if size > self.remaining:
            limit = max(self.limit >> 20, 1)
            raise InvalidFile(f"has more than {limit} MiB of {self.what}")
        self.remaining -= size


def unpacked_budget(file_size: int, what: str) -> Budget:
    """Return the budget for the unpacked contents of a file."""
    return Budget(max(ALWAYS_ALLOWED_BYTES, MAX_RATIO * file_size), what)


@contextmanager
def limited_memory(extra: int) -> Iterator[None]:
    """Limit the memory that a call of a C library may allocate to `extra` bytes.

    Allocations of other threads may fail too, so this is only for short calls. It has
    an effect on Linux only, because other systems do not have `/proc/self/statm`.
    """
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + extra
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def quote(text: str) -> str:
    """Shorten text from a file for a message, and escape control characters."""
    return ascii(text if len(text) <= 80 else f"{text[:77]}...")[1:-1]


def check_tree(
    root: Any, children: Callable[[Any], Iterable[Any]], max_values: int = MAX_VALUES
) -> None:
    """Raise if nested values are deeper than `MAX_DEPTH`, too many, or cyclic.

    `children` returns the values directly inside a value.
    """
    count, level = 1, [root]
    for _ in range(MAX_DEPTH):
        if not level:
            return
        lower: list[Any] = []
        for value in level:
            inner = list(children(value))
            count += len(inner)
            if count > max_values:
                raise InvalidFile(f"has more than {max_values:,} nested values")
            lower += inner
        level = lower
    raise InvalidFile(f"has values nested more than {MAX_DEPTH} deep")


class BoundedReader(io.BufferedReader):
    """A file that limits single reads to `max_read` bytes, if set: `zipfile` reads the
    whole list of members, whose size the archive declares."""

    max_read: int | None = None

    def read(self, size: int | None = -1, /) -> bytes:
        if self.max_read is not None and (size or 0) > self.max_read:
            raise InvalidFile("has a list of members that is too large")
        return super().read(size)


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Return the contents of a regular file of at most `max_bytes`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise InvalidFile(f"is larger than {max_bytes >> 20} MiB")
        return file.read(size)


def read_pipe(path: Path, max_bytes: int) -> bytes:
    """Return the contents of a pipe, such as `<(command)` in a shell or `/dev/stdin`.

    A pipe can be read only once, so its contents are kept for later calls.
    """
    pipe = os.open(path, os.O_RDONLY | open_flags("O_NONBLOCK", "O_BINARY"))
    try:
        status = os.fstat(pipe)
        if not (stat.S_ISFIFO(status.st_mode) or stat.S_ISREG(status.st_mode)):
            raise InvalidFile("is not a pipe or a regular file")
        if status.st_ino in _pipe_contents:
            return _pipe_contents[status.st_ino]
        data, deadline = bytearray(), time.monotonic() + PIPE_SECONDS
        while True:
            seconds = max(deadline - time.monotonic(), 0)
            if not select.select([pipe], [], [], seconds)[0]:
                raise InvalidFile(f"was not closed within {PIPE_SECONDS} seconds")
            part = os.read(pipe, PART_BYTES)
            if not part:
                return _pipe_contents.setdefault(status.st_ino, bytes(data))
            data += part
            if len(data) > max_bytes:
                raise InvalidFile(f"is larger than {max_bytes >> 20} MiB")
    finally:
        os.close(pipe)


def is_shell_pipe(path: Path) -> bool:
    """True for the path of a shell's `<(command)`, and for standard input."""
    return str(path.parent) in SHELL_PIPES or str(path) == "/dev/stdin"


def open_regular(path: Path, follow_links: bool = True) -> BoundedReader:
    """Open a file for reading; pipes and devices, which may block, are refused."""
    return BoundedReader(io.FileIO(open_descriptor(path, os.O_RDONLY, follow_links)))


def open_descriptor(path: Path, flags: int, follow_links: bool = False) -> int:
    """Open a regular file and return its file descriptor, without ever blocking.

    Raises `InvalidFile` for folders, pipes, sockets, devices and, unless
    `follow_links`, symbolic links.
    """
    flags |= open_flags("O_NONBLOCK", "O_BINARY")
    if not follow_links:
        if path.is_symlink():
            raise InvalidFile("is a symbolic link")
        flags |= open_flags("O_NOFOLLOW")
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a socket, a pipe or a folder
            raise InvalidFile("is not a regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidFile("is not a regular file")
    return descriptor


def check_name(name: Any) -> str:
    """Return a file name that was read from a file; raise unless it is a plain name.

    A path with several components could lead outside of the folder.
    """
    if not isinstance(name, str):
        raise InvalidFile("has a file name that is not a string")
    is_plain = name.isprintable() and not any(c in name for c in "/\\:")
    if name in ("", ".", "..") or not is_plain or len(name.encode()) > MAX_NAME_BYTES:
        raise InvalidFile(f"has {quote(name)!r}, which is not a file name")
    return name


def parse_json(data: bytes | str, max_values: int | None = None) -> Any:
    """Parse JSON; raise `ValueError` for every problem."""
    if len(data) > MAX_JSON_BYTES:
        raise InvalidFile(f"is larger than {MAX_JSON_BYTES >> 20} MiB")
    try:
        value = json.loads(data)
    except RecursionError:
        raise InvalidFile(f"has values nested more than {MAX_DEPTH} deep") from None
    check_tree(value, _json_children, len(data) if max_values is None else max_values)
    return value


def read_json(path: Path) -> Any:
    """Read a JSON file; raises `OSError` or `ValueError`."""
    return parse_json(read_bytes(path, MAX_JSON_BYTES))


def parse_yaml(text: str) -> Any:
    """Parse YAML; the expanded size of its aliases is limited.

    Raises `ValueError`, or `yaml.YAMLError`, which has the line number.
    """
    if len(text) > MAX_YAML_BYTES:
        raise InvalidFile(f"is larger than {MAX_YAML_BYTES >> 20} MiB")
    _check_yaml_depth(text)
    loader = YamlLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        # checked before construction, because merge keys (`<<`) copy their contents
        check_tree(node, _yaml_children, MAX_YAML_NODES)
        return loader.construct_document(node)
    except RecursionError:
        raise InvalidFile(f"has values nested more than {MAX_DEPTH} deep") from None
    except (AttributeError, LookupError, TypeError, OverflowError) as error:
        # from PyYAML, for a tag whose value has another type (`!!bool 3`)
        raise InvalidFile("has a tag that does not fit its value") from error
    finally:
        loader.dispose()


def _check_yaml_depth(text: str) -> None:
    """Raise if YAML is nested too deep for libyaml, which parses recursively."""
    parser, depth = YamlLoader(text), 0
    try:
        while parser.check_event():
            event = parser.get_event()
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if depth > MAX_DEPTH:
                raise InvalidFile(f"has values nested more than {MAX_DEPTH} deep")
    except RecursionError:  # from the parser in Python
        raise InvalidFile(f"has values nested more than {MAX_DEPTH} deep") from None
    finally:
        parser.dispose()


def _json_children(value: Any) -> Iterable[Any]:
    """Return the values directly inside a list or dict."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _yaml_children(node: yaml.Node) -> list[yaml.Node]:
    """Return the keys and values directly inside a node.

    Raises for long numbers, and for a key that occurs twice in a mapping: PyYAML would
    ignore its first value.
    """
    if isinstance(node, yaml.ScalarNode):
        _check_number(node, MAX_DIGITS)
    if isinstance(node, yaml.MappingNode):
        known = set()
        for key, _ in node.value:
            _check_number(key, MAX_KEY_DIGITS)
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else key
            if name in known and key.tag != MERGE_TAG:
                line = key.start_mark.line + 1
                raise InvalidFile(f"has the key {key.value!r:.200} twice (line {line})")
            known.add(name)
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _check_number(node: yaml.Node, max_digits: int) -> None:
    if node.tag in NUMBER_TAGS and len(node.value) > max_digits:
        raise InvalidFile(f"has a number of more than {max_digits} digits")


@contextmanager
def open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a ZIP archive if the sizes of its members are within the limits."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.max_read = MAX_DIRECTORY_BYTES
        with _zip_errors():
            archive = zipfile.ZipFile(file)
        file.max_read = None
        members = archive.infolist()
        if len({member.filename for member in members}) < len(members):
            raise InvalidFile("has two members of the same name")
        budget = unpacked_budget(size, "unpacked data")
        for member in members:
            budget.take(member.file_size)
        yield archive


@contextmanager
def open_member(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo
) -> Iterator[zipfile.ZipExtFile]:
    """Open a member of an archive; reading it to the end verifies its checksum."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InvalidFile("has an unusual compression")
    with _zip_errors(), archive.open(member) as file:
        assert isinstance(file, zipfile.ZipExtFile)  # always true in read mode
        yield file


def read_parts(file: zipfile.ZipExtFile) -> Iterator[bytes]:
    """Yield the remaining bytes of a member in parts of at most `PART_BYTES`.

    `file.read()` would unpack everything at once, even if this is more than the archive
    declares.
    """
    while part := file.read(PART_BYTES):
        yield part


@contextmanager
def _zip_errors() -> Iterator[None]:
    """Raise errors of `zipfile` as `InvalidFile`."""
    try:
        yield
    except InvalidFile:
        raise
    except (
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        EOFError,
        OSError,
        ValueError,
        NotImplementedError,  # features of newer ZIP versions
        RuntimeError,  # encrypted
    ) as error:
        raise InvalidFile(f"cannot be unpacked ({quote(str(error))})") from error
