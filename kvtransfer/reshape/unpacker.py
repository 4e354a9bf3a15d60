"""Converts received blocks of another format: the transport writes a chunk into staging, and when its checksum matches,
the chunk is converted into the granted blocks."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from kvtransfer.link.channel import Channel
from kvtransfer.protocol.checksum import Checksum
from kvtransfer.protocol.frames import BadFrame, Frame
from kvtransfer.protocol.mapping import Arrival
from kvtransfer.protocol.receive_transfer import Claim
from kvtransfer.reshape.convert import BlockArrays, unpack
from kvtransfer.transports.common.interface import ReceiveLink
from pdserve.core.kv.kv_shape import BlockForm
from pdserve.engine.interface import KvPool
from pdserve.engine.memory.host import HostMemory

# --- staging pool ---------------------------------------------------------------------------------------------
# Host memory for blocks between two formats. It is a pool like an engine's, so every transport can use it.


@final
class StagingPool:
    is_on_host = True
    runs_per_block = 1

    def __init__(self, form: BlockForm, num_blocks: int) -> None:
        self.num_blocks, self.block_bytes = num_blocks, form.block_bytes
        self._memory = HostMemory(num_blocks * form.block_bytes)  # keeps the descriptor
        self.buffer, self.descriptor = self._memory.buffer, self._memory.descriptor


# --- unpacker -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class StagedClaim(Claim):
    """A claim on staging blocks, with the claim on the granted blocks."""

    granted: Claim


@final
class Unpacker:
    """The link that the transport uses. It converts one chunk at a time: a transport settles a chunk before it begins
    the next one."""

    def __init__(self, link: ReceiveLink, arrival: Arrival, target: BlockForm) -> None:
        self._link, self._window = link, arrival.into
        self.source, self.target = link.source, link.target
        self.block_bytes, self.chunk_bytes = arrival.form.block_bytes, link.chunk_bytes
        self.pool: KvPool = StagingPool(arrival.form, max(1, link.chunk_bytes // self.block_bytes))
        self.memory = self.pool.buffer
        self.channel: Channel = link.channel
        self.checksum: Checksum = link.checksum
        self._staged = BlockArrays(self.memory, arrival.form)
        self._pool = BlockArrays(link.memory, target)

    def staged(self, claim: Claim) -> StagedClaim:
        numbers = tuple(range(claim.count))
        return StagedClaim(claim.transfer, claim.first, claim.count, numbers, claim.part, claim.at, claim)

    def digest(self, views: Iterable[memoryview]) -> bytes:
        return self._link.digest(views)

    def views(self, claim: Claim) -> list[memoryview]:
        return self.source.views(self.memory, claim.blocks, claim.part)

    def size_of(self, frame: Frame) -> int:
        """Raises BadFrame on a chunk of some layers only, because the other layers would be converted from old staging
        contents."""
        if frame.part.groups != 1:
            raise BadFrame(f"layer group {frame.part.group} of {frame.part.groups} of blocks that are to be converted")
        return frame.count * self.source.bytes_of(frame.part)

    def enter(self, claim: Claim) -> bool:
        return self._link.enter(_granted(claim))

    def leave(self, claim: Claim) -> None:
        self._link.leave(_granted(claim))

    def settle(self, claim: Claim, frame: Frame, checksum: bytes) -> None:
        """Converts the staged chunk into the granted blocks if its checksum matches."""
        granted = _granted(claim)
        if hmac.compare_digest(checksum, frame.checksum):
            if not self._link.enter(granted):
                return
            try:
                unpack(self._staged, self._pool, granted.blocks, self._window)
            finally:
                self._link.leave(granted)
        self._link.settle(granted, frame, checksum)


def _granted(claim: Claim) -> Claim:
    assert isinstance(claim, StagedClaim), claim
    return claim.granted
