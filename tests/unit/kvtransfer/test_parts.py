"""Blocks that arrive in parts: by groups of layers, and by shards (the heads of each of the sender's ranks)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvtransfer.protocol import receive_transfers
from kvtransfer.protocol.frames import pack, tag_of
from kvtransfer.protocol.plan import MAX_GROUPS, WHOLE, Part, PartLayout
from kvtransfer.protocol.receive_transfers import ReceiveTransfers
from kvtransfer.protocol.send_transfers import SendTransfers
from kvtransfer.protocol.transport import ReceiveOutcome
from pdserve.core.errors import ConfigError
from pdserve.core.kv.kv_shape import ITEM_BYTES, KvShape
from pdserve.core.kv.stamps import BlockStamps
from pdserve.engine.memory.pool import BlockShape, TorchPool
from tests.unit.kvtransfer.harness import HostPool, grant_of

SHAPE = KvShape(layout="block-major.v1", dtype="float32", num_layers=4, num_kv_heads=4, head_dim=8, block_size=2)


INT8 = replace(SHAPE, layout="block-major-int8.v1", dtype="int8")
HEADS = replace(SHAPE, layout="block-major-heads.v1")
HEADS_INT8 = replace(SHAPE, layout="block-major-heads-int8.v1", dtype="int8")


@given(
    st.sampled_from([SHAPE, INT8, HEADS, HEADS_INT8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.lists(st.integers(0, 7), unique=True, min_size=1, max_size=5),
)
def test_parts_fill_every_value_once(shape: KvShape, ranks: int, groups: int, blocks: list[int]) -> None:
    """Each rank's blocks are cut by hand out of a whole block, and the parts must reproduce that block."""
    target = HostPool(8, shape.block_bytes)
    original = bytes(HostPool(8, shape.block_bytes, seed=3).memory)
    for rank in range(ranks):
        source_shape = replace(shape, tp_degree=ranks, tp_rank=rank)
        to, out = PartLayout.to_receive(source_shape, shape), PartLayout.to_send(source_shape, shape)
        assert (to.index, to.count, out.index, out.count) == (rank, ranks, rank, ranks)
        assert out.block_bytes == source_shape.block_bytes
        source = bytearray(8 * source_shape.block_bytes)
        for group in range(groups):
            part = Part(rank, group, groups)
            truth = to.views(memoryview(bytearray(original)), blocks, part)
            mine = out.views(memoryview(source), blocks, part)
            assert sum(map(len, mine)) == sum(map(len, truth)) == len(blocks) * to.bytes_of(part)
            assert out.bytes_of(part) == to.bytes_of(part)
            scatter(b"".join(truth), mine)
            scatter(b"".join(mine), to.views(memoryview(target.memory), blocks, part))
    form = shape.form
    for block in blocks:
        at = block * shape.block_bytes
        for begin, end in [
            (0, form.value_bytes),
            (form.scales_at, form.scales_at + 4 * form.num_rows * form.is_scaled),
        ]:
            assert target.memory[at + begin : at + end] == original[at + begin : at + end]


def scatter(data: bytes, views: list[memoryview]) -> None:
    at = 0
    for view in views:
        view[:] = data[at : at + len(view)]
        at += len(view)


