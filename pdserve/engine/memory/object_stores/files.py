"""Shared stores of files, in a folder or in what fsspec reaches, such as a bucket. Workers remove the oldest files."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, final

from pdserve.bounded_file import write_all
from pdserve.core.errors import ConfigError
from pdserve.core.installation import advice
from pdserve.core.urls import hide_password
from pdserve.engine.memory.object_stores.interface import CALL_S, FULL, ROOT, without_credentials

PROBES: Final = 8  # names that one round of a search asks for
SWEEPS: Final = 16  # a worker looks for old objects after writing 1/SWEEPS of the bound
STALE_S: Final = 3600.0  # after which the file of a writer that was killed is removed,
TOUCH_S: Final = 3600.0  # and after which a read renews an object's age
MOST_LISTED: Final = 2**17  # objects at a time, which bounds the memory for a listing
PARTS: Final = tuple(f"{number:02x}" for number in range(256))  # by the first digits of names, thus of equal sizes
BUCKETS: Final = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss")  # which have no folders
_NAME: Final = re.compile(r"[0-9a-f]{32}")
_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


@dataclass(frozen=True, slots=True)
class Listed:
    path: str
    num_bytes: int
    used_s: float
    is_whole: bool = True  # False: the file of a writer that has not finished


def too_old(listed: Iterable[Listed], most_bytes: int, now_s: float) -> list[str]:
    """Which to remove so that an eighth of the bound is free: the oldest, and what killed writers have left. Pure."""
    removed = [one.path for one in listed if not one.is_whole and now_s - one.used_s > STALE_S]
    whole = sorted((one for one in listed if one.is_whole), key=lambda one: one.used_s)
    excess = sum(one.num_bytes for one in whole) - most_bytes
    if excess > 0:
        excess += most_bytes // 8
    for one in whole:
        if excess <= 0:
            break
        removed.append(one.path)
        excess -= one.num_bytes
    return removed


class FileStore(ABC):
    """Objects as files of ROOT/<part>/<room>/<name>. The bound is for all rooms; each worker looks after it."""

    most_got = 1

    def __init__(self, room: str, object_bytes: int, most_bytes: int) -> None:
        self._room, self._object_bytes, self._most_bytes = room, object_bytes, most_bytes
        self._unswept = most_bytes  # so that it is looked at after each start
        self._to_sweep: list[str] = []  # parts
        self._is_full = False

    @abstractmethod
    def _size(self, name: str) -> int | None:
        """In bytes; None: there is none. Raises OSError."""

    @abstractmethod
    def _read(self, name: str) -> bytes | None:
        """At most a byte more than an object has. Raises OSError."""

    @abstractmethod
    def _write(self, name: str, contents: bytes) -> None:
        """Whole or not at all. Raises OSError."""

    @abstractmethod
    def _remove(self, path: str) -> None:
        """If it is there. Raises OSError."""

    @abstractmethod
    def _list(self, part: str) -> Iterator[Listed]:
        """Of all rooms. Raises OSError."""

    @abstractmethod
    def close(self) -> None: ...

    def num_found(self, names: Sequence[str]) -> int:
        """Asks for few: a store that has an object has those before it, or a read finds out."""
        found, missing = 0, len(names)  # the first `found` are there, and number `missing` is not
        while found < missing:
            step = max(1, (missing - found) // PROBES)
            for at in range(found + step - 1, missing, step):
                if self._size(names[at]) != self._object_bytes:
                    missing = at
                    break
                found = at + 1
        return found

    def are_there(self, names: Sequence[str]) -> list[bool]:
        return [self._size(name) == self._object_bytes for name in names]

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        found = [self._read(name) for name in names]
        return [one if one is not None and len(one) == self._object_bytes else None for one in found]

    def put(self, objects: Sequence[tuple[str, bytes]]) -> None:
        self._unswept += len(objects) * self._object_bytes
        try:
            for name, contents in objects:
                self._write(name, contents)
        except OSError as error:
            self._is_full = self._is_full or error.errno in FULL
            raise

    def make_room(self) -> None:
        if self._is_full or self._unswept >= self._most_bytes // SWEEPS:
            self._unswept = 0
            self._to_sweep += [one for one in PARTS if one not in self._to_sweep]
        if self._to_sweep:
            self._sweep()

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._remove(path_of(self._room, name))

    def _sweep(self) -> None:
        """Of the next parts, as many as have about MOST_LISTED objects. They get their share of the bound. The others
        follow with the next objects that are written."""
        listed: list[Listed] = []
        is_cut, num_parts = False, 0
        while num_parts < len(self._to_sweep) and len(listed) <= MOST_LISTED // 2:
            try:
                found = list(islice(self._list(self._to_sweep[num_parts]), MOST_LISTED))
            except OSError:
                self._to_sweep.append(self._to_sweep.pop(num_parts))  # so that others get their turn
                raise
            is_cut = is_cut or len(found) == MOST_LISTED
            listed += found
            num_parts += 1
        most_bytes = self._most_bytes * num_parts // len(PARTS)
        if is_cut or self._is_full:  # there may be any number of others, or other files
            most_bytes = min(most_bytes, sum(one.num_bytes for one in listed) - 1)
        for path in too_old(listed, most_bytes, time.time()):
            self._remove(path)
        del self._to_sweep[:num_parts]
        self._is_full = self._is_full and bool(self._to_sweep)


def path_of(room: str, name: str) -> str:
    return f"{ROOT}/{name[:2]}/{room}/{name}"


@final
class FolderStore(FileStore):
    """Files of mode 0600 in folders of mode 0700. No link below the folder is followed."""

    most_got = 4

    def __init__(self, path: Path, room: str, object_bytes: int, most_bytes: int) -> None:
        """Raises OSError."""
        super().__init__(room, object_bytes, most_bytes)
        self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._is_open = True
        with contextlib.ExitStack() as opened:
            opened.callback(self.close)
            try:
                self._make(ROOT)
            except OSError as error:
                if error.errno not in FULL:  # else each write tries it
                    raise
            opened.pop_all()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._root)

    def _make(self, path: str) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700, dir_fd=self._root)

    def _folder(self, path: str) -> int:
        """A descriptor of a folder below the root. Raises OSError, also if a part of it is a link."""
        folder = self._root
        for part in path.split("/"):
            try:
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | _FLAGS, dir_fd=folder)
            finally:
                if folder != self._root:
                    os.close(folder)
            folder = inner
        return folder

    @contextlib.contextmanager
    def _opened_folder(self, path: str) -> Iterator[int]:
        folder = self._folder(path)
        try:
            yield folder
        finally:
            os.close(folder)

    def _size(self, name: str) -> int | None:
        try:
            with self._opened_folder(path_of(self._room, name)[:-33]) as folder:
                facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return facts.st_size if stat.S_ISREG(facts.st_mode) else None

    def _read(self, name: str) -> bytes | None:
        try:
            with self._opened_folder(path_of(self._room, name)[:-33]) as folder:
                descriptor = os.open(name, os.O_RDONLY | _FLAGS, dir_fd=folder)
        except FileNotFoundError:
            return None
        try:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                return None
            if abs(time.time() - facts.st_mtime) > TOUCH_S:  # the clock may have gone back
                with contextlib.suppress(OSError):
                    os.utime(descriptor)
            parts, left = [], self._object_bytes + 1
            while left > 0 and (part := os.read(descriptor, left)):
                parts.append(part)
                left -= len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)
        finally:
            os.close(descriptor)

    def _write(self, name: str, contents: bytes) -> None:
        path = path_of(self._room, name)[:-33]
        for outer in (ROOT, path.rpartition("/")[0], path):
            self._make(outer)
        with self._opened_folder(path) as folder:
            unfinished = f".{name}.{secrets.token_hex(8)}"
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=folder)
            try:
                try:
                    write_all(os.pwritev, descriptor, [memoryview(contents)], 0)
                finally:
                    os.close(descriptor)
                # The system may store the name before the contents: such an object is not verified.
                os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(unfinished, dir_fd=folder)
                raise

    def _remove(self, path: str) -> None:
        folder_path, _, name = path.rpartition("/")
        with contextlib.suppress(FileNotFoundError), self._opened_folder(folder_path) as folder:
            os.unlink(name, dir_fd=folder)

    def _list(self, part: str) -> Iterator[Listed]:
        for room, _ in self._entries(f"{ROOT}/{part}"):
            for name, facts in self._entries(f"{ROOT}/{part}/{room}"):
                is_whole = _NAME.fullmatch(name) is not None
                if stat.S_ISREG(facts.st_mode) and (is_whole or name.startswith(".")):
                    yield Listed(f"{ROOT}/{part}/{room}/{name}", facts.st_size, facts.st_mtime, is_whole)

    def _entries(self, path: str) -> Iterator[tuple[str, os.stat_result]]:
        """Names and facts; none if it is no folder. Others may remove files meanwhile."""
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            self._opened_folder(path) as folder,
            os.scandir(folder) as entries,
        ):
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    facts = os.stat(entry.name, dir_fd=folder, follow_symlinks=False)
                    yield entry.name, facts


@final
class FsspecStore(FileStore):
    """Objects of a bucket, or of another file system that fsspec reaches, which writes an object whole."""

    def __init__(self, url: str, room: str, object_bytes: int, most_bytes: int) -> None:
        """Raises ConfigError."""
        super().__init__(room, object_bytes, most_bytes)
        self._url = url
        shown, scheme = hide_password(url), url.partition("://")[0]
        self._is_bucket = scheme in BUCKETS
        try:
            import fsspec
        except ImportError:
            raise ConfigError("kv_store", shown, f"the package fsspec; {advice('store')}") from None
        timeouts = {"connect_timeout": CALL_S, "read_timeout": CALL_S, "retries": {"max_attempts": 1}}
        is_s3 = scheme in ("s3", "s3a")
        options = {"config_kwargs": timeouts} if is_s3 else {}
        try:
            fsspec.get_filesystem_class(scheme)
            self._files, self._path = fsspec.core.url_to_fs(url, **options)
            # Not as an option, which some file systems hand to a client that refuses it.
            self._files.dircache.use_listings_cache = False
            if is_s3:
                self._files.retries = 1  # which s3fs would make beside those of its client
        except ImportError as error:
            how = advice("store") if is_s3 else "install it beside fsspec"
            expected = f"a package that reaches {scheme}:// ({error}); {how}"
            raise ConfigError("kv_store", shown, expected) from None
        except Exception as error:  # of any file system
            reason = without_credentials(str(error), url)
            expected = f"redis://, file:// or a URL of fsspec, such as s3://BUCKET/PATH ({reason})"
            raise ConfigError("kv_store", shown, expected) from None

    def close(self) -> None:
        pass

    def _size(self, name: str) -> int | None:
        with self._as_os_error():
            try:
                return int(self._files.info(self._at(path_of(self._room, name)))["size"])
            except FileNotFoundError:
                return None

    def _read(self, name: str) -> bytes | None:
        with self._as_os_error():
            try:
                path = self._at(path_of(self._room, name))
                return bytes(self._files.cat_file(path, start=0, end=self._object_bytes + 1))
            except FileNotFoundError:
                return None

    def _write(self, name: str, contents: bytes) -> None:
        with self._as_os_error():
            path = self._at(path_of(self._room, name))
            if not self._is_bucket:
                self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(path, contents)

    def _remove(self, path: str) -> None:
        with self._as_os_error(), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._at(path))

    def _list(self, part: str) -> Iterator[Listed]:
        with self._as_os_error():
            try:
                found = self._files.find(self._at(f"{ROOT}/{part}"), detail=True)
            except FileNotFoundError:
                return
            base = self._at("").lstrip("/")
            for path, facts in found.items():
                used = facts.get("LastModified") or facts.get("mtime") or facts.get("created") or 0.0
                used_s = used.timestamp() if hasattr(used, "timestamp") else float(used)
                if _NAME.fullmatch(path.rpartition("/")[2]):
                    yield Listed(path.lstrip("/").removeprefix(base), int(facts["size"]), used_s)

    def _at(self, path: str) -> str:
        return f"{self._path.rstrip('/')}/{path}"

    @contextlib.contextmanager
    def _as_os_error(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:  # each file system has its own
            raise OSError(without_credentials(f"{type(error).__name__}: {error}", self._url)) from None
