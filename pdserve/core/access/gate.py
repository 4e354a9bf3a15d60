"""Load shedding: which requests are rejected before any work is done for them. Pure.

Reading, tokenizing and placing a request costs the front (gateway and router) CPU time, also if the cluster then
rejects it. A gate before that work rejects for one of two causes:

**cluster.** Each caller has a budget of CPU time for requests that the cluster rejects: BURST_S at once, and
REJECTED_SHARE of a core, which all callers that have used theirs up divide. Each rejection by the cluster takes the
mean CPU time of a request from the budget, and each accepted request returns a part of that. Once a budget is used up,
its flows, the caller's requests of one priority, have debts, and what returns is divided among these. While a flow has
a debt, its requests pass at the rate at which the cluster has accepted them lately, CHOICE more, and as many as the
returning budget allows. So no flow whose requests are accepted is rejected, whatever others send, and the cluster
always has more requests to choose from than it accepts.

**front.** The event loop cannot keep up: in ON_INTERVALS intervals in a row, and for ON_LASTS_S, its delay was at least
ON_SHARE of the default TTFT target and did not recover, the loop itself used OWN_SHARE of a core, and LEAST_RUNNING
requests were running. A pause, a slow start, a burst whose backlog drains, or a few requests on a machine that is busy
with other work do not meet all of these. The number of running requests is then limited, first to CUT of them, or to
what the loop kept up with before if they have multiplied since the delay began. The limit follows the delay: it is cut
while the delay is above TARGET_S, and raised while it is below and requests are rejected; after LIFT_INTERVALS below it
is not under what runs. It is dropped once it has rejected nothing for OFF_S. Callers share it as they share connections
(shares.py).

The CPU time of a running request is what its tokens cost, so a limit on running requests also holds for long answers.

The delay also sets the pace of the workers' messages (Pace).

A gateway asks before it has read a request's body, and so its priority. If the caller has used several priorities
lately, the request passes, and the gateway asks again when it knows the priority.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict
from typing import Final, final

from pdserve.core.access.shares import COUNT_WEIGHT, Shares
from pdserve.core.durations import clamped_s
from pdserve.core.errors import LoadShed

BURST_S: Final = 0.25
REJECTED_SHARE: Final = 0.05
CHOICE: Final = 0.2
MOST_DEBT_S: Final = 0.1  # so that a flow enters freely again at most a second after its flood
ACCEPTED_S: Final = 2.0  # over which the rate of accepted requests is measured
AT_ONCE_S: Final = 0.02  # of the rate at which requests pass, as many may pass at once
COST_WEIGHT: Final = 0.1  # weight of the last interval in the mean CPU time of a request
MOST_COST_S: Final = 0.05
LEAST_COUNTED: Final = 4  # requests of an interval that is measured
RECENT_S: Final = 60.0  # in which a priority counts as used
MAX_CALLERS: Final = 1024
MAX_PRIORITIES: Final = 8  # of one caller

DEFAULT_TTFT_S: Final = 2.0  # of a gateway that does not know the router's
INTERVAL_S: Final = 0.1
ON_SHARE: Final = 0.05
ON_INTERVALS: Final = 3
ON_LASTS_S: Final = 0.5
RECOVERING: Final = 0.9  # a delay below this share of the one before
GROWING: Final = 1.5  # running requests, as a multiple of those when the delay began
OWN_SHARE: Final = 0.05
LEAST_RUNNING: Final = 64
TARGET_S: Final = 0.025
CUT: Final = 0.9
RAISE: Final = 0.02
LEAST_LIMIT: Final = 8
OFF_S: Final = 2.0
LIFT_INTERVALS: Final = 3  # without delay, after which the limit is not below what runs
HEADROOM: Final = 0.125  # share of the running requests; more than the part that is kept for operators
LEAST_WAITS: Final = 4  # of an interval in which waits count
DRAINING: Final = 0.75  # requests that entered, as a share of those whose waits ended; below it a backlog drains

CLUSTER_RETRY_S: Final = (0.5, 30.0)
FRONT_RETRY_S: Final = 1.0
_GOLDEN: Final = 0.6180339887498949
_UNLIMITED: Final = 2**31

PACE_DELAY_S: Final = 0.005  # of the event loop; below it messages need no pace
PACE_FACTOR: Final = 3.0
LEAST_PACE_S: Final = 0.02
MOST_PACE_S: Final = 0.16
PACE_WEIGHT: Final = 0.3  # of the last interval in the mean delay


@final
class Pace:
    """How long a worker should wait between two messages. The router reads one message of a worker in each turn of its
    event loop, so messages that come more often than turns wait for each other, for seconds if the turns are long."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.interval_s = self._late_s = 0.0

    def follow(self, late_s: float) -> None:
        """After an interval with this mean delay of the event loop, which is half a turn."""
        self._late_s += PACE_WEIGHT * (late_s - self._late_s)
        if self._late_s <= PACE_DELAY_S:
            self.interval_s = 0.0
            return
        needed_s = min(PACE_FACTOR * self._late_s, MOST_PACE_S)
        if self.interval_s / 4.0 <= needed_s <= self.interval_s:  # each change is a message to all workers
            return
        self.interval_s = LEAST_PACE_S
        while self.interval_s < needed_s:
            self.interval_s *= 2.0


