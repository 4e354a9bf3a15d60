"""Injects faults according to a plan, by a transport around a real one.

It is used only if a worker was started with faults to inject. A sender's thread then uses one socket of a pair, and two
threads forward frames between the other socket of the pair and the real connection. Lost, late, duplicated, changed,
truncated and stalled frames therefore reach the product's code as they would from a network. A receiver has faults
before it writes a chunk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import logging
import math
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, final

from kvtransfer.faults.plan import Fault, FaultKind, Where, parse
from kvtransfer.protocol.frames import HEADER_BYTES, Frame, Kind, Tag, decode
from kvtransfer.protocol.plan import MAX_CHUNK_BYTES
from kvtransfer.protocol.transfers import Claim
from kvtransfer.transports.common.interface import ReceiveHalf, ReceiveLink, SendHalf, Transport
from pdserve.engine.interface import KvPool

log = logging.getLogger(__name__)

_HEADER_SHARE: Final = 0.1  # share of changed bytes that are in a header
_STALE: Final = 1 << 62  # added to a generation, this gives a generation that was never granted
_FRAMES_KNOWN: Final = 1024  # transfers whose frames are counted
# The time counts from the actual stop, which on a busy machine may be later than the planned end of the stop.
_WAKE: Final = (
    "n=0; until grep -q '^State:.T' /proc/{pid}/status || [ $n -ge 1000 ]; do sleep 0.01; n=$((n+1)); done; "
    "sleep {for_s:.3f}; kill -CONT {pid}"
)


class FaultInjector:
    """The faults of one worker. `fault_of` is called for each frame, and must return the same fault for each frame of a
    transfer."""

    def __init__(self, fault_of: Callable[[Tag], Fault | None]) -> None:
        self._fault_of = fault_of
        self._lock = threading.Lock()  # guards the two below
        self._frames: dict[tuple[Tag, Where], int] = {}
        self._ending = threading.Lock()
        self.counts: Counter[FaultKind] = Counter()
        self.pauses: list[tuple[float, float]] = []  # when this process was stopped, on its monotonic clock

    def between(self, sock: socket.socket, *, has_slots: bool) -> socket.socket:
        """The socket that a sender uses in place of its authenticated one. `has_slots`: of its transport."""
        near, far = socket.socketpair()
        near.settimeout(sock.gettimeout())
        sock.setblocking(True)
        pair = _SocketPair(far, sock)
        for direction, source, target in ((Where.SENT, far, sock), (Where.ANSWERED, sock, far)):
            _Pump(self, has_slots, pair, direction, source, target).start()
        return near

    def before_write(self, tag: Tag) -> None:
        """A receiver is about to write a chunk."""
        fault = self.due(tag, Where.WRITTEN)
        if fault is None:
            return
        if fault.kind is FaultKind.STALL:
            time.sleep(fault.for_s)
        else:
            self.end_process(fault)

    def end_process(self, fault: Fault) -> None:
        """Kills this process, or stops it for some time. Stops do not overlap, because a separate process ends each."""
        with self._ending:
            self._end_process(fault)

    def _end_process(self, fault: Fault) -> None:
        began_s = time.monotonic()
        self.pauses.append((began_s, math.inf))  # other threads may run again before this one
        if fault.kind is FaultKind.STOP:
            wake = _WAKE.format(pid=os.getpid(), for_s=fault.for_s)
            subprocess.Popen(["/bin/sh", "-c", wake], start_new_session=True, stdin=subprocess.DEVNULL)
        os.kill(os.getpid(), signal.SIGSTOP if fault.kind is FaultKind.STOP else signal.SIGKILL)
        # A thread may continue for a moment before the signal reaches it.
        while time.monotonic() < began_s + fault.for_s:
            time.sleep(0.002)
        self.pauses[-1] = (began_s, time.monotonic())

    def due(self, tag: Tag, where: Where) -> Fault | None:
        """The fault of this frame of the transfer, if any."""
        fault = self._fault_of(tag)
        if fault is None or fault.where is not where:
            return None
        with self._lock:
            nth = self._frames.pop((tag, where), 0)
            self._frames[tag, where] = nth + 1
            while len(self._frames) > _FRAMES_KNOWN:
                del self._frames[next(iter(self._frames))]
            if nth != fault.nth:
                return None
            self.counts[fault.kind] += 1
        log.warning("fault injected", extra={"fault": fault.kind.value, "where": where.value, "for_s": fault.for_s})
        return fault


def make_fault_injector(faults: str) -> FaultInjector | None:
    """The faults of a worker's setting; None if it is empty. Raises ConfigError."""
    if not faults:
        return None
    log.warning("faults are injected into KV transfers", extra={"faults": faults})
    return FaultInjector(parse(faults).fault_of)


def with_faults(transports: Sequence[Transport], injector: FaultInjector | None) -> tuple[Transport, ...]:
    return tuple(transports if injector is None else (FaultyTransport(one, injector) for one in transports))


