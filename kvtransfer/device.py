"""What the transports between GPUs need from a device. Pure.

Every call queues work on one of the device's own streams and returns; the caller is woken when the work is done. Work
is ordered only on request: `behind` other work, and after what the engine had queued at a fence. All other work runs
concurrently and ends in any order. The same protocol serves CUDA, and a stand-in in plain memory for tests without a
GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from pdserve.engine.gpu.extent import Extent

if TYPE_CHECKING:  # it locks, and what decides about transfers imports this module
    from kvtransfer.staging_budget import StagingBudget

COPY_S: Final = 10.0  # a copy that takes longer is assumed not to end
MESSAGE_S: Final = 3.0  # the same for a message, which is queued only when the other end is ready for it

Wake = Callable[[], None]
Fence = Any  # a point in the engine's stream: everything queued before it


class Copying(Protocol):
    """A copy in progress."""

    @property
    def is_done(self) -> bool:
        """Never blocks. Raises TransferFailed if the device has failed or takes too long."""
        ...

    def digest(self) -> bytes:
        """The checksum (8 bytes) of all blocks, in order; available once the copy is done."""
        ...


class Blocks(Protocol):
    """Blocks of equal size in device memory: this process's pool, staging, or another process's pool."""

    num_blocks: int
    block_bytes: int

    def narrowed(self, extent: Extent) -> Blocks:
        """Those bytes of every block, with its runs concatenated."""
        ...

    def cut(self, first: int, count: int, num_bytes: int) -> Blocks:
        """Blocks first .. first + count - 1 as blocks of another size, as many as fit."""
        ...

    def close(self) -> None: ...


class Pinned(Protocol):
    """Pinned host memory, which the device reads and writes directly."""

    view: memoryview

    def close(self) -> None: ...


class Device(Protocol):
    name: str  # the same for all processes on one device
    budget: StagingBudget  # of the staging that connections take

    def pool(self) -> Blocks:
        """The engine's."""
        ...

    def staging(self, num_blocks: int) -> Blocks: ...

    def pinned(self, num_bytes: int) -> Pinned:
        """Raises TransferFailed if the host has no memory left."""
        ...

    def export(self) -> bytes:
        """What another process on this host needs to open the pool."""
        ...

    def open(self, exported: bytes) -> Blocks:
        """Another process's pool. Raises TransferFailed."""
        ...

    def fence(self) -> Fence:
        """Now. Any thread may ask."""
        ...

    def copy(
        self,
        source: Blocks,
        sources: Sequence[int],
        target: Blocks | None,
        targets: Sequence[int],
        wake: Wake,
        after: Fence | None,
        behind: Copying | None = None,
    ) -> Copying:
        """Copies source blocks to target blocks of the same size, after the work before the fence and the work that it
        is `behind`; without a target, only computes their digest."""
        ...

    def move(
        self,
        staging: Blocks,
        host: Pinned,
        num_bytes: int,
        wake: Wake,
        *,
        is_to_host: bool,
        behind: Copying | None = None,
    ) -> Copying:
        """The first bytes of the staging, to or from host memory."""
        ...

    def drain(self) -> None:
        """Waits, without a time limit, until no work that was queued here accesses memory: a block that was returned
        earlier could be overwritten."""
        ...


class DeviceConnection(Protocol):
    """An ordered channel between the device memories of two processes. Both ends must issue their calls in the same
    order."""

    def send(self, source: Blocks, num_bytes: int, wake: Wake) -> Copying:
        """The first bytes of the blocks."""
        ...

    def receive(self, target: Blocks, num_bytes: int, wake: Wake) -> Copying: ...

    def close(self) -> None:
        """Aborts everything in progress; afterwards the connection does not access memory of this process. Raises
        TransferFailed if that cannot be ensured."""
        ...


class DeviceConnector(Protocol):
    version: str  # of the library; both ends must have the same

    def new_id(self) -> bytes:
        """The id from which both ends of a new connection are made."""
        ...

    def join(self, device: Any, unique_id: bytes, rank: int) -> DeviceConnection:
        """Connects to the other end. Blocking. Raises TransferFailed."""
        ...