@final
class _Budget:
    """Of one caller."""

    __slots__ = ("at_s", "indebted", "level_s")

    def __init__(self, now_s: float) -> None:
        self.level_s = BURST_S  # CPU time that is left, at `at_s`
        self.at_s = now_s
        self.indebted: set[_Flow] = set()  # a budget without any is refilled


@final
class _Flow:
    __slots__ = ("accepted_rps", "at_s", "budget", "level_s", "passes", "retry_s", "used_s")

    def __init__(self, budget: _Budget, now_s: float) -> None:
        self.budget = budget
        self.level_s = 0.0  # a debt of CPU time is below 0, at `at_s`
        self.accepted_rps = 0.0  # at `at_s`
        self.passes = 0.0  # requests that may pass while there is a debt, at `at_s`
        self.at_s = self.used_s = now_s
        self.retry_s = 0.0  # that the cluster last gave


@final
class Gate:
    """`enter` each request that `check` lets pass, and `leave` at its end."""

    def __init__(self, ttft_s: float = DEFAULT_TTFT_S) -> None:
        """`ttft_s`: the default TTFT target."""
        self.ttft_s = ttft_s  # may change
        self.pace = Pace()
        self.request_s = 0.0  # mean CPU time of a request; 0 before the first measurement
        self._callers: OrderedDict[str, dict[int, _Flow]] = (
            OrderedDict()
        )  # flows by priority; least recently used first
        self._short: set[_Budget] = set()  # that are used up
        self._shares = Shares(_UNLIMITED, COUNT_WEIGHT)
        self._limit: float | None = None  # on running requests
        self._kept_up = 0  # the most requests that ran in the last interval in which the loop kept up
        self._is_cut = False  # a cut of the limit has not had its effect yet
        self._num_late, self._late_since_s, self._last_late_s = 0, 0.0, 0.0  # intervals in a row; the last one's delay
        self._late_running = 0  # when the first of them ended
        self._rejected_s = 0.0  # last rejection by the limit
        self._has_rejected = False  # in the interval
        self._most_running = 0  # in the interval
        self._num_entered = self._num_retries = 0
        self._began_s: float | None = None  # of the interval
        self._late_s, self._num_ticks, self._busy_s = 0.0, 0, 0.0
        self._waits_s: list[float] = []
        self._num_in_time = 0  # intervals in a row with a limit and without delay

    @property
    def running(self) -> int:
        return self._shares.total

    @property
    def limit(self) -> float | None:
        """On running requests; None while the event loop keeps up."""
        return self._limit

    def check(self, caller: str, priority: int | None, now_s: float) -> LoadShed | None:
        """The error of a request that must not enter. `priority` None: not known yet."""
        flows = self._callers.get(caller)
        if flows:
            recent = [one for one, flow in flows.items() if now_s - flow.used_s <= RECENT_S]
            if priority is None:
                if len(recent) > 1:
                    return None
                priority = recent[0] if recent else 0
            flow = flows.get(_flow_of(flows, priority))
            if flow is not None and self._level_s(flow, now_s) < 0.0 and flow.passes < 1.0:
                return LoadShed("cluster", self._spread_s(clamped_s(flow.retry_s, *CLUSTER_RETRY_S)))
        if not self._shares.fits(caller, 1):
            self._rejected_s, self._has_rejected = now_s, True
            return LoadShed("front", self._spread_s(FRONT_RETRY_S))
        return None

    def enter(self, caller: str, priority: int, now_s: float) -> None:
        flow = self._flow(caller, priority, now_s)
        if self._level_s(flow, now_s) < 0.0:
            flow.passes = max(flow.passes - 1.0, -1.0)
        self._shares.add(caller, 1)
        self._num_entered += 1
        self._most_running = max(self._most_running, self._shares.total)

    def leave(self, caller: str) -> None:
        self._shares.add(caller, -1)

    def accepted(self, caller: str, priority: int, now_s: float) -> None:
        """The cluster has begun to answer a request."""
        flow = self._flow(caller, priority, now_s)
        level_s = self._level_s(flow, now_s) + CHOICE * self.request_s
        flow.level_s = min(level_s, 0.0)
        if level_s >= 0.0:
            flow.budget.level_s = min(flow.budget.level_s + level_s, BURST_S)
            self._settle(flow)
        flow.accepted_rps += 1.0 / ACCEPTED_S

    def rejected(self, caller: str, priority: int, retry_after_s: float, now_s: float) -> None:
        """The cluster has rejected a request as overloaded."""
        flow = self._flow(caller, priority, now_s)
        level_s, budget = self._level_s(flow, now_s), flow.budget
        paid_s = min(budget.level_s, self.request_s) if level_s >= 0.0 else 0.0
        budget.level_s -= paid_s
        flow.level_s = max(level_s - (self.request_s - paid_s), -MOST_DEBT_S)
        flow.retry_s = retry_after_s
        if flow.level_s < 0.0:
            budget.indebted.add(flow)
            self._short.add(budget)

    def waited(self, seconds: float) -> None:
        """A request has waited in this process before its work began, which adds to the event loop's delay."""
        self._waits_s.append(seconds)

    def observe(self, late_s: float, busy_s: float, now_s: float) -> None:
        """A timer of the event loop was called `late_s` late; the loop has used `busy_s` of CPU time since the last
        call."""
        if self._began_s is None:
            self._began_s = now_s
            return
        self._late_s += late_s
        self._busy_s += busy_s
        self._num_ticks += 1
        passed_s = now_s - self._began_s
        if passed_s < INTERVAL_S:
            return
        self._measure_cost()
        late_s = self._late_s / self._num_ticks
        self.pace.follow(late_s)
        self._follow(late_s + self._usual_wait_s(), self._busy_s / passed_s, now_s)
        for flow in [one for budget in self._short for one in budget.indebted]:
            self._level_s(flow, now_s)
        self._restart(now_s)

    def pause(self) -> None:
        """Nothing is observed until the next `observe`, which begins an interval. For a time without requests."""
        self._num_late, self._began_s = 0, None
        self.pace.reset()
        self._set_limit(None)
        self._restart(None)

    def check_state(self) -> None:
        self._shares.check()
        assert len(self._callers) <= MAX_CALLERS, "too many callers"
        assert all(len(flows) <= MAX_PRIORITIES for flows in self._callers.values()), "too many priorities"
        budgets = {one.budget for flows in self._callers.values() for one in flows.values()}
        assert self._short == {one for one in budgets if one.indebted}, "budgets that are used up"
        assert self._limit is None or self._limit >= LEAST_LIMIT, "a limit that lets nothing in"

    # ------------------------------------------------------------------------------------------------------------

    def _restart(self, now_s: float | None) -> None:
        self._began_s = now_s
        self._late_s, self._num_ticks, self._busy_s = 0.0, 0, 0.0
        self._waits_s.clear()
        self._num_entered, self._most_running, self._has_rejected = 0, self._shares.total, False

    def _measure_cost(self) -> None:
        if self._num_entered < LEAST_COUNTED:
            return
        found_s = min(self._busy_s / self._num_entered, MOST_COST_S)
        self.request_s += COST_WEIGHT * (found_s - self.request_s) if self.request_s else found_s

    def _usual_wait_s(self) -> float:
        """The median, so that no single request sets it. 0 while a backlog drains: it ends by itself."""
        num_waits = len(self._waits_s)
        if num_waits < LEAST_WAITS or self._num_entered < DRAINING * num_waits:
            return 0.0
        return statistics.median_low(self._waits_s)

    def _follow(self, late_s: float, share: float, now_s: float) -> None:
        """Sets the limit after an interval with this mean delay and this share of a core."""
        is_own = share >= OWN_SHARE
        if self._limit is None:
            is_late = late_s >= ON_SHARE * self.ttft_s
            if not is_late:
                self._kept_up = self._most_running
            is_late &= is_own and self._most_running >= LEAST_RUNNING
            if not is_late or late_s < RECOVERING * self._last_late_s:
                self._num_late, self._late_since_s = 0, now_s
            self._num_late += is_late
            if self._num_late == 1:
                self._late_running = self.running
            self._last_late_s = late_s
            if self._num_late >= ON_INTERVALS and now_s - self._late_since_s >= ON_LASTS_S:
                self._num_late, self._num_in_time, self._rejected_s, self._is_cut = 0, 0, now_s, True
                is_growing = self.running > GROWING * self._late_running
                self._set_limit(self._kept_up if is_growing else max(self._kept_up, CUT * self.running))
            return
        self._num_in_time = 0 if late_s > TARGET_S else self._num_in_time + 1
        if now_s - self._rejected_s > OFF_S:
            self._set_limit(None)
        elif late_s > TARGET_S:
            # Answers that are running end by themselves, so another cut waits until this one has had its effect.
            self._is_cut &= self.running > self._limit
            if is_own and not self._is_cut:
                self._is_cut = True
                self._set_limit(CUT * self._limit)
        elif self._num_in_time >= LIFT_INTERVALS and self.running > self._limit:
            self._is_cut = False
            self._set_limit((1.0 + HEADROOM) * self.running + LEAST_LIMIT)
        elif self._has_rejected:
            self._is_cut = False
            self._set_limit(self._limit + max(RAISE * self._limit, 1.0))

    def _set_limit(self, limit: float | None) -> None:
        self._limit = None if limit is None else max(limit, LEAST_LIMIT)
        self._shares.limit = _UNLIMITED if self._limit is None else int(self._limit)

    def _flow(self, caller: str, priority: int, now_s: float) -> _Flow:
        flows = self._callers.setdefault(caller, {})
        self._callers.move_to_end(caller)
        number = _flow_of(flows, priority)
        flow = flows.get(number)
        if flow is None:
            budget = next((one.budget for one in flows.values()), None)
            flow = flows[number] = _Flow(_Budget(now_s) if budget is None else budget, now_s)
            if len(self._callers) > MAX_CALLERS:
                _, evicted = self._callers.popitem(last=False)
                self._short -= {one.budget for one in evicted.values()}
        flow.used_s = now_s
        return flow

    def _level_s(self, flow: _Flow, now_s: float) -> float:
        """Brings the flow and its budget up to date."""
        budget = flow.budget
        share = REJECTED_SHARE / max(len(self._short), 1)
        if not budget.indebted:
            budget.level_s = min(budget.level_s + max(now_s - budget.at_s, 0.0) * share, BURST_S)
        budget.at_s = max(budget.at_s, now_s)
        passed_s = max(now_s - flow.at_s, 0.0)
        share /= max(len(budget.indebted), 1)
        flow.level_s = min(flow.level_s + passed_s * share, 0.0)
        flow.accepted_rps *= math.exp(-passed_s / ACCEPTED_S)
        rate_rps = (1.0 + CHOICE) * flow.accepted_rps + (share / self.request_s if self.request_s else 0.0)
        flow.passes = min(flow.passes + passed_s * rate_rps, 1.0 + AT_ONCE_S * rate_rps)
        flow.at_s = max(flow.at_s, now_s)
        self._settle(flow)
        return flow.level_s

    def _settle(self, flow: _Flow) -> None:
        if flow.level_s >= 0.0:
            flow.budget.indebted.discard(flow)
            if not flow.budget.indebted:
                self._short.discard(flow.budget)

    def _spread_s(self, retry_s: float) -> float:
        """Between one and two times as long, so that rejected clients do not return together."""
        self._num_retries += 1
        return retry_s * (1.0 + self._num_retries * _GOLDEN % 1.0)


def _flow_of(flows: dict[int, _Flow], priority: int) -> int:
    """The number of the flow for a priority: beyond MAX_PRIORITIES the nearest one that exists."""
    if priority in flows or len(flows) < MAX_PRIORITIES:
        return priority
    return min(flows, key=lambda one: (abs(one - priority), one))
