"""Admission control: whether a request that waits may go on waiting. Pure.

A request is rejected only if serving it would cost others: if demand is over BUSY_SHARE of the capacity, and over what
the other workers can do while one serves it. Otherwise a hopeless request is served late, behind those that can meet
their target. What it leaves in the prefix caches serves the next turn of its session.

forecast.py predicts when a request starts, from what is ahead of it in the order of queue.py:

    start(r) = when the capacity has done what is ahead of r, at the observed drain rate
    ttft(r)  = waited + its prefill on the worker that ends it first, which begins at start(r) or when it is free

While decode workers are full, nothing starts. This standstill is expected to last as long again as it has lasted.

How sure that is: the errors of single prefills are independent, so their sum is relatively more certain the more wait.
The error of the drain rate is common to all. It is the standard error of the observed drain rate, or, where no queue
was seen yet, the relative error of the model, if that has seen enough batches. The drain also varies around its mean,
above all where decode workers are full and nothing starts until answers end (forecast.DrainError).

    error(start) = start * hypot(error of the drain rate, variation of the drain over one target TTFT,
                                 error of one prefill / sqrt(requests ahead + 1))
    error(ttft)  = hypot(error(start), error of one prefill * own prefill)

If more comes than can be done, for certain, then some must be rejected, the sooner the better. A request is rejected if
its predicted TTFT misses the target with one standard error, or, while others wait, with one standard error and ROOM
times its prefill: a met target counts the same whatever the prompt, so the longest are given up. The longest that is
admitted shrinks as more waits, so the queue comes to rest short of the target, where an error of prediction makes no
request late. If less comes than can be done, for certain, the queue will shrink again, and a request is rejected only
if it misses its target even where the prediction errs by SIGMAS. In between, it gets the less benefit of the doubt the
more likely it is that too much comes; a long one must then leave a standard error to spare.

A newcomer that arrives while others wait is rejected, too, if it is expected to displace more than one other request
(_displaced): serving it would keep one target and miss several.

A rejection is worth most at arrival. A request that was admitted and has become late is rejected only where too much
comes for certain, or if it is long, or if the late requests before it take longer than its target TTFT. Otherwise it
is served late.

A request that makes an earlier one miss its target is rejected too: r harms q, which is behind it in its level, if q
starts in time without r and not with it. Only its own level is a reason: a higher class is not rejected for what a
lower one asks. That is one pass over those who wait. What goes before a newcomer of a tenant that was served less is
only as much as others may have before they yield to it (shares.py); a request that must yield to it is not harmed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from pdserve.core.durations import clamped_s
from router.commands import FailKind
from router.ending import turn_away
from router.forecast import HORIZON, Capacity, capacity
from router.ledger import Ledger
from router.policy.interface import Decision, Obstacle, Outlook
from router.policy.outlook import SIGMAS
from router.queue import Entry, Queue
from router.request import Request

BUSY_SHARE: Final = 0.5  # of the capacity: with less demand, a late request stands in nobody's way for long
ROOM: Final = 2.5  # prefills of its own that must fit; between 2.5 and 3 all traffic of docs/benchmarks.md is alike
LONG: Final = 1.05  # of the mean request's prefill; requests that are all alike are not long
QUARTERS: Final = (-1.15, -0.32, 0.32, 1.15)  # medians of a normal distribution's four quarters
UNSEEN_ERROR: Final = 0.1  # of the drain rate that the model predicts, beyond its own error: paths, memory, routers
SHORTEST_RETRY_S: Final = 0.05
LONGEST_RETRY_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """What goes before a request that waits."""

    work_s: float  # prefill seconds
    count: int  # requests
    harmed: str = ""  # one behind it that would start too late since it is there


def admit_before_placing(ledger: Ledger, request: Request) -> None:
    """A newcomer while others wait. A long request has the least time to start, goes first, and would be placed before
    `admit` sees it: it is rejected here if it displaces more than one other request."""
    outlook = request.outlook
    if not ledger.rules >= {"refusal", "shortest"} or outlook is None or request.request_id not in ledger.queue:
        return
    if not _others_wait(ledger.queue, ledger.queue.entry(request.request_id)):
        return
    free = _capacity(ledger)
    displaced = _displaced(ledger, outlook, free)
    if displaced > 1.0:
        message = f"its prefill of {outlook.ttft_s:.3f} s would displace {displaced:.1f} other requests"
        retry_s = bounded_retry_s(free.start_in_s(ledger.queue.on_time_s))
        turn_away(ledger, request, FailKind.OVERLOADED, message, retry_s)


def admit(ledger: Ledger, request: Request) -> None:
    """A newcomer that could not be placed at once."""
    outlook = request.outlook
    if "refusal" not in ledger.rules or outlook is None or request.request_id not in ledger.queue:
        return
    queue, slo, waited_s = ledger.queue, request.facts.slo, ledger.now_s - request.arrived_s
    entry, free = queue.entry(request.request_id), _capacity(ledger)
    is_too_much = _is_too_much(ledger, outlook, free)
    ahead = around(entry, queue, free, ledger.now_s)
    start_s, own_s = free.start_in_s(ahead.work_s) + _standstill_s(ledger), outlook.ttft_s
    done_s = free.done_in_s(start_s, own_s)
    predicted_s = waited_s + done_s
    error_s = _error_s(ledger, outlook, max(done_s - own_s, 0.0), ahead.count)
    longest_s = max(slo.ttft_s - waited_s - start_s - error_s, 0.0) / ROOM
    benefit_s = _benefit_of_doubt(ledger, outlook, free) * error_s if error_s < math.inf else math.inf
    surely_late_s = predicted_s - benefit_s
    if surely_late_s > slo.ttft_s or _misses_tpot(outlook, slo.tpot_s):
        message = f"first token predicted after {predicted_s:.3f} s"
        if not _refuse_late(ledger, request, message, bounded_retry_s(max(predicted_s, surely_late_s) - slo.ttft_s)):
            queue.turn_late(request.request_id)
    elif is_too_much and "shortest" in ledger.rules and _others_wait(queue, entry) and own_s > longest_s:
        message = f"more is asked for than can be done: prompts of up to {longest_s:.3f} s have a place"
        _refuse_late(ledger, request, message, bounded_retry_s(predicted_s + (ROOM - 1.0) * own_s - slo.ttft_s))
    elif ahead.harmed and _drain_error(ledger, outlook) < 1.0:
        message = f"{ahead.harmed} was admitted before and would miss its TTFT target"
        turn_away(ledger, request, FailKind.OVERLOADED, message, bounded_retry_s(own_s))


def drop_late(ledger: Ledger) -> None:
    """Requests whose last moment to start has passed are rejected, or served after those that can be on time."""
    for request_id in ledger.queue.late_since(ledger.now_s):
        request = ledger.requests[request_id]
        outlook, waited_s = request.outlook, ledger.now_s - request.arrived_s
        if "refusal" not in ledger.rules or outlook is None:
            continue
        free, least_s = _capacity(ledger), surely_s(outlook.ttft_s, outlook)
        promised_s = request.facts.slo.ttft_s
        is_hopeless = _is_long(ledger, outlook) and waited_s + least_s > promised_s
        late_start_s = free.start_in_s(ledger.queue.late_ahead_s(request_id))
        if is_hopeless or late_start_s > promised_s or _is_too_much(ledger, outlook, free):
            # There is room for it, if at all, when those who wait have been served.
            work_s = sum(ledger.queue.entry(one).prefill_s for one in ledger.queue)
            retry_s = bounded_retry_s(free.start_in_s(work_s))
            _refuse_late(ledger, request, f"has waited {waited_s:.3f} s, which leaves too little", retry_s)


def is_in_vain(ledger: Ledger, request: Request, decision: Decision) -> bool:
    """About to be placed, it is predicted to miss its target: rejected, or put behind requests that can meet theirs.
    A request that was late before has waited for this placement and gets it.
    """
    outlook, slo, queue = request.outlook, request.facts.slo, ledger.queue
    if "least-slack" not in ledger.rules or outlook is None or not decision.candidates or request.output:
        return False
    if request.request_id not in queue:
        return False
    waited_s, own_s = ledger.now_s - request.arrived_s, decision.candidates[0].ttft_s
    ttft_s = waited_s + own_s
    if ttft_s <= slo.ttft_s:
        return False
    if queue.is_late(request.request_id):
        return False
    is_hopeless = _is_long(ledger, outlook) and waited_s + surely_s(own_s, outlook) > slo.ttft_s
    message, retry_s = f"first token predicted after {ttft_s:.3f} s", bounded_retry_s(ttft_s - slo.ttft_s)
    is_sure = is_hopeless or _is_too_much(ledger, outlook, _capacity(ledger))
    if is_sure and _refuse_late(ledger, request, message, retry_s):
        return True
    queue.turn_late(request.request_id)
    return queue.num_on_time > 0


def surely_s(predicted_s: float, outlook: Outlook) -> float:
    """What one prefill takes at least, by the error band of the model that the outlook is from."""
    if outlook.ttft_s <= 0.0:
        return predicted_s
    return predicted_s * max(1.0 - outlook.band_s / outlook.ttft_s, 0.0)


def around(entry: Entry, queue: Queue, fluid: Capacity, now_s: float) -> Ahead:
    """What goes before the entry, and whom behind it that would make late."""
    shares = queue.shares
    before: defaultdict[str, float] = defaultdict(float)  # tenant -> prefill seconds that go before the entry
    behind, count = [], 0
    for one in queue.on_time(entry.level):
        if one < entry:
            before[one.tenant] += one.prefill_s
            count += 1
        elif one is not entry:
            behind.append(one)
    room_s = shares.served_s(entry.tenant) + before[entry.tenant] + shares.quantum_s
    work_s = sum(
        seconds if tenant == entry.tenant else min(seconds, max(room_s - shares.served_s(tenant), 0.0))
        for tenant, seconds in before.items()
    )
    for level in queue.levels:
        if level >= entry.level:
            break
        higher = queue.at_level(level)
        work_s += sum(one.prefill_s for one in higher)
        count += len(higher)
    before_s, own_s = work_s, entry.prefill_s
    for one in behind:
        spare_s = fluid.done_by(one.late_at_s - now_s) - work_s
        if 0.0 <= spare_s < own_s and not shares.is_ahead(one.tenant, entry.tenant):
            return Ahead(work_s=before_s, count=count, harmed=one.request_id)
        work_s += one.prefill_s
    return Ahead(work_s=before_s, count=count)


def _others_wait(queue: Queue, entry: Entry) -> bool:
    """Of the entry's own level, on time."""
    return any(one is not entry for one in queue.on_time(entry.level))