@pytest.mark.gpu_checks
@pytest.mark.parametrize("shape", [SHAPE, INT8, HEADS, HEADS_INT8], ids=lambda one: one.layout)
@pytest.mark.parametrize("groups", [1, 4])
def test_a_ranks_part_is_what_its_engine_stores(shape: KvShape, groups: int) -> None:
    """A pool with all heads is sent to a rank with half of them, in the order of bytes of the engine's own pools."""
    target_shape = replace(shape, tp_degree=2, tp_rank=1)
    source, target = engine_pool(shape), engine_pool(target_shape)
    source.raw.copy_(torch.randint(0, 256, source.raw.shape, generator=torch.Generator().manual_seed(1)))
    out, to = PartLayout.to_cut(shape, target_shape), PartLayout.to_receive(shape, target_shape)
    for group in range(groups):
        part = Part(0, group, groups)
        sent = b"".join(out.views(source.buffer, [2, 0], part))
        scatter(sent, to.views(target.buffer, [1, 3], part))
    pairs = [(target.tensor, source.tensor[..., 2:, :])]
    if source.scales is not None and target.scales is not None:
        pairs.append((target.scales, source.scales[..., 2:]))
    for mine, theirs in pairs:
        assert bits(mine[[1, 3]]).equal(bits(theirs[[2, 0]]))
    [(_, run), *_] = out.runs(Part(0, 0, groups))
    tokens = shape.block_size if shape.form.heads_first else 1
    assert run == 2 * tokens * shape.head_dim * ITEM_BYTES[shape.dtype]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def engine_pool(shape: KvShape) -> TorchPool:
    """An engine's pool of the shape, which must have the same name for it."""
    size = {"num_layers": shape.num_layers, "block_size": shape.block_size, "head_dim": shape.head_dim}
    dtype = getattr(torch, shape.dtype)
    of = BlockShape(**size, num_kv_heads=shape.num_heads, dtype=dtype, heads_first=shape.form.heads_first)
    assert (of.layout, of.block_bytes) == (shape.layout, shape.block_bytes)
    return TorchPool(num_blocks=4, shape=of, device=torch.device("cpu"))


def test_one_part_is_one_run_of_bytes() -> None:
    shards = PartLayout.to_receive(SHAPE, SHAPE)
    assert [len(view) for view in shards.views(memoryview(bytearray(8 * SHAPE.block_bytes)), [3, 4, 5], WHOLE)] == [
        3 * SHAPE.block_bytes
    ]


@pytest.mark.parametrize("part", [Part(0, 0, 3), Part(0, 4, 4), Part(0, 0, 8), Part(0, 0, 64), Part(0, 0, 0)])
def test_impossible_layer_groups_are_rejected(part: Part) -> None:
    with pytest.raises(ConfigError, match="a divisor of the 4 layers, at most 32"):
        PartLayout.to_receive(SHAPE, SHAPE).runs(part)


def test_the_number_of_groups_is_limited_by_the_stamp() -> None:
    deep = replace(SHAPE, num_layers=2 * MAX_GROUPS)
    shards = PartLayout.to_receive(deep, deep)
    assert sum(shards.bytes_of(Part(0, group, MAX_GROUPS)) for group in range(MAX_GROUPS)) == deep.block_bytes
    with pytest.raises(ConfigError):
        shards.runs(Part(0, 0, 2 * MAX_GROUPS))


def test_a_rank_without_heads_for_the_target_is_rejected() -> None:
    source, target = replace(SHAPE, tp_degree=2, tp_rank=1), replace(SHAPE, tp_degree=4, tp_rank=0)
    with pytest.raises(ConfigError, match=r"kv_shape.tp_rank: got 1 of 2, expected a rank that holds heads of rank 0"):
        PartLayout.to_receive(source, target)


GRANT = grant_of("t", 1, 5, (3, 4))
TAG = tag_of(GRANT.key)


def table() -> ReceiveTransfers:
    table = ReceiveTransfers(BlockStamps(8))
    table.expect(GRANT, 0.0, 10.0, [1, 2])
    assert table.announce(TAG, 10, 0, 2, num_shards=2) == []
    assert table.announce(TAG, 20, 1, 1, num_shards=2) == []
    return table


def receive(
    table: ReceiveTransfers, writer: int, part: Part, first: int, content_hashes: list[int], is_last: bool = False
) -> list[Any]:
    claim = table.claim(TAG, writer, first, pack(content_hashes, 5, part.mask), 0.0, part)
    assert claim is not None
    assert table.enter(claim)
    table.leave(claim, 0.0)
    return table.settle(claim, 1, True, is_last, 0.0)


def test_a_transfer_needs_every_part_of_every_shard() -> None:
    it = table()
    assert receive(it, 20, Part(1, 0, 1), 0, [1, 2], is_last=True) == []
    assert receive(it, 10, Part(0, 1, 2), 0, [1, 2]) == []
    assert receive(it, 10, Part(0, 0, 2), 1, [2]) == []
    *answers, report = receive(it, 10, Part(0, 0, 2), 0, [1], is_last=True)
    assert report.received.outcome is ReceiveOutcome.VERIFIED
    assert {(answer.writer, answer.is_verified) for answer in answers} == {(10, True), (20, True)}


