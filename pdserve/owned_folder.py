"""Temporary folders that are removed by their process or, if it was killed, by the next start of a cluster.

The owner holds a lock on a file in its folder. The kernel releases the lock when the owner ends, even if it is killed,
so a folder whose lock can be taken has no owner. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self, final

try:
    import fcntl
except ImportError:  # on a system without it, nothing is removed
    fcntl = None  # type: ignore[assignment]

PREFIX: Final = "pdserve-run-"
SHORT: Final = Path("/tmp")
_LOCK: Final = "owner.lock"
_MAX_SOCKET_CHARS: Final = 100  # the kernel allows 107 bytes
_TRIES: Final = 10
_UNLOCKED_S: Final = 3600.0  # a folder of this age without a lock file was abandoned between creation and locking


@final
class OwnedFolder:
    """A folder of mode 0700. `path` exists until remove(), or until sweep() after this process has died."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock, self._is_left = lock, False
        # systemd-tmpfiles removes old files from temporary folders, unless a folder itself is locked (tmpfiles.d(5)).
        # Without its socket file, a server that still runs could not be reached.
        self._aging_lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _take(self._aging_lock)

    @property
    def locks(self) -> tuple[int, ...]:
        """Descriptors: a process that inherits them owns the folder too."""
        return (self._lock, self._aging_lock)

    @classmethod
    def make(cls, purpose: str, parent: Path | None = None) -> Self:
        parent = parent or Path(tempfile.gettempdir())
        for _ in range(_TRIES):
            path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-", dir=parent))
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            if _take(lock) is not False and (path / _LOCK).exists():
                return cls(path, lock)
            os.close(lock)  # a sweep removed the folder between creation of the file and its lock
        raise AssertionError(f"{_TRIES} new folders in {parent} were removed at once")

    @classmethod
    def for_socket(cls, purpose: str, name: str) -> Self:
        """One in which the path of a socket file called `name` is short enough."""
        folder = cls.make(purpose)
        if len(str(folder.path / name)) > _MAX_SOCKET_CHARS:
            folder.remove()
            folder = cls.make(purpose, SHORT)
        return folder

    @classmethod
    def of_another(cls, path: Path) -> Self:
        """A folder that another process of this user owns, for `remove`. Raises OSError."""
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if not is_private(os.fstat(folder)):
                raise PermissionError(errno.EPERM, "a folder that others can enter", str(path))
            return cls(path, os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder))
        finally:
            os.close(folder)

    def remove(self) -> None:
        """Idempotent."""
        if not self._is_left:
            shutil.rmtree(self.path, ignore_errors=True)
        self.leave()

    def leave(self) -> None:
        """It stays, for another owner. Idempotent."""
        if not self._is_left:
            os.close(self._lock)
            os.close(self._aging_lock)
        self._is_left = True


@contextlib.contextmanager
def owned_folder(purpose: str) -> Iterator[Path]:
    """Makes a folder, and removes it at the end of the block."""
    folder = OwnedFolder.make(purpose)
    try:
        yield folder.path
    finally:
        folder.remove()


def sweep(*parents: Path) -> list[Path]:
    """Removes this user's folders in `parents` whose owner has ended; returns them.

    A shared temporary folder may contain links of other users: links are never followed, and a folder that others can
    access is left alone.
    """
    removed = []
    for parent in parents or temporary_folders():
        for path in sorted(parent.glob(f"{PREFIX}*-*")):
            with contextlib.suppress(OSError):
                if _remove_ownerless(path):
                    removed.append(path)
    return removed


def temporary_folders() -> list[Path]:
    """This process's temporary folder, and SHORT, for files that need a short path."""
    return list(dict.fromkeys([Path(tempfile.gettempdir()), SHORT]))


def is_private(facts: os.stat_result) -> bool:
    """Whether it is a folder that only this user can enter."""
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not stat.S_IMODE(facts.st_mode) & 0o077


def open_private(path: Path) -> int:
    """A descriptor of a file that only this user can access, for example to lock it; made if it is absent. Follows no
    link. Raises OSError."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _remove_ownerless(path: Path) -> bool:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        facts = os.fstat(folder)
        if not is_private(facts):
            return False
        try:
            lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        except FileNotFoundError:
            if abs(time.time() - facts.st_mtime) < _UNLOCKED_S:  # the clock may have gone back
                return False
            shutil.rmtree(path, ignore_errors=True)
            return True
        try:
            if _take(lock) is not True:
                return False
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
        return True
    finally:
        os.close(folder)


def _take(lock: int) -> bool | None:
    """None: this system or file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return True
