"""The decode worker in the model: the real ReceiveTransfers and BlockAllocator, one thread per connection, an owner.

An event is what one thread does while it holds the receiver's lock, so every interleaving of threads is an order of
events. A write and its `leave` are one event, at the latest time at which the write can happen: an earlier write would
be visible to nothing before that time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from kvtransfer.protocol.receive_transfers import Action, ReceiveTransfers, ReplyToSender, ReportReceived
from kvtransfer.protocol.send_transfers import Announce, Retract
from kvtransfer.protocol.transfers import Claim
from kvtransfer.protocol.transport import Received, ReceiveOutcome
from pdserve.core.kv.blocks import BlockAllocator
from pdserve.core.kv.kv_shape import TransferKey
from tests.unit.kvtransfer.model.checker import Event, Output, Violated
from tests.unit.kvtransfer.model.wire import JUNK, TORN, Chunk, Content, Scenario, content_hash_of, grant_of


class At(Enum):
    """The position of a connection's thread within a chunk."""

    HEADER = "header"
    CLAIMED = "claimed"
    WRITING = "writing"  # Between enter and leave.
    WRITTEN = "written"


@dataclass(slots=True)
class Thread:
    at: At = At.HEADER
    claim: Claim | None = None
    chunk: Chunk | None = None
    left: int = 0  # slices


@dataclass(slots=True)
class Order:
    """One transfer as its owner sees it. `blocks` are held; `is_committed` once they may be read."""

    key: TransferKey
    blocks: list[int]
    is_committed: bool = False
    said: list[ReceiveOutcome] = field(default_factory=list)


