"""Chooses what happens to transfer number n of the fault storm, from the storm's seed and n alone. Pure.

Two in five transfers meet a fault. It hits a frame or a process (kvtransfer.faults.plan), or comes from an owner of the
transfer: the owner aborts, leaves gaps, never finishes, restarts, or does not report its failure to the other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Final

from kvtransfer.faults.plan import Fault, FaultKind, FaultPlan
from kvtransfer.protocol.frames import Tag, tag_of
from pdserve.core.kv.kv_shape import TransferKey

MAX_BLOCKS: Final = 24
FAULT_SHARE: Final = 0.4
LONGEST_S: Final = 0.8  # of delays, stalls and stops


class OwnerFault(Enum):
    RECEIVER_ABORTS = "receiver aborts"
    SENDER_ABORTS = "sender aborts"
    GAP = "last push leaves a gap"
    UNFINISHED = "never finished"
    TWICE = "a block pushed twice"
    REUSE = "source reused too early"
    OTHER_TEXT = "another text's blocks"
    RESTART = "sender restarts"


# Relative frequencies. About 200 of 100,000 transfers kill a process, and 200 stop one.
WEIGHTS: Final[dict[FaultKind | OwnerFault, float]] = {
    FaultKind.DROP: 10.0,
    FaultKind.DELAY: 10.0,
    FaultKind.DUPLICATE: 6.0,
    FaultKind.CORRUPT: 10.0,
    FaultKind.TRUNCATE: 3.0,
    FaultKind.STALL: 1.0,
    FaultKind.CUT: 3.0,
    FaultKind.KILL: 0.4,
    FaultKind.STOP: 0.4,
    OwnerFault.RECEIVER_ABORTS: 12.0,
    OwnerFault.SENDER_ABORTS: 12.0,
    OwnerFault.GAP: 6.0,
    OwnerFault.UNFINISHED: 6.0,
    OwnerFault.TWICE: 3.0,
    OwnerFault.REUSE: 6.0,
    OwnerFault.OTHER_TEXT: 3.0,
    OwnerFault.RESTART: 1.5,
}
NO_FAULT: Final = "none"


@dataclass(frozen=True, slots=True)
class Case:
    """One transfer."""

    number: int
    key: TransferKey
    fault: Fault | OwnerFault | None
    count: int  # blocks
    deadline_s: float
    pieces: tuple[tuple[float, tuple[int, ...]], ...]  # (pause before, grant indices): how the blocks are pushed
    act_at: int  # the piece before which an owner's fault happens
    hold_s: float  # how long a committed landing is kept
    tells: bool  # whether a failure is reported to the other side, as a router does; else that side must detect it

    @property
    def label(self) -> str:
        return NO_FAULT if self.fault is None else label_of(self.fault)


def label_of(fault: Fault | OwnerFault) -> str:
    return fault.value if isinstance(fault, OwnerFault) else f"{fault.kind.value} ({fault.where.value})"


def case_of(seed: int, number: int) -> Case:
    rng = random.Random(f"{seed} {number}")
    key = TransferKey(transfer_id=f"s{number % 51}", attempt=rng.randint(1, 3), generation=number)
    fault: Fault | OwnerFault | None = None
    if rng.random() < FAULT_SHARE:
        kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if isinstance(kind, FaultKind):
            plan = FaultPlan(seed=seed, share=1.0, longest_s=LONGEST_S, weights={kind: 1.0})
            fault = plan.fault_of(tag_of(key))
        else:
            fault = kind
    count = rng.randint(2, MAX_BLOCKS)
    pieces = tuple(_pieces(rng, count, fault))
    return Case(
        number=number,
        key=key,
        fault=fault,
        count=count,
        deadline_s=rng.uniform(0.4, 1.5),
        pieces=pieces,
        act_at=rng.randrange(len(pieces) + 1),
        hold_s=rng.choice((0.0, 0.0, rng.uniform(0.0, 0.1))),
        tells=rng.random() < 0.8,
    )


def _pieces(
    rng: random.Random, count: int, fault: Fault | OwnerFault | None
) -> Iterator[tuple[float, tuple[int, ...]]]:
    indices = list(range(count))
    if rng.random() < 0.3:
        rng.shuffle(indices)
    if fault in (OwnerFault.GAP, OwnerFault.UNFINISHED):
        indices.pop()
    elif fault is OwnerFault.TWICE:
        indices.append(indices[0])
    while indices:
        size = rng.randint(1, len(indices))
        yield rng.choice((0.0, 0.0, 0.0, rng.uniform(0.0, 0.01))), tuple(indices[:size])
        del indices[:size]


@lru_cache(maxsize=4096)
def fault_at(seed: int, generation: int) -> Fault | None:
    fault = case_of(seed, generation).fault
    return fault if isinstance(fault, Fault) else None


def fault_of(seed: int, tag: Tag) -> Fault | None:
    """The fault of the transfer with this tag; none for a generation that is not a transfer of the storm."""
    return fault_at(seed, tag.generation) if tag.generation < 1 << 32 else None
