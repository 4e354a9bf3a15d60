"""Allocates KV blocks, and keeps finished blocks for later prompts with the same prefix. Pure: no clock, no randomness.

A block is in exactly one state: free; cached (no sequence uses it, but its hash finds it); or referenced (one or more
sequences use it, with or without a hash). When there are no free blocks, cached blocks are evicted, in
the order of retention.py. With a host tier, their contents are copied there, and a later prompt may load them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

from pdserve.core.kv.host_tier import HostTier, LowerTier
from pdserve.core.kv.retention import Retention
from pdserve.core.kv.stamps import BlockStamps, content_hash64
from pdserve.core.kv.tier_reads import MOST_ALONE, Tier

# --- runs of free blocks --------------------------------------------------------------------------------------
# Free block numbers are kept as runs, so that an allocation is contiguous where memory allows. A transfer needs one
# descriptor per run, so allocation uses best fit: the smallest run that is large enough, or else the largest runs
# first.


@final
class FreeRuns:
    """A set of block numbers, stored as maximal runs of consecutive ones."""

    def __init__(self, num_blocks: int) -> None:
        self._len = 0
        self._length_from: dict[int, int] = {}  # first block of a run -> its length
        self._first_until: dict[int, int] = {}  # one past the last block of a run -> its first block
        self._by_size: list[tuple[int, int]] = []  # (length, first block), ascending
        if num_blocks:
            self._insert(0, num_blocks)

    def __len__(self) -> int:
        return self._len

    def runs(self) -> Iterator[tuple[int, int]]:
        """(first block, length) of each run, ascending."""
        return iter(sorted(self._length_from.items()))

    def take(self, count: int) -> list[int]:
        """Removes and returns `count` blocks; the caller must ensure that there are as many."""
        assert count <= self._len
        taken: list[int] = []
        while len(taken) < count:
            wanted = count - len(taken)
            at = min(bisect_left(self._by_size, (wanted, -1)), len(self._by_size) - 1)
            length, first = self._by_size[at]
            used = min(wanted, length)
            self._remove(first, length)
            if used < length:
                self._insert(first + used, length - used)
            taken.extend(range(first, first + used))
        return taken

    def add(self, block: int) -> None:
        """Adds a block that is not in the set, and joins it with adjacent runs."""
        first, length = block, 1
        before = self._first_until.get(block)
        if before is not None:
            self._remove(before, block - before)
            first, length = before, length + block - before
        after = self._length_from.get(block + 1)
        if after is not None:
            self._remove(block + 1, after)
            length += after
        self._insert(first, length)

    def _insert(self, first: int, length: int) -> None:
        self._length_from[first] = length
        self._first_until[first + length] = first
        insort(self._by_size, (length, first))
        self._len += length

    def _remove(self, first: int, length: int) -> None:
        del self._length_from[first]
        del self._first_until[first + length]
        del self._by_size[bisect_left(self._by_size, (length, first))]
        self._len -= length


def runs_of(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """(first block, length) of the maximal ascending runs of `blocks`, in their order."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][0] + runs[-1][1] == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs


def longest_runs_first(blocks: Iterable[int]) -> list[int]:
    """The order in which `FreeRuns.take` gives all of `blocks`."""
    runs = sorted(((length, first) for first, length in runs_of(sorted(blocks))), reverse=True)
    return [block for length, first in runs for block in range(first, first + length)]


# --- allocation -----------------------------------------------------------------------------------------------

#: The share of the host tier for copies of blocks that are still in the pool. Such copies displace others.
AHEAD_SHARE: Final = 0.125


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChange:
    """The hashes that were added to and removed from the prefix cache since change number `sequence - 1`. A block that
    has moved to another tier is stored again.

    A snapshot contains all hashes after change `sequence`, and replaces everything that a reader knew before. Applying
    a hash twice changes nothing, so a snapshot may overlap the changes that follow it.
    """

    sequence: int
    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...] = ()
    is_snapshot: bool = False
    tiers: bytes = b""  # the tier of each stored hash; empty: all are in the pool

    def tiered(self) -> Iterator[tuple[bytes, Tier]]:
        """The stored hashes with their tiers."""
        return zip(self.stored, map(Tier, self.tiers or bytes(len(self.stored))), strict=True)


