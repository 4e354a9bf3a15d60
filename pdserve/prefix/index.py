"""The prefix index in memory: how many leading blocks of a prompt each worker has cached, and in which tiers. Pure.

It receives each worker's cache changes in order. A gap in their numbers is detected, and repaired by the next snapshot.
The index is a hint: workers verify every block again, so a stale entry costs a recomputation, but never causes a wrong
token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol, final

from pdserve.core.kv.blocks import CacheChange
from pdserve.core.kv.tier_reads import Tier, TierDepths

MAX_ENTRIES: Final = 8 * 2**20  # (block, worker) pairs; about 100 bytes each
# number of replaced incarnations that are remembered; messages of older ones cannot arrive any more
MAX_ENDED: Final = 4096


class Applied(Enum):
    APPLIED = "applied"
    NEEDS_SNAPSHOT = "needs snapshot"  # changes were missed; the known state is kept until a snapshot arrives
    STALE = "stale"  # repeated, or from an ended incarnation; nothing changed


@dataclass(slots=True)
class _Cache:
    incarnation: str
    slot: int
    sequence: int = 0
    needs_snapshot: bool = False
    blocks: set[bytes] = field(default_factory=set)
    lower: dict[bytes, Tier] = field(default_factory=dict)  # those of them that the pool does not have


@final
class PrefixDepths(dict[str, int]):
    """The number of leading blocks of a prompt that each worker has, by worker id."""

    __slots__ = ("tiers",)

    def __init__(self, depths: Mapping[str, int] | None = None, tiers: Mapping[str, TierDepths] | None = None) -> None:
        """`tiers`: of the workers whose pool does not have all of them."""
        super().__init__(depths or {})
        self.tiers: Mapping[str, TierDepths] = tiers or {}

    def joined(self, other: Mapping[str, int]) -> PrefixDepths:
        """The larger depth of each worker. The pools have all of `other`."""
        depths = {name: max(self.get(name, 0), other.get(name, 0)) for name in {**self, **other}}
        tiers = {name: split for name, split in self.tiers.items() if self[name] > other.get(name, 0)}
        return PrefixDepths(depths, tiers)


@final
class PrefixIndex:
    """Blocks by worker, and workers by block as bits of an integer, so that a lookup is one AND per block."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._workers: dict[str, _Cache] = {}
        self._ended: dict[str, str] = {}  # worker id -> the incarnation before the present one
        self._holders: dict[bytes, int] = {}
        self._worker_of_slot: dict[int, str] = {}
        self._free_slots: list[int] = []
        self._num_entries = 0
        self.num_dropped = 0  # entries that were dropped because of the limit

    @property
    def num_entries(self) -> int:
        return self._num_entries

    def num_blocks(self, worker_id: str) -> int:
        cache = self._workers.get(worker_id)
        return 0 if cache is None else len(cache.blocks)

    def needs_snapshot(self, worker_id: str) -> bool:
        cache = self._workers.get(worker_id)
        return cache is not None and cache.needs_snapshot

    def apply(self, worker_id: str, incarnation: str, change: CacheChange) -> Applied:
        """Applies a worker's change. Changes of an incarnation are numbered from 1; a new incarnation replaces the old
        one.

        A change after a gap is applied as well, because it is better than none.
        """
        cache = self._workers.get(worker_id)
        if cache is None or cache.incarnation != incarnation:
            if self._ended.get(worker_id) == incarnation:
                return Applied.STALE
            cache = self._begin(worker_id, incarnation)
        if change.is_snapshot:
            self._forget(cache, tuple(cache.blocks.difference(change.stored)))
            cache.needs_snapshot = False
        elif change.sequence <= cache.sequence:
            return Applied.STALE
        elif change.sequence != cache.sequence + 1:
            cache.needs_snapshot = True
        cache.sequence = change.sequence
        self._forget(cache, change.removed)
        self._store(cache, change)
        return Applied.NEEDS_SNAPSHOT if cache.needs_snapshot else Applied.APPLIED

    def remove(self, worker_id: str, incarnation: str) -> None:
        """The worker cannot be reached; O(its blocks). It may come back with a snapshot.

        No-op if another incarnation has replaced it.
        """
        cache = self._workers.get(worker_id)
        if cache is None or cache.incarnation != incarnation:
            return
        self._forget(cache, tuple(cache.blocks))
        del self._workers[worker_id]
        del self._worker_of_slot[cache.slot]
        self._free_slots.append(cache.slot)

    def lookup(self, hashes: Sequence[bytes]) -> PrefixDepths:
        """Leading blocks of `hashes` by worker; workers that lack the first are left out."""
        holders = enumerate(self._holders.get(one, 0) for one in hashes)
        depths = leading_blocks(holders, -1, len(hashes))
        found = PrefixDepths({self._worker_of_slot[slot]: depth for slot, depth in depths.items()})
        found.tiers = {
            worker_id: tiers
            for worker_id, depth in found.items()
            if (tiers := _tier_depths(hashes, depth, self._workers[worker_id].lower)) is not None
        }
        return found

    def check(self) -> None:
        """Raises AssertionError unless both directions are consistent."""
        from_workers = {(block, cache.slot) for cache in self._workers.values() for block in cache.blocks}
        from_blocks = {(block, slot) for block, bits in self._holders.items() for slot in slots_of(bits)}
        assert from_workers == from_blocks, "workers by block and blocks by worker differ"
        assert len(from_workers) == self._num_entries, f"{self._num_entries} entries counted, {len(from_workers)} held"
        for cache in self._workers.values():
            assert cache.lower.keys() <= cache.blocks, "a tier of a block that the worker lacks"
        assert {cache.slot: name for name, cache in self._workers.items()} == self._worker_of_slot, "slots differ"

    def _begin(self, worker_id: str, incarnation: str) -> _Cache:
        former = self._workers.get(worker_id)
        if former is not None:
            self.remove(worker_id, former.incarnation)
            self._ended[worker_id] = former.incarnation
            if len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]
        slot = self._free_slots.pop() if self._free_slots else len(self._worker_of_slot)
        cache = self._workers[worker_id] = _Cache(incarnation, slot)
        self._worker_of_slot[slot] = worker_id
        return cache

    def _store(self, cache: _Cache, change: CacheChange) -> None:
        bit = 1 << cache.slot
        for one, tier in change.tiered():
            if one not in cache.blocks:
                if self._num_entries >= self._max_entries:
                    self.num_dropped += 1
                    continue
                cache.blocks.add(one)
                self._holders[one] = self._holders.get(one, 0) | bit
                self._num_entries += 1
            if tier is not Tier.POOL:
                cache.lower[one] = tier
            elif cache.lower:
                cache.lower.pop(one, None)

    def _forget(self, cache: _Cache, hashes: Iterable[bytes]) -> None:
        bit = 1 << cache.slot
        for one in hashes:
            if one not in cache.blocks:
                continue
            cache.blocks.discard(one)
            cache.lower.pop(one, None)
            left = self._holders[one] & ~bit
            if left:
                self._holders[one] = left
            else:
                del self._holders[one]
            self._num_entries -= 1


