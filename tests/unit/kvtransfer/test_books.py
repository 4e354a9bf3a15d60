"""Both tables joined by a simulated connection, under random schedules with faults. No thread, clock or socket.

Memory is modelled: the moment a side hands memory back, its owner scribbles over it, and any later access by the
transfer is an error. A transfer that is reported VERIFIED must equal its source at that moment.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtransfer import receive_transfers, send_transfers
from kvtransfer.frames import Tag
from kvtransfer.parts import Part
from kvtransfer.receive_transfers import Claim, ReceiveTransfers
from kvtransfer.send_transfers import Job, SendTransfers
from kvtransfer.stamping import pack
from kvtransfer.transport import ReceiveOutcome, SendOutcome
from pdserve.core.grant import Grant, TransferKey
from pdserve.core.stamps import BlockStamps
from tests.unit.kvtransfer.harness import fingerprint

FACTS = fingerprint(64)
SCRIBBLE = -1
STAMPS = BlockStamps(1_000_000)


def stamps(tag: Tag, count: int) -> bytes:
    """Of blocks without names."""
    return pack([0] * count, tag.generation, 1)


def grant_of(transfer_id: str, attempt: int, generation: int, blocks: tuple[int, ...]) -> Grant:
    key = TransferKey(transfer_id=transfer_id, attempt=attempt, generation=generation)
    return Grant(key=key, endpoint="", worker_id="d", incarnation="i", fingerprint=FACTS, blocks=blocks, held_blocks=0)


@dataclass
class Chunk:
    """On the simulated wire; `payload` is what was read, `checksum` what was there."""

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
    must_cut: bool = False  # a write is open for too long
    writing: tuple[Claim, Chunk] | None = None
    handed_back: set[TransferKey] = field(default_factory=set)
    returned: set[TransferKey] = field(default_factory=set)
    receiver_said: dict[TransferKey, list[ReceiveOutcome]] = field(default_factory=dict)
    sender_said: Counter[TransferKey] = field(default_factory=Counter)

    def fault(self, chance: float) -> bool:
        return self.rng.random() < chance and self.is_faulty

    # Acting on what the tables decide.

    def receiver_acts(self, actions: list[receive_transfers.Action]) -> None:
        for action in actions:
            if isinstance(action, receive_transfers.Answer):
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
                assert self.writing[0].target.grant.key != key, "handed back while a write was open"
            if outcome is ReceiveOutcome.VERIFIED:
                got = [self.target[block] for block in grant.blocks]
                assert got == [100 + source for source in self.sources[key]], "wrong bytes were verified"
            self.handed_back.add(key)
            for block in grant.blocks:
                self.target[block] = SCRIBBLE

    def sender_acts(self, actions: list[send_transfers.Action]) -> None:
        for action in actions:
            if isinstance(action, send_transfers.Report):
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

    # Things that may happen at any time.

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
            blocks = [*blocks, (0, self.sources[key][0])]  # a block twice: the sender must notice
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
                message.tag, self.writer, message.first, stamps(message.tag, len(message.payload)), self.now_s
            )
            if claim is not None and self.table.enter(claim):
                self.writing = claim, message

    def receive(self) -> None:
        if self.writing is None:
            return
        (claim, chunk), self.writing = self.writing, None
        assert claim.target.grant.key not in self.handed_back, "written after it was handed back"
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
        """The socket breaks: what is on the wire is lost, and both threads stop touching memory."""
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
        """No more faults: everything must come to an end."""
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


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.lists(st.integers(0, len(HAPPENINGS) - 1), max_size=200))
def test_no_schedule_verifies_wrong_bytes_or_touches_memory_that_was_handed_back(seed: int, steps: list[int]) -> None:
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


def opened(
    blocks: tuple[int, ...] = (0, 1, 2, 3), deadline_at_s: float | None = None
) -> tuple[ReceiveTransfers, Grant, Tag]:
    table, grant = ReceiveTransfers(STAMPS, grace_s=1.0), grant_of("t", 1, 1, blocks)
    assert table.expect(grant, 0.0, deadline_at_s) == []
    tag = receive_transfers.tag_of(grant.key)
    assert table.announce(tag, 1) == []
    return table, grant, tag


def outcomes_of(actions: list[receive_transfers.Action]) -> list[tuple[ReceiveOutcome, str]]:
    return [(a.received.outcome, a.received.error) for a in actions if isinstance(a, receive_transfers.Report)]


def test_a_chunk_of_an_old_generation_or_attempt_gets_no_claim_and_is_counted() -> None:
    table, _, tag = opened()
    assert table.claim(tag._replace(generation=0), 1, 0, stamps(tag, 1), 0.0) is None
    assert table.claim(tag._replace(attempt=9), 1, 0, stamps(tag, 1), 0.0) is None
    assert table.stats.late_messages == 2


def test_a_chunk_from_a_connection_that_did_not_announce_gets_no_claim() -> None:
    table, _, tag = opened()
    assert table.claim(tag, 2, 0, stamps(tag, 1), 0.0) is None
    assert table.stats.late_messages == 1


def test_a_chunk_outside_the_grant_or_over_another_gets_no_claim() -> None:
    table, _, tag = opened()
    assert table.claim(tag, 1, 3, stamps(tag, 2), 0.0) is None
    assert table.claim(tag, 1, 2**31, stamps(tag, 2**10), 0.0) is None
    assert table.claim(tag, 1, 0, stamps(tag, 2), 0.0) is not None
    assert table.claim(tag, 1, 1, stamps(tag, 2), 0.0) is None
    assert table.stats.duplicate_chunks == 3


def test_an_empty_grant_is_verified_at_once_and_a_late_announcement_learns_it() -> None:
    table, grant = ReceiveTransfers(STAMPS), grant_of("t", 1, 1, ())
    assert outcomes_of(table.expect(grant, 0.0, None)) == [(ReceiveOutcome.VERIFIED, "")]
    tag = receive_transfers.tag_of(grant.key)
    assert table.announce(tag, 5) == [receive_transfers.Answer(5, tag, True)]


def test_a_last_chunk_that_leaves_a_gap_fails_the_transfer_at_once() -> None:
    table, _, tag = opened()
    claim = table.claim(tag, 1, 3, stamps(tag, 1), 0.0)
    assert claim is not None
    actions = table.settle(claim, 1, True, True, 0.0)
    assert outcomes_of(actions) == [(ReceiveOutcome.FAILED, "3 of 4 blocks never came")]
    assert receive_transfers.Answer(1, tag, False, "3 of 4 blocks never came") in actions


def test_an_abort_that_does_not_drain_in_time_is_quarantined_and_then_drained() -> None:
    table, grant, tag = opened()
    claim = table.claim(tag, 1, 0, stamps(tag, 1), 0.0)
    assert claim is not None
    assert table.enter(claim)
    assert outcomes_of(table.abort(grant.key, 10.0)) == []
    assert table.next_alarm_s == 11.0
    assert outcomes_of(table.expire(10.9)) == []
    assert outcomes_of(table.expire(11.0)) == [(ReceiveOutcome.QUARANTINED, "aborted by the receiver")]
    assert outcomes_of(table.leave(claim, 12.0)) == [(ReceiveOutcome.DRAINED, "aborted by the receiver")]
    assert (table.stats.quarantined, table.stats.cancelled) == (1, 1)


def test_a_deadline_fails_the_transfer_and_says_how_far_it_came() -> None:
    table, _, tag = opened(deadline_at_s=5.0)
    claim = table.claim(tag, 1, 0, stamps(tag, 3), 0.0)
    assert claim is not None
    table.settle(claim, 3, True, False, 0.0)
    assert table.expire(4.9) == []
    error = "the deadline passed when 3 of 4 blocks had come"
    assert outcomes_of(table.expire(5.0)) == [(ReceiveOutcome.FAILED, error)]
    assert table.stats.expired == 1


def test_an_abort_of_what_ended_or_never_was_does_nothing() -> None:
    table, grant, _ = opened()
    table.cut(1, "gone", 0.0)
    assert table.abort(grant.key, 0.0) == []
    assert table.abort(TransferKey(transfer_id="x", attempt=1, generation=1), 0.0) == []


def test_alarms_of_ended_transfers_do_not_pile_up() -> None:
    table = ReceiveTransfers(STAMPS)
    for generation in range(5000):
        grant = grant_of("t", 1, generation, (0,))
        table.expect(grant, 0.0, 600.0)
        table.abort(grant.key, 0.0)
    assert len(table._alarms) < 300
    assert len(table._ended) <= receive_transfers.REMEMBERED


def test_chunks_of_two_transfers_take_turns() -> None:
    out = SendTransfers(1, STAMPS)
    out.linked()
    for name in ("long", "short"):
        grant = grant_of(name, 1, 1, tuple(range(4)))
        out.start(grant, 0.0, None)
        out.push(grant.key, [(i, i) for i in range(4)], True, 0.0)
    order = []
    while (job := out.take(2, 0.0)) is not None:
        out.stamp(job)
        order.append((job.transfer.grant.key.transfer_id, job.chunk.first, job.transfer.is_stamped))
        out.written(job, 0.0)
    assert order == [("long", 0, False), ("short", 0, False), ("long", 2, True), ("short", 2, True)]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_last_chunk_is_the_last_one_sent(order: tuple[int, ...]) -> None:
    """Copies on several streams end in any order. A receiver that hears "last" too early reports missing blocks."""
    out = SendTransfers(1, STAMPS)
    out.linked()
    grant = grant_of("t", 1, 1, tuple(range(6)))
    out.start(grant, 0.0, None)
    out.push(grant.key, [(i, i) for i in range(6)], True, 0.0)
    jobs = [out.take(2, 0.0) for _ in range(3)]
    says_last = []
    for number in order:
        job = jobs[number]
        assert job is not None
        out.stamp(job)
        says_last.append(job.transfer.is_stamped)
    assert says_last == [False, False, True]


def test_a_connection_that_ends_closes_the_writes_that_it_had_open() -> None:
    table, grant, tag = opened()
    first, second = (table.claim(tag, 1, at, stamps(tag, 1), 0.0) for at in (0, 1))
    assert first is not None
    assert second is not None
    assert table.enter(first)
    assert table.enter(second)
    table.leave(first, 0.0)
    assert outcomes_of(table.abort(grant.key, 1.0)) == [], "a write is open"
    assert outcomes_of(table.cut(1, "the connection broke", 2.0)) == [
        (ReceiveOutcome.DRAINED, "aborted by the receiver")
    ]


def test_the_end_of_one_shard_does_not_close_the_writes_of_another() -> None:
    table = ReceiveTransfers(STAMPS, grace_s=1.0)
    grant = grant_of("t", 1, 1, (0, 1))
    table.expect(grant, 0.0, None)
    tag = receive_transfers.tag_of(grant.key)
    claims = []
    for shard, writer in enumerate((1, 2)):
        assert table.announce(tag, writer, shard, num_shards=2) == []
        claims.append(table.claim(tag, writer, 0, shard_stamps(tag, shard), 0.0, Part(shard, 0, 1)))
    for claim in claims:
        assert claim is not None
        assert table.enter(claim)
    assert outcomes_of(table.cut(1, "the connection broke", 2.0)) == [], "the other shard still writes"
    assert outcomes_of(table.cut(2, "the connection broke", 2.0)) == [(ReceiveOutcome.FAILED, "the connection broke")]


def shard_stamps(tag: Tag, shard: int) -> bytes:
    return pack([0], tag.generation, Part(shard, 0, 1).mask)


def test_a_deadline_before_the_sender_came_says_that_no_block_did() -> None:
    table, grant = ReceiveTransfers(STAMPS), grant_of("t", 1, 1, (0, 1, 2, 3))
    table.expect(grant, 0.0, 5.0)
    error = "the deadline passed when 0 of 4 blocks had come"
    assert outcomes_of(table.expire(5.0)) == [(ReceiveOutcome.FAILED, error)]


@pytest.mark.parametrize(("groups", "pieces"), [(1, "1 of 2 blocks"), (2, "1 of 4 parts of blocks")])
def test_a_sender_says_at_its_deadline_how_far_it_came(groups: int, pieces: str) -> None:
    out, grant = SendTransfers(1, STAMPS), grant_of("t", 1, 1, (0, 1))
    out.linked()
    out.start(grant, 0.0, 5.0, groups=groups)
    out.push(grant.key, [(0, 0)], False, 1.0, groups=range(1))
    job = out.take(1, 1.0)
    assert job is not None
    out.written(job, 1.0)
    assert out.expire(4.9) == []
    [sent] = [one.sent for one in out.expire(5.0) if isinstance(one, send_transfers.Report)]
    assert sent.error == f"the deadline passed when {pieces} were sent"


def test_a_block_that_is_pushed_twice_is_named() -> None:
    out, grant = SendTransfers(1, STAMPS), grant_of("t", 1, 1, (0, 1, 2, 3))
    out.linked()
    out.start(grant, 0.0, None)
    out.push(grant.key, [(0, 0), (1, 1)], False, 0.0)
    [sent] = [
        one.sent for one in out.push(grant.key, [(1, 1), (2, 2)], False, 0.0) if isinstance(one, send_transfers.Report)
    ]
    assert (sent.outcome, sent.error) == (SendOutcome.FAILED, "blocks 1..2 of 4 were pushed twice")


def test_a_transfer_that_was_given_up_before_the_connection_is_retracted_over_it() -> None:
    """The receiver learns of it, so that it does not wait for its own deadline."""
    out, grant, empty = SendTransfers(1, STAMPS), grant_of("t", 1, 1, (0, 1)), grant_of("empty", 1, 1, ())
    for each in (grant, empty):
        out.start(each, 0.0, None)
        out.abort(each.key, 1.0)
    assert out.needs_link
    retract = send_transfers.Retract(receive_transfers.tag_of(grant.key), "aborted by the sender", True)
    assert out.linked() == [retract], "the grant of nothing needs no word"
    assert not out.needs_link
    assert out.linked() == []


def test_a_cut_closes_the_reads_of_its_transfers_and_says_nothing_over_the_connection() -> None:
    out, grant = SendTransfers(1, STAMPS), grant_of("t", 1, 1, (0, 1))
    out.linked()
    out.start(grant, 0.0, None)
    out.push(grant.key, [(0, 0), (1, 1)], True, 0.0)
    assert out.take(1, 0.0) is not None
    [report] = out.cut("the connection broke", 1.0)
    assert isinstance(report, send_transfers.Report)
    assert (report.sent.outcome, report.sent.error) == (SendOutcome.FAILED, "the connection broke")
    assert out.keys == []
    assert not out.needs_link
    assert out.linked() == [], "the receiver saw the end of the connection"


def test_a_transfer_that_was_verified_is_not_retracted_over_a_later_connection() -> None:
    out, grant = SendTransfers(1, STAMPS), grant_of("t", 1, 1, (0,))
    out.linked()
    out.start(grant, 0.0, None)
    out.push(grant.key, [(0, 0)], True, 0.0)
    job = out.take(1, 0.0)
    assert job is not None
    out.written(job, 0.0)
    [report] = out.done(receive_transfers.tag_of(grant.key), 1.0)
    assert isinstance(report, send_transfers.Report)
    assert report.sent.outcome is SendOutcome.SENT
    assert not out.needs_link
    assert out.linked() == []


def test_an_announcement_that_is_not_expected_is_answered_and_counted() -> None:
    table, _, tag = opened()
    unknown = tag._replace(generation=9)
    refused = "the receiver does not expect this transfer"
    assert table.announce(unknown, 1) == [receive_transfers.Answer(1, unknown, False, refused)]
    assert table.announce(tag, 2) == [receive_transfers.Answer(2, tag, False, f"{refused}: shard 0 has its writer")]
    assert table.announce(tag, 1, shard=1) == [
        receive_transfers.Answer(1, tag, False, f"{refused}: shard 1 is not of 1")
    ]
    assert table.announce(tag, 1, shard=-1) == [
        receive_transfers.Answer(1, tag, False, f"{refused}: shard -1 is not of 1")
    ]
    assert table.stats.late_messages == 4
    assert table.announce(tag, 1) == [], "the writer repeats itself"
    assert table.stats.late_messages == 4


@pytest.mark.parametrize(("is_cancelled", "count"), [(False, "failed"), (True, "cancelled")])
def test_a_sender_that_gives_up_ends_the_transfer_at_once(is_cancelled: bool, count: str) -> None:
    table, _, tag = opened()
    assert table.retract(tag, 2, "not mine", 0.0) == [], "only the writer speaks for it"
    actions = table.retract(tag, 1, "the client left", 1.0, is_cancelled=is_cancelled)
    assert outcomes_of(actions) == [(ReceiveOutcome.FAILED, "the sender gave up: the client left")]
    assert not [one for one in actions if isinstance(one, receive_transfers.Answer)], "it knows"
    assert getattr(table.stats, count) == 1
    assert table.retract(tag, 1, "again", 2.0) == []
    assert table.stats.late_messages == 2


@pytest.mark.parametrize(("groups", "pieces"), [(1, "2 of 4 blocks"), (2, "6 of 8 parts of blocks")])
def test_a_last_push_that_leaves_a_gap_fails_the_transfer(groups: int, pieces: str) -> None:
    out, grant = SendTransfers(1, STAMPS), grant_of("t", 1, 1, (0, 1, 2, 3))
    out.linked()
    out.start(grant, 0.0, None, groups=groups)
    actions = out.push(grant.key, [(0, 0), (3, 3)], True, 0.0, groups=range(1))
    [sent] = [one.sent for one in actions if isinstance(one, send_transfers.Report)]
    assert (sent.outcome, sent.error) == (SendOutcome.FAILED, f"the last push leaves {pieces} out")


@pytest.mark.parametrize(("is_cancelled", "count"), [(False, "failed"), (True, "cancelled")])
def test_a_receiver_that_gives_up_ends_the_transfer_of_the_sender(is_cancelled: bool, count: str) -> None:
    out, grant = SendTransfers(1, STAMPS), grant_of("t", 1, 1, (0, 1))
    tag = receive_transfers.tag_of(grant.key)
    out.linked()
    out.start(grant, 0.0, None)
    [report] = out.refused(tag, "no memory", 1.0, is_cancelled=is_cancelled)
    assert isinstance(report, send_transfers.Report), "the receiver knows, so that nothing is said to it"
    assert (report.sent.outcome, report.sent.error) == (SendOutcome.FAILED, "the receiver refused: no memory")
    assert getattr(out.stats, count) == 1
    assert out.refused(tag, "again", 2.0) == []
    assert out.done(tag, 2.0) == []
    assert out.stats.late_messages == 2


def test_a_refusal_while_a_block_is_read_waits_for_the_read() -> None:
    out, grant = SendTransfers(1, STAMPS), grant_of("t", 1, 1, (0, 1))
    tag = receive_transfers.tag_of(grant.key)
    out.linked()
    out.start(grant, 0.0, None)
    out.push(grant.key, [(0, 0), (1, 1)], True, 0.0)
    job = out.take(1, 0.0)
    assert job is not None
    assert out.refused(tag, "no memory", 1.0) == []
    assert out.refused(tag, "again", 1.0) == []
    assert out.stats.late_messages == 1
    assert out.take(1, 1.0) is None, "no further block is read"
    [report] = out.written(job, 2.0)
    assert isinstance(report, send_transfers.Report)
    assert report.sent.error == "the receiver refused: no memory"


@pytest.mark.parametrize(
    ("is_sent", "ends_at_s", "error"),
    [
        (False, 8.0, "nothing was pushed or taken for 7 s"),
        (True, 4.0, "the receiver did not confirm it within 3 s of its last block"),
    ],
)
def test_a_transfer_without_a_deadline_ends_by_its_lease(is_sent: bool, ends_at_s: float, error: str) -> None:
    out, grant = SendTransfers(1, STAMPS, stall_s=7.0, unconfirmed_s=3.0), grant_of("t", 1, 1, (0, 1))
    out.linked()
    out.start(grant, 0.0, None)
    out.push(grant.key, [(0, 0), (1, 1)] if is_sent else [(0, 0)], is_sent, 1.0)
    job = out.take(2, 1.0)
    assert job is not None
    out.written(job, 1.0)
    assert out.next_alarm_s == ends_at_s
    assert out.expire(ends_at_s - 0.1) == []
    [sent] = [one.sent for one in out.expire(ends_at_s) if isinstance(one, send_transfers.Report)]
    assert (sent.outcome, sent.error) == (SendOutcome.FAILED, error)
    assert (out.stats.failed, out.next_alarm_s) == (1, None)