@final
class BlockAllocator:
    """Reference-counted blocks 0 .. num_blocks - 1, the prefix cache over them, and their stamps.

    The changes of the prefix cache include the tiers: a hash is stored while the pool or a tier has it.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        is_cache_on: bool = True,
        stamps: BlockStamps | None = None,
        tier: HostTier | None = None,
        lower: LowerTier | None = None,
        computed_s: Callable[[int], float] | None = None,
        on_reuse: Callable[[Sequence[bytes], Sequence[int], Callable[[int, bytes], bool]], None] | None = None,
    ) -> None:
        """`lower`: the tier below `tier`, or below the pool if there is no `tier`. `computed_s`: seconds to compute a
        block as one of many, after so many others; None: the same for all. `on_reuse` is called with the hashes and
        blocks that a further text uses, and a function that tells whether a block still has the contents of a hash."""
        self._on_reuse = on_reuse
        self.tier = tier
        self.now_s = 0.0  # set by the schedulers; blocks that were used at the same time leave in their order
        self.lower = lower
        self._in_lower: set[bytes] = set()
        self.stamps = BlockStamps(num_blocks) if stamps is None else stamps
        self._is_cache_on = is_cache_on
        self._free = FreeRuns(num_blocks)
        self._references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        num_tiered = num_blocks + (0 if tier is None else tier.num_slots)
        self._retention = Retention(num_tiered, computed_s, self._block_of)
        self._ahead = self._retention.ahead
        self._most_ahead = 0
        if tier is not None and not tier.loads_at_once:  # in the tier, they are copies of what the pool has
            # One read may evict as much of the pool at once.
            self._most_ahead = min(int(MOST_ALONE * num_blocks), int(AHEAD_SHARE * tier.num_slots))
        self._moved: dict[bytes, Tier | None] = {}  # hash -> its tier at the last change; None: none had it
        self._shown: set[bytes] = set()  # of these, those that a snapshot had already, which must not cancel each other
        self._sequence = 0

    @property
    def num_blocks(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        return len(self._retention.pool) + len(self._ahead)

    @property
    def num_available(self) -> int:
        """Number of blocks that `allocate` can use: free and evictable ones."""
        return len(self._free) + self.num_evictable

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.num_available

    def allocate(self, count: int, copied: Sequence[bytes] = ()) -> list[int] | None:
        """`count` blocks with one reference each, contiguous where possible. None, without a change, if there are
        fewer. Blocks `copied` of a text, in its order, are in the host tier and stay there."""
        num_free = len(self._free)
        if count > num_free + self.num_evictable:
            return None
        evicted = self._evict(count - num_free, copied) if count > num_free else []
        if num_free:
            for block in evicted:
                self._free.add(block)
            evicted = []
        if len(evicted) > 1:
            blocks = longest_runs_first(evicted)
        else:
            blocks = evicted or self._free.take(count)
        references = self._references
        for block in blocks:
            references[block] = 1
        self.stamps.begin(blocks)
        return blocks

    def _evict(self, count: int, staying: Sequence[bytes]) -> list[int]:
        """The blocks that leave first, in their order. They are neither free nor referenced afterwards."""
        if self.tier is None and self.lower is None:
            leaving = self._next_to_leave(count)
            block_of, hash_of, moved = self._block_of, self._hash_of, self._moved
            evicted = [block_of.pop(block_hash) for block_hash in leaving]
            for block, block_hash in zip(evicted, leaving, strict=True):
                del hash_of[block]
                moved.setdefault(block_hash, Tier.POOL)
            return evicted
        most_saved = 0
        if self.tier is not None:
            most_saved = self.tier.most_saved
        elif self.lower is not None:
            most_saved = self.lower.room
        for block_hash in staying:
            self._retention.host.discard(block_hash)
        evicted = [self._block_of[block_hash] for block_hash in self._next_to_leave(count)]
        passed: list[tuple[bytes, int]] = []  # to the tier below
        for left, block in zip(range(count, 0, -1), evicted, strict=False):
            if left <= most_saved and not self._save(block):  # the most valuable of many
                passed.append((self._hash_of[block], block))
            self._forget(block)
        if self.lower is not None:
            for block_hash, block in reversed(passed):  # the most valuable first, because the tier below may fill up
                self.lower.take_block(block_hash, block)
        if evicted and self.tier is not None:
            self.tier.flush()
        elif evicted and self.lower is not None:
            self.lower.start_copies()
        for block_hash in reversed(staying):
            self._retention.entered_host(block_hash, self.now_s)
        return evicted

    def save_ahead(self) -> None:
        """Saves some of the blocks that leave next, so that their eviction needs no copy. They stay cached. An
        allocation may evict more blocks at once than the host tier takes."""
        tier = self.tier
        if tier is None or len(self._ahead) >= self._most_ahead or not self._retention.pool:
            return
        pool, before = self._retention.pool, tier.num_saved
        count = min(self._most_ahead - len(self._ahead), len(pool), tier.most_saved)
        for block_hash in pool.pop(count, self.now_s):
            self._ahead[block_hash] = None
            self._copy(block_hash, self._block_of[block_hash])
        if tier.num_saved > before:
            tier.flush()

    def _next_to_leave(self, count: int) -> list[bytes]:
        """Blocks that were saved ahead, after those of ended sessions."""
        retention = self._retention
        if not self._ahead:
            return retention.pool.pop(count, self.now_s)
        leaving: list[bytes] = []
        while self._ahead and len(leaving) < count:
            block_hash = next(iter(self._ahead))
            if retention.leaves_after_pool(block_hash, self.now_s):
                leaving += retention.pool.pop(1, self.now_s)
            else:
                del self._ahead[block_hash]
                leaving.append(block_hash)
        return leaving + retention.pool.pop(count - len(leaving), self.now_s)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of `hashes`. Adds a reference to each."""
        blocks: list[int] = []
        for one in hashes:
            block = self._block_of.get(one)
            if block is None:
                break
            if self._references[block] == 0:
                self._retention.no_longer_leaves(one)
            self._references[block] += 1
            blocks.append(block)
        return blocks

    def began(self, hashes: Sequence[bytes], reused: Sequence[int] = ()) -> None:
        """A text with these leading blocks has got its blocks, of which the pool had the first."""
        self._retention.began(hashes, self.now_s)
        if self._on_reuse is not None and reused:
            self._on_reuse(hashes[: len(reused)], reused, self._holds)

    def _holds(self, block: int, block_hash: bytes) -> bool:
        """False: something else has written to the block."""
        return self.stamps.content_hash(block) == content_hash64(block_hash)

    def save_all(self, lower: LowerTier) -> Iterator[bytes]:
        """Hands what memory has to a tier below it, as if it left, the beginnings of texts first. At each step, one
        block, whose hash follows."""
        for block_hash, block in self._block_of.items():
            if self._holds(block, block_hash):
                lower.take_block(block_hash, block)
                yield block_hash
        for block_hash in self.tier or ():
            if block_hash not in self._block_of and self.tier is not None:
                self.tier.hand_down(block_hash, lower)
                yield block_hash

    def __contains__(self, block_hash: object) -> bool:
        """Whether the pool has the block, for later texts."""
        return block_hash in self._block_of

    def num_matched(self, hashes: Sequence[bytes]) -> int:
        """The length of the longest cached prefix of `hashes`."""
        return next((at for at, one in enumerate(hashes) if one not in self._block_of), len(hashes))

    def load(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Fills the first of `blocks`, which are referenced and unused so far, with the blocks `hashes` of the host
        tier, which are a part of a text in its order. Adds them to the prefix cache."""
        assert self.tier is not None
        filled = blocks[: len(hashes)]
        self.tier.load(hashes, filled)
        for block, block_hash in zip(filled, hashes, strict=True):
            self.stamps.mark(block, content_hash64(block_hash))
            self.publish(block, block_hash)

    def publish(self, block: int, block_hash: bytes) -> bool:
        """Adds a referenced block with final contents to the prefix cache.

        False if it was not added: the cache is off, or another block has the same tokens. Such a duplicate is not
        shared, and becomes free when its users release it.
        """
        assert self._references[block] > 0, f"block {block} is published without a reference"
        if not self._is_cache_on or self._block_of.get(block_hash, block) != block:
            return False
        known = self._hash_of.get(block)
        assert known in (None, block_hash), f"block {block} is already published for other tokens"
        if known is None:
            self._hash_of[block] = block_hash
            self._block_of[block_hash] = block
            self._moved.setdefault(block_hash, self._lower_tier_of(block_hash))
        return True

    def invalidate(self, block: int) -> None:
        """Removes the block from the prefix cache because its contents are wrong."""
        block_hash = self._hash_of.get(block)
        if block_hash is not None:
            if self.tier is not None:
                self.tier.drop(block_hash)
            if self.lower is not None:
                self.lower.drop(block_hash)
                self._in_lower.discard(block_hash)
            self._retention.drop(block_hash)
            self._forget(block)
            if self._references[block] == 0:
                self._free.add(block)

    def drop_copy(self, block_hash: bytes) -> None:
        """The contents of the copy in the host tier are wrong."""
        if self.tier is not None and block_hash in self.tier:
            self._moved.setdefault(block_hash, self._tier_of(block_hash))
            self.tier.drop(block_hash)
            self._retention.host.discard(block_hash)

    def release(self, blocks: Sequence[int], reuse_within_s: float | None = None) -> None:
        """A text no longer uses its blocks, given in its order. `reuse_within_s`: a later text is announced to use them
        within that time; 0: none will; None: unknown."""
        hashes = [one for one in map(self._hash_of.get, blocks) if one is not None]
        self._retention.released(hashes, self.now_s, reuse_within_s)
        self.give_back(blocks)

    def end(self, hashes: Sequence[bytes]) -> None:
        """Blocks of a text, in its order, whose session has ended: those from the first of them on leave first, unless
        other texts use them."""
        self._retention.end(hashes, self.now_s)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Releases one reference of each block, given in the order of a text, without a use."""
        unused: list[bytes] = []
        # Reversed, so that a shared prefix is evicted last: without it, the blocks after it cannot be found.
        references, hash_of = self._references, self._hash_of
        for block in reversed(blocks):
            left = references[block] - 1
            assert left >= 0, f"block {block} is released more often than taken"
            references[block] = left
            if left == 0:
                block_hash = hash_of.get(block)
                if block_hash is None:
                    self._free.add(block)
                else:
                    unused.append(block_hash)
        self._retention.may_leave_pool(unused, self.now_s)

    def lower_changed(self, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """What the tier below memory has got and lost since the last call."""
        for block_hash in removed:
            if block_hash in self._in_lower:
                self._moved.setdefault(block_hash, self._tier_of(block_hash))
                self._in_lower.discard(block_hash)
        for block_hash in added:
            self._moved.setdefault(block_hash, self._tier_of(block_hash))
            self._in_lower.add(block_hash)

    def take_changes(self) -> CacheChange | None:
        """The changes since the last call, with a sequence number; None if there are none. Changes that cancel each
        other are omitted."""
        moved, self._moved = self._moved, {}
        shown, self._shown = self._shown, set()
        stored: list[bytes] = []
        removed: list[bytes] = []
        tiers = bytearray()
        for block_hash, before in moved.items():
            tier = self._tier_of(block_hash)
            if tier is None:
                if before is not None or block_hash in shown:
                    removed.append(block_hash)
            elif tier is not before or block_hash in shown:
                stored.append(block_hash)
                tiers.append(tier)
        if not stored and not removed:
            return None
        self._sequence += 1
        told = bytes(tiers) if any(tiers) else b""
        return CacheChange(sequence=self._sequence, stored=tuple(stored), removed=tuple(removed), tiers=told)

    def snapshot(self) -> CacheChange:
        self._shown.update(self._moved)
        stored = dict.fromkeys(self._block_of, Tier.POOL)
        for hashes, tier in ((self.tier or (), Tier.HOST), (self._in_lower, Tier.DISK)):
            for block_hash in hashes:
                stored.setdefault(block_hash, tier)
        tiers = bytes(stored.values())
        return CacheChange(
            sequence=self._sequence, stored=tuple(stored), is_snapshot=True, tiers=tiers if any(tiers) else b""
        )

    def check(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """Raises AssertionError unless the tables are consistent and, if `holders` is given, unless the references are
        exactly those of the holders."""
        for block, count in enumerate(self._references):
            assert count >= 0, f"block {block} has {count} references"
        free = {block for first, length in self._free.runs() for block in range(first, first + length)}
        cached = {self._block_of[block_hash] for block_hash in (*self._retention.pool, *self._ahead)}
        referenced = {block for block, count in enumerate(self._references) if count}
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, f"both free and cached: {sorted(free & cached)}"
        assert not free & referenced, f"both free and referenced: {sorted(free & referenced)}"
        assert not cached & referenced, f"both cached and referenced: {sorted(cached & referenced)}"
        lost = set(range(self.num_blocks)) - free - cached - referenced
        assert not lost, f"neither free nor cached nor referenced: {sorted(lost)}"
        assert not free & set(self._hash_of), "a free block has a hash"
        assert cached <= set(self._hash_of), "a cached block has no hash"
        assert {h: b for b, h in self._hash_of.items()} == self._block_of, "hashes and blocks are not one to one"
        assert self.num_referenced == len(referenced), "counts do not add up"
        self._retention.check()
        assert set(self._retention.host) == set(self.tier or ()), "the order of the host tier has other blocks"
        if self.tier is not None:
            self.tier.check()
        if holders is not None:
            held = Counter(block for blocks in holders for block in blocks)
            wrong = {
                b: (self._references[b], held[b]) for b in referenced | set(held) if self._references[b] != held[b]
            }
            assert not wrong, f"block: (references, holders) differ: {wrong}"

    def _save(self, block: int) -> bool:
        """The block is about to be reused. False: the tier below memory should take it."""
        block_hash = self._hash_of[block]
        return self._copy(block_hash, block) if self.tier is not None else not self._holds(block, block_hash)

    def _copy(self, block_hash: bytes, block: int) -> bool:
        """Copies a block to the host tier, unless it has one or the block no longer has its contents. False if the
        block is not worth it."""
        tier, retention = self.tier, self._retention
        assert tier is not None
        if block_hash in tier or not self._holds(block, block_hash):
            return True
        if not tier.rule.saves(*retention.expected_use(block_hash, self.now_s)):
            return False
        if tier.is_full:
            if not retention.is_worth_a_copy(block_hash, self.now_s):
                return False
            (left,) = self._retention.host.pop(1, self.now_s)
            self._moved.setdefault(left, self._tier_of(left))
            tier.leave(left)
        tier.save(block, block_hash)
        retention.entered_host(block_hash, self.now_s)
        return True

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        self._moved.setdefault(block_hash, Tier.POOL)

    def _tier_of(self, block_hash: bytes) -> Tier | None:
        """The fastest tier that has the block."""
        return Tier.POOL if block_hash in self._block_of else self._lower_tier_of(block_hash)

    def _lower_tier_of(self, block_hash: bytes) -> Tier | None:
        if self.tier is not None and block_hash in self.tier:
            return Tier.HOST
        return Tier.DISK if block_hash in self._in_lower else None