def _is_too_much(ledger: Ledger, outlook: Outlook, free: Capacity) -> bool:
    """More comes than can be done, and that is sure."""
    demand = ledger.demand
    error = math.hypot(demand.error, _drain_error(ledger, outlook))
    return demand.rate(ledger.now_s) * max(1.0 - SIGMAS * error, 0.0) > free.rate


def _displaced(ledger: Ledger, outlook: Outlook, free: Capacity) -> float:
    """How many other requests are expected to miss their target if this one is served.

    If more comes than can be done, the requests up to some size are what can be served, and each of its seconds takes
    the place of one request of that size. `bearable` is the demand at which the queue reaches the target within the
    horizon. What demand is, is uncertain, so this is a mean over QUARTERS of its distribution. That the queue will fill
    up is as likely as it is full: a demand that has lasted for some time is expected to last as long again.
    """
    demand = ledger.demand
    rate, error = demand.of_others(outlook.ttft_s, ledger.now_s)
    error = rate * math.hypot(error, _drain_error(ledger, outlook))
    if demand.target_s <= 0.0 or free.rate <= 0.0:
        return 0.0
    full = free.start_in_s(ledger.queue.on_time_s) / demand.target_s  # its own prefill is part of it
    bearable = free.rate * max(1.0 + (1.0 - full) / HORIZON, 0.0)
    demands = [rate + sigmas * error for sigmas in QUARTERS]
    sizes_s = [demand.size_within(bearable / each) for each in demands if each > bearable]
    return min(full, 1.0) * sum(outlook.ttft_s / size_s for size_s in sizes_s) / len(QUARTERS)


