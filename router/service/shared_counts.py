"""Counts of tenants that the routers of one launcher share: a file in their folder, which each maps into its memory.

A router locks the file for the few microseconds of one use. So a quota holds for all routers together exactly as for
one, and costs no message. The kernel releases the lock of a router that ends, even if it is killed.

The file has one row for each tenant. Each router has a column for its own answers in progress. When it starts, it
clears its column, because its predecessor's answers have ended with that. Until then, they count.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from typing import Final, final

from pdserve.config import MAX_ROUTERS
from pdserve.core.errors import Overloaded
from router.service.tenants import TenantCounts

FILE: Final = "tenants"
MAX_ROWS: Final = 16_384  # more than a key file has tenants, with room for those that were removed from it
_FULL: Final = float("inf")  # the level of a bucket of which nothing was taken
_NUM_ROWS: Final = Struct("<Q")  # rows in use, at the start of the file
_DIGEST_BYTES: Final = 16
_ROW: Final = Struct(f"<{_DIGEST_BYTES}sdd{MAX_ROUTERS}I")  # tenant, level, at_s, answers in progress of each router
_FIRST: Final = 64  # where the rows begin
_BUCKET: Final = Struct("<dd")
_BUCKET_AT: Final = _DIGEST_BYTES
_RUNNING: Final = Struct(f"<{MAX_ROUTERS}I")
_OWN: Final = Struct("<I")
_RUNNING_AT: Final = _BUCKET_AT + _BUCKET.size


@final
class SharedCountsFile:
    def __init__(self, folder: Path, member: int) -> None:
        """`member`: the number of this router among those that share the folder; no other running router has it."""
        self._column = _RUNNING_AT + member * _OWN.size
        self._file = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.ftruncate(self._file, _FIRST + MAX_ROWS * _ROW.size)  # a file that is not written takes no room
        self.data = mmap.mmap(self._file, 0)
        self.lock()
        for at in self._rows():
            _OWN.pack_into(self.data, at + self._column, 0)
        self.unlock()

    def counts_of(self, tenant: str) -> TenantCounts:
        return SharedCounts(self, blake2b(tenant.encode(), digest_size=_DIGEST_BYTES).digest(), self._column)

    def close(self) -> None:
        """Idempotent. Counts that are used afterwards stay in this process."""
        if not self.data.closed:
            self.data.close()
            os.close(self._file)

    @property
    def is_closed(self) -> bool:
        return self.data.closed

    def lock(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def unlock(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def row_of(self, digest: bytes) -> int:
        """The offset of the tenant's row, which may be new. While locked. Raises Overloaded."""
        end = _FIRST + self._num_rows() * _ROW.size
        at = self.data.find(digest, _FIRST, end)
        while at >= 0 and (at - _FIRST) % _ROW.size:  # the same bytes, by chance, elsewhere in a row
            at = self.data.find(digest, at + 1, end)
        if at < 0:
            at = self._new_row()
            _ROW.pack_into(self.data, at, digest, _FULL, 0.0, *([0] * MAX_ROUTERS))
        return at

    def _new_row(self) -> int:
        """A row that was never used, or that of the tenant whose last call was the longest ago."""
        count = self._num_rows()
        if count < MAX_ROWS:
            _NUM_ROWS.pack_into(self.data, 0, count + 1)
            return _FIRST + count * _ROW.size
        idle = [at for at in self._rows() if not any(_RUNNING.unpack_from(self.data, at + _RUNNING_AT))]
        if not idle:
            raise Overloaded(f"{MAX_ROWS} tenants have answers in progress", 1.0)
        return min(idle, key=lambda at: _BUCKET.unpack_from(self.data, at + _BUCKET_AT)[1])

    def _rows(self) -> range:
        return range(_FIRST, _FIRST + self._num_rows() * _ROW.size, _ROW.size)

    def _num_rows(self) -> int:
        return min(int(_NUM_ROWS.unpack_from(self.data)[0]), MAX_ROWS)


@final
class SharedCounts(TenantCounts):
    """One tenant's row, read at the start of a block, written at its end, and locked between."""

    __slots__ = ("_at", "_column", "_digest", "_file")

    def __init__(self, file: SharedCountsFile, digest: bytes, column: int) -> None:
        super().__init__()
        self._file, self._digest, self._column = file, digest, column
        self._at = _FIRST

    def __enter__(self) -> None:
        file = self._file
        if file.is_closed:  # the router has stopped serving
            return
        file.lock()
        try:
            data = file.data
            if data[self._at : self._at + _DIGEST_BYTES] != self._digest:
                self._at = file.row_of(self._digest)
            level, self.at_s = _BUCKET.unpack_from(data, self._at + _BUCKET_AT)
            self.level = None if level == _FULL else level
            own = _OWN.unpack_from(data, self._at + self._column)[0]
            self.others = sum(_RUNNING.unpack_from(data, self._at + _RUNNING_AT)) - own
        except BaseException:
            file.unlock()
            raise

    def __exit__(self, *error: object) -> None:
        file = self._file
        if file.is_closed:
            return
        level = _FULL if self.level is None else self.level
        _BUCKET.pack_into(file.data, self._at + _BUCKET_AT, level, self.at_s)
        _OWN.pack_into(file.data, self._at + self._column, max(self.running, 0))
        file.unlock()