@dataclass
class DecodeSide:
    scenario: Scenario
    table: ReceiveTransfers
    pool: BlockAllocator
    memory: list[Content]
    incarnation: int = 1
    now_s: float = 0.0
    threads: dict[int, Thread] = field(default_factory=dict)
    orders: dict[int, Order] = field(default_factory=dict)
    num_granted: int = 0

    @classmethod
    def begun(cls, scenario: Scenario, incarnation: int = 1, num_granted: int = 0) -> DecodeSide:
        pool = BlockAllocator(scenario.target_blocks)
        table = ReceiveTransfers(pool.stamps, grace_s=scenario.grace_s)
        side = cls(scenario, table, pool, [JUNK] * scenario.target_blocks, incarnation)
        side.num_granted = num_granted
        return side

    def react(self, event: Event) -> list[Output] | None:
        match event:
            case ("grant",):
                return self._grant()
            case ("connect", int(writer)):
                self.threads[writer] = Thread()
                return []
            case ("hear", int(writer), message):
                return self._on_frame(writer, message)
            case ("go on", int(writer)):
                return self._go_on(writer)
            case ("thread ends", int(writer)):
                return self._end(writer)
            case ("abort", int(transfer)):
                order = self.orders.get(transfer)
                is_waiting = order is not None and order.said in ([], [ReceiveOutcome.QUARANTINED])
                return self._do(self.table.abort(order.key, self.now_s)) if order is not None and is_waiting else None
            case ("free", int(transfer)):
                return self._free(transfer)
            case ("time passes",):
                return self._tick()
            case ("restart",):
                self.__dict__.update(DecodeSide.begun(self.scenario, self.incarnation + 1, self.num_granted).__dict__)
                return []
        raise AssertionError(event)

    def alone(self) -> Iterator[Event]:
        yield ("grant",)
        if self.scenario.has_clock:
            yield ("time passes",)
        yield from (("free", transfer) for transfer in self.orders)
        yield from (("go on", writer) for writer in self.threads)

    def given_up(self) -> Iterator[Event]:
        yield ("restart",)
        yield from (("abort", transfer) for transfer in self.orders)

    @property
    def holds(self) -> list[int]:
        return [block for order in self.orders.values() for block in order.blocks]

    def next_alarm_s(self) -> float | None:
        """The next time at which something is due."""
        return self.table.next_alarm_s

    def _deadline_at_s(self) -> float | None:
        return None if self.scenario.deadline_s is None else self.now_s + self.scenario.deadline_s

    def deadline_s(self) -> float:
        """When the last open transfer ends by itself: at its deadline, or for want of progress where it has none."""
        return max(
            (one.deadline_at_s or one.lease_at_s or self.now_s for one in self.table._open.values()), default=self.now_s
        )

    def _grant(self) -> list[Output] | None:
        if self.num_granted == self.scenario.transfers:
            return None
        blocks = self.pool.allocate(self.scenario.blocks)
        if blocks is None:
            return None
        self.num_granted += 1
        transfer = self.num_granted
        grant = grant_of(transfer, self.incarnation, tuple(blocks))
        for block in blocks:
            self.memory[block] = JUNK
        self.orders[transfer] = Order(grant.key, blocks)
        content_hashes = [content_hash_of(transfer, index) for index in range(len(blocks))]
        actions = self.table.expect(grant, self.now_s, self._deadline_at_s(), content_hashes)
        return [("grant", transfer), *self._do(actions)]

    def _on_frame(self, writer: int, message: object) -> list[Output] | None:
        thread = self.threads[writer]
        if thread.at is not At.HEADER:
            return None
        match message:
            case Announce(tag):
                return self._do(self.table.announce(tag, writer))
            case Retract(tag, error):
                return self._do(self.table.retract(tag, writer, error, self.now_s))
            case Chunk(tag, first, stamps):
                claim = self.table.claim(tag, writer, first, stamps, self.now_s)
                if claim is None:
                    return self._do(self.table.review(tag, self.now_s))
                self.threads[writer] = Thread(At.CLAIMED, claim, message, self.scenario.slices)
                return []
        raise AssertionError(message)

    def _go_on(self, writer: int) -> list[Output] | None:
        """Makes the thread's next call of the table."""
        thread = self.threads[writer]
        claim, chunk = thread.claim, thread.chunk
        if claim is None or chunk is None:
            return None
        if thread.at is At.CLAIMED:
            if self.table.enter(claim):
                thread.at = At.WRITING
                return []
            self.threads[writer] = Thread()  # The rest is read and discarded.
            return self._do(self.table.review(chunk.tag, self.now_s))
        if thread.at is At.WRITING:
            thread.left -= 1
            self._write(claim, chunk, is_whole=thread.left == 0)
            thread.at = At.WRITTEN if thread.left == 0 else At.CLAIMED
            return self._do(self.table.leave(claim, self.now_s))
        matches = tuple(self.memory[block] for block in claim.blocks) == chunk.checksum
        self.threads[writer] = Thread()
        return self._do(self.table.settle(claim, len(chunk.payload), matches, chunk.is_last, self.now_s))

    def _write(self, claim: Claim, chunk: Chunk, *, is_whole: bool) -> None:
        order = self.orders.get(chunk.origin)
        for block, content in zip(claim.blocks, chunk.payload, strict=True):
            if order is None or block not in order.blocks or order.is_committed:
                raise Violated("no old writer", f"block {block} of D is written for transfer {chunk.origin}")
            self.memory[block] = content if is_whole else TORN

    def _end(self, writer: int) -> list[Output] | None:
        thread = self.threads[writer]
        if thread.at is At.WRITING:
            return None  # Its open write is closed first.
        del self.threads[writer]
        return self._do(self.table.cut(writer, "cut", self.now_s))

    def _free(self, transfer: int) -> list[Output] | None:
        """The request has ended, and its committed blocks are freed."""
        order = self.orders.get(transfer)
        if order is None or not order.is_committed:
            return None
        self._give_back(order)
        return []

    def _tick(self) -> list[Output] | None:
        alarm_s = self.next_alarm_s()
        if alarm_s is None:
            return None
        self.now_s = max(self.now_s, alarm_s)
        return self._do(self.table.expire(self.now_s))

    def _do(self, actions: list[Action]) -> list[Output]:
        outputs: list[Output] = []
        for action in actions:
            if isinstance(action, ReplyToSender):
                if action.writer in self.threads:
                    outputs.append(
                        ("answer", action.writer, ReplyToSender(action.writer, action.tag, action.is_verified))
                    )
            elif isinstance(
                action, ReportReceived
            ):  # Sever needs no action: the thread may end at any time in this model.
                outputs += self._hear_end(action.received)
        self.pool.check(holders=[order.blocks for order in self.orders.values()])
        return outputs

    def _hear_end(self, received: Received) -> list[Output]:
        transfer = received.key.generation
        order = self.orders[transfer]
        if order.said not in ([], [ReceiveOutcome.QUARANTINED]) or (
            order.said and received.outcome is not ReceiveOutcome.DRAINED
        ):
            told = [one.value for one in (*order.said, received.outcome)]
            raise Violated("one end", f"the owner of transfer {transfer} on D hears {', '.join(told)}")
        order.said.append(received.outcome)
        if received.outcome is ReceiveOutcome.QUARANTINED:
            return []
        if received.outcome is not ReceiveOutcome.VERIFIED:
            self._give_back(order)
            return []
        found = [self.memory[block] for block in order.blocks]
        expected = [(transfer, index) for index in range(len(order.blocks))]
        if found != expected:
            raise Violated("only whole and right", f"transfer {transfer} is VERIFIED with {found} for {expected}")
        order.is_committed = True
        return [("verified", transfer)]

    def _give_back(self, order: Order) -> None:
        self.pool.release(order.blocks)
        order.blocks = []
        order.is_committed = False
