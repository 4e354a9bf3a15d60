"""How a tier below memory (slow_tier.py) reaches the blocks of a pool: it writes copies in rows of host memory, and
reads into the pool. This file has the path of pools on the host. That of pools on GPUs is
kvtransfer/device_staging.py.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol, TypeAlias, final

import numpy as np

from pdserve.bounded_file import Buffer
from pdserve.core.errors import ConfigError, TransferFailed
from pdserve.engine.interface import KvPool
from pdserve.engine.memory.block_files import PAGE
from pdserve.engine.memory.host import HostCopies, pool_blocks

QUEUE_BYTES: Final = 128 * 2**20  # of copies that wait to be written

Ready = Callable[[bool], None]  # the row has the block, or false: it has something else, and nothing writes to it


class Landing(Protocol):
    """Memory for a read of some blocks."""

    @property
    def parts(self) -> Sequence[Sequence[Buffer]]:
        """The memory of each block, in parts."""
        ...

    def put(self, at: int, contents: bytes) -> None:
        """Fills the memory of one block."""
        ...

    def into_pool(self, good: Sequence[bool]) -> list[bool]:
        """Which of the good blocks are in the pool, and verified there. Nothing writes to any of the blocks after it.
        May wait."""
        ...


class Staging(Protocol):
    """Those of its methods that take blocks are called on the engine's thread, and wait for nothing."""

    @property
    def num_rows(self) -> int: ...

    @property
    def room(self) -> int:
        """How many blocks of the pool it can take now."""
        ...

    @property
    def parts_per_block(self) -> int:
        """Of a `Landing`."""
        ...

    @property
    def most_read(self) -> int:
        """Blocks of a `Landing`."""
        ...

    @property
    def is_aligned(self) -> bool:
        """Whether each part of a `Landing` begins and ends at a page."""
        ...

    def row(self, row: int) -> Any:
        """An array of bytes."""
        ...

    def take_block(self, block: int, row: int, ready: Ready) -> None:
        """A block of the pool is copied to a row. `ready` is called once, on any thread."""
        ...

    def take_copy(self, copy: int, row: int, ready: Ready) -> None:
        """A slot of the host tier is copied to a row."""
        ...

    def start_copies(self) -> None:
        """What was taken since the last call is copied before anything that is queued from now on writes to it."""
        ...

    def fence(self) -> Any:
        """What the engine has queued so far, which may use blocks that a read fills later. Raises if the device has
        failed."""
        ...

    def landing(self, blocks: Sequence[int], fence: Any) -> AbstractContextManager[Landing]:
        """Called on the threads of reads."""
        ...

    def close(self, within_s: float) -> None:
        """Nothing is read or written any more. Idempotent."""
        ...


class CopyCount(Protocol):
    """A host tier."""

    @property
    def num_slots(self) -> int: ...


#: Makes the staging of a pool on a device, of which a host tier has copies, for so many threads that read. Raises
#: TransferFailed.
OpenStaging: TypeAlias = Callable[[KvPool, Any, int], Staging]


def staging_of(
    pool: KvPool,
    copies: CopyCount | None,
    num_readers: int,
    on_device: OpenStaging | None,
    setting: str,
    value: str,
) -> Staging:
    """Raises ConfigError for the setting if there is none."""
    if pool.is_on_host:
        assert copies is None or isinstance(copies, HostCopies)
        return HostStaging(pool, copies, most_rows(pool))
    if on_device is None:
        raise ConfigError(setting, value, "none for a pool on a device that this worker cannot copy from")
    try:
        return on_device(pool, copies, num_readers)
    except TransferFailed as failed:
        raise ConfigError(setting, value, f"none for this pool: {failed.message}") from failed


def most_rows(pool: KvPool) -> int:
    return max(1, QUEUE_BYTES // pool.block_bytes)


def is_aligned(blocks: Any) -> bool:
    """Whether each run of bytes begins and ends at a page."""
    return bool(blocks.ctypes.data % PAGE == 0 and blocks.shape[-1] % PAGE == 0)


@final
class HostStaging:
    """Of a pool on the host, whose blocks are copied at once, and which a read fills directly."""

    most_read = sys.maxsize

    def __init__(self, pool: KvPool, copies: HostCopies | None, num_rows: int) -> None:
        self.num_rows = self.room = num_rows
        self._blocks, self._copies = pool_blocks(pool), copies
        self.parts_per_block = int(self._blocks.shape[0])
        self.is_aligned = is_aligned(self._blocks)
        memory = mmap.mmap(-1, num_rows * pool.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._rows = np.frombuffer(memory, np.uint8).reshape(num_rows, pool.block_bytes)

    def row(self, row: int) -> Any:
        return self._rows[row]

    def take_block(self, block: int, row: int, ready: Ready) -> None:
        runs = self._blocks[:, block]
        self._rows[row].reshape(runs.shape)[:] = runs
        ready(True)

    def take_copy(self, copy: int, row: int, ready: Ready) -> None:
        assert self._copies is not None, "there is no host tier"
        self._rows[row] = self._copies.copy_of(copy).reshape(-1)
        ready(True)

    def start_copies(self) -> None:
        pass

    def fence(self) -> None:
        return None

    @contextmanager
    def landing(self, blocks: Sequence[int], fence: None) -> Iterator[Landing]:
        yield _InPool([self._blocks[:, block] for block in blocks])

    def close(self, within_s: float) -> None:
        pass


@final
class _InPool:
    def __init__(self, blocks: Sequence[Any]) -> None:
        self._blocks = blocks

    @property
    def parts(self) -> list[list[Buffer]]:
        return [list(runs) for runs in self._blocks]

    def put(self, at: int, contents: bytes) -> None:
        runs = self._blocks[at]
        runs[:] = np.frombuffer(contents, np.uint8).reshape(runs.shape)

    def into_pool(self, good: Sequence[bool]) -> list[bool]:
        return list(good)
