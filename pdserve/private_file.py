"""Opens files that this user writes and others may not read. Standard library only."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

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