def test_a_transfer_waits_for_every_shard() -> None:
    it = ReceiveTransfers(BlockStamps(8))
    it.expect(GRANT, 0.0, 10.0)
    it.announce(TAG, 10, 0, 1, num_shards=2)
    assert receive(it, 10, Part(0, 0, 1), 0, [1, 2], is_last=True) == []
    it.announce(TAG, 20, 1, 1, num_shards=2)
    assert receive(it, 20, Part(1, 0, 1), 0, [1, 2])[-1].received.outcome is ReceiveOutcome.VERIFIED


def test_only_repeated_parts_are_dropped() -> None:
    it = table()
    receive(it, 10, Part(0, 0, 2), 0, [1, 2])
    assert it.claim(TAG, 10, 1, pack([2], 5, 1), 0.0, Part(0, 0, 2)) is None
    assert it.stats.duplicate_chunks == 1
    assert it.claim(TAG, 10, 1, pack([2], 5, 2), 0.0, Part(0, 1, 2)) is not None


def test_a_chunk_contains_only_one_part() -> None:
    it = table()
    assert it.claim(TAG, 10, 1, pack([2, 1], 5, 1), 0.0, Part(0, 0, 2)) is None
    assert it.stats.duplicate_chunks == 1


@pytest.mark.parametrize(
    ("writer", "part"),
    [(20, Part(0, 0, 2)), (10, Part(1, 0, 1)), (10, Part(0, 0, 1)), (10, Part(0, 2, 4)), (10, Part(7, 0, 1))],
)
def test_a_shard_has_one_writer_and_its_groups(writer: int, part: Part) -> None:
    it = table()
    assert it.claim(TAG, writer, 0, pack([1], 5, part.mask), 0.0, part) is None
    assert (it.stats.late_messages, it.stats.chunks) == (1, 0)


def test_a_stamp_for_another_group_is_refused() -> None:
    it = table()
    assert it.claim(TAG, 10, 0, pack([1], 5, 1), 0.0, Part(0, 1, 2)) is None
    assert it.stats.stamp_mismatches == 1
    answers = it.review(TAG, 0.0)
    assert "layer groups 0x1, expected 0x2" in answers[-1].received.error  # type: ignore[union-attr]


def test_second_writers_and_unknown_shards_are_rejected() -> None:
    it = table()
    [taken] = it.announce(TAG, 30, 0, 2, num_shards=2)
    [absent] = it.announce(TAG, 30, 2, 1, num_shards=2)
    assert "shard 0 has its writer" in taken.error  # type: ignore[union-attr]
    assert "shard 2 is not of 2" in absent.error  # type: ignore[union-attr]
    assert it.announce(TAG, 10, 0, 2, num_shards=2) == [], "again, from its own"
    assert it.stats.late_messages == 2


def test_the_first_announcement_sets_the_number_of_shards() -> None:
    it = ReceiveTransfers(BlockStamps(8))
    it.expect(GRANT, 0.0, 10.0)
    assert it.announce(TAG, 10, 1, num_shards=4) == []
    [other] = it.announce(TAG, 20, 0, num_shards=2)
    assert "shard 0 is not of 4" in other.error  # type: ignore[union-attr]
    for shard, writer in ((0, 20), (2, 30), (3, 40)):
        assert it.announce(TAG, writer, shard, num_shards=4) == []
    for shard, writer in ((1, 10), (0, 20), (2, 30)):
        assert receive(it, writer, Part(shard, 0, 1), 0, [1, 2], is_last=True) == []
    assert receive(it, 40, Part(3, 0, 1), 0, [1, 2])[-1].received.outcome is ReceiveOutcome.VERIFIED


def test_a_deadline_reports_the_parts_received() -> None:
    it = table()
    receive(it, 10, Part(0, 0, 2), 0, [1, 2])
    *_, report = it.expire(10.0)
    assert report.received.error == "the deadline passed when 2 of 6 parts of blocks had arrived"  # type: ignore[union-attr]


