import random

import pytest
from hypothesis import given as given_any
from hypothesis import settings
from hypothesis import strategies as st

from pdserve.core.kv.blocks import CacheChange
from pdserve.core.kv.hashing import block_hashes, chain_key
from pdserve.core.kv.tier_reads import Tier, TierDepths
from pdserve.prefix.index import Applied, MemoryLookup, PrefixIndex, leading_blocks
from tests.support.examples import examples
from tests.unit.prefix.given import chain


def change(
    sequence: int, stored: list[bytes], removed: list[bytes] | None = None, *, snapshot: bool = False
) -> CacheChange:
    return CacheChange(sequence=sequence, stored=tuple(stored), removed=tuple(removed or ()), is_snapshot=snapshot)


@pytest.fixture
def index():
    index = PrefixIndex()
    yield index
    index.check()


def test_a_lookup_returns_leading_blocks_of_each_worker(index: PrefixIndex) -> None:
    blocks = chain(5)
    index.apply("long", "1", change(1, blocks))
    index.apply("short", "1", change(1, blocks[:2]))
    index.apply("late", "1", change(1, blocks[1:]))
    assert index.lookup(blocks) == {"long": 5, "short": 2}
    assert index.lookup(blocks[:1]) == {"long": 1, "short": 1}
    assert index.lookup([]) == {}
    assert index.lookup(chain(3, "unknown")) == {}


def tiered(sequence: int, tiers: dict[bytes, Tier], *, snapshot: bool = False) -> CacheChange:
    return CacheChange(sequence=sequence, stored=tuple(tiers), tiers=bytes(tiers.values()), is_snapshot=snapshot)


def test_a_lookup_says_how_the_blocks_are_split_over_tiers(index: PrefixIndex) -> None:
    blocks = chain(6)
    index.apply("pool", "1", change(1, blocks))
    index.apply("w", "1", tiered(1, dict(zip(blocks, map(Tier, (0, 0, 1, 1, 2, 2)), strict=True))))
    found = index.lookup(blocks)
    assert (found, found.tiers) == ({"pool": 6, "w": 6}, {"w": TierDepths(2, 4)})
    assert index.lookup(blocks[:3]).tiers == {"w": TierDepths(2, 3)}
    assert index.lookup(blocks[:2]).tiers == {}
    index.apply("w", "1", tiered(2, {blocks[2]: Tier.POOL, blocks[3]: Tier.DISK}))
    assert index.lookup(blocks).tiers == {"w": TierDepths(3, 3)}
    index.apply("w", "1", change(3, [], [blocks[1]]))
    index.apply("w", "1", change(4, [blocks[1], blocks[3]]))  # without tiers, as of an older worker: in the pool
    assert index.lookup(blocks).tiers == {"w": TierDepths(4, 4)}
    index.apply("w", "1", tiered(5, dict.fromkeys(blocks[:2], Tier.HOST), snapshot=True))
    found = index.lookup(blocks)
    assert (found["w"], found.tiers) == (2, {"w": TierDepths(0, 2)})


def test_a_removed_block_ends_the_prefix_before_it(index: PrefixIndex) -> None:
    blocks = chain(4)
    index.apply("w", "1", change(1, blocks))
    index.apply("w", "1", change(2, [], [blocks[2]]))
    assert index.lookup(blocks) == {"w": 2}


def test_a_gap_is_repaired_by_a_snapshot(index: PrefixIndex) -> None:
    blocks = chain(4)
    assert index.apply("w", "1", change(1, blocks[:1])) is Applied.APPLIED
    assert index.apply("w", "1", change(3, blocks[:3])) is Applied.NEEDS_SNAPSHOT
    assert index.lookup(blocks) == {"w": 3}
    assert index.apply("w", "1", change(4, [])) is Applied.NEEDS_SNAPSHOT
    assert index.needs_snapshot("w")
    assert index.apply("w", "1", change(4, blocks[:2], snapshot=True)) is Applied.APPLIED
    assert index.lookup(blocks) == {"w": 2}
    assert index.apply("w", "1", change(5, [blocks[2]])) is Applied.APPLIED
    assert index.lookup(blocks) == {"w": 3}


def test_a_repeated_change_is_stale(index: PrefixIndex) -> None:
    blocks = chain(2)
    index.apply("w", "1", change(1, blocks))
    index.apply("w", "1", change(2, [], blocks))
    assert index.apply("w", "1", change(1, blocks)) is Applied.STALE
    assert index.lookup(blocks) == {}