def _is_long(ledger: Ledger, outlook: Outlook) -> bool:
    """It takes more than the mean request. Rejecting a shorter one after it has waited saves little."""
    return outlook.ttft_s > LONG * ledger.demand.mean_s


def _benefit_of_doubt(ledger: Ledger, outlook: Outlook, free: Capacity) -> float:
    """By how many standard errors the prediction for a newcomer must miss the target: SIGMAS where demand is below the
    capacity for certain, and fewer the less certain that is. Long requests, and all requests where demand is above the
    capacity for certain, must instead meet it with one standard error to spare."""
    rate = ledger.demand.rate(ledger.now_s)
    error = rate * math.hypot(ledger.demand.error, _drain_error(ledger, outlook))
    if error <= 0.0:
        return SIGMAS
    spare = (free.rate - rate) / error
    least = -1.0 if spare < -SIGMAS or _is_long(ledger, outlook) else 0.0
    return min(max(spare, least), SIGMAS)


def _drain_error(ledger: Ledger, outlook: Outlook) -> float:
    """Relative, of the rate at which the queue drains: as observed, or as the model's own error tells."""
    observed = ledger.pace.error
    if not outlook.is_sure or outlook.ttft_s <= 0.0:
        return observed
    return min(observed, UNSEEN_ERROR + outlook.band_s / outlook.ttft_s / SIGMAS)