def test_a_fault_of_one_shard_waits_for_other_writes() -> None:
    it = table()
    claim = it.claim(TAG, 20, 0, pack([1], 5, 1), 0.0, Part(1, 0, 1))
    assert claim is not None
    assert it.enter(claim)
    [answer] = it.cut(10, "its rank died", 0.0)
    assert isinstance(answer, receive_transfers.ReplyToSender)
    assert (answer.writer, answer.error) == (20, "its rank died")
    assert it.keys == [GRANT.key], "the other rank's write is open"
    [report] = it.leave(claim, 0.0)
    assert report.received.outcome is ReceiveOutcome.FAILED  # type: ignore[union-attr]


def test_a_lost_writer_closes_only_its_own_writes() -> None:
    it = table()
    claims = [
        it.claim(TAG, 10, 0, pack([1], 5, 1), 0.0, Part(0, 0, 2)),
        it.claim(TAG, 20, 0, pack([1], 5, 1), 0.0, Part(1, 0, 1)),
    ]
    for claim in claims:
        assert claim is not None
        assert it.enter(claim)
    assert [type(action) for action in it.cut(10, "cut", 0.0)] == [receive_transfers.ReplyToSender]
    [report] = it.cut(20, "cut", 0.0)
    assert report.received.outcome is ReceiveOutcome.FAILED  # type: ignore[union-attr]


def test_the_last_chunk_of_a_shard_concerns_only_that_shard() -> None:
    it = table()
    receive(it, 20, Part(1, 0, 1), 0, [1, 2], is_last=True)
    assert it.keys == [GRANT.key]
    *_, report = receive(it, 10, Part(0, 0, 2), 0, [1, 2], is_last=True)
    assert report.received.error == "2 of 4 parts of blocks did not arrive"


def test_a_retraction_of_one_shard_reaches_the_others() -> None:
    it = table()
    [answer, report] = it.retract(TAG, 10, "enough", 0.0)
    assert (answer.writer, report.received.error) == (20, "the sender gave up: enough")  # type: ignore[union-attr]


def departures(groups: int) -> SendTransfers:
    out = SendTransfers(100, BlockStamps(8))
    out.start(grant_of("t", 1, 5, (0, 1)), 0.0, None, shard=1, groups=groups)
    [announce] = out.linked()
    assert (announce.shard, announce.groups) == (1, groups)  # type: ignore[union-attr]
    return out


def test_groups_are_sent_in_the_order_of_pushes() -> None:
    out, key = departures(2), grant_of("t", 1, 5, ()).key
    out.push(key, [(0, 3), (1, 4)], False, 0.0, groups=range(1))
    first = out.take(1, 0.0)
    assert first is not None
    assert (first.part, first.chunk.sources) == (Part(1, 0, 2), (3, 4))
    assert out.stamp(first) == pack([0, 0], 5, 1)
    assert not first.transfer.is_stamped
    out.written(first, 0.0)
    out.push(key, [(0, 3), (1, 4)], True, 0.0, groups=range(1, 2))
    second = out.take(1, 0.0)
    assert second is not None
    assert second.part.group == 1
    assert out.stamp(second) == pack([0, 0], 5, 2)
    assert second.transfer.is_stamped
    out.written(second, 0.0)
    [report] = out.done(tag_of(key), 0.0)
    assert report.sent.num_bytes == 200  # type: ignore[union-attr]


def test_a_repeated_or_missing_group_fails_the_transfer() -> None:
    key = grant_of("t", 1, 5, ()).key
    out = departures(2)
    out.push(key, [(0, 3)], False, 0.0, groups=range(1))
    assert "were pushed twice" in out.push(key, [(0, 3)], False, 0.0, groups=range(2))[-1].sent.error  # type: ignore[union-attr]
    out = departures(2)
    error = out.push(key, [(0, 3), (1, 4)], True, 0.0, groups=range(1, 2))[-1].sent.error  # type: ignore[union-attr]
    assert error == "the last push leaves 2 of 4 parts of blocks out"
