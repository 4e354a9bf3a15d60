"""Two real ends of a transfer in one process, joined by a real gRPC server, sockets and shared memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvtransfer.link.receiver import PlainReceiver
from kvtransfer.link.sender import PlainSender
from kvtransfer.protocol.frames import Tag, pack
from kvtransfer.protocol.lease import Lease
from kvtransfer.protocol.transport import Received, Sent
from pdserve.core.kv.kv_shape import Fingerprint, Grant, TransferKey
from pdserve.core.kv.stamps import BlockStamps
from tests.support.transfer_ends import BLOCK_BYTES, WAIT_S, GrpcHost, HostPool, fingerprint

# Long limits, for busy machines and for hand-written peers that send no heartbeats.
PATIENT = Lease(silence_s=60.0, unconfirmed_s=60.0)


def wait_for(holds: Callable[[], bool], what: str) -> None:
    ends_s = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > ends_s:
            raise AssertionError(f"waited {WAIT_S} s for {what}")
        time.sleep(0.001)


class Clock:
    """The machine's clock plus the time that a test adds at once. Sleeping threads notice it at their next
    heartbeat."""

    def __init__(self) -> None:
        self.added_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.added_s


class Heard:
    """The arguments of a callback, in order. wait() returns the last one."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._changed = threading.Condition()

    def __call__(self, end: Received | Sent) -> None:
        with self._changed:
            self.all.append(end)
            self._changed.notify_all()

    def wait(self, count: int = 1) -> Any:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.all) >= count, WAIT_S), f"heard only {self.all}"
            return self.all[count - 1]

    def wait_for_one(self, at_most_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self.all), at_most_s)

    @property
    def outcomes(self) -> list[str]:
        return [end.outcome.value for end in self.all]


@dataclass
class Pair:
    """A sender and a receiver with their pools."""

    transport: str
    source: HostPool
    target: HostPool
    receiver: PlainReceiver
    sender: PlainSender
    host: GrpcHost
    source_stamps: BlockStamps
    target_stamps: BlockStamps
    facts: Fingerprint | None = None  # of both; None: of plain bytes
    _attempts: int = 0
    _generation: int = field(default=0)

    def grant(self, blocks: tuple[int, ...], transfer_id: str | None = None, **changes: Any) -> Grant:
        self._generation += 1
        plain = Grant(
            key=TransferKey(transfer_id=transfer_id or f"t{self._generation}", attempt=1, generation=self._generation),
            endpoint=self.host.endpoint,
            worker_id="d0",
            incarnation="d0-1",
            fingerprint=self.facts or fingerprint(self.target.block_bytes),
            blocks=blocks,
            num_cached_blocks=0,
        )
        return replace(plain, **changes)

    def begin(
        self, grant: Grant, deadline_s: float | None = None, content_hashes: Sequence[int] | None = None
    ) -> tuple[Heard, Heard]:
        """Opens both sides."""
        received, sent = Heard(), Heard()
        self.receiver.expect(grant, received, deadline_s, content_hashes)
        self.sender.start(grant, sent, deadline_s)
        return received, sent

    def move(self, grant: Grant, sources: tuple[int, ...]) -> tuple[Received, Sent]:
        received, sent = self.begin(grant)
        self.sender.push(grant.key, list(enumerate(sources)), True)
        return received.wait(), sent.wait()

    def move_in_groups(self, grant: Grant, sources: tuple[int, ...], groups: int) -> tuple[Received, Sent]:
        """Sends each group of layers when it could have been computed."""
        received, sent = Heard(), Heard()
        self.receiver.expect(grant, received)
        self.sender.start(grant, sent, groups=groups)
        for group in range(groups):
            self.sender.push(grant.key, list(enumerate(sources)), group == groups - 1, range(group, group + 1))
        return received.wait(), sent.wait()

    def assert_equal(self, grant: Grant, sources: tuple[int, ...]) -> None:
        for index, source in enumerate(sources):
            assert self.target.block(grant.blocks[index]) == self.source.block(source), f"block {index} differs"


STAMPS = BlockStamps(1_000_000)  # For transfer tables without a pool.


def unmarked_stamps(tag: Tag, count: int) -> bytes:
    """Stamps of blocks without content hashes."""
    return pack([0] * count, tag.generation, 1)


def grant_of(transfer_id: str, attempt: int, generation: int, blocks: tuple[int, ...]) -> Grant:
    """A grant without an endpoint, for tests of transfer tables."""
    key = TransferKey(transfer_id=transfer_id, attempt=attempt, generation=generation)
    facts = fingerprint(64)
    return Grant(
        key=key, endpoint="", worker_id="d", incarnation="i", fingerprint=facts, blocks=blocks, num_cached_blocks=0
    )


__all__ = [
    "BLOCK_BYTES",
    "PATIENT",
    "STAMPS",
    "WAIT_S",
    "Clock",
    "GrpcHost",
    "Heard",
    "HostPool",
    "Pair",
    "fingerprint",
    "grant_of",
    "unmarked_stamps",
    "wait_for",
]