def _error_s(ledger: Ledger, outlook: Outlook, start_s: float, num_ahead: int) -> float:
    """Of the predicted TTFT of a request that waits behind so many; infinite where nothing is known."""
    drain = _drain_error(ledger, outlook)
    if drain >= 1.0:
        return math.inf
    single = outlook.band_s / outlook.ttft_s / SIGMAS if outlook.ttft_s > 0.0 else 0.0
    own_s, variation = single * outlook.ttft_s, ledger.pace.variation.relative
    return math.hypot(start_s * drain, start_s * variation, start_s * single / math.sqrt(num_ahead + 1), own_s)


def _standstill_s(ledger: Ledger) -> float:
    """How much longer nothing is expected to start since decode workers are full: as long again as it has lasted."""
    head = ledger.queue.first()
    is_decode_full = head is not None and ledger.requests[head].waits_for in (Obstacle.ROOM, Obstacle.DECODE)
    return ledger.pace.standstill_s if is_decode_full else 0.0


def _misses_tpot(outlook: Outlook, tpot_s: float) -> bool:
    return outlook.is_sure and surely_s(outlook.tpot_s, outlook) > tpot_s


def _refuse_late(ledger: Ledger, request: Request, message: str, retry_after_s: float) -> bool:
    """False: it may stay, since that costs nobody who can be on time."""
    if "refusal" not in ledger.rules or request.attempt:
        return False
    rate, demand = _capacity(ledger).rate, ledger.demand
    # Its worker is lost to the others while it computes this; they come first, but cannot interrupt it.
    if demand.rate(ledger.now_s) * (1.0 - demand.error) <= max(BUSY_SHARE * rate, rate - 1.0):
        return False
    promised_s = request.facts.slo.ttft_s
    turn_away(ledger, request, FailKind.OVERLOADED, f"{message}, the target is {promised_s:.3f} s", retry_after_s)
    return True


def _capacity(ledger: Ledger) -> Capacity:
    prefills, decodes = ledger.fleet.usable(ledger.now_s)
    fluid = capacity(prefills, decodes, ledger.now_s, ledger.pace.share, with_local="path-choice" in ledger.rules)
    ledger.pace.offers(fluid.rate / ledger.pace.share, ledger.now_s, ledger.demand.target_s)
    return fluid


def bounded_retry_s(wait_s: float) -> float:
    return clamped_s(wait_s, SHORTEST_RETRY_S, LONGEST_RETRY_S)
