"""Simulated KV transfers: each is two sessions of kvtransfer, and a flow that shares the bandwidth of both ends. Pure.

A worker's flows get equal shares of its bandwidth, and a flow runs as fast as the smaller of its two shares. Chunks of
a transfer are sent one after the other; each arrives one latency after its last byte was sent.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol, final

from kvtransfer.protocol.session import RECEIVER_MOVES, SENDER_MOVES, Event, Session, State
from pdserve.core.attempt import AttemptKey
from pdserve.core.json_text import to_json
from pdserve.core.kv.kv_shape import TransferKey
from simulator.cluster.agenda import Agenda
from simulator.model import NetworkLink


class End(Protocol):
    """The interface of a worker that a transfer uses."""

    link: NetworkLink
    flows: dict[TransferKey, Transfer]

    def moving(self, key: AttemptKey) -> None:
        """The first byte was sent."""

    def received(
        self, key: AttemptKey, transfer: TransferKey, transfer_s: float, busy_s: float, num_bytes: int
    ) -> None:
        """Every block has arrived and was verified."""

    def not_received(self, key: AttemptKey, transfer: TransferKey, error: str) -> None:
        """The transfer ended incomplete, and nothing writes to the blocks any more."""

    def sent(self, key: AttemptKey, transfer: TransferKey, is_whole: bool, error: str, exposed_s: float = 0.0) -> None:
        """The source blocks are no longer read. If complete, it arrived `exposed_s` after its last push."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedGrant:
    """The part of a grant that a simulated prefill worker needs. Routers forward it as bytes, like a real one."""

    key: TransferKey
    worker_id: str
    num_cached_blocks: int
    num_blocks: int

    def encode(self) -> bytes:
        key = self.key
        values = [key.transfer_id, key.attempt, key.generation, self.worker_id, self.num_cached_blocks, self.num_blocks]
        return to_json(values).encode()

    @classmethod
    def decode(cls, data: bytes) -> SimulatedGrant:
        transfer_id, attempt, generation, worker_id, num_cached_blocks, num_blocks = json.loads(data)
        key = TransferKey(transfer_id=transfer_id, attempt=attempt, generation=generation)
        return cls(key=key, worker_id=worker_id, num_cached_blocks=num_cached_blocks, num_blocks=num_blocks)


@dataclass(slots=True, kw_only=True, eq=False)
class Transfer:
    grant: SimulatedGrant
    receiver: End
    receiver_key: AttemptKey
    block_bytes: int
    inward: Session
    outward: Session
    sender: End | None = None
    sender_key: AttemptKey | None = None
    latency_s: float = 0.0
    pushed: deque[tuple[int, int]] = field(default_factory=deque)  # chunks that wait to be sent
    chunk: tuple[int, int] | None = None  # the chunk that is being sent
    left_bytes: float = 0.0  # of it
    bytes_per_s: float = 0.0
    as_of_s: float = 0.0  # time at which `left_bytes` was computed
    turn: int = 0  # invalidates earlier predictions of the end
    began_s: float | None = None
    chunk_began_s: float = 0.0
    busy_s: float = 0.0  # time with a chunk in transfer, without latency
    last_pushed_s: float = 0.0

    @property
    def key(self) -> TransferKey:
        return self.grant.key


