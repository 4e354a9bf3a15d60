"""Assigns each interval of a request's time to a phase of pdserve/core/phases.py. Pure.

An interval ends when the request's stage changes. Workers' reports assign parts of it to phases. The rest is assigned
to MESSAGES if the worker has reported all of its own work, and otherwise to the phase of the stage. So the phases
always add up to the whole time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, final

from pdserve.core.phases import Phase, Phases, Slice
from router.lifecycle import Move, Stage

MAX_SLICES: Final = 128  # further intervals are added to an earlier slice of the same phase

STANDS_FOR: Final[Mapping[Stage, Phase]] = {
    Stage.QUEUED: Phase.QUEUE,
    Stage.RESERVING: Phase.RESERVE,
    Stage.RESERVING_LOCAL: Phase.RESERVE,
    Stage.PREFILLING: Phase.PREFILL,
    Stage.LANDED: Phase.PREFILL,
    Stage.MOVING: Phase.TRANSFER_WAIT,
    Stage.DECODING: Phase.DECODE,
    Stage.LOCAL: Phase.PREFILL,  # until its first token; then DECODE
}
GOES_ON: Final = frozenset(
    {
        (Stage.PREFILLING, Move.COMMITTED),  # the last chunk is assumed to be still in computation
        (Stage.DECODING, Move.TOKENS),
        (Stage.LOCAL, Move.TOKENS),
    }
)


@final
class Timeline:
    __slots__ = ("_arrived_s", "_mark_s", "_parts", "_seconds", "_slices", "is_accounted")

    def __init__(self, arrived_s: float) -> None:
        self._arrived_s = self._mark_s = arrived_s
        self._seconds: dict[Phase, float] = {}
        self._slices: list[Slice] = []
        self._parts: list[tuple[Phase, float, str]] = []
        self.is_accounted = False  # the worker has reported all of its work in the open interval

    def report(self, phase: Phase, seconds: float, worker_id: str) -> None:
        """Assigns `seconds` of the open interval to this phase, as the worker reported."""
        if 0.0 < seconds < math.inf:
            self._parts.append((phase, seconds, worker_id))

    def close(self, rest: Phase, now_s: float, attempt: int) -> None:
        """Ends the open interval. Reports that exceed it are clipped, because two clocks never agree exactly."""
        for phase, seconds, worker_id in self._parts:
            self._add(phase, min(self._mark_s + seconds, now_s), attempt, worker_id)
        self._parts.clear()
        self.is_accounted = False
        self._add(rest, now_s, attempt)

    def moved(self, stage: Stage, move: Move, now_s: float, attempt: int, last_token_s: float | None) -> None:
        """The request leaves `stage` by `move`. `last_token_s` is when the current attempt's last token came, or
        None."""
        if (stage, move) in GOES_ON or stage not in STANDS_FOR:
            return
        rest = STANDS_FOR[stage]
        if stage is Stage.LOCAL and last_token_s is not None:
            rest = Phase.DECODE
        is_lost = move is Move.LOST or (move is Move.DECLINED and stage is Stage.PREFILLING)
        if self.is_accounted:
            rest = Phase.MESSAGES
        elif is_lost and rest is Phase.DECODE and last_token_s is not None:
            self.close(rest, max(self._mark_s, min(last_token_s, now_s)), attempt)
            rest = Phase.LOST
        elif is_lost:
            rest = Phase.LOST
        self.close(rest, now_s, attempt)

    def so_far(self, stage: Stage, last_token_s: float | None, now_s: float) -> tuple[Slice, ...]:
        """The slices if the open interval of a request in `stage` ended now. `last_token_s` is as for `moved`."""
        copy = Timeline(self._arrived_s)
        copy._mark_s, copy._parts, copy._slices = self._mark_s, list(self._parts), list(self._slices)
        is_decoding = stage is Stage.LOCAL and last_token_s is not None
        copy.close(Phase.DECODE if is_decoding else STANDS_FOR.get(stage, Phase.MESSAGES), now_s, 0)
        return copy.slices

    @property
    def phases(self) -> Phases:
        """The phases of all ended intervals."""
        return Phases.of(self._seconds)

    @property
    def slices(self) -> tuple[Slice, ...]:
        return tuple(self._slices)

    def _add(self, phase: Phase, until_s: float, attempt: int, worker_id: str = "") -> None:
        seconds = until_s - self._mark_s
        if seconds <= 0.0:
            return
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        slice_ = Slice(
            phase=phase,
            attempt=attempt,
            begin_s=self._mark_s - self._arrived_s,
            seconds=seconds,
            worker_id=worker_id,
        )
        self._mark_s = until_s
        if len(self._slices) >= MAX_SLICES:
            for index, one in enumerate(self._slices):
                if (one.phase, one.worker_id) == (phase, worker_id):
                    self._slices[index] = Slice(
                        phase=phase,
                        attempt=one.attempt,
                        begin_s=one.begin_s,
                        seconds=one.seconds + seconds,
                        worker_id=worker_id,
                    )
                    return
        self._slices.append(slice_)
