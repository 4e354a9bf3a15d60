"""A seeded plan of the faults of transfers, for tests of a whole cluster. Pure.

A plan assigns at most one fault to each transfer. The fault depends only on the seed and the transfer's tag, so a run
can be repeated, whatever the order of the threads is. `kvtransfer.faults.injector` injects the faults.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final

from kvtransfer.protocol.frames import Tag
from pdserve.core.errors import ConfigError


class FaultKind(Enum):
    DROP = "drop"  # the frame is lost
    DELAY = "delay"  # it is sent later, after frames that follow it
    DUPLICATE = "duplicate"
    CORRUPT = "corrupt"  # one byte of it is changed
    TRUNCATE = "truncate"  # its end is lost, and the following bytes are read in its place
    STALL = "stall"  # it is delayed, and so are all later frames
    CUT = "cut"  # the connection ends before it
    KILL = "kill"  # the process gets SIGKILL
    STOP = "stop"  # the process gets SIGSTOP, and SIGCONT later


class Where(Enum):
    """Where the fault is injected."""

    SENT = "sent"  # a frame of the sender; the sender's process
    ANSWERED = "answered"  # a frame of the receiver, before the sender reads it
    WRITTEN = "written"  # a chunk that the receiver is about to write; the receiver's process


OF_FRAMES: Final = tuple(kind for kind in FaultKind if kind not in (FaultKind.KILL, FaultKind.STOP))
OF_WRITES: Final = (FaultKind.STALL, FaultKind.KILL, FaultKind.STOP)


@dataclass(frozen=True, slots=True)
class Fault:
    kind: FaultKind
    where: Where
    nth: int  # number of the transfer's frame there, from 0; a transfer with fewer frames has no fault
    for_s: float  # of a delay, a stall or a stop
    at: float  # position in the frame of the changed byte or of the cut, as a share of its length


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """`weights` are the relative frequencies of the kinds."""

    seed: int = 0
    share: float = 0.1  # share of transfers with a fault
    longest_s: float = 0.5  # of delays, stalls and stops
    weights: Mapping[FaultKind, float] = field(default_factory=lambda: MappingProxyType(dict.fromkeys(OF_FRAMES, 1.0)))

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise ConfigError("share", self.share, "between 0 and 1")
        if not 0.0 < self.longest_s <= 3600.0:
            raise ConfigError("longest_s", self.longest_s, "above 0 and at most 3600 seconds")
        if not any(self.weights.values()) or not all(0.0 <= weight < 1e9 for weight in self.weights.values()):
            raise ConfigError("weights", dict(self.weights), "at least one kind, and none below 0")

    def fault_of(self, tag: Tag) -> Fault | None:
        """The fault of this transfer, if any."""
        words = b"%d %d %d " % (self.seed, tag.attempt, tag.generation)
        rng = random.Random(int.from_bytes(hashlib.blake2b(words + tag.transfer, digest_size=8).digest(), "little"))
        if rng.random() >= self.share:
            return None
        kind = rng.choices(list(self.weights), list(self.weights.values()))[0]
        places = {Where.SENT: 3.0}  # where the bytes are
        if kind in OF_WRITES:
            places[Where.WRITTEN] = 3.0
        if kind in OF_FRAMES:
            places[Where.ANSWERED] = 1.0
        where = rng.choices(list(places), list(places.values()))[0]
        # The sender's first frame is the announcement. The chunks, which matter most, follow.
        nth = rng.choice((0, 1, 1, 1, 2, 2, 3)) if where is Where.SENT else rng.choice((0, 0, 1))
        return Fault(kind, where, nth, rng.uniform(0.1, 1.0) * self.longest_s, rng.random())


def parse(text: str) -> FaultPlan:
    """`seed=7,share=0.1,longest_s=0.5,drop=1,kill=0.01`: everything may be omitted. Without any kind, all faults of
    frames are equally frequent. Raises ConfigError."""
    kinds = {kind.value: kind for kind in FaultKind}
    options = ("seed", "share", "longest_s")
    given: dict[str, float] = {}
    weights: dict[FaultKind, float] = {}
    for word in text.split(","):
        name, _, value = word.strip().partition("=")
        try:
            number = float(value)
        except ValueError:
            raise ConfigError("inject_faults", word, "NAME=NUMBER, such as drop=1") from None
        if name in kinds:
            weights[kinds[name]] = number
        elif name in options:
            given[name] = number
        else:
            raise ConfigError("inject_faults", name, "one of " + ", ".join((*options, *kinds)))
    if not math.isfinite(given.get("seed", 0.0)):
        raise ConfigError("seed", given["seed"], "a whole number")
    plan = FaultPlan(weights=weights) if weights else FaultPlan()
    return FaultPlan(
        seed=int(given.get("seed", plan.seed)),
        share=given.get("share", plan.share),
        longest_s=given.get("longest_s", plan.longest_s),
        weights=plan.weights,
    )
