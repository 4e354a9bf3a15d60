"""What the paths between GPUs ask of a device. Pure.

Every call queues work on a stream of the device's own and returns; whoever asked is woken when it is done. So one
protocol serves CUDA and a stand-in of plain memory, by which it is tested where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Wake = Callable[[], None]


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

    def close(self) -> None: ...


class Device(Protocol):
    name: str  # the same for all processes on one device

    def pool(self) -> Blocks:
        """The engine's."""
        ...

    def staging(self, num_blocks: int) -> Blocks: ...

    def export(self) -> bytes:
        """What another process on this host needs to open the pool."""
        ...

    def open(self, exported: bytes) -> Blocks:
        """Another process's pool. Raises TransferFailed."""
        ...

    def copy(
        self, source: Blocks, sources: Sequence[int], target: Blocks | None, targets: Sequence[int], wake: Wake
    ) -> Copying:
        """Source blocks to target blocks, after what the engine has queued so far; without a target, their digest."""
        ...

    def drain(self) -> None:
        """Waits until nothing that was queued here touches memory, as long as it takes: a block that were handed back
        before could be written over."""
        ...


class Lane(Protocol):
    """Two processes' ordered channel between device memories. Both ends must ask in the same order."""

    def send(self, source: Blocks, block: int, num_bytes: int, wake: Wake) -> Copying: ...

    def receive(self, target: Blocks, block: int, num_bytes: int, wake: Wake) -> Copying: ...

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
