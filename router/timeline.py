"""Which phase each stretch of a request's life belongs to. Pure; the phases are those of pdserve/core/phases.py.

A stretch ends where the request's stage changes. Worker reports divide it; what they leave goes to one phase more:
MESSAGES where the worker has accounted for all of its own work, else the phase that its stage stands for. So the
phases add up to the whole time, whatever happens to the request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, final

from pdserve.core.phases import Phase, Phases, Slice
from router.lifecycle import Move, Stage

MOST_SLICES: Final = 128  # beyond it, a stretch is added to an earlier slice of its phase

STANDS_FOR: Final[Mapping[Stage, Phase]] = {
    Stage.QUEUED: Phase.QUEUE,
    Stage.RESERVING: Phase.RESERVE,
    Stage.SEATING: Phase.RESERVE,
    Stage.PREFILLING: Phase.PREFILL,
    Stage.LANDED: Phase.PREFILL,
    Stage.MOVING: Phase.TRANSFER_WAIT,
    Stage.DECODING: Phase.DECODE,
    Stage.LOCAL: Phase.PREFILL,  # until its first token; then DECODE
}
GOES_ON: Final = frozenset(
    {
        (Stage.PREFILLING, Move.COMMITTED),  # the prompt's last chunk is still being computed, as far as is known
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
        self._parts: list[tuple[Phase, float]] = []
        self.is_accounted = False  # the worker has accounted for all of its work in the open stretch

    def report(self, phase: Phase, seconds: float) -> None:
        """Its worker spent so long of the open stretch in this phase."""
        if 0.0 < seconds < math.inf:
            self._parts.append((phase, seconds))

    def close(self, rest: Phase, now_s: float, attempt: int, *, is_rest_reported: bool = False) -> None:
        """Ends the open stretch. Reports that exceed it are cut: two clocks and two messages never agree exactly."""
        for phase, seconds in self._parts:
            self._add(phase, min(self._mark_s + seconds, now_s), attempt, is_reported=True)
        self._parts.clear()
        self.is_accounted = False
        self._add(rest, now_s, attempt, is_reported=is_rest_reported)

    def moved(self, stage: Stage, move: Move, now_s: float, attempt: int, last_token_s: float | None) -> None:
        """The request leaves `stage` by `move`. `last_token_s`: of the present attempt's tokens; None: it has none."""
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

    @property
    def phases(self) -> Phases:
        """Of all stretches that have ended."""
        return Phases.of(self._seconds)

    @property
    def slices(self) -> tuple[Slice, ...]:
        return tuple(self._slices)

    def _add(self, phase: Phase, until_s: float, attempt: int, *, is_reported: bool) -> None:
        seconds = until_s - self._mark_s
        if seconds <= 0.0:
            return
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        slice_ = Slice(
            phase=phase,
            attempt=attempt,
            begin_s=self._mark_s - self._arrived_s,
            seconds=seconds,
            is_reported=is_reported,
        )
        self._mark_s = until_s
        if len(self._slices) >= MOST_SLICES:
            for index, one in enumerate(self._slices):
                if (one.phase, one.is_reported) == (phase, is_reported):
                    self._slices[index] = Slice(
                        phase=phase,
                        attempt=one.attempt,
                        begin_s=one.begin_s,
                        seconds=one.seconds + seconds,
                        is_reported=is_reported,
                    )
                    return
        self._slices.append(slice_)
