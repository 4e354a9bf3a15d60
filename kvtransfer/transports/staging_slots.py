"""A connection's staging slots on a device, if needed with pinned host memory for a socket."""

from __future__ import annotations

from typing import final

from kvtransfer.device import Blocks, Device, Pinned
from kvtransfer.plan import blocks_per_chunk
from kvtransfer.staging_budget import StagingShare


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