def _tier_depths(hashes: Sequence[bytes], depth: int, lower: Mapping[bytes, Tier]) -> TierDepths | None:
    """Of the `depth` leading ones, which the worker has. None: the pool has all of them. By bisection, as in Redis,
    because a cache evicts leaves first."""
    last = lower.get(hashes[depth - 1])
    if last is None:
        return None
    pool = bisect_left(range(depth), True, key=lambda at: hashes[at] in lower)
    if last is not Tier.DISK:
        return TierDepths(pool, depth)
    return TierDepths(pool, bisect_left(range(depth), True, lo=pool, key=lambda at: lower.get(hashes[at]) is Tier.DISK))


def leading_blocks(holders: Iterable[tuple[int, int]], alive: int, count: int) -> dict[int, int]:
    """How many of a chain's `count` leading blocks each slot holds; slots that lack the first are left out.

    `holders` pairs a block's place in the chain with one bit per slot that holds it, in order. A missing place is held
    by the same slots as the next one. Only slots in `alive` count (-1: all).
    """
    depths: dict[int, int] = {}
    for at, bits in holders:
        still = alive & bits
        if still != alive and at:
            depths.update(dict.fromkeys(slots_of(alive & ~bits), at))
        alive = still
        if not alive:
            return depths
    if count:
        depths.update(dict.fromkeys(slots_of(alive), count))
    return depths


def slots_of(bits: int) -> list[int]:
    """Numbers of the set bits of a non-negative integer."""
    slots = []
    while bits:
        low = bits & -bits
        slots.append(low.bit_length() - 1)
        bits ^= low
    return slots


# --- lookups --------------------------------------------------------------------------------------------------


class PrefixLookup(Protocol):
    @property
    def is_available(self) -> bool:
        """False while the index cannot be reached; an empty answer then has no meaning."""

    async def lookup(self, hashes: Sequence[bytes]) -> PrefixDepths:
        """The number of leading blocks of the chain `hashes` that each worker has cached, by worker id.

        Never raises: an index that cannot answer in time returns nothing, and routing continues by load.
        """

    async def inspect(self, hashes: Sequence[bytes]) -> PrefixDepths | None:
        """The same for a person who looks; None: the index cannot be reached, or is slow. It may take longer, and
        changes nothing for lookups."""


@final
class MemoryLookup:
    """Answers from an index that this process feeds itself."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self.is_available = True

    async def lookup(self, hashes: Sequence[bytes]) -> PrefixDepths:
        return self._index.lookup(hashes)

    async def inspect(self, hashes: Sequence[bytes]) -> PrefixDepths | None:
        return self._index.lookup(hashes)
