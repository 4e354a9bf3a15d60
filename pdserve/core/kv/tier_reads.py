"""The tiers that hold a worker's cached blocks. Pure."""

from __future__ import annotations

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
