"""What the transports between GPUs share: a pool's device, preparation of its kernels, packed chunks, and staging
slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import final

from kvtransfer.devices.copy_limits import CopyLimits, StagingShare
from kvtransfer.protocol.device import Blocks, Copying, Device, Fence, Pinned
from kvtransfer.protocol.frames import BadFrame
from kvtransfer.protocol.plan import Part, blocks_per_chunk
from kvtransfer.protocol.send_transfers import StaleSource
from kvtransfer.protocol.transfers import Job
from kvtransfer.transports.common.interface import ReceiveLink, SendLink
from pdserve.engine.gpu.kernels.extent import StridedExtent
from pdserve.engine.interface import KvPool

DeviceOf = Callable[[KvPool], Device]


def wake_nobody() -> None:
    """The `wake` of work that is followed by other work, which wakes the thread."""


class OnDevice:
    is_for_hosts, is_for_devices = False, True
    divides_blocks = True  # if the parts of a block are equal runs of bytes
    packages: tuple[str, ...] = ()  # packages that it needs besides torch and Triton

    def __init__(self, device_of: DeviceOf | None = None) -> None:
        """`device_of` replaces CUDA in tests."""
        self._device_of = device_of

    def why_not(self, *, is_on_host: bool = False) -> str:
        if is_on_host or self._device_of is not None:
            return ""
        from kvtransfer.devices.cuda import why_no_cuda

        return why_no_cuda(*self.packages)

    def prepare(self, pool: KvPool, runs: Sequence[StridedExtent] = (), limits: CopyLimits | None = None) -> None:
        """Compiles and loads the copy kernels, with all runs of a block that will be copied.

        This takes seconds. It is done before there are connections, because these would be silent meanwhile and be
        assumed dead. A kernel is compiled for each combination of alignments, so one run of each is copied: to its
        place in another block, and into a block of its own size and back.
        """
        device = self.device(pool, limits)
        source, scratch = device.pool(), device.staging(2)
        last: Copying | None = None  # copies run one after the other, because they share scratch memory
        try:
            last = device.copy(source, [0], None, (), wake_nobody, None, last)
            last = device.copy(source, [0], scratch, [0], wake_nobody, None, last)
            for run in _one_of_each(runs):
                part, dense, placed = source.narrowed(run), scratch.cut(0, 1, run.num_bytes), scratch.narrowed(run)
                last = device.copy(part, [0], None, (), wake_nobody, None, last)
                for one, sources, other, targets in ((part, [0], placed, [1]), (part, [0], dense, [0])):
                    last = device.copy(one, sources, other, targets, wake_nobody, None, last)
                last = device.copy(dense, [0], placed, [1], wake_nobody, None, last)
        finally:
            device.drain()
            scratch.close()

    def fence(self, pool: KvPool) -> Fence:
        """The current point of the engine's stream."""
        return self.device(pool).fence()

    def device(self, pool: KvPool, limits: CopyLimits | None = None) -> Device:
        """`limits` are set by the first call for a pool."""
        if self._device_of is not None:
            return self._device_of(pool)
        from kvtransfer.devices.cuda import device_of

        return device_of(pool, limits)


def extents_of_part(link: ReceiveLink, part: Part) -> tuple[StridedExtent, StridedExtent]:
    """The part's bytes in the blocks of the sender and of the receiver. Raises BadFrame unless both are equal runs of
    the same total size."""
    source, target = link.source.extent(part), link.target.extent(part)
    if source is None or target is None or source.num_bytes != target.num_bytes:
        raise BadFrame(f"{part}: between devices, a part of a block must be equal runs of bytes")
    return source, target


def announce_packed(
    link: SendLink,
    job: Job,
    digest: bytes,
    free: deque[int],
    slot: int,
    say: Callable[[bytes], None],
    *,
    frame_slot: int = 0,
    length: int = 0,
) -> None:
    """Sends the frame of a chunk that was copied into a staging slot, or frees the slot if its transfer has ended.
    `frame_slot` and `length` are fields of the frame."""
    try:
        head = link.head(job, digest, slot=frame_slot, length=length) if job.transfer.session.is_open else b""
    except StaleSource as stale:
        free.append(slot)
        link.stale(job, str(stale))
        return
    if head:
        say(head)
    else:
        free.append(slot)
    link.finished(job)


def _one_of_each(runs: Sequence[StridedExtent]) -> list[StridedExtent]:
    """One run for each alignment: of the address modulo 16 bytes, and of the size modulo 16 words."""
    return list({(one.first % 16, one.num_bytes % 64): one for one in reversed(runs)}.values())


# --- staging slots --------------------------------------------------------------------------------------------
# One connection has them on a device, with pinned host memory if a socket needs it.


def slot_size(block_bytes: int, slot_bytes: int) -> int:
    """Bytes of a slot that holds whole blocks: about `slot_bytes`, and at least one block."""
    return blocks_per_chunk(block_bytes, slot_bytes) * block_bytes


@final
class StagingSlots:
    """Each slot is a separate allocation, so that connections with other numbers of slots can reuse it."""

    def __init__(self, device: Device, block_bytes: int, share: StagingShare, *, is_pinned: bool = False) -> None:
        """Closes `share` with the slots. Raises TransferFailed if the device or the host has no memory left."""
        self.num_bytes, self._share = share.slot_bytes, share
        self._blocks = share.slot_bytes // block_bytes
        self._slots: list[Blocks] = []
        self._hosts: list[Pinned] = []
        try:
            for _ in range(share.num_slots):
                self._slots.append(device.staging(self._blocks))
                if is_pinned:
                    self._hosts.append(device.pinned(self.num_bytes))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, slot: int) -> Blocks:
        return self._slots[slot]

    def dense(self, slot: int, num_bytes: int) -> Blocks:
        """The slot as blocks of `num_bytes` bytes."""
        return self._slots[slot].cut(0, self._blocks, num_bytes)

    def host(self, slot: int) -> Pinned:
        return self._hosts[slot]

    def view(self, slot: int, num_bytes: int) -> memoryview:
        return self._hosts[slot].view[:num_bytes]

    def close(self) -> None:
        """Call it once no work on the device uses them."""
        for staging in self._slots:
            staging.close()
        for host in self._hosts:
            host.close()
        self._share.close()
