"""Turns of conversations: what is learned of them, and how the deadline of a task is spread over them. Pure.

A task is the work of one session for which its client gives one deadline. Its time runs from the first turn that names
the deadline. Of each turn

    answering = time left - (turns - 1) * pause        what is left for answers; the client takes the pauses
    needed    = turns * (ttft + (tokens - 1) * tpot)   what answers take that just meet the ordinary targets
    pace      = answering / needed                     at least 1, at most MOST_PACE
    targets   = pace * ordinary targets

`turns` are the turns that the conversation is expected to have from this one on, or those that another conversation of
the session has if these are more: a subagent is followed by its caller. `pause` is the mean pause before a turn, and
`tokens` is the expected length of the answer. The ordinary targets are those of the request, the tenant or the
router.

A deadline only makes targets looser. So a task with time to spare lets others go first, and the router seldom has to
reject its turns. A task without has the ordinary targets, which are due sooner than loosened ones. Tighter ones would
slow it down: under load, requests that cannot meet their targets come last or are rejected, and a tight TPOT limits
how much a worker may do at the same time, so all requests wait longer.

- A target that the request states stays as it is.
- If too little is known about further turns, and after the deadline, the ordinary targets hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

from pdserve.core.durations import DAY_S
from pdserve.core.results import TaskView
from pdserve.core.types import Slo

IDLE_S: Final = 1800.0  # a conversation that pauses for longer counts as ended

# --- what is learned ------------------------------------------------------------------------------------------

KEPT: Final = 0.98  # forgetting factor per observation
LEAST_SEEN: Final = 8.0  # observations before a prediction
LEAST_SHARE: Final = 0.5  # of conversations that go on, for a prediction
QUANTILE: Final = 0.9  # of pauses that are at most as long as predicted
SHORTEST_PAUSE_S: Final = 2.0**-4  # upper end of the first bin; each further one is longer by a factor of sqrt(2)
NUM_BINS: Final = 40  # the last one ends at 46 hours
MAX_CLASS: Final = 6  # 32 and more turns
MAX_PACED_TURNS: Final = 2 ** (MAX_CLASS - 1)


@final
class ReuseModel:
    """Pauses and growth of the conversations of one class."""

    __slots__ = ("_bins", "_continued", "_ended", "_growth", "_pauses_s")

    def __init__(self) -> None:
        self._bins = [0.0] * NUM_BINS
        self._continued = self._ended = self._growth = self._pauses_s = 0.0

    @property
    def seen(self) -> float:
        """Observations, older ones with less weight."""
        return self._continued + self._ended

    @property
    def share(self) -> float:
        """Of conversations that went on."""
        return self._continued / self.seen if self.seen > 0.0 else 0.0

    @property
    def growth_tokens(self) -> float:
        """Mean growth of the prompt from one turn to the next."""
        return self._growth / self._continued if self._continued > 0.0 else 0.0

    @property
    def pause_s(self) -> float:
        """Mean pause before the next turn."""
        return self._pauses_s / self._continued if self._continued > 0.0 else 0.0

    @property
    def goes_on(self) -> float:
        """Probability of a next turn, below 1: one end more than seen is assumed, because ends are learned late."""
        return self._continued / (self.seen + 1.0)

    def continued(self, pause_s: float, growth_tokens: int) -> None:
        self._forget()
        index, edge_s = 0, SHORTEST_PAUSE_S
        while edge_s < pause_s and index < NUM_BINS - 1:
            index, edge_s = index + 1, edge_s * 2.0**0.5
        self._bins[index] += 1.0
        self._continued += 1.0
        self._growth += max(growth_tokens, 0)
        self._pauses_s += min(pause_s, IDLE_S)

    def ended(self) -> None:
        self._forget()
        self._ended += 1.0

    def revived(self) -> None:
        """One that had counted as ended goes on."""
        self._ended = max(self._ended - 1.0, 0.0)

    def within_s(self) -> float | None:
        """The time within which most of those that go on do so. None: too little is known, or most do not go on."""
        if self.seen < LEAST_SEEN or self.share < LEAST_SHARE:
            return None
        left, edge_s = QUANTILE * self._continued, SHORTEST_PAUSE_S
        for weight in self._bins[:-1]:
            left -= weight
            if left <= 1e-9:
                break
            edge_s *= 2.0**0.5
        return edge_s

    def _forget(self) -> None:
        self._bins = [KEPT * one for one in self._bins]
        self._continued *= KEPT
        self._ended *= KEPT
        self._growth *= KEPT
        self._pauses_s *= KEPT


def class_of(turns: int) -> int:
    """0: all conversations."""
    return min(turns.bit_length(), MAX_CLASS)


def turns_ahead(model_of: Callable[[int], ReuseModel]) -> list[float]:
    """By the number of a turn, at most MAX_PACED_TURNS: how many turns a conversation is expected to have from that one
    on. `model_of` gives the model of conversations with so many turns."""
    goes_on = [model_of(2**number // 2).goes_on for number in range(MAX_CLASS + 1)]  # by class
    ahead = [1.0 / (1.0 - goes_on[MAX_CLASS])]
    for turn in range(MAX_PACED_TURNS - 1, -1, -1):
        ahead.append(1.0 + goes_on[class_of(turn)] * ahead[-1])
    return ahead[::-1]


# --- tasks ----------------------------------------------------------------------------------------------------

MOST_PACE: Final = 4.0
RUNNING: Final = "running"
IN_TIME: Final = "in_time"
LATE: Final = "late"
UNKNOWN: Final = "unknown"  # the router forgot the session before the task had ended


@dataclass(slots=True, kw_only=True, eq=False)
class Task:
    """Of one session. `began_s` is the arrival of the first turn that named the deadline."""

    began_s: float
    slo_s: float  # the deadline, from then on; as the last turn that named one said
    slo: Slo  # of the last turn
    turns: int = 1
    turns_left: float | None = None  # after the last turn, as expected when it came; None: unknown
    served_s: float | None = None  # end of the last request; None: it was not served
    is_last: bool = False  # its client has said so
    state: str = RUNNING

    @property
    def due_s(self) -> float:
        return self.began_s + self.slo_s

    @property
    def is_running(self) -> bool:
        return self.state == RUNNING

    def end(self, *, is_known: bool) -> None:
        """`is_known`: that no further turn was to come."""
        is_in_time = self.served_s is not None and self.served_s <= self.due_s
        self.state = LATE if not is_in_time else IN_TIME if is_known else UNKNOWN

    def view(self, origin_s: float) -> TaskView:
        return TaskView(
            state=self.state,
            began_at_s=self.began_s + origin_s,
            due_at_s=self.due_s + origin_s,
            turns=self.turns,
            turns_left=self.turns_left,
            ttft_s=self.slo.ttft_s,
            tpot_s=self.slo.tpot_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What is expected of a turn and of those after it."""

    tokens: float  # of the answer
    turns: float | None  # from this one on; None: unknown
    pause_s: float = 0.0


def paced(slo: Slo, stated: frozenset[str], left_s: float, expected: Expected) -> Slo:
    """The targets of a turn, as the module says. `slo` are the ordinary ones, of which the request states those in
    `stated` (names of fields). `left_s` is the time to the task's deadline."""
    if expected.turns is None:
        return slo
    turns = max(expected.turns, 1.0)
    needed_s = turns * (slo.ttft_s + max(expected.tokens - 1.0, 0.0) * slo.tpot_s)
    pace = (left_s - (turns - 1.0) * expected.pause_s) / needed_s
    if not pace > 1.0:  # also NaN
        return slo
    pace = min(pace, MOST_PACE)
    ttft_s, tpot_s = (
        one_s if name in stated else min(pace * one_s, DAY_S)
        for name, one_s in (("ttft_s", slo.ttft_s), ("tpot_s", slo.tpot_s))
    )
    return Slo(ttft_s=ttft_s, tpot_s=tpot_s, itl_s=slo.itl_s)
