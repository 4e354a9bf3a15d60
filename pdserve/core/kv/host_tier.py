"""Blocks that have left the pool, in memory of the host: where they are, and when they are loaded again. Pure: another
object makes the copies.

A copy stays when its block is loaded, so that the block can leave the pool again without another copy. The allocator
decides which copies leave (blocks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, final

from pdserve.core.durations import clamped_s
from pdserve.core.kv.tier_reads import Tier, TierSpeed, is_sooner

LONG_TOKENS: Final = 32_768  # of a prompt that is worth to be loaded, if any is: later tokens take longer to compute
SHORT_BLOCKS: Final = 64
SLOWEST: Final = 8.0  # times as long as computing: a tier that is read beside steps would save less than an eighth
UNKNOWN_CHANCE: Final = 0.5  # of another use of a block, before any is learned


class BlockCopies(Protocol):
    """Memory of `num_slots` blocks beside the pool."""

    @property
    def num_slots(self) -> int: ...

    def save(self, block: int, slot: int) -> None:
        """Copies a block of the pool into a slot."""
        ...

    def load(self, slot: int, block: int) -> None:
        """Copies a slot into a block of the pool."""
        ...


class QueuedCopies(BlockCopies, Protocol):
    """Copies that another thread or a device makes, behind the engine. A fetch source reads them (fetch.py)."""

    @property
    def room(self) -> int:
        """How many blocks it can save now."""
        ...

    def flush(self) -> None:
        """The saves since the last call read their blocks before anything that is queued from now on writes to them.
        Returns at once."""
        ...


class LowerTier(Protocol):
    """A tier below memory. It takes copies, and returns at once."""

    @property
    def room(self) -> int:
        """How many blocks it can take now."""
        ...

    def take_block(self, block_hash: bytes, block: int) -> None:
        """A block of the pool is about to be reused, and no tier in memory keeps it."""
        ...

    def take_copy(self, block_hash: bytes, slot: int) -> None:
        """A slot of the host tier is about to be reused."""
        ...

    def start_copies(self) -> None:
        """What it took since the last call is read before anything that is queued from now on writes to it."""
        ...

    def drop(self, block_hash: bytes) -> None:
        """The contents are wrong."""
        ...


@final
class LowerTiers:
    """Several tiers below memory, each of which takes what it has room for."""

    def __init__(self, *tiers: LowerTier) -> None:
        self._tiers = tiers

    @property
    def room(self) -> int:
        return max(tier.room for tier in self._tiers)

    def take_block(self, block_hash: bytes, block: int) -> None:
        for tier in self._tiers:
            tier.take_block(block_hash, block)

    def take_copy(self, block_hash: bytes, slot: int) -> None:
        for tier in self._tiers:
            tier.take_copy(block_hash, slot)

    def start_copies(self) -> None:
        for tier in self._tiers:
            tier.start_copies()

    def drop(self, block_hash: bytes) -> None:
        for tier in self._tiers:
            tier.drop(block_hash)


@dataclass(frozen=True, slots=True)
class LoadRule:
    """Blocks are loaded where that is sooner than computing them, and where nothing is known about computing. They are
    saved if what a load is expected to save is more than the time that the save takes."""

    block_s: float  # to load one block
    prefill_s: Callable[[int, int], float]  # to compute so many tokens after so many others; 0.0: unknown
    is_beside: bool = False  # copies are made beside steps, and take no time from the engine

    def loads(self, num_blocks: int, *, cached_tokens: int, block_size: int) -> bool:
        """Whether to load `num_blocks` blocks that follow `cached_tokens` tokens."""
        return is_sooner(num_blocks * self.block_s, self.prefill_s(num_blocks * block_size, cached_tokens))

    def saves(self, computed_s: float, chance: float | None) -> bool:
        """Whether to save a block of a text whose blocks take `computed_s` each to compute; 0.0: unknown. It is used
        again with the probability `chance`; None: unknown."""
        if computed_s == 0.0:
            return True
        if self.is_beside:
            return chance != 0.0 and self.block_s < SLOWEST * computed_s
        return (UNKNOWN_CHANCE if chance is None else chance) * (computed_s - self.block_s) > self.block_s

    def is_worthwhile(self, block_size: int) -> bool:
        """Whether to have a tier: it pays for a long prompt or, if an engine's steps take about as long whatever their
        tokens, for a short one."""
        lengths = (SHORT_BLOCKS, long_blocks(block_size))
        return any(self.saves(self.prefill_s(count * block_size, 0) / count, 1.0) for count in lengths)


def is_disk_worthwhile(read_s: float, computed_s: float) -> bool:
    """Whether to have a disk tier, from the times of a long prompt. A disk may be slower than computing: what it reads
    before the turn of a prompt costs the prompt nothing."""
    return is_sooner(read_s, SLOWEST * computed_s)


def long_blocks(block_size: int) -> int:
    """Of a prompt for which a tier is worthwhile, if it is for any."""
    return max(1, LONG_TOKENS // block_size)


@final
class HostTier:
    def __init__(
        self,
        copies: BlockCopies,
        rule: LoadRule,
        most_saved: int,
        lower: LowerTier | None = None,
        *,
        queued: QueuedCopies | None = None,
    ) -> None:
        """`most_saved`: copies for one allocation, because each takes time. `lower` gets what leaves. `queued`: the
        copies, if they are made behind the engine; then nothing is loaded at once."""
        self.rule = rule
        self._lower = lower
        self._most_saved = most_saved
        self._copies, self._queued = copies, queued
        self._free = list(range(copies.num_slots))
        self._slot_of: dict[bytes, int] = {}  # by block hash
        self.num_saved = 0
        self.num_loaded = 0

    @property
    def num_slots(self) -> int:
        return self._copies.num_slots

    @property
    def most_saved(self) -> int:
        """Copies for one allocation."""
        return self._most_saved if self._queued is None else min(self._most_saved, self._queued.room)

    @property
    def loads_at_once(self) -> bool:
        return self._queued is None

    @property
    def speed(self) -> TierSpeed:
        """Of a tier that loads at once."""
        block_s = clamped_s(self.rule.block_s)
        return TierSpeed(tier=Tier.HOST, block_s=block_s, is_at_once=True, most_given=self._most_saved)

    @property
    def copies(self) -> dict[str, int]:
        """Blocks that were copied in each direction."""
        return {"saved": self.num_saved, "loaded": self.num_loaded}

    def __len__(self) -> int:
        return len(self._slot_of)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._slot_of)

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._slot_of

    def num_found(self, hashes: Sequence[bytes]) -> int:
        """The length of the longest prefix of `hashes` that has copies."""
        return next((index for index, one in enumerate(hashes) if one not in self._slot_of), len(hashes))

    def slot_of(self, block_hash: bytes) -> int | None:
        return self._slot_of.get(block_hash)

    @property
    def is_full(self) -> bool:
        return not self._free

    def leave(self, block_hash: bytes) -> None:
        """The copy makes room for another one."""
        self.hand_down(block_hash)
        self.drop(block_hash)

    def hand_down(self, block_hash: bytes, lower: LowerTier | None = None) -> None:
        """The tier below, or `lower`, gets the copy too."""
        lower = self._lower if lower is None else lower  # an empty disk tier is false
        if lower is not None:
            lower.take_copy(block_hash, self._slot_of[block_hash])

    def save(self, block: int, block_hash: bytes) -> None:
        """Copies a block that leaves the pool and has no copy. The tier must not be full."""
        slot = self._free.pop()
        self._copies.save(block, slot)
        self._slot_of[block_hash] = slot
        self.num_saved += 1

    def flush(self) -> None:
        """After the saves of one allocation, before its blocks are used."""
        if self._queued is not None:
            self._queued.flush()
        if self._lower is not None:
            self._lower.start_copies()

    def load(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Copies the kept blocks `hashes` of a text, in its order, into `blocks`."""
        for block_hash, block in zip(hashes, blocks, strict=True):
            self._copies.load(self._slot_of[block_hash], block)
        self.num_loaded += len(hashes)

    def drop(self, block_hash: bytes) -> None:
        """The copy leaves, or its contents are wrong."""
        slot = self._slot_of.pop(block_hash, None)
        if slot is not None:
            self._free.append(slot)

    def check(self) -> None:
        """Raises AssertionError unless each slot is free, or has one hash."""
        slots = [*self._free, *self._slot_of.values()]
        assert sorted(slots) == list(range(self.num_slots)), f"slots are lost or used twice: {sorted(slots)}"
