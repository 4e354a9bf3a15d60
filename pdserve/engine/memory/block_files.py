"""Files of KV blocks that outlive the process: their format, and what a crash or another program may have left in them.

A folder belongs to one process, which holds a lock in it. It has *segments*: files of a fixed size and number of slots,
which are filled one after the other, and removed whole, the oldest first. A segment begins with a header and a table:

    header  magic, number of slots, bytes of a block, number of the segment, fingerprint, crc32 of these
    table   for each slot: hash of the block, checksum of its contents, crc32 of these, of the place and of the header
    slots   the contents

An entry is written after its contents, but the system may store it before them. So each read compares the checksum:
a torn write is a miss. What does not have this format, or was written for other contents (another model, dtype or
layout), is removed or left alone, and never read. No function here follows a link, and none waits for a pipe.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import re
import stat
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, final

from pdserve.bounded_file import MOST_PARTS, Buffer, after, lock_folder, open_private_folder, write_all
from pdserve.core.errors import ConfigError
from pdserve.core.kv.hashing import HASH_BYTES

log = logging.getLogger(__name__)

MAGIC: Final = b"pdserve1"
SEGMENT_BYTES: Final = 64 * 2**20
MOST_SEGMENTS: Final = 128  # each is an open file
LEAST_SEGMENTS: Final = 8
MOST_FILES: Final = 10_000  # in the folder
MOST_NUMBER: Final = 10**15  # of a segment
SPEED_BYTES: Final = 16 * 2**20  # written and read to measure the device
GROUP_BYTES: Final = 16 * 2**20  # read by one call
PAGE: Final = 4096
_NAME: Final = re.compile(r"[0-9]{16}\.kv")
_HEADER: Final = struct.Struct("<8sIIQQ32s")  # the second integer is 0
_ENTRY: Final = struct.Struct(f"<{HASH_BYTES}s8s")
_CRC: Final = struct.Struct("<I")
_ENTRY_BYTES: Final = _ENTRY.size + _CRC.size
_OPEN: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


def _checksum() -> tuple[str, Callable[[], Any]]:
    try:
        from xxhash import xxh3_64
    except ImportError:
        return "blake2b-64", lambda: blake2b(digest_size=8)
    return "xxh3-64", xxh3_64


CHECKSUM, _new_checksum = _checksum()


def checksum_of(parts: Sequence[Buffer]) -> bytes:
    """8 bytes, of the parts one after the other."""
    state = _new_checksum()
    for part in parts:
        state.update(part)
    return bytes(state.digest())


class FileCalls:
    """The system's calls that read and write blocks. Tests inject faults here."""

    def read(self, descriptor: int, parts: Sequence[Buffer], offset: int) -> int:
        return os.preadv(descriptor, parts, offset)

    def write(self, descriptor: int, parts: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(descriptor, parts, offset)

    def sync(self, descriptor: int) -> None:
        os.fdatasync(descriptor)

    def reserve(self, descriptor: int, num_bytes: int) -> None:
        os.posix_fallocate(descriptor, 0, num_bytes)


@final
@dataclass(eq=False)
class Segment:
    """An open file. It is closed when nothing refers to it any more, which may be after it was removed."""

    number: int
    descriptor: int
    reader: int  # another descriptor of it, or the same
    header: bytes
    num_slots: int
    num_bytes: int
    hashes: dict[int, bytes] = field(default_factory=dict)  # of the blocks in its table, by slot

    def __post_init__(self) -> None:
        for descriptor in {self.descriptor, self.reader}:
            weakref.finalize(self, os.close, descriptor)


@dataclass(frozen=True, slots=True)
class Place:
    segment: Segment
    slot: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks in consecutive slots."""

    segment: Segment
    first_slot: int
    indexes: tuple[int, ...]  # which of the wanted blocks, in the order of the slots
    checksums: tuple[bytes, ...]


@final
class BlockFiles:
    """The blocks in one folder. One thread writes, one reads, and any may ask whether a block is there."""

    def __init__(
        self,
        path: Path,
        name: str,
        *,
        block_bytes: int,
        num_bytes: int,
        most_slots: int,
        contents: bytes,
        is_aligned: bool = False,
        calls: FileCalls | None = None,
        report: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        """`name`: of the folder in `path`, which is made if there is none. `contents` identifies everything that makes
        a block's bytes differ for equal hashes. `is_aligned`: each part of a block begins and ends at a page, in the
        file and in memory, so reads may go past the system's page cache. `report` is called with the segments that
        were read so far. Raises ConfigError."""
        self._calls = FileCalls() if calls is None else calls
        self._contents = blake2b(
            contents + b"\n" + CHECKSUM.encode(), digest_size=32, person=b"pdserve.kvfiles"
        ).digest()
        self.block_bytes = block_bytes
        self._is_direct = is_aligned and hasattr(os, "O_DIRECT")
        segment_bytes = min(max(SEGMENT_BYTES, num_bytes // MOST_SEGMENTS), num_bytes // LEAST_SEGMENTS)
        self.segment_slots = (segment_bytes - _table_bytes(1)) // (block_bytes + _ENTRY_BYTES)
        while self.segment_slots > 0 and self._size(self.segment_slots) > segment_bytes:  # the table ends at a page
            self.segment_slots -= 1
        if self.segment_slots < 1:
            least = LEAST_SEGMENTS * (_table_bytes(1) + block_bytes)
            raise ConfigError(
                "kv_disk_bytes", num_bytes, f"at least {least}, for {LEAST_SEGMENTS} blocks of this model"
            )
        self._most_bytes, self._most_slots = num_bytes, max(most_slots, 2 * self.segment_slots)
        self._places: dict[bytes, Place] = {}
        self._segments: list[Segment] = []  # the oldest first; the last is being filled
        self._num_filled = self.segment_slots  # slots of the last one
        self._next_number = 0
        self._left: list[bytes] = []
        self._guard = threading.Lock()
        opened = contextlib.ExitStack()
        self._release = weakref.finalize(self, opened.close)
        try:
            self._folder = open_private_folder(path, name, "kv_disk_path")
            opened.callback(os.close, self._folder)
            opened.callback(os.close, lock_folder(self._folder, path / name, "kv_disk_path"))
            self._scan(report)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._places

    def hashes(self) -> list[bytes]:
        with self._guard:
            return list(self._places)

    @property
    def num_slots(self) -> int:
        return min(self._most_bytes // self._size(self.segment_slots) * self.segment_slots, self._most_slots)

    @property
    def num_bytes(self) -> int:
        """Of all segments."""
        with self._guard:
            return sum(segment.num_bytes for segment in self._segments)

    def is_young(self, block_hash: bytes) -> bool:
        """Whether the block is there, and will stay for long: it is not in the oldest quarter."""
        with self._guard:
            place, segments = self._places.get(block_hash), self._segments
            if place is None or not self._is_full(segments):
                return place is not None
            return place.segment.number > segments[len(segments) // 4].number

    def close(self) -> None:
        """Forgets all blocks, and releases the folder for another process. No write may run. Idempotent."""
        with self._guard:
            self._places, self._segments = {}, []
        self._release()

    # -- reads --------------------------------------------------------------------------------------------------

    def groups(self, hashes: Sequence[bytes], parts_per_block: int) -> list[Group]:
        """The reads that supply the blocks, in the order of their places. Blocks that are not there are in none."""
        with self._guard:
            found = [(index, place) for index, one in enumerate(hashes) if (place := self._places.get(one))]
        found.sort(key=lambda one: (one[1].segment.number, one[1].slot))
        most = max(1, min(GROUP_BYTES // self.block_bytes, MOST_PARTS // parts_per_block))
        runs: list[list[tuple[int, Place]]] = []
        for index, place in found:
            last = runs[-1][-1][1] if runs else None
            is_next = last is not None and last.segment is place.segment and last.slot + 1 == place.slot
            if is_next and len(runs[-1]) < most:
                runs[-1].append((index, place))
            else:
                runs.append([(index, place)])
        return [
            Group(
                run[0][1].segment,
                run[0][1].slot,
                tuple(index for index, _ in run),
                tuple(place.checksum for _, place in run),
            )
            for run in runs
        ]

    def read(self, group: Group, blocks: Sequence[Sequence[Buffer]]) -> list[bool]:
        """Reads into the parts of each block of the group. Returns which are verified; the others have any contents.
        Raises OSError."""
        begin = offset = self._offset(group.segment, group.first_slot)
        end = begin + len(blocks) * self.block_bytes
        parts = [part for block in blocks for part in block]
        while offset < end:
            num_read = self._calls.read(group.segment.reader, parts, offset)
            if num_read <= 0:
                break
            offset += num_read
            parts = after(parts, num_read)
        whole = (offset - begin) // self.block_bytes
        return [index < whole and checksum_of(block) == group.checksums[index] for index, block in enumerate(blocks)]

    def read_bytes_s(self) -> float:
        """The measured speed of a sequential read, of a file that is not in the system's memory. 0.0 if it cannot be
        measured, for instance because the disk is full."""
        try:
            descriptor = os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=self._folder)
        except OSError:
            return 0.0
        reader = descriptor
        try:
            write_all(self._calls.write, descriptor, [os.urandom(SPEED_BYTES)], 0)
            self._calls.sync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            into = mmap.mmap(-1, SPEED_BYTES // 4)
            reader = self._reader(descriptor)
            began_s = time.perf_counter()
            for offset in range(0, SPEED_BYTES, len(into)):
                self._calls.read(reader, [into], offset)
            return SPEED_BYTES / max(1e-9, time.perf_counter() - began_s)
        except OSError:
            return 0.0
        finally:
            for one in {descriptor, reader}:
                os.close(one)

    def forget(self, block_hash: bytes, segment: Segment | None = None, slot: int = -1) -> None:
        """The block is not to be used; with a place, only if it is still there, and not written anew elsewhere."""
        with self._guard:
            place = self._places.get(block_hash)
            if place is not None and (segment is None or (place.segment, place.slot) == (segment, slot)):
                del self._places[block_hash]

    # -- writes -------------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """How many blocks the next call of `write` takes."""
        return self.segment_slots - self._num_filled or self.segment_slots

    def take_left(self) -> list[bytes]:
        """The blocks that have left for others since the last call."""
        left, self._left = self._left, []
        return left

    def write(self, blocks: Sequence[tuple[bytes, Buffer]]) -> list[Place]:
        """Writes at most `room` blocks, each of one run of bytes, which `add` makes visible. Raises OSError."""
        if self._num_filled == self.segment_slots:
            self._begin_segment()
        segment, slot = self._segments[-1], self._num_filled
        assert len(blocks) <= self.segment_slots - slot, "more blocks than the segment has room for"
        self._num_filled += len(blocks)  # also after a failure: these slots may have any contents
        write_all(
            self._calls.write, segment.descriptor, [contents for _, contents in blocks], self._offset(segment, slot)
        )
        checksums = [checksum_of([contents]) for _, contents in blocks]
        entries = b"".join(
            _entry(block_hash, checksum, slot + index, segment.header)
            for index, ((block_hash, _), checksum) in enumerate(zip(blocks, checksums, strict=True))
        )
        write_all(self._calls.write, segment.descriptor, [entries], _HEADER.size + _CRC.size + slot * _ENTRY_BYTES)
        segment.hashes.update(enumerate((block_hash for block_hash, _ in blocks), slot))
        return [Place(segment, slot + index, checksum) for index, checksum in enumerate(checksums)]

    def add(self, block_hash: bytes, place: Place) -> None:
        with self._guard:
            self._places[block_hash] = place

    def erase(self, hashes: Collection[bytes]) -> None:
        """Removes the blocks from all tables, so that the next process does not find them. Raises OSError."""
        for segment in self._segments:
            slots = [slot for slot, one in segment.hashes.items() if one in hashes]
            for slot in slots:
                at = _HEADER.size + _CRC.size + slot * _ENTRY_BYTES
                write_all(self._calls.write, segment.descriptor, [bytes(_ENTRY_BYTES)], at)
            if slots:
                self._calls.sync(segment.descriptor)
            for slot in slots:
                del segment.hashes[slot]

    def sync(self) -> None:
        """Waits until what was written is stored. Raises OSError; then the newest segment is given up."""
        if not self._segments:
            return
        try:
            self._calls.sync(self._segments[-1].descriptor)
            if self._is_direct:  # host memory is for the host tier
                os.posix_fadvise(self._segments[-1].descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:  # the system no longer knows which of the bytes are stored; those that are not are misses
            self._num_filled = self.segment_slots
            raise

    def _begin_segment(self) -> None:
        while self._is_full(self._segments):
            self._remove_oldest()
        number = self._next_number
        self._next_number += 1
        name = _file_name(number)
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=self._folder)
        slots = self.segment_slots
        reader = self._reader(descriptor)
        segment = Segment(number, descriptor, reader, self._header(number, slots), slots, self._size(slots))
        try:
            self._calls.reserve(descriptor, segment.num_bytes)
            write_all(self._calls.write, descriptor, [segment.header], 0)
        except OSError:
            os.unlink(name, dir_fd=self._folder)
            raise
        with self._guard:
            self._segments.append(segment)
        self._num_filled = 0

    def _is_in(self, block_hash: bytes, segment: Segment) -> bool:
        place = self._places.get(block_hash)
        return place is not None and place.segment is segment

    def _remove_oldest(self) -> None:
        with self._guard:
            segment = self._segments.pop(0)
            left = [one for one in set(segment.hashes.values()) if self._is_in(one, segment)]
            for block_hash in left:
                self._places.pop(block_hash, None)
        self._left += left
        _unlink(_file_name(segment.number), self._folder)

    # -- what is there at the start ---------------------------------------------------------------------------

    def _scan(self, report: Callable[[int, int], None]) -> None:
        names = sorted(self._names())
        for done, name in enumerate(names):
            self._next_number = _number_of(name) + 1
            segment = self._opened(name)
            if segment is not None:
                self._segments.append(segment)
                for block_hash, place in self._read_table(segment):
                    self._places[block_hash] = place  # a newer segment's, if several have it
                    segment.hashes[place.slot] = block_hash
            report(done + 1, len(names))
        while self._segments and self._is_above(self._segments):
            self._remove_oldest()
        self._left.clear()
        if self._segments and self._segments[-1].num_slots == self.segment_slots:  # it is filled further
            self._num_filled = self._used_slots(self._segments[-1])

    def _names(self) -> Iterator[str]:
        with os.scandir(self._folder) as entries:
            for count, entry in enumerate(entries):
                if count >= MOST_FILES:
                    raise ConfigError("kv_disk_path", f"a folder with over {MOST_FILES} entries", "one of this worker")
                if _NAME.fullmatch(entry.name) and _number_of(entry.name) < MOST_NUMBER:
                    yield entry.name

    def _opened(self, name: str) -> Segment | None:
        """A segment that can be read; None if the file is none. What this process's user has left unusable is removed.
        Nothing else is touched."""
        try:
            descriptor = os.open(name, os.O_RDWR | _OPEN, dir_fd=self._folder)
        except OSError as error:
            log.warning("a file of the disk tier was left alone", extra={"file": name, "error": error.strerror})
            return None
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_nlink != 1:
            os.close(descriptor)
            log.warning("a file of the disk tier was left alone", extra={"file": name, "error": "not a file of ours"})
            return None
        header = bytearray(_HEADER.size + _CRC.size)
        try:
            num_read = self._calls.read(descriptor, [header], 0)
        except OSError:
            num_read = 0
        slots = _HEADER.unpack_from(header)[1]
        reader = self._reader(descriptor)
        segment = Segment(_number_of(name), descriptor, reader, bytes(header), slots, facts.st_size)
        is_ours = num_read == len(header) and header == self._header(segment.number, slots)
        is_whole = 0 < slots <= self._most_slots and facts.st_size == self._size(slots) <= self._most_bytes
        if not is_ours or not is_whole or len(self._segments) > 2 * MOST_SEGMENTS:
            log.info("a file of the disk tier was removed: another model, layout or size", extra={"file": name})
            _unlink(name, self._folder)
            return None
        os.fchmod(descriptor, 0o600)
        return segment

    def _reader(self, descriptor: int) -> int:
        """A descriptor of the same file that reads past the page cache, where that is possible: on an NVMe disk this is
        several times faster. Otherwise the same one."""
        if self._is_direct:
            with contextlib.suppress(OSError):
                return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        return descriptor

    def _read_table(self, segment: Segment) -> Iterator[tuple[bytes, Place]]:
        table = bytearray(segment.num_slots * _ENTRY_BYTES)
        try:
            num_read = self._calls.read(segment.descriptor, [table], _HEADER.size + _CRC.size)
        except OSError as error:
            log.warning("a file of the disk tier cannot be read", extra={"error": error.strerror})
            return
        for slot in range(num_read // _ENTRY_BYTES):
            entry = bytes(table[slot * _ENTRY_BYTES : (slot + 1) * _ENTRY_BYTES])
            block_hash, checksum = _ENTRY.unpack_from(entry)
            if entry == _entry(block_hash, checksum, slot, segment.header):
                yield block_hash, Place(segment, slot, checksum)

    def _used_slots(self, segment: Segment) -> int:
        """How many slots may have an entry in the table, valid or not. All, if it cannot be read."""
        table = bytearray(segment.num_slots * _ENTRY_BYTES)
        try:
            num_read = self._calls.read(segment.descriptor, [table], _HEADER.size + _CRC.size)
        except OSError:
            num_read = 0
        used = -(-len(table.rstrip(b"\0")) // _ENTRY_BYTES)
        return used if num_read == len(table) else segment.num_slots

    # -- places ---------------------------------------------------------------------------------------------------

    def _is_full(self, segments: Sequence[Segment]) -> bool:
        """Whether there is no room for another segment."""
        return self._is_above(segments, self._size(self.segment_slots), self.segment_slots)

    def _is_above(self, segments: Sequence[Segment], num_bytes: int = 0, num_slots: int = 0) -> bool:
        """Whether the segments, and so many bytes and slots, are more than there may be."""
        return (
            sum(one.num_bytes for one in segments) + num_bytes > self._most_bytes
            or sum(one.num_slots for one in segments) + num_slots > self._most_slots
        )

    def _header(self, number: int, num_slots: int) -> bytes:
        body = _HEADER.pack(MAGIC, num_slots, 0, self.block_bytes, number, self._contents)
        return body + _CRC.pack(zlib.crc32(body))

    def _offset(self, segment: Segment, slot: int) -> int:
        return _table_bytes(segment.num_slots) + slot * self.block_bytes

    def _size(self, num_slots: int) -> int:
        return _table_bytes(num_slots) + num_slots * self.block_bytes


def _table_bytes(num_slots: int) -> int:
    """Of header and table, up to a page."""
    return -(-(_HEADER.size + _CRC.size + num_slots * _ENTRY_BYTES) // PAGE) * PAGE


def _entry(block_hash: bytes, checksum: bytes, slot: int, header: bytes) -> bytes:
    body = _ENTRY.pack(block_hash, checksum)
    return body + _CRC.pack(zlib.crc32(body + _CRC.pack(slot) + header))


def _file_name(number: int) -> str:
    return f"{number:016d}.kv"


def _number_of(name: str) -> int:
    return int(name.removesuffix(".kv"))


def _unlink(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError as error:
        log.warning("a file of the disk tier cannot be removed", extra={"file": name, "error": error.strerror})
