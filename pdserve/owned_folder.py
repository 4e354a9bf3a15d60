"""Temporary folders that end with the process that made them, or are removed by the next start of a cluster.

The owner holds a lock on a file in its folder. The kernel frees the lock when the owner ends, however it ends, so a
folder whose lock can be taken has no owner. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import Final, Self, final

try:
    import fcntl
except ImportError:  # a system without it has no locks of this kind, and nothing is removed there
    fcntl = None  # type: ignore[assignment]

PREFIX: Final = "pdserve-run-"
SHORT: Final = Path("/tmp")
_LOCK: Final = "owner.lock"
_TRIES: Final = 10
_UNLOCKED_S: Final = 3600.0  # a folder so old without a lock file was left between its creation and its lock


@final
class OwnedFolder:
    """Of mode 0700. `path` exists until remove(), or until sweep() after the death of this process."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def make(cls, purpose: str, parent: Path | None = None) -> Self:
        parent = parent or Path(tempfile.gettempdir())
        for _ in range(_TRIES):
            path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-", dir=parent))
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            if _take(lock) and (path / _LOCK).exists():
                return cls(path, lock)
            os.close(lock)  # a sweep came between the file and its lock, and has removed the folder
        raise AssertionError(f"{_TRIES} new folders in {parent} were removed at once")

    def remove(self) -> None:
        """Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep(*parents: Path) -> list[Path]:
    """Removes this user's folders in `parents` whose owner has ended; returns them.

    A shared temporary folder may hold traps of other users: links are never followed, and a folder that is not ours
    alone is left.
    """
    removed = []
    for parent in parents or temporary_folders():
        for path in sorted(parent.glob(f"{PREFIX}*-*")):
            with contextlib.suppress(OSError):
                if _remove_ownerless(path):
                    removed.append(path)
    return removed


def temporary_folders() -> list[Path]:
    """The one of this process, and SHORT, where what needs a short path lies."""
    return list(dict.fromkeys([Path(tempfile.gettempdir()), SHORT]))


def _remove_ownerless(path: Path) -> bool:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        facts = os.fstat(folder)
        if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
            return False
        try:
            lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        except FileNotFoundError:
            if time.time() - facts.st_mtime < _UNLOCKED_S:
                return False
            shutil.rmtree(path, ignore_errors=True)
            return True
        try:
            if not _take(lock):
                return False
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
        return True
    finally:
        os.close(folder)


def _take(lock: int) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
