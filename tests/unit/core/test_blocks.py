"""The block allocator and its prefix cache."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from pdserve.core.kv.blocks import BlockAllocator, CacheChange, FreeRuns, longest_runs_first, runs_of
from pdserve.core.kv.stamps import content_hash64


def h(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.fixture
def blocks() -> Iterator[BlockAllocator]:
    allocator = BlockAllocator(8)
    yield allocator
    allocator.check()


def published(allocator: BlockAllocator, *numbers: int) -> list[int]:
    taken = allocator.allocate(len(numbers))
    assert taken is not None
    for block, number in zip(taken, numbers, strict=True):
        assert allocator.publish(block, h(number))
    return taken


def test_an_allocation_is_one_run_where_memory_allows(blocks: BlockAllocator) -> None:
    first, second, third = blocks.allocate(2), blocks.allocate(3), blocks.allocate(1)
    assert first is not None
    assert second is not None
    assert third is not None
    assert [runs_of(each) for each in (first, second, third)] == [[(0, 2)], [(2, 3)], [(5, 1)]]
    blocks.release(second)
    assert blocks.allocate(2) == [6, 7]  # The smallest run that is large enough.
    assert blocks.allocate(3) == [2, 3, 4]


def test_scattered_memory_is_handed_out_largest_run_first(blocks: BlockAllocator) -> None:
    held = blocks.allocate(8)
    assert held is not None
    blocks.release([0, 1, 2, 4, 6, 7])
    assert blocks.allocate(5) == [0, 1, 2, 6, 7]


def test_evicted_memory_is_handed_out_as_free_memory_is() -> None:
    draw = random.Random(0)
    for _ in range(100):
        evicted = draw.sample(range(30), draw.randrange(1, 30))
        free = FreeRuns(0)
        for block in evicted:
            free.add(block)
        assert longest_runs_first(evicted) == free.take(len(evicted))


def test_an_impossible_allocation_changes_nothing(blocks: BlockAllocator) -> None:
    published(blocks, 1)
    before = blocks.num_available
    assert blocks.allocate(8) is None
    assert blocks.num_available == before


def test_zero_blocks_can_always_be_allocated() -> None:
    assert BlockAllocator(0).allocate(0) == []


def test_only_published_blocks_are_found_again(blocks: BlockAllocator) -> None:
    taken = published(blocks, 1, 2)
    plain = blocks.allocate(1)
    assert plain is not None
    blocks.release(taken + plain)
    assert (blocks.num_free, blocks.num_evictable, blocks.num_referenced) == (6, 2, 0)
    assert blocks.match([h(1), h(2), h(3)]) == taken
    assert (blocks.num_free, blocks.num_evictable, blocks.num_referenced) == (6, 0, 2)


def test_a_match_ends_at_the_first_hash_that_is_missing(blocks: BlockAllocator) -> None:
    taken = published(blocks, 1, 2, 3)
    assert blocks.match([h(1), h(9), h(3)]) == taken[:1]
    blocks.check(holders=[taken, taken[:1]])


def test_a_reader_of_a_snapshot_learns_of_a_block_that_came_and_left(blocks: BlockAllocator) -> None:
    (block,) = published(blocks, 1)
    assert blocks.snapshot().stored == (h(1),)
    blocks.invalidate(block)
    assert blocks.take_changes() == CacheChange(sequence=1, stored=(), removed=(h(1),))
    assert blocks.take_changes() is None


def test_a_shared_prefix_is_evicted_after_later_blocks(blocks: BlockAllocator) -> None:
    blocks.release(published(blocks, 1, 2, 3))
    assert blocks.allocate(6) is not None
    assert blocks.snapshot().stored == (h(1), h(2))
    assert blocks.allocate(1) is not None
    assert blocks.snapshot().stored == (h(1),)


def test_a_used_block_is_evicted_later(blocks: BlockAllocator) -> None:
    blocks.release(published(blocks, 1))
    blocks.release(published(blocks, 2))
    blocks.release(blocks.match([h(1)]))
    assert blocks.allocate(7) is not None
    assert blocks.snapshot().stored == (h(1),)


def test_a_duplicate_stays_private_and_becomes_free(blocks: BlockAllocator) -> None:
    first = published(blocks, 1)
    second = blocks.allocate(1)
    assert second is not None
    assert not blocks.publish(second[0], h(1))
    blocks.release(second)
    assert blocks.num_free == 7
    assert blocks.match([h(1)]) == first


def test_publishing_twice_is_reported_once(blocks: BlockAllocator) -> None:
    taken = published(blocks, 1)
    assert blocks.publish(taken[0], h(1))
    assert blocks.take_changes() == CacheChange(sequence=1, stored=(h(1),))
    assert blocks.take_changes() is None


def test_changes_are_numbered_and_undone_ones_omitted(blocks: BlockAllocator) -> None:
    blocks.release(published(blocks, 1, 2))
    assert blocks.take_changes() == CacheChange(sequence=1, stored=(h(1), h(2)))
    full = blocks.allocate(8)
    assert full is not None
    assert blocks.publish(full[0], h(2))
    assert blocks.take_changes() == CacheChange(sequence=2, stored=(), removed=(h(1),))
    assert blocks.snapshot() == CacheChange(sequence=2, stored=(h(2),), is_snapshot=True)


def test_without_a_cache_nothing_is_found() -> None:
    allocator = BlockAllocator(2, is_cache_on=False)
    taken = allocator.allocate(1)
    assert taken is not None
    assert not allocator.publish(taken[0], h(1))
    allocator.release(taken)
    assert allocator.match([h(1)]) == []
    allocator.check(holders=[])


def test_releasing_too_often_raises(blocks: BlockAllocator) -> None:
    taken = blocks.allocate(1)
    assert taken is not None
    blocks.release(taken)
    with pytest.raises(AssertionError, match="released more often"):
        blocks.release(taken)


def test_the_check_names_a_leak(blocks: BlockAllocator) -> None:
    taken = blocks.allocate(2)
    assert taken is not None
    with pytest.raises(AssertionError, match="differ"):
        blocks.check(holders=[taken[:1]])


def test_an_invalidated_cached_block_is_free(blocks: BlockAllocator) -> None:
    blocks.release(published(blocks, 1, 2))
    blocks.invalidate(0)
    blocks.check()
    assert (blocks.num_free, blocks.num_evictable) == (7, 1)
    assert blocks.match([h(1)]) == []
    blocks.invalidate(0)  # It has no hash any more.
    assert blocks.num_free == 7


def test_an_invalidated_held_block_stays_held(blocks: BlockAllocator) -> None:
    taken = published(blocks, 1)
    blocks.invalidate(taken[0])
    assert (blocks.num_referenced, blocks.match([h(1)])) == (1, [])
    blocks.release(taken)
    assert blocks.num_free == 8


def test_the_most_valuable_block_reaches_the_tier_below_first() -> None:
    """It may have room for some only."""
    taken: list[bytes] = []

    class Lower:
        room = 8

        def take_block(self, block_hash: bytes, block: int) -> None:
            taken.append(block_hash)

        def take_copy(self, block_hash: bytes, slot: int) -> None:
            raise AssertionError("there is no host tier")

        def start_copies(self) -> None:
            pass

        def drop(self, block_hash: bytes) -> None:
            pass

    allocator = BlockAllocator(3, lower=Lower())
    blocks = allocator.allocate(3)
    assert blocks is not None
    hashes = [bytes([number]) * 16 for number in range(3)]
    for block, block_hash in zip(blocks, hashes, strict=True):
        allocator.stamps.mark(block, content_hash64(block_hash))
        allocator.publish(block, block_hash)
    allocator.release(blocks)
    assert allocator.allocate(3) is not None
    assert taken == hashes  # the end of a text has less value than its beginning
