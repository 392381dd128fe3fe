"""Limits on JSON, YAML and ZIP files that are not trusted."""

from __future__ import annotations

import json
import os
import socket
import time
import zipfile
from pathlib import Path

import pytest
import yaml

from reverie.config import ConfigError, read_config_file
from reverie.storage import limits
from reverie.storage.limits import (
    InvalidFile,
    open_member,
    open_zip,
    parse_json,
    parse_yaml,
    read_bytes,
    read_json,
    read_parts,
)


def test_json_is_read(tmp_path):
    value = {"a": [1, 2.5, None, True], "b": {"c": "text"}}
    path = tmp_path / "x.json"
    path.write_text(json.dumps(value))
    assert read_json(path) == value
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize("opening", ["[", '{"a":', "[ ", '["]",'])
@pytest.mark.parametrize("depth", [100, 100_000])
def test_deep_json_is_refused(opening, depth):
    closing = {"[": "]", "{": "}"}[opening[0]]
    with pytest.raises(InvalidFile, match="nested more than 64 deep"):
        parse_json(opening * depth + "1" + closing * depth)


@pytest.mark.parametrize("text", ["", "{", "[1,]", "9" * 5000, b"\xff", '{"a": 1'])
def test_damaged_json_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


def test_large_json_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "x.json"
    with open(path, "wb") as file:
        file.truncate(limits.MAX_JSON_BYTES + 1)
    with pytest.raises(InvalidFile, match="larger than 256 MiB"):
        read_json(path)


def test_pipes_and_folders_are_not_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(InvalidFile, match="not a regular file"):
            read_bytes(path, 100)


def test_yaml_is_read_like_safe_load():
    text = """
    base: &base {a: 1, b: [1.5, true, null, 2001-02-03]}
    other: {<<: *base, c: x}
    again: *base
    """
    assert parse_yaml(text) == yaml.safe_load(text)
    assert parse_yaml("") is None


@pytest.mark.parametrize("text", ["a: 1\na: 2", "x: {a: 1, a: 1}", "- {1: x, 1: y}"])
def test_repeated_keys_are_refused(text):
    line = 1 + text.count("\n")
    with pytest.raises(InvalidFile, match=rf"has the key '[a1]' twice \(line {line}\)"):
        parse_yaml(text)


def nested(first: str, each: str, levels: int = 12, width: int = 10) -> str:
    """Return YAML in which every level refers `width` times to the level before it."""
    lines = [f"a0: &a0 {first}"]
    for level in range(levels):
        items = ", ".join([f"*a{level}"] * width)
        lines.append(f"a{level + 1}: &a{level + 1} {each.replace('ITEMS', items)}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "{a: " * 100_000,
        "- " * 10_000 + "1",
        nested("{x: 1}", "{<<: [ITEMS]}"),
        nested("[1]", "[ITEMS]"),
        "&a [*a]",
        "a: &a {<<: *a}",
        "a: !!bool 3",
        "a: !!int ''",
        "a: !!timestamp x",
        "a: !!float x",
        "a: !!python/object/apply:os.system [true]",
        "? [1, 2]\n: 3",
        "a: 1\0",
        "x" * (limits.MAX_YAML_BYTES + 1),
    ],
    ids=range(15),
)
def test_hostile_yaml_is_refused_in_time(text):
    start = time.process_time()
    with pytest.raises((ValueError, yaml.YAMLError)):
        parse_yaml(text)
    assert time.process_time() - start < 30


def unpack(path) -> int:
    with open_zip(path) as archive:
        total = 0
        for member in archive.infolist():
            with open_member(archive, member) as file:
                total += sum(map(len, read_parts(file)))
        return total


def test_archives_that_unpack_to_too_much_are_refused(tmp_path):
    path = tmp_path / "x.zip"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("zeros", "w") as file,
    ):
        for _ in range(300):
            file.write(bytes(1 << 20))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(InvalidFile, match="more than 256 MiB of unpacked data"):
        unpack(path)


def test_members_are_not_unpacked_beyond_their_declared_size(tmp_path):
    path = tmp_path / "x.zip"
    size, declared = 200 << 20, 1000
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(size))
    data = path.read_bytes().replace(
        size.to_bytes(4, "little"), declared.to_bytes(4, "little")
    )
    path.write_bytes(data)
    with pytest.raises(InvalidFile, match="CRC"):
        unpack(path)


