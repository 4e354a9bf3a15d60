"""What the paths between GPUs ask of a device. Pure.

Every call queues work on one of the device's own streams and returns; whoever asked is woken when it is done. Work has
an order only where it is asked for: `behind` other work, and after what the engine had queued at a fence. All else runs
side by side and ends in any order. So one protocol serves CUDA and a stand-in of plain memory, by which it is tested
where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from kvtransfer.staging_budget import StagingBudget
from pdserve.engine.gpu.extent import Extent

COPY_S: Final = 10.0  # a copy that takes longer will not end
LANE_S: Final = 3.0  # nor a message, which is asked for only when the other end is ready for it

Wake = Callable[[], None]
Fence = Any  # a moment of the engine's stream: all that it has queued until then


class Copying(Protocol):
    """Blocks on their way."""

    @property
    def is_done(self) -> bool:
        """Never waits. Raises TransferFailed where the device has failed or takes too long."""
        ...

    def digest(self) -> bytes:
        """8 bytes over the contents of all blocks, in order; once it is done."""
        ...


class Blocks(Protocol):
    """Blocks of equal size in device memory: this process's pool, staging, or another process's pool."""

    num_blocks: int
    block_bytes: int

    def narrowed(self, extent: Extent) -> Blocks:
        """Those bytes of every block, its runs one behind the other."""
        ...

    def cut(self, first: int, count: int, num_bytes: int) -> Blocks:
        """Blocks first .. first + count - 1 as blocks of another size, as many as fit."""
        ...

    def close(self) -> None: ...


class Pinned(Protocol):
    """Host memory that the device reads and writes by itself."""

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
        """Raises TransferFailed where the host has no memory left."""
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
        """Source blocks to target blocks of the same size, once what the fence stands for and the work in front have
        ended; without a target, their digest."""
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
        """Waits until nothing that was queued here touches memory, as long as it takes: a block that were handed back
        before could be written over."""
        ...


class Lane(Protocol):
    """Two processes' ordered channel between device memories. Both ends must ask in the same order."""

    def send(self, source: Blocks, num_bytes: int, wake: Wake) -> Copying:
        """The first bytes of the blocks."""
        ...

    def receive(self, target: Blocks, num_bytes: int, wake: Wake) -> Copying: ...

    def close(self) -> None:
        """Ends what is under way; afterwards nothing of the lane touches memory of this process. Raises
        TransferFailed where that cannot be had."""
        ...


class Lanes(Protocol):
    version: str  # of the library; both ends must have the same

    def new_id(self) -> bytes:
        """What both ends of a new lane are made with."""
        ...

    def join(self, device: Any, lane_id: bytes, rank: int) -> Lane:
        """Meets the other end. Blocking. Raises TransferFailed."""
        ...
