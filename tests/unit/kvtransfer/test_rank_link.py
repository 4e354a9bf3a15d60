"""A leader and its ranks over real streams in one process: leadership, orders, and lost ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from benchmarks.fault_storm import ranks
from benchmarks.fault_storm.ranks import (
    SHAPE,
    RankedStorage,
    StormRanks,
    content_hash_of,
    fingerprint_of_ranks,
    text_of,
)
from benchmarks.fault_storm.storage import Memory
from kvtransfer.faults.injector import FaultInjector
from kvtransfer.link.endpoint import make_receiver, make_sender
from kvtransfer.protocol.transport import ReceiveOutcome, SendOutcome
from kvtransfer.ranks.rank_endpoints import JoinedReceiver, JoinedSender
from kvtransfer.ranks.rank_link import RankLink, RemoteReceiver
from kvtransfer.ranks.rank_server import RankServer
from pdserve.config import WorkerConfig
from pdserve.core.access.proof import ClusterSecret, Identity
from pdserve.core.errors import ConfigError, InvalidRequest, Unavailable
from pdserve.core.kv.kv_shape import Grant, TransferKey
from pdserve.core.kv.stamps import BlockStamps
from pdserve.v1 import rank_pb2
from tests.support.cluster_secret import SECRET, TEXT
from tests.support.fake_ends import stand_ins
from tests.support.transfer_ends import endpoint_config
from tests.unit.kvtransfer.harness import PATIENT, GrpcHost, Heard, Pair, wait_for

COUNT = 5
LEADER = Identity.of(SECRET, "leader", "d0", "d0-1")
OPENING = rank_pb2.OpenEndpoint(incarnation="d0-1")


class Worker:
    """A worker of several ranks, all in this process."""

    def __init__(
        self, name: str, degree: int, *, is_sender: bool, transport: str = "tcp", memory: Memory = "host"
    ) -> None:
        self.storage, self.name = RankedStorage(degree, memory), name
        none = FaultInjector(lambda tag: None)
        self.ranks = StormRanks(self.storage, transport, name, f"{name}-1", none)
        facts = fingerprint_of_ranks(degree)
        common: dict[str, Any] = {
            "worker_id": name,
            "incarnation": f"{name}-1",
            "transport": transport,
            "stamps": self.storage.stamps,
            "lease": PATIENT,
        }
        self.facts, self.host = facts, None
        if is_sender:
            self.sender: JoinedSender = self.ranks.sender(
                make_sender(endpoint_config(self.storage.pool, facts, **common))
            )
        else:
            own = make_receiver(endpoint_config(self.storage.pool, facts, **common), host="127.0.0.1")
            self.host = GrpcHost(own.servicer)
            self.receiver: JoinedReceiver = self.ranks.receiver(own)

    def grant(self, generation: int, blocks: list[int]) -> Grant:
        assert self.host is not None
        return Grant(
            key=TransferKey(transfer_id=f"t{generation}", attempt=1, generation=generation),
            endpoint=self.host.endpoint,
            worker_id=self.name,
            incarnation=f"{self.name}-1",
            fingerprint=self.facts,
            blocks=tuple(blocks),
            num_cached_blocks=0,
            rank_endpoints=self.receiver.rank_endpoints,
        )

    def close(self) -> None:
        (self.receiver if self.host is not None else self.sender).close()
        self.ranks.close()
        if self.host is not None:
            self.host.stop()


@pytest.fixture
def worker() -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make(name: str, degree: int, **options: Any) -> Worker:
        made.append(Worker(name, degree, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Move:
    """Transfer number `number` of COUNT blocks, begun on both sides."""

    def __init__(self, p: Worker, d: Worker, number: int) -> None:
        self.p, self.d, self.number = p, d, number
        self.received, self.sent, self.opened = Heard(), Heard(), Heard()
        blocks, sources = d.storage.take(COUNT), p.storage.take(COUNT)
        assert blocks is not None
        assert sources is not None
        self.blocks, self.sources = blocks, sources
        p.storage.fill(sources, number)
        self.grant = d.grant(number, blocks)
        content_hashes = [content_hash_of(number, place) for place in range(COUNT)]
        if d.receiver.expect(self.grant, self.received, 60.0, content_hashes, lambda: self.opened(None)):  # type: ignore[arg-type]
            self.opened(None)  # type: ignore[arg-type]
        self.opened.wait()
        p.sender.start(self.grant, self.sent, 60.0, text_of(number, COUNT))

    def push(self, indices: range = range(COUNT)) -> None:
        blocks = [(index, self.sources[index]) for index in indices]
        self.p.sender.push(self.grant.key, blocks, indices.stop == COUNT)

    def assert_received(self) -> None:
        assert (self.received.wait().outcome, self.received.all[0].error) == (ReceiveOutcome.VERIFIED, "")
        assert self.sent.wait().outcome is SendOutcome.SENT
        for place, block in enumerate(self.blocks):
            self.d.storage.must_hold(block, self.number, place)
        assert self.d.storage.wrong == []

    @property
    def is_over_everywhere(self) -> bool:
        return self.p.sender.open_keys == self.d.receiver.open_keys == []


@pytest.mark.parametrize(
    ("degrees", "transport"), [((1, 2), "shm"), ((2, 1), "tcp"), ((2, 2), "shm"), ((2, 4), "tcp"), ((4, 2), "shm")]
)
def test_every_rank_gets_its_heads_of_every_block(
    worker: Callable[..., Worker], degrees: tuple[int, int], transport: str
) -> None:
    p = worker("p0", degrees[0], is_sender=True, transport=transport)
    d = worker("d0", degrees[1], is_sender=False, transport=transport)
    for number in (1, 2):
        move = Move(p, d, number)
        move.push(range(2))
        move.push(range(2, COUNT))
        move.assert_received()
        assert move.received.all[0].num_bytes == COUNT * SHAPE.block_bytes
        assert move.is_over_everywhere
    assert d.receiver.stats.verified == 2 * degrees[1]


@pytest.mark.gpu_checks
@pytest.mark.parametrize(
    ("degrees", "transport", "heads_first"),
    [
        *product([(1, 2), (2, 1), (2, 2), (2, 4), (4, 2)], ["cuda_ipc", "nccl", "tcp"], [False]),
        *product([(1, 2), (4, 2)], ["cuda_ipc", "nccl", "tcp"], [True]),
    ],
)
def test_ranks_on_devices_send_heads_from_their_blocks(
    degrees: tuple[int, int], transport: str, heads_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "SHAPE", replace(SHAPE, heads_first=heads_first))
    with stand_ins() as devices:
        p = Worker("p0", degrees[0], is_sender=True, transport=transport, memory="stand-in")
        d = Worker("d0", degrees[1], is_sender=False, transport=transport, memory="stand-in")
        try:
            for number in (1, 2):
                move = Move(p, d, number)
                move.push(range(2))
                move.push(range(2, COUNT))
                move.assert_received()
                assert move.received.all[0].num_bytes == COUNT * SHAPE.block_bytes
                assert move.sent.all[0].num_bytes == COUNT * SHAPE.block_bytes
            assert len(devices) == sum(degrees)
        finally:
            p.close()
            d.close()


def test_a_block_reused_during_a_send_fails_all_parts(worker: Callable[..., Worker]) -> None:
    p, d = worker("p0", 2, is_sender=True), worker("d0", 2, is_sender=False)
    move = Move(p, d, 1)
    move.push(range(2))
    p.storage.stamps.begin(move.sources)
    p.storage.fill(move.sources, 9)  # The step that writes them first sends the new epochs to every rank.
    move.push(range(2, COUNT))
    assert move.sent.wait().outcome is SendOutcome.FAILED
    assert move.received.wait().outcome is ReceiveOutcome.FAILED
    assert len(move.sent.all) == len(move.received.all) == 1
    wait_for(lambda: move.is_over_everywhere, "the end of every part")


def test_a_rank_does_not_send_reassigned_blocks(worker: Callable[..., Worker]) -> None:
    p, d = worker("p0", 2, is_sender=True), worker("d0", 2, is_sender=False)
    move = Move(p, d, 1)
    p.ranks.servers[0].reached([(block, 99) for block in move.sources])
    move.push()
    assert "reassigned before this rank was ordered" in move.sent.wait().error
    assert move.received.wait().outcome is ReceiveOutcome.FAILED


def test_a_part_that_fails_before_it_is_connected_reaches_the_receiver(worker: Callable[..., Worker]) -> None:
    p, d = worker("p0", 2, is_sender=True), worker("d0", 1, is_sender=False)
    move = Move(p, d, 1)
    p.ranks.servers[0].reached([(block, 99) for block in move.sources])
    move.push()
    assert move.received.wait().outcome is ReceiveOutcome.FAILED
    assert "reassigned before this rank was ordered" in move.sent.wait().error


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_an_abort_frees_every_rank_on_both_sides(worker: Callable[..., Worker], side: str) -> None:
    p, d = worker("p0", 2, is_sender=True), worker("d0", 4, is_sender=False)
    move = Move(p, d, 1)
    move.push(range(2))
    (p.sender if side == "sender" else d.receiver).abort(move.grant.key)
    assert move.sent.wait().outcome is SendOutcome.FAILED
    assert move.received.wait().is_cancelled
    assert move.sent.all[0].is_cancelled
    assert move.is_over_everywhere
    again = Move(p, d, 2)
    again.push()
    again.assert_received()


def test_a_worker_without_a_rank_is_unhealthy_and_frees_nothing(worker: Callable[..., Worker]) -> None:
    """The rank may still write, so the worker ends instead of reusing blocks."""
    p, d = worker("p0", 1, is_sender=True), worker("d0", 2, is_sender=False)
    move = Move(p, d, 1)
    move.push(range(2))
    assert d.receiver.is_healthy
    d.ranks.servers[0].close()
    wait_for(lambda: not d.receiver.is_healthy, "the loss of a rank")
    assert move.sent.wait().outcome is SendOutcome.FAILED
    assert move.received.all == []
    grant = d.grant(2, [100])
    ended = Heard()
    d.receiver.expect(grant, ended)
    wait_for(lambda: bool(ended.all), "the end of a grant that a rank cannot open")
    assert "is gone" in ended.all[0].error


def test_a_grant_without_all_ranks_is_refused_by_name(worker: Callable[..., Worker]) -> None:
    p, d = worker("p0", 1, is_sender=True), worker("d0", 2, is_sender=False)
    ended = Heard()
    grant = d.grant(1, [3])
    object.__setattr__(grant, "rank_endpoints", ())
    p.sender.start(grant, ended)
    assert ended.wait().error.startswith("grant.rank_endpoints: got 0, expected 1")
    assert p.sender.open_keys == []


@pytest.fixture
def server() -> Iterator[RankServer]:
    storage = RankedStorage(2)
    config = WorkerConfig(model="m", worker_id="d0", transport="tcp", cluster_secret=TEXT)
    none = FaultInjector(lambda tag: None)
    ranks = StormRanks(storage, "tcp", "d0", "d0-1", none)
    assert config.worker_id == "d0"
    yield ranks.servers[0]
    ranks.close()


@pytest.mark.parametrize(
    ("identity", "why"),
    [
        (
            Identity.of(ClusterSecret("another secret of a cluster"), "leader", "d0", "d0-1"),
            "another PDSERVE_CLUSTER_SECRET",
        ),
        (Identity.of(SECRET, "worker", "d0", "d0-1"), "only a leader may call"),
        (Identity.of(SECRET, "leader", "d1", "d0-1"), "this rank is of d0: a leader of 'd1'"),
        (Identity.of(SECRET, "leader", "d0", "d0-2"), "open: expected first, with the caller's incarnation"),
    ],
)
def test_a_rank_accepts_only_its_own_leader(server: RankServer, identity: Identity, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        RankLink(1, server.address, identity, OPENING, 20.0)
    assert why in refused.value.message
    assert not server._is_led


def test_a_rank_has_one_leader(server: RankServer) -> None:
    first = RankLink(1, server.address, LEADER, OPENING, 20.0)
    with pytest.raises(ConfigError, match="a second leader"):
        RankLink(1, server.address, LEADER, OPENING, 20.0)
    assert first.is_alive
    first.close()
    assert not first.is_alive


def test_an_endpoint_that_cannot_open_reports_the_reason() -> None:
    storage = RankedStorage(2)
    none = FaultInjector(lambda tag: None)
    ranks = StormRanks(storage, "nccl", "d0", "d0-1", none)
    with pytest.raises(ConfigError, match=r"rank 1: transport: got nccl"):
        RankLink(1, ranks.servers[0].address, LEADER, OPENING, 20.0)
    ranks.close()


def test_a_rank_that_does_not_answer_is_named() -> None:
    with pytest.raises(ConfigError, match=r"rank 1 at 127\.0\.0\.1:9: UNAVAILABLE"):
        RankLink(1, "127.0.0.1:9", LEADER, OPENING, 20.0)


def test_the_leader_rejects_a_key_in_use(server: RankServer) -> None:
    link = RankLink(1, server.address, LEADER, OPENING, 20.0)
    remote = RemoteReceiver(link, BlockStamps(1024))
    grant = Grant(
        key=TransferKey(transfer_id="t", attempt=1, generation=1),
        endpoint="h:1",
        worker_id="d0",
        incarnation="d0-1",
        fingerprint=fingerprint_of_ranks(2),
        blocks=(511, 512),
        num_cached_blocks=0,
    )
    ended = Heard()
    assert not remote.expect(grant, ended)
    assert ended.wait().error == "grant.blocks: got 512, expected 0..511"
    remote.expect(grant, ended)
    with pytest.raises(InvalidRequest):
        remote.expect(grant, ended)
    ended.wait(2)
    link.close()
    with pytest.raises(Unavailable):
        remote.expect(grant, ended)


@pytest.mark.parametrize("transport", ["tcp"])
def test_one_rank_and_equal_shapes_need_only_the_plain_sender(pair: Pair) -> None:
    sender = JoinedSender([pair.sender], pair.sender.config.fingerprint.shape, is_on_host=True)
    grant, received, sent = pair.grant((1, 2)), Heard(), Heard()
    pair.receiver.expect(grant, received)
    sender.start(grant, sent)
    assert sender._undivided == {grant.key: pair.sender.plain}
    assert sender.open_keys == [grant.key]
    with pytest.raises(InvalidRequest, match="one that is not open already"):
        sender.start(grant, sent)
    sender.push(grant.key, [(0, 3), (1, 4)], True)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    assert sent.wait().outcome is SendOutcome.SENT
    assert sender.open_keys == []
    given_up, failed = pair.grant((5,)), Heard()
    sender.start(given_up, failed)
    sender.abort(given_up.key)
    assert failed.wait().is_cancelled
    pair.sender.plain.close()
    late = Heard()
    sender.start(pair.grant((6,)), late)
    assert late.wait().error == "the KV sender is closed"
    sender.close()
    with pytest.raises(Unavailable, match="the KV endpoints of the worker's ranks are closed"):
        sender.start(pair.grant((7,)), late)
    assert sent.outcomes == ["sent"]
    assert sender.open_keys == []