@final
class Network:
    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._transfers: dict[TransferKey, Transfer] = {}
        self.num_bytes = 0

    @property
    def is_quiet(self) -> bool:
        return not self._transfers

    # -- the receiver --------------------------------------------------------------------------------------------

    def expect(self, receiver: End, key: AttemptKey, grant: SimulatedGrant, block_bytes: int) -> None:
        self._transfers[grant.key] = Transfer(
            grant=grant,
            receiver=receiver,
            receiver_key=key,
            block_bytes=block_bytes,
            inward=Session(RECEIVER_MOVES, grant.num_blocks),
            outward=Session(SENDER_MOVES, grant.num_blocks),
        )

    def abort_receiving(self, key: TransferKey) -> None:
        transfer = self._transfers.get(key)
        if transfer is None or transfer.inward.has_ended:
            return
        transfer.inward.handle(Event.ABORTED, "aborted by the receiver")
        self._still(transfer)
        if transfer.inward.has_ended:
            self._report_to_receiver(transfer)
        else:  # the chunk in flight arrives first
            self._agenda.after(transfer.latency_s, self._receiver_ends, transfer)
        self._agenda.after(transfer.latency_s, self._sender_ends, transfer, Event.CANCELLED, "the receiver gave up")

    # -- the sender ----------------------------------------------------------------------------------------------

    def start(self, sender: End, key: AttemptKey, grant: SimulatedGrant) -> None:
        transfer = self._transfers.get(grant.key)
        if transfer is None or not transfer.inward.is_open:
            sender.sent(key, grant.key, False, "the receiver does not expect it")
            return
        transfer.sender, transfer.sender_key = sender, key
        transfer.latency_s = max(sender.link.latency_s, transfer.receiver.link.latency_s)
        transfer.outward.handle(Event.ANNOUNCED)
        transfer.inward.handle(Event.ANNOUNCED)

    def push(self, key: TransferKey, first: int, count: int) -> None:
        transfer = self._transfers.get(key)
        if transfer is None or not transfer.outward.claim(first, count):
            return
        transfer.inward.claim(first, count)
        transfer.pushed.append((first, count))
        transfer.last_pushed_s = self._agenda.now_s
        if transfer.chunk is None:
            self._next_chunk(transfer)

    def abort_sending(self, key: TransferKey) -> None:
        transfer = self._transfers.get(key)
        if transfer is None:
            return
        self._sender_ends(transfer, Event.ABORTED, "aborted by the sender")
        self._agenda.after(transfer.latency_s, self._receiver_ends, transfer, Event.CANCELLED, "the sender gave up")

    def cut(self, end: End) -> None:
        """A worker died. Its transfers end on the other side."""
        for transfer in list(self._transfers.values()):
            if transfer.receiver is end:
                self._still(transfer)
                transfer.inward.handle(Event.CUT)
                transfer.inward.writer_gone()
                self._agenda.after(transfer.latency_s, self._sender_ends, transfer, Event.CUT, "the receiver died")
            elif transfer.sender is end:
                self._still(transfer)
                transfer.outward.handle(Event.CUT)
                transfer.outward.writer_gone()
                self._agenda.after(transfer.latency_s, self._receiver_ends, transfer, Event.CUT, "the sender died")
            self._forget_if_over(transfer)

    # -- bytes ---------------------------------------------------------------------------------------------------

    def _next_chunk(self, transfer: Transfer) -> None:
        sender, receiver, key = transfer.sender, transfer.receiver, transfer.key
        assert sender is not None, "blocks are pushed after the start"
        if not transfer.pushed or not transfer.outward.enter() or not transfer.inward.enter():
            self._leave(transfer)
            return
        transfer.chunk = transfer.pushed.popleft()
        transfer.left_bytes = float(transfer.chunk[1] * transfer.block_bytes)
        transfer.as_of_s = transfer.chunk_began_s = self._agenda.now_s
        if transfer.began_s is None:
            transfer.began_s = self._agenda.now_s
            receiver.moving(transfer.receiver_key)
        if key in sender.flows:
            self._foresee(transfer)
        else:
            sender.flows[key] = receiver.flows[key] = transfer
            self._share(transfer)

    def _leave(self, transfer: Transfer) -> None:
        transfer.turn += 1
        transfer.chunk = None
        if transfer.sender is not None and transfer.sender.flows.pop(transfer.key, None) is not None:
            transfer.receiver.flows.pop(transfer.key, None)
            self._share(transfer)

    def _share(self, changed: Transfer) -> None:
        """The number of flows at its two ends has changed."""
        assert changed.sender is not None
        now_s = self._agenda.now_s
        for flow in {**changed.sender.flows, **changed.receiver.flows}.values():
            assert flow.sender is not None
            rate = min(
                flow.sender.link.bytes_per_s / len(flow.sender.flows),
                flow.receiver.link.bytes_per_s / len(flow.receiver.flows),
            )
            if rate != flow.bytes_per_s or flow is changed:
                flow.left_bytes = max(0.0, flow.left_bytes - flow.bytes_per_s * (now_s - flow.as_of_s))
                flow.as_of_s, flow.bytes_per_s = now_s, rate
                self._foresee(flow)

    def _foresee(self, flow: Transfer) -> None:
        flow.turn += 1
        self._agenda.after(flow.left_bytes / flow.bytes_per_s, self._chunk_left, flow, flow.turn)

    def _chunk_left(self, transfer: Transfer, turn: int) -> None:
        if turn != transfer.turn or transfer.chunk is None:
            return
        first, count = transfer.chunk
        transfer.busy_s += self._agenda.now_s - transfer.chunk_began_s
        self._agenda.after(transfer.latency_s, self._chunk_landed, transfer, first, count)
        transfer.outward.mark_transferred(first, count)
        transfer.outward.leave()
        self._next_chunk(transfer)

    def _chunk_landed(self, transfer: Transfer, first: int, count: int) -> None:
        inward = transfer.inward
        if not inward.is_open:
            return
        inward.mark_transferred(first, count)
        inward.check(first, count, True)
        inward.leave()
        if inward.state is State.VERIFIED:
            self._agenda.after(transfer.latency_s, self._sender_ends, transfer)
            assert transfer.began_s is not None
            num_bytes = inward.size * transfer.block_bytes
            self.num_bytes += num_bytes
            transfer_s = self._agenda.now_s - transfer.began_s
            busy_s = transfer.latency_s + transfer.busy_s
            transfer.receiver.received(transfer.receiver_key, transfer.key, transfer_s, busy_s, num_bytes)
            self._forget_if_over(transfer)  # its sender may have aborted while the last chunk was in transfer

    # -- ends ----------------------------------------------------------------------------------------------------

    def _still(self, transfer: Transfer) -> None:
        transfer.pushed.clear()
        self._leave(transfer)

    def _receiver_ends(self, transfer: Transfer, fault: Event | None = None, error: str = "") -> None:
        inward = transfer.inward
        if inward.has_ended:
            return
        if fault is not None:
            inward.handle(fault, error)
        inward.writer_gone()
        self._report_to_receiver(transfer)

    def _report_to_receiver(self, transfer: Transfer) -> None:
        inward = transfer.inward
        transfer.receiver.not_received(transfer.receiver_key, transfer.key, inward.error or inward.state.value)
        self._forget_if_over(transfer)

    def _forget_if_over(self, transfer: Transfer) -> None:
        if transfer.inward.has_ended and (transfer.sender is None or transfer.outward.has_ended):
            self._transfers.pop(transfer.key, None)

    def _sender_ends(self, transfer: Transfer, fault: Event | None = None, error: str = "") -> None:
        outward = transfer.outward
        sender, key = transfer.sender, transfer.sender_key
        if sender is None or key is None or outward.has_ended:
            return
        if fault is None:
            outward.check(0, outward.size, True)
        else:
            self._still(transfer)
            outward.handle(fault, error)
            outward.writer_gone()
        self._forget_if_over(transfer)
        exposed_s = self._agenda.now_s - transfer.last_pushed_s
        sender.sent(key, transfer.key, outward.state is State.VERIFIED, outward.error, exposed_s)
