from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.protocol.grants import grant_from_proto, grant_to_proto
from kvtransfer.protocol.plan import (
    Chunk,
    Coverage,
    Extent,
    advance,
    blocks_per_chunk,
    byte_ranges,
    chunks_of,
    copy,
    extents_of,
    host_view,
    views_of,
)
from pdserve.core.errors import ConfigError, InvalidRequest
from pdserve.core.kv.kv_shape import Grant, TransferKey
from pdserve.wire.protocol import FINGERPRINT
from tests.support.transfer_ends import HostPool, runs_in
from tests.unit.kvtransfer.harness import fingerprint

BLOCKS = st.lists(st.integers(0, 40), max_size=40, unique=True)
FACTS = fingerprint(64)


def grant_of(blocks: tuple[int, ...]) -> Grant:
    return Grant(
        key=TransferKey(transfer_id="r1", attempt=2, generation=2**40),
        endpoint="127.0.0.1:1",
        worker_id="d0",
        incarnation="i",
        fingerprint=FACTS,
        blocks=blocks,
        num_cached_blocks=3,
    )


def test_consecutive_blocks_are_one_extent_and_order_is_kept() -> None:
    assert extents_of((4, 5, 6, 2, 3, 9)) == [Extent(4, 3), Extent(2, 2), Extent(9, 1)]
    assert extents_of(()) == []


def test_descending_blocks_are_not_merged() -> None:
    assert extents_of((3, 2, 1)) == [Extent(3, 1), Extent(2, 1), Extent(1, 1)]


@given(BLOCKS)
def test_extents_list_the_same_blocks_in_the_same_order(blocks: list[int]) -> None:
    extents = extents_of(blocks)
    assert [block for one in extents for block in range(one.first, one.first + one.count)] == blocks
    assert all(b.first != a.first + a.count for a, b in pairwise(extents))


@given(BLOCKS, st.integers(1, 100))
def test_byte_ranges_cover_exactly_the_blocks(blocks: list[int], block_bytes: int) -> None:
    ranges = byte_ranges(blocks, block_bytes)
    covered = [byte for begin, end in ranges for byte in range(begin, end)]
    assert covered == [block * block_bytes + i for block in blocks for i in range(block_bytes)]


def test_a_chunk_holds_at_least_one_block_however_large() -> None:
    assert [blocks_per_chunk(size, 100) for size in (1, 30, 100, 101, 5000)] == [100, 3, 1, 1, 1]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), unique_by=lambda p: p[0]), st.integers(1, 8))
def test_chunks_hold_consecutive_indices_within_the_limit_and_lose_nothing(
    pushes: list[tuple[int, int]], limit: int
) -> None:
    chunks = list(chunks_of(pushes, limit))
    assert all(1 <= chunk.count <= limit for chunk in chunks)
    assert [(c.first + i, source) for c in chunks for i, source in enumerate(c.sources)] == pushes


@given(st.integers(1, 20), st.integers(1, 20))
def test_splitting_a_chunk_loses_nothing(count: int, limit: int) -> None:
    chunk = Chunk(5, tuple(range(100, 100 + count)))
    head, tail = chunk.split(limit)
    assert head.count <= limit
    assert head.sources + (tail.sources if tail else ()) == chunk.sources
    assert tail is None or tail.first == head.first + head.count


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8))))
def test_coverage_behaves_like_a_set(spans: list[tuple[int, int]]) -> None:
    coverage, seen = Coverage(40), set[int]()
    for first, count in spans:
        span = set(range(first, first + count))
        assert coverage.overlaps(first, count) == bool(seen & span)
        coverage.add(first, count)
        seen |= span
        assert coverage.count == len(seen)
        assert coverage.is_full == (len(seen) == 40)


@given(BLOCKS)
def test_a_grant_survives_the_wire(blocks: list[int]) -> None:
    grant = grant_of(tuple(blocks))
    assert grant_from_proto(grant_to_proto(grant)) == grant


def test_a_fingerprint_survives_the_wire() -> None:
    assert FINGERPRINT.decode(FINGERPRINT.encode(FACTS)) == FACTS


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda m: m.extents[0].__setattr__("num_blocks", 2**31), "extents"),
        (lambda m: m.__setattr__("num_blocks", 4), "grant.extents"),
        (lambda m: m.__setattr__("transfer_id", ""), "grant.transfer_id"),
        (lambda m: m.__setattr__("transfer_id", "x" * 300), "grant.transfer_id"),
    ],
)
def test_a_malformed_grant_names_its_field(change: object, field: str) -> None:
    message = grant_to_proto(grant_of((1, 2, 3)))
    change(message)  # type: ignore[operator]
    with pytest.raises(InvalidRequest) as refused:
        grant_from_proto(message)
    assert refused.value.field == field


