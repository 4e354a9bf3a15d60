"""The interface of a device that the transports between GPUs use. Pure.

Each call queues work on one of the device's own streams and returns. `wake` is called when the work is done. Work runs
concurrently and ends in any order, unless the caller sets an order: `behind` other work, or after the work that the
engine had queued at a fence. CUDA implements this protocol; tests without a GPU use a fake in plain memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from pdserve.engine.gpu.kernels.extent import StridedExtent

if TYPE_CHECKING:  # copy_limits has locks, and pure modules import this one
    from kvtransfer.devices.copy_limits import StagingBudget

COPY_S: Final = 10.0  # a copy that takes longer is assumed to be stuck
MESSAGE_S: Final = 3.0  # the same for a message, which is queued only when the peer is ready for it

Wake = Callable[[], None]
Fence = Any  # a point in the engine's stream: all work queued before it


class Copying(Protocol):
    """A copy in progress."""

    @property
    def is_done(self) -> bool:
        """Never blocks. Raises TransferFailed if the device has failed or takes too long."""
        ...

    def digest(self) -> bytes:
        """The checksum (8 bytes) of all blocks, in order; available once the copy is done."""
        ...

    def sums(self) -> Sequence[int]:
        """The checksum of each block, in order; available once the copy is done."""
        ...


class Blocks(Protocol):
    """Blocks of equal size in device memory: of this process's pool, of staging, or of another process's pool."""

    num_blocks: int
    block_bytes: int

    def narrowed(self, extent: StridedExtent) -> Blocks:
        """The extent's bytes of every block, with the runs concatenated."""
        ...

    def cut(self, first: int, count: int, num_bytes: int) -> Blocks:
        """Blocks first .. first + count - 1 as blocks of `num_bytes` bytes, as many as fit."""
        ...

    def close(self) -> None: ...


class Pinned(Protocol):
    """Pinned host memory, which the device reads and writes directly."""

    view: memoryview

    def close(self) -> None: ...


class Device(Protocol):
    name: str  # the same for all processes on one device
    budget: StagingBudget  # for the staging of connections

    def pool(self) -> Blocks:
        """The engine's."""
        ...

    def staging(self, num_blocks: int) -> Blocks: ...

    def gather(
        self, source: Blocks, sources: Sequence[int], target: Blocks, targets: Sequence[int], after: Fence
    ) -> Copying:
        """As `copy`, for work of the engine that is held. It waits for no other copy."""
        ...

    def pinned(self, num_bytes: int) -> Pinned:
        """Raises TransferFailed if the host has no memory left."""
        ...

    def unpin(self) -> None:
        """Returns the pinned memory that was closed to the host. May wait for the device."""
        ...

    def export(self) -> bytes:
        """The bytes with which another process on this host can open the pool."""
        ...

    def open(self, exported: bytes) -> Blocks:
        """Another process's pool. Raises TransferFailed."""
        ...

    def fence(self) -> Fence:
        """The current point of the engine's stream. Any thread may call it."""
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
        """Copies source blocks to target blocks of the same size, once the work before the fence `after` and the work
        `behind` is done. Without a target, only computes the digest."""
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
        """Copies the first bytes of the staging to or from host memory."""
        ...

    def move_blocks(
        self,
        blocks: Blocks,
        numbers: Sequence[int],
        host: Pinned,
        slots: Sequence[int],
        wake: Wake,
        *,
        is_to_host: bool,
        after: Fence | None = None,
        behind: Copying | None = None,
    ) -> Copying:
        """Copies blocks to or from slots of their size in host memory, in the order given."""
        ...

    def hold_engine(self, copying: Copying) -> None:
        """What the engine queues from now on runs after the copy. Does not block. Called on the engine's thread."""
        ...

    def drain(self) -> None:
        """Waits, without a time limit, until no work that was queued here accesses memory. Blocks that were returned
        before could be overwritten."""
        ...


class DeviceConnection(Protocol):
    """An ordered connection between the device memories of two processes, which must issue their calls in the same
    order."""

    def send(self, source: Blocks, num_bytes: int, wake: Wake) -> Copying:
        """Sends the first bytes of the blocks."""
        ...

    def receive(self, target: Blocks, num_bytes: int, wake: Wake) -> Copying: ...

    def close(self) -> None:
        """Aborts everything in progress; afterwards the connection does not access memory of this process. Raises
        TransferFailed if that cannot be ensured."""
        ...


class DeviceConnector(Protocol):
    version: str  # of the library; both processes must have the same

    def new_id(self) -> bytes:
        """The id with which both processes make a new connection."""
        ...

    def join(self, device: Any, unique_id: bytes, rank: int) -> DeviceConnection:
        """Connects to the other process. Blocking. Raises TransferFailed."""
        ...
