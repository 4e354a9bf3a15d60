"""The prefill worker in the model: the real SendTransfers and BlockAllocator, the one thread of a pair, an owner.

A chunk's checksum is computed when the chunk is taken (`take`). Its bytes are read at the latest possible time
(`send`), as with a socket that was full in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvtransfer.protocol.receive_transfers import ReplyToSender
from kvtransfer.protocol.send_transfers import Action, Announce, ReportSent, SendTransfers, StaleSource
from kvtransfer.protocol.transfers import Job
from kvtransfer.protocol.transport import Sent
from pdserve.core.kv.blocks import BlockAllocator
from pdserve.core.kv.kv_shape import TransferKey
from tests.unit.kvtransfer.model.checker import Event, Output, Violated
from tests.unit.kvtransfer.model.wire import BLOCK_BYTES, JUNK, Chunk, Content, Scenario, content_hash_of, grant_of


@dataclass(slots=True)
class Order:
    """One transfer as its owner sees it."""

    key: TransferKey
    blocks: list[int]
    num_pushed: int = 0
    num_ends: int = 0


@dataclass
class PrefillSide:
    scenario: Scenario
    pool: BlockAllocator
    memory: list[Content]
    table: SendTransfers | None = None  # Number of the pair's connection; a new connection has a new table.
    to_incarnation: int = 0  # Incarnation of the worker at the other end.
    now_s: float = 0.0
    job: Job | None = None
    stamps: bytes = b""
    checksum: tuple[Content, ...] = ()
    orders: dict[int, Order] = field(default_factory=dict)

    @classmethod
    def begun(cls, scenario: Scenario) -> PrefillSide:
        return cls(scenario, BlockAllocator(scenario.source_blocks), [JUNK] * scenario.source_blocks)

    def react(self, event: Event) -> list[Output] | None:
        match event:
            case ("start", int(transfer), int(incarnation)):
                return self._start(transfer, incarnation)
            case ("push", int(transfer)):
                return self._push(transfer)
            case ("take",):
                return self._take()
            case ("send",):
                return self._send()
            case ("cut",):
                return self._cut()
            case ("restart",):
                self.__dict__.update(PrefillSide.begun(self.scenario).__dict__)
                return []
        if self.table is None:
            return None
        match event:
            case ("dial",):
                return (
                    [("linked", self.to_incarnation), *self._do(self.table.linked())] if self.table.needs_link else None
                )
            case ("hear", ReplyToSender(_, tag, True)):
                return self._do(self.table.done(tag, self.now_s))
            case ("hear", ReplyToSender(_, tag, False)):
                return self._do(self.table.refused(tag, "", self.now_s))
            case ("abort", int(transfer)):
                order = self.orders.get(transfer)
                return None if order is None or order.num_ends else self._do(self.table.abort(order.key, self.now_s))
            case ("time passes",):
                return self._tick()
        raise AssertionError(event)

    def alone(self) -> Iterator[Event]:
        yield from (("push", transfer) for transfer in self.orders)
        yield from (("take",), ("send",), ("dial",))
        if self.scenario.has_clock:
            yield ("time passes",)

    def given_up(self) -> Iterator[Event]:
        yield ("restart",)
        yield from (("abort", transfer) for transfer in self.orders)

    @property
    def holds(self) -> list[int]:
        return [block for order in self.orders.values() for block in order.blocks]

    def next_alarm_s(self) -> float | None:
        return None if self.table is None else self.table.next_alarm_s

    def _deadline_at_s(self) -> float | None:
        return None if self.scenario.deadline_s is None else self.now_s + self.scenario.deadline_s

    def deadline_s(self) -> float:
        """When the last open transfer ends by itself: at its deadline, or for want of progress where it has none."""
        open_ones = () if self.table is None else self.table._open.values()
        return max((one.deadline_at_s or one.lease_at_s or self.now_s for one in open_ones), default=self.now_s)

    def _start(self, transfer: int, incarnation: int) -> list[Output] | None:
        if self.table is not None and self.to_incarnation != incarnation:
            return None  # The old connection ends first. In the product both may overlap, but they share no state.
        blocks = self.pool.allocate(self.scenario.blocks)
        if blocks is None:
            return None
        for block in blocks:
            self.memory[block] = JUNK
        if self.table is None:
            self.table, self.to_incarnation = SendTransfers(BLOCK_BYTES, self.pool.stamps), incarnation
        grant = grant_of(transfer, incarnation, tuple(range(self.scenario.blocks)))
        self.orders[transfer] = Order(grant.key, blocks)
        return self._do(self.table.start(grant, self.now_s, self._deadline_at_s()))

    def _push(self, transfer: int) -> list[Output] | None:
        """The next block is computed and passed to the sender."""
        order = self.orders.get(transfer)
        if self.table is None or order is None or order.num_pushed >= len(order.blocks):
            return None
        index = order.num_pushed
        order.num_pushed += 1
        block = order.blocks[index]
        self.memory[block] = (transfer, index)
        self.pool.stamps.mark(block, content_hash_of(transfer, index))
        is_last = order.num_pushed == len(order.blocks)
        return self._do(self.table.push(order.key, [(index, block)], is_last, self.now_s))

    def _take(self) -> list[Output] | None:
        if self.table is None or self.job is not None or not self.table.is_linked:
            return None
        self.job = self.table.take(1, self.now_s)
        if self.job is None:
            return None
        self.checksum = self._read(self.job)
        try:
            self.stamps = self.table.stamp(self.job)
        except StaleSource as stale:
            job, self.job, self.checksum = self.job, None, ()
            return self._do(self.table.stale(job, str(stale), self.now_s))
        return []

    def _send(self) -> list[Output] | None:
        if self.table is None or self.job is None:
            return None
        job, stamps, checksum = self.job, self.stamps, self.checksum
        payload = self._read(job)
        self.job, self.stamps, self.checksum = None, b"", ()
        origin = job.transfer.grant.key.generation
        chunk = Chunk(job.transfer.tag, job.chunk.first, stamps, payload, checksum, job.transfer.is_stamped, origin)
        return [("send", chunk), *self._do(self.table.written(job, self.now_s))]

    def _read(self, job: Job) -> tuple[Content, ...]:
        transfer = job.transfer.grant.key.generation
        order = self.orders[transfer]
        for source in job.chunk.sources:
            if source not in order.blocks:
                raise Violated("sources kept", f"block {source} of P is read for transfer {transfer}, which has ended")
        return tuple(self.memory[source] for source in job.chunk.sources)

    def _cut(self) -> list[Output] | None:
        """The pair's thread ends, and with it the frame that it was writing."""
        if self.table is None:
            return None
        self.job, self.stamps, self.checksum = None, b"", ()
        outputs = self._do(self.table.cut("cut", self.now_s))
        self.table = None
        return outputs

    def _tick(self) -> list[Output] | None:
        alarm_s = self.next_alarm_s()
        if alarm_s is None or self.table is None:
            return None
        self.now_s = max(self.now_s, alarm_s)
        return self._do(self.table.expire(self.now_s))

    def _do(self, actions: list[Action]) -> list[Output]:
        outputs: list[Output] = []
        for action in actions:
            if isinstance(action, ReportSent):
                outputs.append(self._hear_end(action.sent))
            elif isinstance(action, Announce):
                outputs.append(("send", action))
            else:
                outputs.append(("send", type(action)(action.tag, "")))
        self.pool.check(holders=[order.blocks for order in self.orders.values()])
        return outputs

    def _hear_end(self, sent: Sent) -> Output:
        transfer = sent.key.generation
        order = self.orders[transfer]
        order.num_ends += 1
        if order.num_ends > 1:
            raise Violated(
                "one end", f"the owner of transfer {transfer} on P hears {sent.outcome.value} as a second end"
            )
        self.pool.release(order.blocks)
        order.blocks = []
        return ("ended", transfer, sent.outcome)
