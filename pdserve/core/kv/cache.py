"""A worker's KV cache: supplies the blocks of texts, reuses cached prefixes, and keeps computed blocks. Pure.

Both workers' schedulers and the simulator use it. In them, only `KvCache` changes the pool's allocator (blocks.py) and
marks its stamps (stamps.py).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from pdserve.core.attempt import Attempt, blocks_for, shareable_blocks
from pdserve.core.kv.blocks import BlockAllocator, CacheChange
from pdserve.core.kv.kv_shape import TransferKey
from pdserve.core.kv.stamps import content_hash64


@dataclass(frozen=True, slots=True)
class Allocation:
    """The blocks of a text, in its order. The first `cached_tokens` tokens have their KV, the rest must be computed."""

    blocks: list[int]
    cached_tokens: int


@dataclass(slots=True)
class LastFound:
    """Where the leading blocks of a waiting text ended when `KvCache.tokens_found` last looked for them."""

    in_pool: int = 0
    in_tier: int = 0  # of those that follow in the host tier


class WaitingText(Protocol):
    """A prompt that waits on a worker of either role."""

    @property
    def attempt(self) -> Attempt: ...

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def hashes(self) -> Sequence[bytes]: ...

    @property
    def last_found(self) -> LastFound: ...

    def num_reusable(self, block_size: int) -> int:
        """How many of the leading blocks need not be computed if the cache has them."""
        ...

    def reusable(self, block_size: int) -> Sequence[bytes]:
        """The hashes of these blocks."""
        ...


@final
class KvCache:
    """Blocks of `block_size` tokens. Callers only read `blocks`, for its counters and stamps."""

    def __init__(self, blocks: BlockAllocator, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.lent: dict[TransferKey, list[int]] = {}  # to other workers

    def advance(self, now_s: float) -> None:
        """The time at which blocks are used from now on, for the order in which they leave. Those that leave next may
        be saved."""
        self.blocks.now_s = max(self.blocks.now_s, now_s)
        self.blocks.save_ahead()

    def allocate(self, num_tokens: int, hashes: Sequence[bytes] = (), *, spare: int = 0) -> Allocation | None:
        """Blocks for a text of `num_tokens` tokens: those of its longest cached prefix, then new ones.

        `hashes` are the chain hashes of its full blocks; without them, no block is reused. Blocks that follow the
        cached ones are loaded from the host tier where it has them. At least the last token must be computed. Returns
        None, and holds nothing, unless `spare` further blocks remain available.
        """
        shared = hashes[: shareable_blocks(num_tokens, self.block_size)]
        cached = self.blocks.match(shared)
        missing = blocks_for(num_tokens, self.block_size) - len(cached)
        rest = shared[len(cached) :]
        has_room = missing + spare <= self.blocks.num_available
        new = self.blocks.allocate(missing, rest[: self._num_copied(rest)]) if has_room else None
        if new is None:
            self.blocks.give_back(cached)
            return None
        self.blocks.began(hashes, cached)
        num_cached = len(cached) + self._load(rest, new, len(cached) * self.block_size)
        return Allocation(cached + new, num_cached * self.block_size)

    def num_found(self, hashes: Sequence[bytes]) -> int:
        """How many of the leading blocks `allocate` would not leave to be computed."""
        matched = self.blocks.num_matched(hashes)
        return matched + self._num_loadable(hashes[matched:], matched * self.block_size)

    def tokens_found(self, text: WaitingText) -> int:
        """An estimate of `num_found` in tokens, for the order of waiting texts. Each step asks for each of them, so the
        search begins where the last one ended. It may miss that a block has left before a later one."""
        hashes, end, last, tier = text.hashes, text.num_reusable(self.block_size), text.last_found, self.blocks.tier
        last.in_pool = found = _end_in(self.blocks, hashes, 0, end, last.in_pool)
        if tier is not None and tier.loads_at_once:
            last.in_tier = _end_in(tier, hashes, found, end, last.in_tier)
            if self._is_load_sooner(last.in_tier - found, found * self.block_size):
                found = last.in_tier
        return found * self.block_size

    def begin_fetch(self, hashes: Sequence[bytes], first: int, most: int, *, spare: int = 0) -> list[int] | None:
        """References to the `first` leading blocks, which `num_found` counts, and behind them up to `most` new blocks,
        at least one, to be filled. Returns None, and holds nothing, if `spare` further blocks would not remain
        available."""
        cached = self.blocks.match(hashes[:first])
        num_loaded = first - len(cached)
        copied = hashes[len(cached) : first]
        num_new = min(num_loaded + most, self.blocks.num_available - spare)
        staying, tier = copied, self.blocks.tier
        if tier is not None and not tier.loads_at_once:  # the fetch may read them
            staying = hashes[first : first + tier.num_found(hashes[first:])]
        new = self.blocks.allocate(num_new, staying) if num_new > num_loaded else None
        if new is None:
            self.blocks.give_back(cached)
            return None
        num_loaded = self._load(copied, new, len(cached) * self.block_size)
        assert num_loaded == len(copied), "a copy has left while it was needed"
        return [*cached, *new]

    def _num_copied(self, hashes: Sequence[bytes]) -> int:
        """How many of the leading blocks the host tier has and loads at once; 0 if a fetch source reads the tier. What
        is evicted for them must not displace their copies."""
        tier = self.blocks.tier
        return tier.num_found(hashes) if tier is not None and tier.loads_at_once else 0

    def lend(self, key: TransferKey, hashes: Sequence[bytes], *, spare: int = 0) -> list[int] | None:
        """References to exactly these blocks, which `take_back` ends; those that the pool lacks are loaded from the
        host tier, if it loads at once. Holds nothing otherwise, and returns None if one is missing, or if that is more
        than one allocation saves; an empty list if it would take one of the last `spare` available blocks."""
        if self.num_lendable(hashes) < len(hashes):
            return None
        kept = min(spare, self.blocks.num_available)
        cached = self.blocks.match(hashes)
        rest = hashes[len(cached) :]
        has_room = len(rest) + kept <= self.blocks.num_available
        new = self.blocks.allocate(len(rest), rest) if rest and has_room else []
        if not has_room or new is None:
            self.blocks.give_back(cached)
            return []
        if rest:
            self.blocks.load(rest, new)
            cached += new
        self.lent[key] = cached
        return cached

    def num_lendable(self, hashes: Sequence[bytes]) -> int:
        """How many of the leading blocks `lend` would find."""
        matched, tier = self.blocks.num_matched(hashes), self.blocks.tier
        return matched + (0 if tier is None else min(self._num_copied(hashes[matched:]), tier.most_saved))

    def take_back(self, key: TransferKey) -> None:
        """Nobody reads the lent blocks any more."""
        self.blocks.give_back(self.lent.pop(key))

    def _num_loadable(self, hashes: Sequence[bytes], cached_tokens: int) -> int:
        count = self._num_copied(hashes)
        return count if self._is_load_sooner(count, cached_tokens) else 0

    def _is_load_sooner(self, count: int, cached_tokens: int) -> bool:
        """Whether to load `count` blocks from the host tier. They follow `cached_tokens` tokens."""
        tier = self.blocks.tier
        if tier is None or not count:
            return False
        return tier.rule.loads(count, cached_tokens=cached_tokens, block_size=self.block_size)

    def _load(self, hashes: Sequence[bytes], blocks: Sequence[int], cached_tokens: int) -> int:
        """Loads the first blocks of `hashes` into `blocks`. Returns their number. Called after `blocks` were allocated,
        because that may have moved a block to the tier, or out of it."""
        count = self._num_loadable(hashes, cached_tokens)
        if count:
            self.blocks.load(hashes[:count], blocks)
        return count

    def extend(self, count: int) -> list[int] | None:
        """`count` new blocks, for texts that grow. None, without a change, if there are fewer."""
        return self.blocks.allocate(count)

    def mark(self, blocks: Iterable[int], content_hashes: Iterable[int]) -> None:
        """Notes final contents without caching them: of partly filled blocks, and of blocks that are sent earlier than
        they are committed."""
        for block, content_hash in zip(blocks, content_hashes, strict=True):
            self.blocks.stamps.mark(block, content_hash)

    def commit(self, blocks: Sequence[int], hashes: Sequence[bytes], first: int, end: int) -> None:
        """Blocks number `first` to `end` - 1 of a text are full and final: marks them, and adds them to the prefix
        cache under their chain hashes. `blocks` and `hashes` are those of the whole text."""
        mark, publish = self.blocks.stamps.mark, self.blocks.publish
        for index in range(first, end):
            block, block_hash = blocks[index], hashes[index]
            mark(block, content_hash64(block_hash))
            publish(block, block_hash)

    def release(self, blocks: Sequence[int], reuse_within_s: float | None = None) -> None:
        """A text no longer uses its blocks, given in its order. Committed ones stay cached until they are evicted.

        `reuse_within_s` is a hint: a later text is expected to use them within that time; 0: none; None: unknown.
        """
        self.blocks.release(blocks, reuse_within_s)

    def end(self, hashes: Sequence[bytes]) -> None:
        """The session of a text with these blocks, given in its order, has ended: its blocks from the first of them on
        leave first, unless other texts use them."""
        self.blocks.end(hashes)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Releases blocks that were filled for a text that has not used them yet."""
        self.blocks.give_back(blocks)

    def invalidate(self, block: int) -> None:
        """The block's contents are wrong, so no later text may reuse them."""
        self.blocks.invalidate(block)

    def take_changes(self) -> CacheChange | None:
        """The changes of what can be reused since the last call, for the prefix index; None if there are none."""
        return self.blocks.take_changes()

    def snapshot(self) -> CacheChange:
        """Everything that can be reused."""
        return self.blocks.snapshot()


def _end_in(found: Container[bytes], hashes: Sequence[bytes], first: int, end: int, near: int) -> int:
    """The end of the blocks that `found` has from number `first` on, at most `end`. Searched from `near`."""
    if first >= end or hashes[first] not in found:
        return first
    at = min(max(near, first), end)
    while at > first and hashes[at - 1] not in found:
        at -= 1
    while at < end and hashes[at] in found:
        at += 1
    return at
