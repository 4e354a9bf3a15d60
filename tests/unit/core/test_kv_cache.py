"""The KV cache of a worker, over its allocator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdserve.core.kv.blocks import BlockAllocator
from pdserve.core.kv.cache import Allocation, KvCache
from pdserve.core.kv.stamps import UNMARKED, content_hash64

SIZE = 4
HASHES = [bytes([number] * 16) for number in range(1, 4)]  # three full blocks


@pytest.fixture
def kv() -> Iterator[KvCache]:
    cache = KvCache(BlockAllocator(8), SIZE)
    yield cache
    cache.blocks.check()


def computed(kv: KvCache, num_tokens: int, hashes: list[bytes]) -> list[int]:
    """The blocks of a text that was computed completely, still held."""
    allocation = kv.allocate(num_tokens, hashes)
    assert allocation is not None
    kv.commit(allocation.blocks, hashes, allocation.cached_tokens // SIZE, num_tokens // SIZE)
    return allocation.blocks


def test_a_cached_prefix_is_reused(kv: KvCache) -> None:
    held = computed(kv, 3 * SIZE, HASHES)
    again = kv.allocate(3 * SIZE + 1, HASHES)
    assert again == Allocation([*held, 3], cached_tokens=3 * SIZE)
    kv.blocks.check(holders=[held, again.blocks])


def test_the_last_token_is_computed(kv: KvCache) -> None:
    held = computed(kv, 3 * SIZE, HASHES)
    assert kv.allocate(3 * SIZE, HASHES) == Allocation([*held[:2], 3], cached_tokens=2 * SIZE)


def test_without_hashes_nothing_is_reused(kv: KvCache) -> None:
    computed(kv, 3 * SIZE, HASHES)
    assert kv.allocate(3 * SIZE + 1) == Allocation([3, 4, 5, 6], cached_tokens=0)


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (1, True), (2, False)])
def test_an_allocation_leaves_spare_blocks(kv: KvCache, spare: int, fits: bool) -> None:
    held = computed(kv, 2 * SIZE + 1, HASHES)
    allocation = kv.allocate(5 * SIZE + 1, HASHES, spare=spare)  # reuses two blocks, and needs four
    assert (allocation is not None, kv.blocks.num_available) == (fits, 1 if fits else 5)
    if allocation is None:
        kv.blocks.check(holders=[held])


def test_a_released_text_stays_cached_until_its_memory_is_needed(kv: KvCache) -> None:
    kv.release(computed(kv, 3 * SIZE, HASHES))
    assert (kv.blocks.num_free, kv.blocks.num_evictable) == (5, 3)
    assert kv.extend(6) is not None
    assert kv.allocate(2 * SIZE, HASHES) == Allocation([0, 1], cached_tokens=SIZE)  # the last block was evicted
    assert kv.extend(1) is None


def test_committed_blocks_are_marked_and_reported(kv: KvCache) -> None:
    blocks = computed(kv, 2 * SIZE + 1, HASHES[:2])
    stamps = kv.blocks.stamps
    assert stamps.content_hashes(blocks) == (*map(content_hash64, HASHES[:2]), UNMARKED)
    kv.mark(blocks[2:], [7])
    assert stamps.content_hash(blocks[2]) == 7
    change = kv.take_changes()
    assert change is not None
    assert (change.stored, kv.snapshot().stored) == (tuple(HASHES[:2]), tuple(HASHES[:2]))


def test_every_marked_block_has_a_content_hash(kv: KvCache) -> None:
    with pytest.raises(ValueError, match="shorter"):
        kv.mark(computed(kv, SIZE + 1, HASHES[:1]), [7])


def test_an_invalidated_block_is_not_reused(kv: KvCache) -> None:
    blocks = computed(kv, 2 * SIZE + 1, HASHES[:2])
    kv.invalidate(blocks[1])
    again = kv.allocate(2 * SIZE + 1, HASHES[:2])
    assert again is not None
    assert (again.blocks[0], again.cached_tokens) == (blocks[0], SIZE)