def test_a_router_that_attaches_late_needs_a_snapshot_first(index: PrefixIndex) -> None:
    assert index.apply("w", "1", change(7, chain(1))) is Applied.NEEDS_SNAPSHOT
    assert index.apply("v", "1", change(7, chain(1), snapshot=True)) is Applied.APPLIED


def test_a_new_incarnation_drops_the_old_ones_blocks(index: PrefixIndex) -> None:
    blocks = chain(3)
    index.apply("w", "old", change(1, blocks))
    index.apply("w", "new", change(1, blocks[:1]))
    assert index.lookup(blocks) == {"w": 1}
    assert index.apply("w", "old", change(2, blocks)) is Applied.STALE
    index.remove("w", "old")
    assert index.lookup(blocks) == {"w": 1}


def test_an_unreachable_worker_is_forgotten_and_may_return(index: PrefixIndex) -> None:
    blocks = chain(3)
    index.apply("w", "1", change(1, blocks))
    index.remove("w", "1")
    assert index.lookup(blocks) == {}
    assert index.num_entries == 0
    assert index.apply("w", "1", change(1, blocks, snapshot=True)) is Applied.APPLIED
    assert index.lookup(blocks) == {"w": 3}


def test_the_slot_of_a_removed_worker_is_reused(index: PrefixIndex) -> None:
    for turn in range(100):
        index.apply(f"w{turn}", "1", change(1, chain(2)))
        index.remove(f"w{turn}", "1")
    index.apply("last", "1", change(1, chain(2)))
    assert index.lookup(chain(2)) == {"last": 2}
    assert max(index._holders.values()) == 1


def test_entries_are_bounded(index: PrefixIndex) -> None:
    index = PrefixIndex(max_entries=3)
    index.apply("w", "1", change(1, chain(5)))
    assert (index.num_entries, index.num_dropped) == (3, 2)
    assert index.lookup(chain(5)) == {"w": 3}
    index.check()


def test_more_than_64_workers(index: PrefixIndex) -> None:
    blocks = chain(100)
    for number in range(100):
        index.apply(f"w{number}", "1", change(1, blocks[: number + 1]))
    assert index.lookup(blocks) == {f"w{number}": number + 1 for number in range(100)}


def test_tenants_cannot_see_each_others_prefixes(index: PrefixIndex) -> None:
    tokens, seed = list(range(64)), bytes(32)
    mine = block_hashes(tokens, 16, chain_key(b"mine", seed))
    theirs = block_hashes(tokens, 16, chain_key(b"theirs", seed))
    index.apply("w", "1", change(1, mine))
    assert index.lookup(mine) == {"w": 4}
    assert index.lookup(theirs) == {}


async def test_the_memory_index_answers_like_the_redis_index(index: PrefixIndex) -> None:
    index.apply("w", "1", change(1, chain(3)))
    assert await MemoryLookup(index).lookup(chain(4)) == {"w": 3}


@settings(max_examples=examples(60), deadline=None)
@given_any(st.integers(0, 2**32))
def test_any_history_matches_a_dictionary_of_sets(seed: int) -> None:
    chance = random.Random(seed)
    index, truth, sequences = PrefixIndex(), {}, {}
    blocks = chain(12)
    for _ in range(60):
        worker = f"w{chance.randrange(4)}"
        if chance.random() < 0.05:
            index.remove(worker, "1")
            truth.pop(worker, None)
            sequences.pop(worker, None)
            continue
        stored = chance.sample(blocks, chance.randrange(6))
        removed = [one for one in chance.sample(blocks, 3) if one not in stored]
        sequences[worker] = sequences.get(worker, 0) + 1
        is_snapshot = chance.random() < 0.1
        index.apply(worker, "1", change(sequences[worker], stored, removed, snapshot=is_snapshot))
        held = set() if is_snapshot else truth.get(worker, set())
        truth[worker] = (held - set(removed)) | set(stored)
    index.check()
    depths = {w: next((n for n, one in enumerate(blocks) if one not in held), 12) for w, held in truth.items()}
    assert index.lookup(blocks) == {worker: depth for worker, depth in depths.items() if depth}


def test_a_skipped_position_is_implied_by_the_next() -> None:
    assert leading_blocks([(3, 0b111), (7, 0b011), (9, 0b001)], 0b111, 10) == {2: 7, 1: 9, 0: 10}
    assert leading_blocks([], 0b1, 0) == {}
