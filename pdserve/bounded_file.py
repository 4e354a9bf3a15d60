"""Reads files that other programs wrote (model folders, settings, keys, certificates, profiles, traces), and opens
private ones.

Such a file may be anything: a device without an end, a pipe that no process writes to, or 10 GB of brackets. So each
is a regular file (links are followed, because the Hub's cache consists of them), its size has a limit, and its JSON has
a limit of depth. Every defect is a ConfigError or ModelError that names the file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

from pdserve.core.errors import ConfigError, ModelError

MAX_JSON_DEPTH: Final = 64
MAX_SETTINGS_BYTES: Final = 2**20  # a TOML file, a secret, or a text that a flag names
MAX_JSON_BYTES: Final = 8 * 2**20  # a JSON file of a model folder, or a profile; the largest known have 1 MB
MAX_TOKENIZER_BYTES: Final = 64 * 2**20  # tokenizer.json; the largest known has 33 MB

MOST_PARTS: Final = 1000  # of memory, that one call reads or writes; the system allows 1,024
Buffer = Any  # a contiguous, writable numpy array of bytes, or a memoryview

OWN_DESCRIPTORS: Final = ("/dev/fd/", "/proc/self/fd/", "/dev/stdin")
NOT_REGULAR: Final = "a file that can be read (this is a folder, pipe, socket or device, and no regular file)"

Kind = type[ConfigError]


def open_regular(path: str | Path, field: str, error: Kind = ConfigError, *, folder: int | None = None) -> int:
    """A descriptor for reading. Raises `error` if the file is neither a regular one nor a pipe that this process was
    started with, or cannot be opened.

    `folder` is a descriptor: the file lies directly in it, and a link is not followed.
    """
    links = 0 if folder is None else os.O_NOFOLLOW
    try:
        mode = os.stat(path, dir_fd=folder, follow_symlinks=not links).st_mode
        if stat.S_ISLNK(mode):
            raise error(field, path, "a file, and no link: copy the file that it leads to")
        # A pipe that the caller's shell has opened, as for `<(command)`.
        is_own_pipe = stat.S_ISFIFO(mode) and str(path).startswith(OWN_DESCRIPTORS)
        # A device is not opened at all, because opening some has an effect.
        if not (stat.S_ISREG(mode) or is_own_pipe):
            raise error(field, path, NOT_REGULAR)
        # O_NONBLOCK, because the file may have been replaced by a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | links, dir_fd=folder)
    except (OSError, ValueError) as failure:
        raise error(field, path, f"a file that can be read ({_reason(failure)})") from None
    if is_own_pipe:
        os.set_blocking(descriptor, True)
    elif not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise error(field, path, NOT_REGULAR)
    return descriptor


@contextlib.contextmanager
def opened(
    path: str | Path, field: str, error: Kind = ConfigError, *, folder: int | None = None
) -> Iterator[BufferedReader]:
    """The regular file. Raises `error`, also if reading fails inside the block. `folder`: as of `open_regular`."""
    with os.fdopen(open_regular(path, field, error, folder=folder), "rb") as file:
        try:
            yield file
        except OSError as failure:
            raise error(field, path, f"a file that can be read ({_reason(failure)})") from None


@contextlib.contextmanager
def opened_folder(path: str | Path, field: str, error: Kind = ConfigError) -> Iterator[int]:
    """A descriptor, with which files of one folder are opened although another one may take its place."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, ValueError) as failure:
        raise error(field, path, f"a folder that can be read ({_reason(failure)})") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_bytes(
    path: str | Path, most_bytes: int, field: str, error: Kind = ConfigError, *, folder: int | None = None
) -> bytes:
    """The whole file. Raises `error` if it has more than `most_bytes`. `folder`: as of `open_regular`."""
    with opened(path, field, error, folder=folder) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > most_bytes else file.read(most_bytes + 1)  # files of /proc have no size
    if max(size, len(data)) > most_bytes:
        raise error(field, f"{path} of {max(size, len(data))} bytes or more", f"a file of at most {most_bytes} bytes")
    return data


def read_text(path: str | Path, most_bytes: int, field: str, error: Kind = ConfigError) -> str:
    """The whole file in UTF-8, like `read_bytes`."""
    data = read_bytes(path, most_bytes, field, error)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as failure:
        raise error(field, path, f"a text file in UTF-8 ({failure})") from None


def parse_json(data: str | bytes, field: str, error: Kind = ConfigError, *, is_strict: bool = False) -> Any:
    """Raises `error` if `data` is not JSON, or has more than MAX_JSON_DEPTH objects and arrays inside each other.
    `is_strict`: also if an object has a name twice."""
    try:
        value = json.loads(data, object_pairs_hook=_unique if is_strict else None)
        is_deep = _is_deep(value)
    except ValueError as failure:
        raise error(field, f"a text that is no JSON ({failure})", "a readable JSON file") from None
    except RecursionError:
        is_deep = True
    if is_deep:
        raise error(field, "objects and arrays that lie too deep", f"at most {MAX_JSON_DEPTH} inside each other")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)[:64]!r} stands twice in an object")
    return found


