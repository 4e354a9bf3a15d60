"""The KV cache of a worker, over its allocator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from pdserve.core.attempt import Attempt, AttemptKey
from pdserve.core.kv.blocks import BlockAllocator
from pdserve.core.kv.cache import Allocation, KvCache, LastFound
from pdserve.core.kv.host_tier import HostTier, LoadRule
from pdserve.core.kv.kv_shape import TransferKey
from pdserve.core.kv.stamps import UNMARKED, content_hash64
from pdserve.core.kv.tier_reads import Tier
from pdserve.core.types import Sampling

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


class Text:
    """A text that waits. Counts what is read of its hashes."""

    def __init__(self, hashes: Sequence[bytes]) -> None:
        self.hashes = CountedHashes(hashes)
        self.last_found = LastFound()
        self.attempt = Attempt(key=AttemptKey(1, "a", 1), prompt_ids=(1,), sampling=Sampling(), arrived_s=0.0)
        self.tokens = [1] * (len(hashes) * SIZE + 1)

    def num_reusable(self, block_size: int) -> int:
        assert block_size == SIZE
        return len(self.hashes)

    def reusable(self, block_size: int) -> Sequence[bytes]:
        return self.hashes[: self.num_reusable(block_size)]


class CountedHashes(list[bytes]):
    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_read += 1
        return super().__getitem__(index)


MANY = [number.to_bytes(16, "big") for number in range(1, 101)]


def test_what_is_found_of_a_waiting_text_follows_the_cache() -> None:
    kv = KvCache(BlockAllocator(100), SIZE)
    text = Text(MANY)
    reads = []
    for count, num_evicted in ((0, 0), (10, 0), (10, 0), (70, 0), (0, 35), (0, 0), (100, 0), (100, 0), (0, 100)):
        if count:
            kv.release(computed(kv, count * SIZE, MANY[:count]))
        if num_evicted:
            blocks = kv.extend(kv.blocks.num_free + num_evicted)
            assert blocks is not None
            kv.release(blocks)
        text.hashes.num_read = 0
        assert kv.tokens_found(text) == kv.num_found(MANY) * SIZE
        reads.append(text.hashes.num_read)
    # What has changed is read, and the first block, and those at the end of what was found.
    assert reads == [1, 12, 3, 63, 38, 3, 67, 2, 1]


def test_invalidated_blocks_of_a_waiting_text_are_not_found() -> None:
    kv = KvCache(BlockAllocator(100), SIZE)
    blocks = computed(kv, 50 * SIZE, MANY[:50])
    text = Text(MANY)
    assert kv.tokens_found(text) == 50 * SIZE
    kv.invalidate(blocks[49])
    assert kv.tokens_found(text) == 49 * SIZE
    kv.invalidate(blocks[0])
    assert kv.tokens_found(text) == 0


# --- host tier ------------------------------------------------------------------------------------------------


class Slots:
    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.copies: list[tuple[str, int, int]] = []  # from and to

    def save(self, block: int, slot: int) -> None:
        self.copies.append(("save", block, slot))

    def load(self, slot: int, block: int) -> None:
        self.copies.append(("load", slot, block))


def tiered(
    num_slots: int, *, block_s: float = 0.0, per_token_s: float = 1.0, most_saved: int = 100
) -> tuple[KvCache, Slots]:
    slots = Slots(num_slots)
    rule = LoadRule(block_s, lambda num_tokens, cached_tokens: num_tokens * per_token_s)
    kv = KvCache(BlockAllocator(4, tier=HostTier(slots, rule, most_saved)), SIZE)
    return kv, slots


def evict_all(kv: KvCache) -> None:
    blocks = kv.extend(kv.blocks.num_blocks)
    assert blocks is not None
    kv.release(blocks)


def test_evicted_blocks_are_loaded_again() -> None:
    kv, slots = tiered(8)
    kv.release(computed(kv, 3 * SIZE, HASHES))
    kv.take_changes()
    evict_all(kv)
    assert [kind for kind, _, _ in slots.copies] == ["save"] * 3
    saved = {block: slot for _, block, slot in slots.copies}
    change = kv.take_changes()
    assert change is not None
    assert (dict(change.tiered()), change.removed) == (dict.fromkeys(HASHES, Tier.HOST), ())
    again = kv.allocate(3 * SIZE + 1, HASHES)
    assert again is not None
    assert again.cached_tokens == 3 * SIZE
    assert slots.copies[3:] == [("load", saved[index], block) for index, block in enumerate(again.blocks[:3])]
    assert kv.blocks.stamps.content_hashes(again.blocks) == (*map(content_hash64, HASHES), UNMARKED)
    kv.release(again.blocks)
    evict_all(kv)
    assert len(slots.copies) == 6  # the tier has kept its copies
    kv.blocks.check()


def test_one_allocation_copies_a_limited_number_of_blocks() -> None:
    kv, slots = tiered(8, most_saved=2)
    kv.release(computed(kv, 3 * SIZE, HASHES))
    evict_all(kv)
    assert len(slots.copies) == 2
    assert set(kv.snapshot().stored) == set(HASHES[:2])  # a text's first blocks, without which no other is found
    kv.blocks.check()


def test_a_block_that_was_overwritten_is_not_copied() -> None:
    kv, slots = tiered(8)
    blocks = computed(kv, 2 * SIZE, HASHES[:2])
    kv.mark(blocks[1:], [7])
    kv.release(blocks)
    evict_all(kv)
    assert len(slots.copies) == 1
    assert kv.snapshot().stored == (HASHES[0],)


def test_the_last_token_is_computed_and_not_loaded() -> None:
    kv, _ = tiered(8)
    kv.release(computed(kv, 3 * SIZE, HASHES))
    evict_all(kv)
    again = kv.allocate(3 * SIZE, HASHES)
    assert again is not None
    assert again.cached_tokens == 2 * SIZE


def test_what_leaves_the_tier_is_no_longer_cached() -> None:
    kv, _ = tiered(2)
    kv.release(computed(kv, 3 * SIZE, HASHES))
    kv.take_changes()
    evict_all(kv)  # the last block is evicted first, so it leaves the tier first
    change = kv.take_changes()
    assert change is not None
    assert (dict(change.tiered()), change.removed) == (dict.fromkeys(HASHES[:2], Tier.HOST), (HASHES[2],))
    assert set(kv.snapshot().stored) == set(HASHES[:2])
    again = kv.allocate(3 * SIZE + 1, HASHES)
    assert again is not None
    assert again.cached_tokens == 2 * SIZE
    kv.blocks.check()


def test_what_is_evicted_does_not_displace_copies_that_are_about_to_be_loaded() -> None:
    kv, _ = tiered(3)
    kv.release(computed(kv, 3 * SIZE, HASHES))
    evict_all(kv)
    others = [bytes([number] * 16) for number in range(4, 6)]
    kv.release(computed(kv, 2 * SIZE, others))
    again = kv.allocate(3 * SIZE + 1, HASHES)  # takes all blocks, so both others leave
    assert again is not None
    assert again.cached_tokens == 3 * SIZE
    assert set(kv.snapshot().stored) == set(HASHES)
    kv.blocks.check(holders=[again.blocks])


@pytest.mark.parametrize(
    ("block_s", "per_token_s", "cached_tokens"),
    [(1.0, 0.3, 3 * SIZE), (1.0, 0.2, 0), (1.0, 0.0, 3 * SIZE)],  # computing is slower, faster, unknown
)
def test_blocks_are_loaded_where_that_is_sooner(block_s: float, per_token_s: float, cached_tokens: int) -> None:
    kv, _ = tiered(8, block_s=block_s, per_token_s=per_token_s)
    kv.release(computed(kv, 3 * SIZE, HASHES))
    evict_all(kv)
    again = kv.allocate(3 * SIZE + 1, HASHES)
    assert again is not None
    assert again.cached_tokens == cached_tokens


@pytest.mark.parametrize(("block_s", "found"), [(0.0, [3, 3, 3]), (100.0, [2, 1, 0])])  # loads are sooner, later
def test_what_a_waiting_text_would_load_is_found(block_s: float, found: list[int]) -> None:
    kv, _ = tiered(8, block_s=block_s)
    text = Text(HASHES)
    kv.release(computed(kv, 3 * SIZE, HASHES))
    assert kv.tokens_found(text) == 3 * SIZE
    for num_found in found:  # each time, one block moves to the tier
        blocks = kv.extend(kv.blocks.num_free + 1)
        assert blocks is not None
        kv.release(blocks)
        assert kv.tokens_found(text) == kv.num_found(HASHES) * SIZE == num_found * SIZE
        text.hashes.num_read = 0
        assert kv.tokens_found(text) == num_found * SIZE
        assert text.hashes.num_read <= 6
    kv.blocks.drop_copy(HASHES[2])
    assert kv.tokens_found(text) == kv.num_found(HASHES) * SIZE == min(2, found[-1]) * SIZE


def test_wrong_contents_leave_the_tier_too() -> None:
    kv, _ = tiered(8)
    kv.release(computed(kv, 2 * SIZE, HASHES[:2]))
    evict_all(kv)
    again = kv.allocate(2 * SIZE + 1, HASHES[:2])
    assert again is not None
    kv.invalidate(again.blocks[0])
    kv.release(again.blocks)
    evict_all(kv)
    assert kv.snapshot().stored == (HASHES[1],)
    kv.blocks.check()


# --- blocks for other workers -------------------------------------------------------------------------------------

PULL = TransferKey(transfer_id="pull", attempt=1, generation=1)


class QueuedSlots(Slots):
    """Copies that are made behind the engine."""

    room = 100

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self.num_flushes = 0

    def flush(self) -> None:
        self.num_flushes += 1


def queued(most_saved: int, num_slots: int = 16, computed_s: float = 2.0) -> tuple[KvCache, QueuedSlots]:
    """A pool of 16 blocks. As many as an eighth of the tier are saved before they leave."""
    slots = QueuedSlots(num_slots)
    rule = LoadRule(1.0, lambda num_tokens, cached_tokens: 2.0 * num_tokens, is_beside=True)
    tier = HostTier(slots, rule, most_saved, queued=slots)
    return KvCache(BlockAllocator(16, tier=tier, computed_s=lambda first: computed_s), SIZE), slots


def test_blocks_that_leave_next_are_saved_before() -> None:
    kv, slots = queued(most_saved=1)
    held = computed(kv, 3 * SIZE, HASHES)
    kv.advance(1.0)
    assert not slots.copies  # they are in use
    kv.release(held)
    for now_s in (2.0, 3.0, 4.0):
        kv.advance(now_s)
    assert slots.copies == [("save", held[2], 15), ("save", held[1], 14)]  # an eighth of the tier, one at a time
    assert slots.num_flushes == 2
    assert kv.take_changes() is not None
    kv.blocks.check(holders=[])
    assert kv.extend(15) is not None  # both leave
    assert len(slots.copies) == 2
    change = kv.take_changes()
    assert change is not None
    assert (dict(change.tiered()), change.removed) == (dict.fromkeys(HASHES[1:], Tier.HOST), ())
    kv.blocks.check()


def test_what_is_saved_before_is_half_of_the_pool() -> None:
    kv, slots = queued(most_saved=16, num_slots=800)
    hashes = [bytes([number] * 16) for number in range(16)]
    kv.release(computed(kv, 16 * SIZE, hashes))
    kv.advance(1.0)
    assert len(slots.copies) == 8
    assert kv.extend(8) is not None
    assert len(slots.copies) == 8
    kv.blocks.check()


def test_few_blocks_are_looked_at_for_being_saved_before() -> None:
    """Also if none is worth a copy."""
    kv, slots = queued(most_saved=1, computed_s=0.01)
    kv.release(computed(kv, 3 * SIZE, HASHES))
    kv.advance(1.0)
    assert len(kv.blocks._ahead) == 1
    assert not slots.copies


def test_a_block_with_other_contents_is_not_saved_before() -> None:
    kv, slots = queued(most_saved=8)
    held = computed(kv, 3 * SIZE, HASHES)
    kv.release(held)
    kv.blocks.stamps.begin([held[2]])
    kv.advance(1.0)
    assert [block for _, block, _ in slots.copies] == [held[1]]


def test_an_ended_session_leaves_before_what_was_saved_earlier() -> None:
    kv, slots = queued(most_saved=8)
    others = [bytes([number] * 16) for number in range(11, 14)]
    first, second = computed(kv, 3 * SIZE, HASHES), computed(kv, 3 * SIZE, others)
    kv.release(first, 60.0)
    kv.advance(1.0)
    assert len(slots.copies) == 2
    kv.release(second, 0.0)
    assert kv.extend(13) is not None
    assert kv.blocks.num_matched(HASHES) == 3
    assert kv.blocks.num_matched(others) == 0
    kv.blocks.check()


def test_a_saved_session_that_ends_leaves_before_others_that_were_saved() -> None:
    kv, slots = queued(most_saved=16, num_slots=800)
    others = [bytes([number] * 16) for number in range(11, 14)]
    kv.release(computed(kv, 3 * SIZE, HASHES))
    kv.release(computed(kv, 3 * SIZE, others))
    kv.advance(1.0)
    assert len(slots.copies) == 6, "all are saved ahead"
    kv.end(others)
    assert kv.extend(13) is not None
    assert (kv.blocks.num_matched(HASHES), kv.blocks.num_matched(others)) == (3, 0)
    kv.blocks.check()


def test_a_block_that_was_saved_before_may_be_used_again() -> None:
    kv, _ = queued(most_saved=8)
    held = computed(kv, 3 * SIZE, HASHES)
    kv.release(held)
    kv.advance(1.0)
    again = kv.allocate(3 * SIZE + 1, HASHES)
    assert again is not None
    assert again.blocks[:3] == held
    kv.blocks.check(holders=[again.blocks])
    assert kv.extend(12) is not None
    kv.blocks.invalidate(held[2])
    kv.release(again.blocks)
    kv.advance(2.0)
    kv.blocks.check()


RULE = LoadRule(1.0, lambda num_tokens, cached_tokens: float(num_tokens))
BESIDE = LoadRule(1.0, lambda num_tokens, cached_tokens: float(num_tokens), is_beside=True)


@pytest.mark.parametrize(
    ("rule", "computed_s", "chance", "is_saved"),
    [
        (RULE, 0.0, 0.0, True),  # nothing is known
        (RULE, 2.1, 1.0, True),
        (RULE, 1.9, 1.0, False),  # two copies take longer
        (RULE, 2.1, None, False),
        (RULE, 3.1, None, True),
        (RULE, 10.0, 0.1, False),
        (BESIDE, 0.5, 0.1, True),  # a load before the turn of its prompt costs nothing
        (BESIDE, 0.5, None, True),
        (BESIDE, 10.0, 0.0, False),
        (BESIDE, 0.1, 1.0, False),
    ],
)
def test_a_block_is_saved_for_what_it_may_save(
    rule: LoadRule, computed_s: float, chance: float | None, is_saved: bool
) -> None:
    assert rule.saves(computed_s, chance) is is_saved


def test_a_block_that_is_not_worth_a_copy_leaves_without_one() -> None:
    slots = Slots(8)
    rule = LoadRule(1.0, lambda num_tokens, cached_tokens: 1.0)
    kv = KvCache(BlockAllocator(4, tier=HostTier(slots, rule, 8), computed_s=lambda first: 2.9), SIZE)
    kv.release(computed(kv, 3 * SIZE, HASHES))
    evict_all(kv)
    assert not slots.copies
    assert kv.num_found(HASHES) == 0
    kv.blocks.check()


def test_lent_blocks_stay_until_they_are_taken_back(kv: KvCache) -> None:
    held = computed(kv, 3 * SIZE, HASHES)
    kv.release(held)
    assert kv.lend(PULL, HASHES[1:]) == held[1:]
    assert kv.allocate(7 * SIZE) is None, "only the first one can be evicted"
    kv.blocks.check(holders=kv.lent.values())
    kv.take_back(PULL)
    assert not kv.lent
    assert kv.blocks.num_referenced == 0


def test_all_blocks_are_lent_or_none(kv: KvCache) -> None:
    kv.release(computed(kv, 2 * SIZE, HASHES[:2]))
    assert kv.lend(PULL, HASHES) is None
    assert not kv.lent
    assert kv.num_lendable(HASHES) == 2
    kv.blocks.check(holders=[])


def test_running_answers_keep_their_memory(kv: KvCache) -> None:
    held = computed(kv, 3 * SIZE, HASHES)
    kv.release(held)
    spare = kv.blocks.num_available - 2
    assert kv.lend(PULL, HASHES, spare=spare) == []
    assert not kv.lent
    kv.blocks.check(holders=[])
    assert kv.blocks.match(HASHES) == held
    assert kv.lend(PULL, HASHES, spare=100) == held, "it takes nothing from what is available"
    kv.take_back(PULL)
    kv.release(held)
    assert kv.lend(PULL, HASHES, spare=spare - 1) == held


@pytest.mark.parametrize("most_saved", [3, 2])
def test_blocks_are_lent_from_the_tier(most_saved: int) -> None:
    kv, _ = tiered(8, most_saved=most_saved)
    kv.release(computed(kv, 3 * SIZE, HASHES))
    while kv.blocks.num_matched(HASHES):
        evict_all(kv)
    assert kv.num_lendable(HASHES) == most_saved
    if most_saved < 3:  # more than one allocation may load
        assert kv.lend(PULL, HASHES) is None
    else:
        lent = kv.lend(PULL, HASHES)
        assert lent is not None
        assert kv.blocks.stamps.content_hashes(lent) == tuple(map(content_hash64, HASHES))
    kv.blocks.check(holders=kv.lent.values())


def test_copies_behind_the_engine_are_not_lent() -> None:
    kv, _ = queued(most_saved=8)
    kv.release(computed(kv, 3 * SIZE, HASHES))
    evict_all(kv)
    assert kv.blocks.tier is not None
    assert kv.blocks.tier.num_found(HASHES) == 3
    assert kv.num_lendable(HASHES) == 0
    assert kv.lend(PULL, HASHES) is None
    assert kv.lend(PULL, HASHES[:1]) is None
    kv.blocks.check(holders=[])
