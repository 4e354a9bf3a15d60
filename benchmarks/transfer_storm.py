"""A seeded storm of transfers with faults, and the proof that no byte was wrong and no memory was lost.

Real endpoints, sockets and rings; faults come from a man in the middle (flipped bits, lost, doubled and stale chunks,
cut connections), from the owners (aborts on either side at random moments, gaps, senders that never finish) and from
time (deadlines, senders that restart). Every block that comes back is stamped at once and must still hold its
stamp when it is granted or read again, so a write or a read after the end is caught.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from benchmarks.transfer_ends import BLOCK_BYTES, WAIT_S, GrpcHost, HostPool, fingerprint
from benchmarks.transfer_proxy import Proxy
from kvtransfer.endpoint import make_receiver, make_sender
from kvtransfer.frames import HEADER_BYTES, Frame, Kind, Tag, tag_of
from kvtransfer.sender import StreamSender
from kvtransfer.transport import Grant, Received, ReceiveOutcome, SendOutcome, Sent, TransferKey

MAX_BLOCKS: Final = 24
IN_FLIGHT: Final = 12
LANDING_BLOCKS: Final = 512
SOURCE_BLOCKS: Final = 512
SENDERS: Final = 2


class Fault(Enum):
    NONE = "none"
    FLIP = "flipped bit"
    DROP = "lost chunk"
    STALE = "stale generation first"
    CUT = "cut connection"
    RECEIVER_ABORTS = "receiver aborts"
    SENDER_ABORTS = "sender aborts"
    GAP = "last push leaves a gap"
    UNFINISHED = "never finished, deadline"
    RESTART = "sender restarts"


# Faults that must never end VERIFIED; the others are races that may be won.
DEADLY: Final = (Fault.FLIP, Fault.DROP, Fault.CUT, Fault.GAP, Fault.UNFINISHED)
FAULTY: Final = [one for one in Fault if one is not Fault.NONE]


@dataclass
class Move:
    """One transfer and what its two owners were told."""

    grant: Grant
    sources: list[int]
    contents: list[bytes]
    fault: Fault
    sender: int
    received: Received | None = None
    sent: Sent | None = None
    told: int = 0


@dataclass
class Result:
    transfers: int
    seconds: float
    outcomes: Counter[str]
    faults: Counter[str]
    wrong: list[str]  # empty, or the storm has found a bug


@dataclass
class Storm:
    transport: str
    seed: int
    fault_share: float = 0.5
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._hook_rng = random.Random(self.seed + 1)
        self._changed = threading.Condition()
        self._faults: dict[Tag, Fault] = {}
        self._moves: dict[TransferKey, Move] = {}
        self._ended: list[Move] = []
        self._landing, self._source = HostPool(LANDING_BLOCKS), HostPool(SOURCE_BLOCKS)
        self._free_landing = list(range(LANDING_BLOCKS))
        self._free_source = list(range(SOURCE_BLOCKS))
        self._stamps = dict.fromkeys(range(LANDING_BLOCKS), bytes(BLOCK_BYTES))
        self._number = 0
        self._receiver = make_receiver(
            self._landing,
            fingerprint(),
            worker_id="d0",
            incarnation="d0-1",
            host="127.0.0.1",
            transport=self.transport,
        )
        self._proxy = Proxy(self._receiver, self._hook, BLOCK_BYTES)
        self._host = GrpcHost(self._proxy)
        self._senders = [self._sender(i) for i in range(SENDERS)]

    def run(self, count: int) -> Result:
        """Runs `count` transfers, IN_FLIGHT at a time, and ends everything that it started."""
        began_s = time.monotonic()
        outcomes: Counter[str] = Counter()
        faults: Counter[str] = Counter()
        started = ended = 0
        while ended < count:
            while started < count and len(self._moves) < IN_FLIGHT:
                self._start()
                started += 1
            for move in self._wait():
                ended += 1
                assert move.received is not None
                outcomes[move.received.outcome.value] += 1
                faults[move.fault.value] += 1
        self._close()
        return Result(count, time.monotonic() - began_s, outcomes, faults, self.wrong)

    def _sender(self, index: int) -> StreamSender:
        self._number += 1
        return make_sender(
            self._source,
            fingerprint(),
            worker_id=f"p{index}",
            incarnation=str(self._number),
            transport=self.transport,
        )

    def _start(self) -> None:
        rng = self._rng
        self._number += 1
        fault = rng.choice(FAULTY) if rng.random() < self.fault_share else Fault.NONE
        count = rng.randint(2, MAX_BLOCKS)
        rng.shuffle(self._free_landing)
        blocks = tuple(self._free_landing.pop() for _ in range(count))
        sources = [self._free_source.pop(0) for _ in range(count)]
        contents = [(self._number * 1000 + i).to_bytes(8, "little") * (BLOCK_BYTES // 8) for i in range(count)]
        for block in blocks:
            if self._landing.block(block) != self._stamps[block]:
                self.wrong.append(f"block {block} was written after it had come back")
        for source, content in zip(sources, contents, strict=True):
            self._write(self._source, source, content)
        key = TransferKey(transfer_id=f"s{rng.randint(0, 50)}", attempt=rng.randint(1, 3), generation=self._number)
        grant = Grant(
            key=key,
            endpoint=self._host.endpoint,
            worker_id="d0",
            incarnation="d0-1",
            fingerprint=fingerprint(),
            blocks=blocks,
            held_blocks=0,
        )
        move = Move(grant, sources, contents, fault, rng.randrange(SENDERS))
        self._moves[key] = move
        self._faults[tag_of(key)] = fault
        deadline_s = 0.05 if fault in (Fault.UNFINISHED, Fault.DROP) else WAIT_S
        self._receiver.expect(grant, self._on_received, deadline_s)
        sender = self._senders[move.sender]
        sender.start(grant, self._on_sent, deadline_s)
        self._push(sender, move)

    def _push(self, sender: StreamSender, move: Move) -> None:
        rng, key = self._rng, move.grant.key
        pushes = list(enumerate(move.sources))
        if rng.random() < 0.3:
            rng.shuffle(pushes)
        if move.fault in (Fault.GAP, Fault.UNFINISHED):
            pushes.pop()
        middle = rng.randint(0, len(pushes))
        sender.push(key, pushes[:middle], False)
        if rng.random() < 0.3:
            time.sleep(rng.uniform(0, 0.002))  # so that aborts meet every stage
        if move.fault is Fault.RECEIVER_ABORTS:
            self._receiver.abort(key)
        elif move.fault is Fault.SENDER_ABORTS:
            sender.abort(key)
        sender.push(key, pushes[middle:], move.fault is not Fault.UNFINISHED)
        if move.fault is Fault.RESTART:
            self._senders[move.sender] = self._sender(move.sender)
            sender.close()

    def _hook(self, frame: Frame, message: bytearray, body: memoryview) -> bytes | bytearray | None:
        fault = self._faults.get(frame.tag, Fault.NONE)
        if frame.kind is not Kind.CHUNK or fault is Fault.NONE:
            return message
        if fault is Fault.FLIP:
            body[self._hook_rng.randrange(len(body))] ^= 1 << self._hook_rng.randrange(8)
        elif fault is Fault.DROP:  # it arrives as an older grant's, so that the ring's slot still comes back
            return self._stale(frame) + message[HEADER_BYTES:]
        elif fault is Fault.STALE and frame.length:  # tcp only: a slot must not come back twice
            return self._stale(frame) + message[HEADER_BYTES:] + message
        elif fault is Fault.CUT:
            return None
        return message

    def _stale(self, frame: Frame) -> bytes:
        tag = frame.tag._replace(generation=frame.tag.generation | 1 << 40)  # one that no grant here has
        return replace(frame, tag=tag).encode()

    def _on_received(self, received: Received) -> None:
        with self._changed:
            move = self._moves[received.key]
            if received.outcome is ReceiveOutcome.QUARANTINED:
                return
            if move.received is not None:
                self.wrong.append(f"{received.key} was told {move.received.outcome} and {received.outcome}")
            if received.outcome is ReceiveOutcome.VERIFIED:
                got = [self._landing.block(block) for block in move.grant.blocks]
                if got != move.contents:
                    self.wrong.append(f"{received.key} was verified with wrong bytes")
            if received.outcome is ReceiveOutcome.VERIFIED and move.fault in DEADLY:
                self.wrong.append(f"{received.key} with fault {move.fault} ended as {received.outcome}")
            for block in move.grant.blocks:
                self._stamps[block] = (b"free" + received.key.generation.to_bytes(4, "little")) * (BLOCK_BYTES // 8)
                self._write(self._landing, block, self._stamps[block])
            move.received = received
            self._tell(move)

    def _on_sent(self, sent: Sent) -> None:
        with self._changed:
            move = self._moves[sent.key]
            if move.sent is not None:
                self.wrong.append(f"{sent.key} was told {move.sent.outcome} and {sent.outcome}")
            is_verified = move.received is None or move.received.outcome is ReceiveOutcome.VERIFIED
            if sent.outcome is SendOutcome.SENT and not is_verified:
                self.wrong.append(f"{sent.key} was sent, and not verified")
            for source in move.sources:
                self._write(self._source, source, b"reused!!" * (BLOCK_BYTES // 8))
            move.sent = sent
            self._tell(move)
        if sent.outcome is SendOutcome.FAILED:  # as the router does when a prefill worker says that sending failed
            self._receiver.abort(sent.key)

    def _tell(self, move: Move) -> None:
        if move.received is not None and move.sent is not None:
            self._ended.append(move)
            self._changed.notify_all()

    def _wait(self) -> list[Move]:
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._ended), WAIT_S * 2):
                raise AssertionError(f"transfers that never ended: {list(self._moves.values())}")
            ended, self._ended = self._ended, []
            for move in ended:
                del self._moves[move.grant.key]
                self._faults.pop(tag_of(move.grant.key))
                self._free_landing += move.grant.blocks
                self._free_source += move.sources
            return ended

    def _close(self) -> None:
        for sender in self._senders:
            sender.close()
            if sender.open_keys:
                self.wrong.append(f"a sender leaked {sender.open_keys}")
        if self._receiver.open_keys:
            self.wrong.append(f"the receiver leaked {self._receiver.open_keys}")
        if len(self._free_landing) != LANDING_BLOCKS or len(self._free_source) != SOURCE_BLOCKS:
            self.wrong.append("blocks were lost")
        for block, stamp in self._stamps.items():
            if self._landing.block(block) != stamp:
                self.wrong.append(f"block {block} was written after it had come back")
        self._receiver.close()
        self._host.stop()
        self._proxy.close()

    @staticmethod
    def _write(pool: HostPool, block: int, content: bytes) -> None:
        pool.memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = content