def _is_deep(value: Any) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_JSON_DEPTH):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for values in inner for one in values if isinstance(one, dict | list)]
    return bool(level)


def read_json_object(path: Path, most_bytes: int = MAX_JSON_BYTES, error: Kind = ModelError) -> dict[str, Any] | None:
    """The JSON object in a file of a model folder; None if there is no such file. A link to nothing is an error."""
    if not os.path.lexists(path):
        return None
    value = parse_json(read_bytes(path, most_bytes, path.name, error), path.name, error)
    if not isinstance(value, dict):
        raise error(path.name, f"a {type(value).__name__}", "a JSON object")
    return value


def _reason(failure: OSError | ValueError) -> str:
    return failure.strerror or str(failure) if isinstance(failure, OSError) else str(failure)


# --- private files --------------------------------------------------------------------------------------------
# This user writes them, and others may not read them. Standard library only.

_LINKS = (errno.ELOOP, errno.EMLINK)  # of O_NOFOLLOW, by system


def cache_file(name: str) -> Path | None:
    """A file in this user's own folder for small files; None without a home that can be written. In a shared folder,
    other users could take the file's name."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "pdserve")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: no home
        return None
    return folder / name


def open_private(path: str | Path, *, is_appended: bool = False) -> int:
    """The descriptor of a file of mode 0600, which is emptied first unless `is_appended`.

    Others may write in its folder, so a link is not followed, and only a regular file with one name that belongs to
    this user is opened, or a device. An older file's mode is reduced to 0600. Raises OSError.
    """
    how = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_APPEND if is_appended else 0)
    try:
        # O_NONBLOCK, because opening a named pipe would otherwise wait for a reader.
        descriptor = os.open(path, how | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in _LINKS:
            raise OSError(error.errno, "it is a link") from None
        if error.errno == errno.ENXIO:
            raise OSError(error.errno, "it is not a regular file") from None
        raise
    try:
        facts = os.fstat(descriptor)
        if stat.S_ISCHR(facts.st_mode):  # a device such as /dev/null, which only root can make
            return descriptor
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        if facts.st_uid != os.geteuid():
            raise OSError(errno.EPERM, f"it belongs to user {facts.st_uid}")
        if facts.st_nlink > 1:
            raise OSError(errno.EMLINK, "it has a second name, which is a hard link")
        os.fchmod(descriptor, 0o600)
        if not is_appended:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_private_folder(path: Path, name: str, field: str) -> int:
    """The descriptor of the folder `name` in `path`. Both are made if they are absent. Raises ConfigError unless only
    this user can enter it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with opened_folder(path, field) as base:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=base)
            folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=base)
    except OSError as error:
        expected = f"a folder that this program can write: {name} in it cannot be opened ({error.strerror})"
        raise ConfigError(field, path, expected) from None
    facts = os.fstat(folder)
    if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
        os.close(folder)
        raise ConfigError(field, path / name, "a folder of this user with mode 0700 (chmod 700)")
    return folder


LOCK: Final = "lock"


def lock_folder(folder: int, path: Path, field: str) -> int:
    """The descriptor of a locked file in the folder, which is closed by its owner. Raises ConfigError if another
    process has it."""
    import fcntl  # not on every system, and clients read files too

    how = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    try:
        descriptor = os.open(LOCK, how, 0o600, dir_fd=folder)
    except OSError as error:
        raise ConfigError(field, path / LOCK, f"a file that can be opened ({error.strerror})") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        is_taken = error.errno in (errno.EACCES, errno.EAGAIN)
        why = "another process uses it" if is_taken else f"its lock failed: {error.strerror}"
        raise ConfigError(field, path, f"a folder of this program alone ({why})") from None
    return descriptor


def after(parts: Sequence[Buffer], num_bytes: int) -> list[Buffer]:
    """What remains of the parts after so many bytes."""
    left = list(parts)
    while left and num_bytes >= len(left[0]):
        num_bytes -= len(left.pop(0))
    if num_bytes:
        left[0] = left[0][num_bytes:]
    return left


def write_all(
    write: Callable[[int, Sequence[Buffer], int], int], descriptor: int, parts: Sequence[Buffer], offset: int
) -> None:
    """`write` is os.pwritev, or does the same. Raises OSError."""
    left: list[Buffer] = list(parts)
    while left:
        num_written = write(descriptor, left[:MOST_PARTS], offset)
        if num_written <= 0:
            raise OSError(errno.EIO, "nothing was written")
        offset += num_written
        left = after(left, num_written)