def test_views_never_reach_outside_the_memory() -> None:
    memory = memoryview(bytearray(100))
    assert [len(view) for view in views_of(memory, (0, 1, 5), 10)] == [20, 10]
    for blocks in ((10,), (-1,), (0, 11)):
        with pytest.raises(IndexError):
            views_of(memory, blocks, 10)


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 6), st.data())
def test_parts_of_blocks_of_several_runs_are_found_in_the_order_of_the_block(
    runs: int, run_bytes: int, num_blocks: int, data: st.DataObject
) -> None:
    block_bytes = runs * run_bytes
    memory = memoryview(bytes(index % 251 for index in range(num_blocks * block_bytes)))
    blocks = data.draw(st.lists(st.integers(0, num_blocks - 1), max_size=num_blocks, unique=True))
    cuts = sorted(data.draw(st.sets(st.integers(0, block_bytes), min_size=2, max_size=6)))
    parts = tuple((begin, end - begin) for begin, end in zip(cuts[::2], cuts[1::2], strict=False))
    sent = []
    for block in blocks:
        whole = b"".join(runs_in(memory, block, num_blocks, block_bytes, runs))
        sent += [whole[at : at + size] for at, size in parts]
    views = views_of(memory, blocks, block_bytes, parts, runs)
    assert b"".join(views) == b"".join(sent)
    assert all(views)
    with pytest.raises(IndexError, match=f"of a pool of {num_blocks}"):
        views_of(memory, [num_blocks], block_bytes, parts, runs)


def test_only_the_bytes_of_a_pools_blocks_are_used() -> None:
    pool = HostPool(4, 64)
    pool.buffer = memoryview(bytearray(5 * 64))
    assert len(host_view(pool)) == 4 * 64
    pool.buffer = memoryview(bytearray(4 * 64 - 1))
    with pytest.raises(ConfigError, match=r"kv_pool\.buffer: got 255 bytes, expected 256: 4 blocks of 64 bytes"):
        host_view(pool)


def test_a_layer_of_consecutive_blocks_is_one_view() -> None:
    memory = memoryview(bytes(4 * 6 * 10))  # Four layers of ten blocks.
    assert [len(view) for view in views_of(memory, (2, 3, 4, 7), 24, ((12, 6),), 4)] == [18, 6]
    assert [len(view) for view in views_of(memory, (2, 3), 24, (), 4)] == [6] * 8


@given(BLOCKS, BLOCKS)
def test_copying_between_differently_scattered_views_keeps_the_bytes(left: list[int], right: list[int]) -> None:
    count = min(len(left), len(right))
    source = memoryview(bytearray(i % 251 for i in range(41 * 8)))
    target = memoryview(bytearray(41 * 8))
    copy(views_of(target, right[:count], 8), views_of(source, left[:count], 8))
    for a, b in zip(left[:count], right[:count], strict=True):
        assert target[b * 8 : b * 8 + 8] == source[a * 8 : a * 8 + 8]


@given(st.lists(st.integers(1, 9), min_size=1), st.data())
def test_advancing_drops_exactly_that_many_bytes(sizes: list[int], data: st.DataObject) -> None:
    views = [memoryview(bytes(size)) for size in sizes]
    dropped = data.draw(st.integers(0, sum(sizes)))
    advance(views, dropped)
    assert sum(map(len, views)) == sum(sizes) - dropped
    assert all(len(view) for view in views)


# -- views into a pool's memory --------------------------------------------------------------------------------

BLOCK_BYTES = 4
MEMORY = bytes(range(20))  # Five blocks.


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ((), []),
        ((1,), [(4, 8)]),
        ((0, 1, 2), [(0, 12)]),
        ((4, 0, 1), [(16, 20), (0, 8)]),
    ],
)
def test_consecutive_blocks_are_one_view(blocks: tuple[int, ...], expected: list[tuple[int, int]]) -> None:
    views = views_of(memoryview(MEMORY), blocks, BLOCK_BYTES)
    assert [bytes(view) for view in views] == [MEMORY[begin:end] for begin, end in expected]


@pytest.mark.parametrize("blocks", [(5,), (0, 5), (-1,), (-1, 0), (10**6,)])
def test_a_block_outside_the_memory_is_an_error(blocks: tuple[int, ...]) -> None:
    with pytest.raises(IndexError, match=f"blocks {min(blocks)}..{max(blocks)} of a pool of 5"):
        views_of(memoryview(MEMORY), blocks, BLOCK_BYTES)


@pytest.mark.parametrize("num_bytes", [0, 1, 4, 5, 12])
def test_views_are_consumed_byte_by_byte(num_bytes: int) -> None:
    views = views_of(memoryview(MEMORY), (2, 0, 4), BLOCK_BYTES)
    whole = b"".join(views)
    advance(views, num_bytes)
    assert b"".join(views) == whole[num_bytes:]


def test_bytes_are_copied_across_views_of_other_lengths() -> None:
    to = bytearray(20)
    copy(views_of(memoryview(to), (3, 1, 2), BLOCK_BYTES), views_of(memoryview(MEMORY), (0, 1, 4), BLOCK_BYTES))
    expected = bytearray(20)
    expected[12:16], expected[4:8], expected[8:12] = MEMORY[0:4], MEMORY[4:8], MEMORY[16:20]
    assert to == expected
