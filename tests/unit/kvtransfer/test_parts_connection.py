"""Blocks that several ranks send in parts, over real connections."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvtransfer.link.endpoint import make_receiver
from kvtransfer.link.sender import PlainSender
from kvtransfer.protocol.plan import Part, PartLayout
from kvtransfer.protocol.transport import ReceiveOutcome, SendOutcome
from pdserve.core.kv.kv_shape import Grant, KvShape, TransferKey
from tests.support.transfer_ends import endpoint_config
from tests.unit.kvtransfer.harness import PATIENT, GrpcHost, Heard, HostPool, fingerprint, wait_for

SHAPE = KvShape(layout="block-major.v1", dtype="float32", num_layers=4, num_kv_heads=4, head_dim=8, block_size=2)
INT8 = replace(SHAPE, layout="block-major-int8.v1", dtype="int8")


class Rig:
    """One receiver, and a sender for each rank."""

    def __init__(self, transport: str, shape: KvShape, ranks: int, runs_per_block: tuple[int, int] = (1, 1)) -> None:
        """`runs_per_block` of the senders' pools and of the receiver's."""
        facts = replace(fingerprint(), shape=shape)
        self.target = HostPool(16, shape.block_bytes, runs_per_block=runs_per_block[1])
        self.receiver = make_receiver(
            endpoint_config(self.target, facts, worker_id="d", incarnation="1", transport=transport, lease=PATIENT),
            host="127.0.0.1",
        )
        self.host = GrpcHost(self.receiver.servicer)
        shapes = [replace(shape, tp_degree=ranks, tp_rank=rank) for rank in range(ranks)]
        self.pools = [HostPool(16, one.block_bytes, rank, runs_per_block[0]) for rank, one in enumerate(shapes)]
        self.senders = [
            PlainSender(
                endpoint_config(
                    pool,
                    replace(facts, shape=one),
                    worker_id=f"p{rank}",
                    incarnation="1",
                    transport=transport,
                    lease=PATIENT,
                )
            )
            for rank, (pool, one) in enumerate(zip(self.pools, shapes, strict=True))
        ]
        self.shapes, self.shape = shapes, shape
        self.grant = Grant(
            key=TransferKey(transfer_id="t", attempt=1, generation=1),
            endpoint=self.host.endpoint,
            worker_id="d",
            incarnation="1",
            fingerprint=facts,
            blocks=(9, 2, 3),
            num_cached_blocks=0,
        )

    def assert_equal(self, sources: list[int], groups: int) -> None:
        for rank, (pool, one) in enumerate(zip(self.pools, self.shapes, strict=True)):
            to, out = PartLayout.to_receive(one, self.shape), PartLayout.to_send(one, self.shape)
            for group in range(groups):
                part = Part(rank, group, groups)
                received = b"".join(to.views(memoryview(self.target.blocks), self.grant.blocks, part))
                assert received == b"".join(out.views(memoryview(pool.blocks), sources, part))

    def close(self) -> None:
        for sender in self.senders:
            sender.close()
        self.receiver.close()
        self.host.stop()


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    made: list[Rig] = []
    yield made
    for rig in made:
        rig.close()


@pytest.mark.parametrize("transport", ["tcp", "shm", "nixl", "nixl-stand-in"], indirect=True)
@pytest.mark.parametrize(
    ("shape", "runs"),
    [(SHAPE, (1, 1)), (INT8, (1, 1)), (SHAPE, (4, 4)), (SHAPE, (4, 1)), (SHAPE, (1, 4))],
    ids=["float32", "int8", "in-layers", "from-layers", "to-layers"],
)
@pytest.mark.parametrize(("ranks", "groups"), [(1, 4), (2, 1), (2, 2), (4, 4)])
def test_parts_over_a_real_connection_complete_the_blocks(
    rigs: list[Rig], transport: str, shape: KvShape, runs: tuple[int, int], ranks: int, groups: int
) -> None:
    rig = Rig(transport, shape, ranks, runs)
    rigs.append(rig)
    received, sent = Heard(), [Heard() for _ in rig.senders]
    rig.receiver.expect(rig.grant, received)
    sources = [5, 6, 1]
    for sender, heard in zip(rig.senders, sent, strict=True):
        sender.start(rig.grant, heard, groups=groups)
        for group in range(groups):
            sender.push(rig.grant.key, list(enumerate(sources)), group == groups - 1, range(group, group + 1))
    assert (received.wait().outcome, received.all[0].error) == (ReceiveOutcome.VERIFIED, "")
    assert [heard.wait().outcome for heard in sent] == [SendOutcome.SENT] * ranks
    rig.assert_equal(sources, groups)


def test_a_rank_that_dies_fails_the_other_ranks_transfer_too(rigs: list[Rig]) -> None:
    rig = Rig("tcp", SHAPE, 2)
    rigs.append(rig)
    received, sent = Heard(), [Heard(), Heard()]
    rig.receiver.expect(rig.grant, received)
    for sender, heard in zip(rig.senders, sent, strict=True):
        sender.start(rig.grant, heard)
        sender.push(rig.grant.key, [(0, 0), (1, 1)], False)
    wait_for(lambda: rig.receiver.stats.chunks == 2, "both ranks' chunks")
    threading.Thread(target=rig.senders[0].close).start()
    assert received.wait().outcome is ReceiveOutcome.FAILED
    assert sent[1].wait().outcome is SendOutcome.FAILED


def test_impossible_groups_fail_at_the_start(rigs: list[Rig]) -> None:
    rig = Rig("tcp", SHAPE, 1)
    rigs.append(rig)
    sent = Heard()
    rig.senders[0].start(rig.grant, sent, groups=3)
    assert "a divisor of the 4 layers" in sent.wait().error
