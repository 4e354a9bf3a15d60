"""The tiers that hold a worker's cached blocks, and when blocks are read instead of computed. Pure.

Workers decide by this rule, and routers predict what they decide. Copies that the engine makes at once are worth it if
they take less time than computing the blocks. A prompt waits for other reads in its queue; what arrives before its turn
costs it nothing. Then either all blocks are read, because later tokens take longer to compute and not longer to read,
or those that arrive before the turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Final, NamedTuple


class Tier(IntEnum):
    """Where a worker has a block: in the fastest tier, if in several. The numbers are those of the wire."""

    POOL = 0
    HOST = 1  # copies in host memory
    DISK = 2


SLOWEST_TIER: Final = Tier.DISK
MOST_ALONE: Final = 0.5  # of the pool, for the blocks of one read, so that a tier that hangs leaves room for prompts


_KNOWN: Final = bytes(min(number, SLOWEST_TIER) for number in range(256))


def known_tiers(numbers: bytes) -> bytes:
    """The tiers that another process has sent: an unknown one of a newer process counts as the slowest."""
    return numbers.translate(_KNOWN)


class TierDepths(NamedTuple):
    """How the leading blocks of a prompt that a worker has are split over its tiers."""

    pool: int  # leading blocks that are in the pool
    memory: int  # in the pool or in host memory; those behind them are on the disk


MAX_SPEEDS: Final = 8  # in one report


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpeed:
    """How long a worker takes to read blocks of one of its tiers, as it has measured."""

    tier: int  # of a newer worker, perhaps none of Tier
    block_s: float
    fixed_s: float = 0.0  # for a read, beside its blocks
    queue_s: float = 0.0  # until the reads that were asked for before have ended
    is_at_once: bool = False  # the engine makes the copies before a step; else prompts wait, and others are computed
    most_given: int = 0  # blocks that it reads at once for another worker

    def read_s(self, num_blocks: int) -> float:
        return self.queue_s + self.fixed_s + num_blocks * self.block_s


# --- the rule -------------------------------------------------------------------------------------------------


def is_sooner(load_s: float, computed_s: float) -> bool:
    """Whether to load what takes `computed_s` to compute; 0.0: that is unknown."""
    return computed_s == 0.0 or load_s < computed_s


def saved_s(read_s: float, computed_s: float, turn_s: float) -> float:
    """Seconds that a prompt saves if it reads, for `read_s`, what takes `computed_s` to compute. Its turn comes in
    `turn_s`."""
    return computed_s - max(0.0, read_s - turn_s)


class Read(NamedTuple):
    num_blocks: int
    saved_s: float


def best_read(
    read_s: Callable[[int], float], computed_s: Callable[[int], float], num_blocks: int, turn_s: float
) -> Read | None:
    """How many of `num_blocks` blocks a prompt waits for. Both functions take a number of blocks; `computed_s` is
    infinite if that is unknown. None: it computes them."""
    best: Read | None = None
    for wanted in (num_blocks, _num_before(read_s, num_blocks, turn_s)):
        if wanted > 0:
            seconds = saved_s(read_s(wanted), computed_s(wanted), turn_s)
            if seconds > 0.0 and (best is None or seconds > best.saved_s):
                best = Read(wanted, seconds)
    return best


def _num_before(read_s: Callable[[int], float], num_blocks: int, turn_s: float) -> int:
    """How many of the blocks are read until the turn of the prompt; 0 if all are."""
    if turn_s <= 0.0 or read_s(num_blocks) <= turn_s:
        return 0
    few, many = 0, num_blocks  # the time of `few` is shorter, that of `many` is not
    while many - few > 1:
        middle = (few + many) // 2
        if read_s(middle) <= turn_s:
            few = middle
        else:
            many = middle
    return few


# --- predictions for another process --------------------------------------------------------------------------


class TierReads(NamedTuple):
    """What a worker does with the leading blocks of a prompt that are in its tiers."""

    num_blocks: int  # leading blocks that it does not compute
    num_read: int  # of these, that it reads from below its pool
    num_kept: int  # of the leading blocks, without those for which a prompt waits in its queue
    copy_s: float  # of the engine's time, for copies
    read_s: float  # of reads for which the prompt waits
    computed_s: float  # to compute instead what is copied and read
    lead_s: float  # the part of `read_s` without the tiers' queues: how much earlier the prompt is sent

    def wait_s(self, turn_s: float) -> float:
        """How much later the prompt is computed than its turn, which comes in `turn_s`."""
        return self.read_s - turn_s if self.read_s > turn_s else 0.0


def predict_reads(
    num_blocks: int,
    tiers: TierDepths,
    speeds: Sequence[TierSpeed],
    computed_s: Callable[[int, int], float],
    turn_s: float,
    most_read: int,
) -> TierReads:
    """Of the `num_blocks` leading blocks that a worker has and a prompt can use. `computed_s`: seconds to compute so
    many blocks after so many others. `most_read`: blocks of one read for which a prompt waits. Blocks of a tier without
    a speed are computed."""
    num_kept = in_pool = have = min(tiers.pool, num_blocks)
    read_s, copy_s, saved, lead_s = 0.0, 0.0, 0.0, 0.0
    for tier, end in ((Tier.HOST, min(tiers.memory, num_blocks)), (Tier.DISK, num_blocks)):
        count = end - have
        if count <= 0:
            continue
        speed = _speed_of(speeds, tier)
        if speed is None:
            break
        if speed.is_at_once:
            seconds, alone_s = speed.read_s(count), computed_s(count, have)
            if seconds == math.inf or not is_sooner(seconds, alone_s):
                break
            have += count
            copy_s, num_kept = copy_s + seconds, have
            saved += alone_s
            continue
        first = have
        alone = partial(_known_s, computed_s, first)
        found = best_read(speed.read_s, alone, min(count, most_read), max(0.0, turn_s - read_s))
        if found is None:
            break
        have += found.num_blocks
        read_s += speed.read_s(found.num_blocks)
        lead_s += speed.read_s(found.num_blocks) - speed.queue_s
        saved += computed_s(found.num_blocks, first)
        if found.num_blocks < count:
            break
    return TierReads(
        num_blocks=have,
        num_read=have - in_pool,
        num_kept=num_kept,
        copy_s=copy_s,
        read_s=read_s,
        computed_s=saved,
        lead_s=lead_s,
    )


def predict_given(
    num_blocks: int,
    tiers: TierDepths,
    speeds: Sequence[TierSpeed],
    computed_s: Callable[[int, int], float],
    most_read: int,
) -> tuple[int, float]:
    """How many of the leading blocks a worker gives to another one that pulls them, and the seconds that it reads
    before. With a disk, it reads as for a prompt of its own whose turn has come."""
    host = _speed_of(speeds, Tier.HOST)
    given, seconds = min(tiers.pool, num_blocks), 0.0
    if host is not None and host.is_at_once and (count := min(tiers.memory, num_blocks) - given) > 0:
        count = min(count, host.most_given)
        given, seconds = given + count, host.read_s(count)
    if _speed_of(speeds, Tier.DISK) is not None:
        reads = predict_reads(num_blocks, tiers, speeds, computed_s, 0.0, most_read)
        if reads.num_blocks > given:
            return reads.num_blocks, reads.copy_s + reads.read_s
    return given, seconds


def _known_s(computed_s: Callable[[int, int], float], first: int, num_blocks: int) -> float:
    """Infinite: unknown."""
    return computed_s(num_blocks, first) or math.inf


def _speed_of(speeds: Sequence[TierSpeed], tier: Tier) -> TierSpeed | None:
    return next((one for one in speeds if one.tier == tier), None)
