"""Both tables joined by a simulated connection, under random schedules with faults. No thread, clock or socket.

Memory is modelled: when a side frees a block, its owner overwrites it at once, and any later access by the transfer is
an error. A transfer that is reported VERIFIED must equal its source at that time.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtransfer.protocol import receive_transfers, send_transfers
from kvtransfer.protocol.frames import Tag
from kvtransfer.protocol.receive_transfers import Claim, ReceiveTransfers
from kvtransfer.protocol.send_transfers import Job, SendTransfers
from kvtransfer.protocol.transport import ReceiveOutcome, SendOutcome
from pdserve.core.kv.kv_shape import Grant, TransferKey
from tests.support.examples import examples
from tests.unit.kvtransfer.harness import STAMPS, grant_of, unmarked_stamps

SCRIBBLE = -1


@dataclass
class Chunk:
    """A chunk on the simulated wire. `payload` are the bytes that were read, `checksum` is of those that were there."""

    tag: Tag
    first: int
    payload: list[int]
    checksum: int
    is_last: bool


@dataclass
class World:
    rng: random.Random
    is_faulty: bool = True
    now_s: float = 0.0
    writer: int = 1
    table: ReceiveTransfers = field(
        default_factory=lambda: ReceiveTransfers(STAMPS, grace_s=1.0, stall_s=1e6, unclaimed_s=1e6)
    )
    out: SendTransfers = field(default_factory=lambda: SendTransfers(1, STAMPS, stall_s=1e6))
    to_receiver: deque[Any] = field(default_factory=deque)
    to_sender: deque[Any] = field(default_factory=deque)
    target: dict[int, int] = field(default_factory=dict)  # block -> value
    source: dict[int, int] = field(default_factory=dict)
    next_block: int = 0
    generation: int = 0
    grants: dict[TransferKey, Grant] = field(default_factory=dict)
    sources: dict[TransferKey, list[int]] = field(default_factory=dict)
    unpushed: dict[TransferKey, list[tuple[int, int]]] = field(default_factory=dict)
    job: Job | None = None
    must_cut: bool = False  # A write is open for too long.
    writing: tuple[Claim, Chunk] | None = None
    handed_back: set[TransferKey] = field(default_factory=set)
    returned: set[TransferKey] = field(default_factory=set)
    receiver_said: dict[TransferKey, list[ReceiveOutcome]] = field(default_factory=dict)
    sender_said: Counter[TransferKey] = field(default_factory=Counter)

    def fault(self, chance: float) -> bool:
        return self.rng.random() < chance and self.is_faulty

    # Carrying out the tables' actions.

    def receiver_acts(self, actions: list[receive_transfers.Action]) -> None:
        for action in actions:
            if isinstance(action, receive_transfers.ReplyToSender):
                self.to_sender.append(action)
                continue
            if isinstance(action, receive_transfers.Sever):
                self.must_cut = True
                continue
            key, outcome = action.received.key, action.received.outcome
            said = self.receiver_said.setdefault(key, [])
            assert not said or said == [ReceiveOutcome.QUARANTINED], f"{key} was told {said}, then {outcome}"
            assert not said or outcome is ReceiveOutcome.DRAINED
            said.append(outcome)
            if outcome is ReceiveOutcome.QUARANTINED:
                continue
            grant = self.grants[key]
            if self.writing is not None:
                assert self.writing[0].transfer.grant.key != key, "handed back while a write was open"
            if outcome is ReceiveOutcome.VERIFIED:
                got = [self.target[block] for block in grant.blocks]
                assert got == [100 + source for source in self.sources[key]], "wrong bytes were verified"
            self.handed_back.add(key)
            for block in grant.blocks:
                self.target[block] = SCRIBBLE

    def sender_acts(self, actions: list[send_transfers.Action]) -> None:
        for action in actions:
            if isinstance(action, send_transfers.ReportSent):
                key = action.sent.key
                self.sender_said[key] += 1
                assert self.sender_said[key] == 1, f"{key} was told twice"
                assert self.job is None or self.job.transfer.grant.key != key, "handed back while being read"
                if action.sent.outcome is SendOutcome.SENT:
                    assert self.receiver_said[key] == [ReceiveOutcome.VERIFIED]
                self.returned.add(key)
                for source in self.sources[key]:
                    self.source[source] = SCRIBBLE
            else:
                self.to_receiver.append(action)

    # Events that may happen at any time.

    def grant(self) -> None:
        self.generation += 1
        count = self.rng.randint(0, 6)
        blocks = tuple(range(self.next_block, self.next_block + count))
        self.next_block += count
        transfer_id = f"t{self.rng.randint(0, 3)}"
        grant = grant_of(transfer_id, self.rng.randint(1, 2), self.generation, blocks)
        sources = self.rng.sample(range(1000 * self.generation, 1000 * self.generation + 10), count)
        self.grants[grant.key], self.sources[grant.key] = grant, sources
        self.source.update({source: 100 + source for source in sources})
        self.target.update(dict.fromkeys(blocks, 0))
        self.unpushed[grant.key] = list(enumerate(sources))
        deadline_at_s = self.now_s + self.rng.uniform(1, 30) if self.fault(0.5) else None
        self.receiver_acts(self.table.expect(grant, self.now_s, deadline_at_s))
        self.sender_acts(self.out.start(grant, self.now_s, deadline_at_s))

    def push(self) -> None:
        waiting = [key for key, rest in self.unpushed.items() if key not in self.returned]
        if not waiting:
            return
        key = self.rng.choice(waiting)
        rest = self.unpushed[key]
        blocks = rest[: self.rng.randint(0, len(rest))]
        if self.fault(0.05) and self.grants[key].blocks:
            blocks = [*blocks, (0, self.sources[key][0])]  # A block that is pushed twice, which the sender must detect.
        self.unpushed[key] = rest[len(blocks) :]
        self.sender_acts(self.out.push(key, blocks, not self.unpushed[key], self.now_s))

    def link(self) -> None:
        if not self.out.is_linked:
            self.writer += 1
            self.to_receiver.clear()
            self.to_sender.clear()
            self.sender_acts(self.out.linked())

    def take(self) -> None:
        if self.job is None and self.out.is_linked:
            self.job = self.out.take(self.rng.randint(1, 3), self.now_s)

    def written(self) -> None:
        if self.job is None:
            return
        job, self.job = self.job, None
        values = [self.source[source] for source in job.chunk.sources]
        assert SCRIBBLE not in values, "read after it was handed back"
        self.out.stamp(job)
        chunk = Chunk(job.transfer.tag, job.chunk.first, values, hash(tuple(values)), job.transfer.is_stamped)
        if self.fault(0.05):
            chunk.payload[self.rng.randrange(len(values))] += 1
        self.to_receiver.append(chunk)
        if self.fault(0.1):
            self.to_receiver.append(chunk)
        if self.fault(0.05):
            self.rng.shuffle(self.to_receiver)
        self.sender_acts(self.out.written(job, self.now_s))

    def deliver(self) -> None:
        if self.writing is not None or not self.to_receiver:
            return
        message = self.to_receiver.popleft()
        if isinstance(message, send_transfers.Announce):
            self.receiver_acts(self.table.announce(message.tag, self.writer))
        elif isinstance(message, send_transfers.Retract):
            self.receiver_acts(self.table.retract(message.tag, self.writer, message.error, self.now_s))
        else:
            claim = self.table.claim(
                message.tag, self.writer, message.first, unmarked_stamps(message.tag, len(message.payload)), self.now_s
            )
            if claim is not None and self.table.enter(claim):
                self.writing = claim, message

    def receive(self) -> None:
        if self.writing is None:
            return
        (claim, chunk), self.writing = self.writing, None
        assert claim.transfer.grant.key not in self.handed_back, "written after it was handed back"
        for block, value in zip(claim.blocks, chunk.payload, strict=True):
            self.target[block] = value
        self.receiver_acts(self.table.leave(claim, self.now_s))
        values = tuple(self.target[block] for block in claim.blocks)
        matches = hash(values) == chunk.checksum
        self.receiver_acts(self.table.settle(claim, len(values), matches, chunk.is_last, self.now_s))

    def answer(self) -> None:
        if not self.to_sender:
            return
        answer = self.to_sender.popleft()
        if answer.is_verified:
            self.sender_acts(self.out.done(answer.tag, self.now_s))
        else:
            self.sender_acts(self.out.refused(answer.tag, answer.error, self.now_s))

    def repeat_an_answer(self) -> None:
        if self.to_sender:
            self.to_sender.append(self.to_sender[0])

    def abort_receive(self) -> None:
        if self.grants:
            key = self.rng.choice(list(self.grants))
            self.receiver_acts(self.table.abort(key, self.now_s))

    def abort_send(self) -> None:
        if self.grants:
            self.sender_acts(self.out.abort(self.rng.choice(list(self.grants)), self.now_s))

    def cut(self) -> None:
        """The socket breaks: messages on the wire are lost, and both threads stop accessing memory."""
        self.job = None
        self.to_receiver.clear()
        self.to_sender.clear()
        if self.writing is not None:
            (claim, _), self.writing = self.writing, None
            self.receiver_acts(self.table.leave(claim, self.now_s))
        self.receiver_acts(self.table.cut(self.writer, "cut", self.now_s))
        self.sender_acts(self.out.cut("cut", self.now_s))

    def tick(self) -> None:
        self.now_s += self.rng.uniform(0, 3)
        self.receiver_acts(self.table.expire(self.now_s))
        self.sender_acts(self.out.expire(self.now_s))
        if self.must_cut or self.out.is_stuck:
            self.must_cut = self.out.is_stuck = False
            self.cut()

    def drain(self) -> None:
        """Runs without further faults until every transfer has ended."""
        for _ in range(10_000):
            if not self.table.keys and not self.out.keys:
                return
            for happen in (self.link, self.push, self.take, self.written, self.deliver, self.receive, self.answer):
                happen()
            if not (self.to_receiver or self.to_sender or self.job or self.writing):
                self.tick()
                if self.is_faulty:
                    self.abort_receive()
        raise AssertionError(f"stuck: {self.table.keys} {self.out.keys}")


BENIGN = (World.grant, World.push, World.link, World.take, World.written, World.deliver, World.receive, World.answer)
HAPPENINGS = (
    *[World.grant] * 5, *[World.push] * 10, *[World.link] * 10, *[World.take] * 20, *[World.written] * 20,
    *[World.deliver] * 30, *[World.receive] * 30, *[World.answer] * 15,
    World.repeat_an_answer, World.abort_receive, World.abort_send, World.cut, World.tick,
)  # fmt: skip


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.lists(st.integers(0, len(HAPPENINGS) - 1), max_size=200))
def test_no_schedule_verifies_wrong_bytes(seed: int, steps: list[int]) -> None:
    world = World(random.Random(seed))
    for step in steps:
        HAPPENINGS[step](world)
    world.drain()
    check_the_end(world)


@pytest.mark.parametrize("seed", range(20))
def test_long_random_schedules_end_cleanly(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng)
    for _ in range(3000):
        rng.choice(HAPPENINGS)(world)
    world.drain()
    check_the_end(world)
    assert world.table.stats.verified > 10
    assert world.out.stats.verified > 10
    assert world.table.stats.late_messages > 0


@pytest.mark.parametrize("seed", range(5))
def test_without_faults_every_transfer_is_verified_and_sent(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng, is_faulty=False)
    for _ in range(2000):
        rng.choice(BENIGN)(world)
    world.drain()
    check_the_end(world)
    assert world.table.stats.verified == world.out.stats.verified == len(world.grants) > 100
    assert world.table.stats.late_messages == world.out.stats.late_messages == 0


def check_the_end(world: World) -> None:
    assert world.handed_back == world.returned == set(world.grants)
    stats = world.table.stats
    outcomes = Counter(said[-1] for said in world.receiver_said.values())
    assert outcomes[ReceiveOutcome.VERIFIED] == stats.verified
    assert outcomes[ReceiveOutcome.FAILED] == stats.failed
    assert outcomes[ReceiveOutcome.DRAINED] == stats.cancelled
    assert sum(outcomes.values()) == stats.transfers == len(world.grants)
    assert world.out.stats.verified + world.out.stats.failed + world.out.stats.cancelled == len(world.grants)