def test_a_huge_list_of_members_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(100):
            archive.writestr(f"{i}", b"")
    assert unpack(path) == 0
    monkeypatch.setattr(limits, "MAX_DIRECTORY_BYTES", 1000)
    with pytest.raises(InvalidFile, match="list of members"):
        unpack(path)


def test_unusual_archives_are_refused(tmp_path):
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a", bytes(100))
    with pytest.raises(InvalidFile, match="unusual compression"):
        unpack(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", bytes(100))
    data = bytearray(path.read_bytes())
    data[6] |= 1  # encrypted, in both headers
    data[data.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)
    with pytest.raises(InvalidFile, match="encrypted"):
        unpack(path)


def special_file(path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        (path.parent / "target").write_text("text")
        path.symlink_to(path.parent / "target")
    else:
        here = os.getcwd()
        os.chdir(path.parent)  # the path of a socket is limited to 100 characters
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
        os.chdir(here)


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "link"])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY])
def test_only_regular_files_are_opened(tmp_path, kind, flags):
    path = tmp_path / "special"
    special_file(path, kind)
    with pytest.raises(InvalidFile, match=r"not a regular file|symbolic link"):
        limits.open_descriptor(path, flags)


def test_links_are_followed_where_the_user_names_the_file(tmp_path):
    special_file(tmp_path / "link", "link")
    with limits.open_regular(tmp_path / "link") as file:
        assert file.read() == b"text"
    with pytest.raises(InvalidFile, match="symbolic link"):
        limits.open_regular(tmp_path / "link", follow_links=False)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../a",
        "a/b",
        "/a",
        "a\\b",
        "C:a",
        "a\0",
        "a\n",
        "é" * 128,
        3,
        None,
    ],
)
def test_names_that_are_not_one_component_are_refused(name):
    with pytest.raises(InvalidFile, match="file name"):
        limits.check_name(name)


@pytest.mark.parametrize("name", ["a", ".a", "a..b", "demo_1 (copy)", "é" * 127])
def test_names_of_files_are_accepted(name):
    assert limits.check_name(name) == name


def make_pipe(data: bytes) -> tuple[int, int]:
    """A pipe with some data in it, as the shell makes of `<(command)`."""
    reader, writer = os.pipe()
    os.write(writer, data)
    return reader, writer


def test_a_config_can_come_from_a_pipe_of_the_shell():
    reader, writer = make_pipe(b"task: catch\n")
    os.close(writer)
    path = Path(f"/dev/fd/{reader}")
    assert read_config_file(path) == {"task": "catch"}
    assert read_config_file(path) == {"task": "catch"}, "only the first read has data"
    os.close(reader)


def test_a_pipe_that_is_not_closed_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(limits, "PIPE_SECONDS", 0.1)
    reader, writer = make_pipe(b"task: catch\n")
    with pytest.raises(ConfigError, match=r"not closed(.|\n)*Fix:"):
        read_config_file(Path(f"/proc/self/fd/{reader}"))
    with pytest.raises(InvalidFile, match="larger"):
        limits.read_pipe(Path(f"/dev/fd/{make_pipe(bytes(99))[0]}"), 10)
    with pytest.raises(InvalidFile, match="not a pipe"):
        limits.read_pipe(Path("/dev/null"), 10)
    os.close(writer)
    os.close(reader)


def test_other_pipes_are_refused(tmp_path):
    """A pipe in a run folder has no writer, or one that never ends."""
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_config_file(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "9" * 5000,
        "a: 0b" + "1" * 500_000,
        "a: 1:" + ":".join(["59"] * 100_000),
        "a: " + ":".join(["59"] * 100_000) + ".5",
        "{" + ", ".join(str(i * (2**61 - 1)) for i in range(1, 20_000)) + "}",
    ],
)
def test_long_yaml_numbers_are_refused_before_they_are_converted(text, monkeypatch):
    """Converting a number takes a time that is quadratic in its length."""
    converted = []
    monkeypatch.setattr(limits.YamlLoader, "construct_document", converted.append)
    with pytest.raises(InvalidFile, match="digits"):
        parse_yaml(text)
    assert not converted
