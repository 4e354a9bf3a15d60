"""Reads and replaces a key file on disk. The format is in pdserve/core/access/key_file.py.

Whoever can write the file can add a key, so it must belong to this user or to root, and nobody else may write it.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from pdserve.bounded_file import opened
from pdserve.core.access.key_file import MAX_FILE_BYTES, read
from pdserve.core.errors import ConfigError

NEW_FILE_MODE: Final = 0o600


class FileVersion(NamedTuple):
    """Differs between two contents of a file."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


def version_of(path: str | Path) -> FileVersion | None:
    """None if there is no such file."""
    try:
        return _version(os.stat(path))
    except OSError:
        return None


def read_bytes(path: str | Path) -> tuple[bytes, FileVersion]:
    """Raises ConfigError if the file cannot be read, is too large, or can be written by other users."""
    with opened(path, "key_file") as file:
        facts = os.fstat(file.fileno())
        _check(path, facts)
        return file.read(MAX_FILE_BYTES + 1), _version(facts)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One writer at a time. Locks the folder, because the file itself is replaced."""
    import fcntl  # here, because a client's system may lack it

    parent = path.resolve().parent
    try:
        folder = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _unreadable(parent, error) from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def replace(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces the file at once, so that no reader sees a part of it. Keeps its mode; a new file has NEW_FILE_MODE.

    Raises ConfigError if the content is not a key file, or the file cannot be written.
    """
    read(content)
    path = path.resolve()  # a link stays a link
    data = json.dumps(content, indent=2).encode() + b"\n"
    try:
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else NEW_FILE_MODE
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                os.fchmod(descriptor, mode)
                file.flush()
                os.fsync(descriptor)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise ConfigError("key_file", path, f"a file that can be written ({error.strerror})") from None


def _check(path: str | Path, facts: os.stat_result) -> None:
    if facts.st_uid not in (0, os.geteuid()):
        raise ConfigError("key_file", f"{path}, of user {facts.st_uid}", "a file of this user or of root")
    if facts.st_mode & 0o022:
        expected = f"a file that only its owner can write: chmod go-w {path}"
        raise ConfigError("key_file", f"{path}, with mode {stat.S_IMODE(facts.st_mode):04o}", expected)
    if facts.st_size > MAX_FILE_BYTES:
        raise ConfigError("key_file", f"{facts.st_size} bytes", f"at most {MAX_FILE_BYTES} bytes")


def _version(facts: os.stat_result) -> FileVersion:
    return FileVersion(facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)


def _unreadable(path: str | Path, error: OSError) -> ConfigError:
    return ConfigError("key_file", path, f"a file that can be read ({error.strerror})")
