"""The tiers that hold a worker's cached blocks, and when blocks are read instead of computed. Pure.

Workers decide by this rule, and routers predict what they decide. Copies that the engine makes at once are worth it if
they take less time than computing the blocks. A prompt waits for other reads in its queue; what arrives before its turn
costs it nothing. Then either all blocks are read, because later tokens take longer to compute and not longer to read,
or those that arrive before the turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple


class Tier(IntEnum):
    """Where a worker has a block: in the fastest tier, if in several. The numbers are those of the wire."""

    POOL = 0
    HOST = 1  # copies in host memory
    DISK = 2


SLOWEST_TIER: Final = Tier.DISK


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