@final
class FaultyTransport:
    """A Transport whose connections have the injector's faults."""

    def __init__(self, inner: Transport, injector: FaultInjector) -> None:
        self._inner, self._injector = inner, injector
        self.kind, self.name, self.order = inner.kind, inner.name, inner.order
        self.is_same_host = inner.is_same_host
        self.is_for_hosts, self.is_for_devices = inner.is_for_hosts, inner.is_for_devices
        self.divides_blocks, self.has_slots = inner.divides_blocks, inner.has_slots
        self.why_not, self.prepare, self.fence = inner.why_not, inner.prepare, inner.fence
        self.listen, self.address = inner.listen, inner.address
        self.dial, self.admits = inner.dial, inner.admits

    def sender(self, sock: socket.socket, pool: KvPool) -> tuple[socket.socket, SendHalf]:
        sock, half = self._inner.sender(sock, pool)
        return self._injector.between(sock, has_slots=self.has_slots), half

    def receiver(self, link: ReceiveLink) -> ReceiveHalf:
        return _FaultyReceive(self._inner.receiver(link), self._injector)


@final
class _FaultyReceive:
    def __init__(self, inner: ReceiveHalf, injector: FaultInjector) -> None:
        self._inner, self._injector = inner, injector
        self.poll, self.close = inner.poll, inner.close

    def check(self, frame: Frame) -> None:
        self._inner.check(frame)
        self._injector.before_write(frame.tag)

    def receive(self, frame: Frame, claim: Claim | None) -> None:
        self._inner.receive(frame, claim)


class _SocketPair:
    """The two sockets of one connection. They are closed when both directions have ended."""

    def __init__(self, *sockets: socket.socket) -> None:
        self._sockets = sockets
        self._lock = threading.Lock()
        self._users = 2

    def leave(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # wakes the other direction, and both peers
        with self._lock:
            self._users -= 1
            if self._users == 0:
                for one in self._sockets:
                    one.close()


class _Pump(threading.Thread):
    """One direction of one connection."""

    def __init__(
        self,
        owner: FaultInjector,
        has_slots: bool,
        pair: _SocketPair,
        direction: Where,
        source: socket.socket,
        target: socket.socket,
    ) -> None:
        super().__init__(name=f"kv-fault_injector-{direction.value}", daemon=True)
        self._owner, self._has_slots, self._pair, self._direction = owner, has_slots, pair, direction
        self._source, self._target = source, target
        self._delayed: list[tuple[float, int, bytes]] = []  # due, number, frame
        self._number = 0

    def run(self) -> None:
        try:
            with contextlib.suppress(OSError):
                while self._forward():
                    pass
        finally:
            self._pair.leave()

    def _forward(self) -> bool:
        """Forwards one frame, or the delayed ones that are due. False: the connection must end."""
        if not self._wait():
            return True
        message = bytearray(HEADER_BYTES)
        if not self._fill(memoryview(message)):
            return False
        frame = decode(message, MAX_CHUNK_BYTES)  # these frames come from the product itself
        rest = bytearray(frame.num_behind)
        if not self._fill(memoryview(rest)):
            return False
        message += rest
        fault = None if frame.kind is Kind.BEAT else self._owner.due(frame.tag, self._direction)
        if fault is None:
            self._target.sendall(message)
            return True
        return self._do(fault, frame, message)

    def _do(self, fault: Fault, frame: Frame, message: bytearray) -> bool:
        match fault.kind:
            case FaultKind.DROP if frame.kind is Kind.CREDIT:
                self._target.sendall(message)  # a credit cannot be lost without its connection
            case FaultKind.DROP if frame.kind is Kind.CHUNK and (self._has_slots or fault.at < 0.5):
                # It arrives as a frame of an unknown grant. For the transfer it is a dropped frame, but the slot is
                # returned.
                stale = frame.tag._replace(generation=frame.tag.generation | _STALE)
                self._target.sendall(dataclasses.replace(frame, tag=stale).encode() + message[HEADER_BYTES:])
            case FaultKind.DROP:
                pass
            case FaultKind.DELAY:
                self._number += 1
                heapq.heappush(self._delayed, (time.monotonic() + fault.for_s, self._number, bytes(message)))
            case FaultKind.DUPLICATE:
                self._target.sendall(message + message)
            case FaultKind.CORRUPT:
                self._corrupt(fault, message)
                self._target.sendall(message)
            case FaultKind.TRUNCATE:
                self._target.sendall(message[: int(fault.at * len(message))])
            case FaultKind.STALL:
                time.sleep(fault.for_s)
                self._target.sendall(message)
            case FaultKind.CUT:
                return False
            case FaultKind.KILL | FaultKind.STOP:
                self._owner.end_process(fault)
                self._target.sendall(message)
        return True

    def _corrupt(self, fault: Fault, message: bytearray) -> None:
        if fault.at < _HEADER_SHARE or len(message) == HEADER_BYTES:
            body = memoryview(message)[:HEADER_BYTES]
        else:
            body = memoryview(message)[HEADER_BYTES:]  # shm: the blocks that the receiver must read
        body[int(fault.at * len(body))] ^= 0x5A

    def _wait(self) -> bool:
        """Waits until there is something to read (True), or sends a delayed frame that is due (False)."""
        timeout_ms = None
        if self._delayed:
            left_s = self._delayed[0][0] - time.monotonic()
            if left_s <= 0:
                self._target.sendall(heapq.heappop(self._delayed)[2])
                return False
            timeout_ms = left_s * 1000 + 1
        poll = select.poll()
        poll.register(self._source, select.POLLIN)
        return bool(poll.poll(timeout_ms))

    def _fill(self, view: memoryview) -> bool:
        """False at the end of the stream."""
        while view:
            received = self._source.recv_into(view)
            if received == 0:
                return False
            view = view[received:]
        return True
