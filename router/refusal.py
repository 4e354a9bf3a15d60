"""Admission: whether a request that waits may go on waiting. Pure.

Refused is only who surely misses its promise, or surely makes somebody miss his who was there before, or is too long
where more is asked for than can be done; and only where serving it would cost others: where someone waits who can keep
his promise, or so many come who can that it would stand in their way. On an idle cluster a hopeless request is served
late.

Predicted with the fluid of forecast.py, in the order of queue.py:

    start(r)  = when the fluid has done what goes before r
    ttft(r)   = waited + start(r) + its prefill where that is fastest
    r is too long if waited + start(r) + ROOM times its prefill is more than its promise
    r harms q, which is behind it in its level, if q starts in time without r and not with it

A kept promise counts the same whatever its prompt, so of more than can be done the longest are given up: who takes p
seconds takes the place of several who take less. The longest that is admitted shrinks as more waits, so the queue comes
to rest short of the promise, where an error of prediction makes nobody late, and who is refused hears it at once. Only
those of its own level are a reason: a higher class is not turned away for what a lower one asks.

That is one pass over those who wait. What goes before a newcomer of a tenant that was served less is only as much as
others may have before they yield to it (shares.py); who must yield to it is not harmed by it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from pdserve.core.durations import clamped_s
from router.commands import FailKind
from router.ending import turn_away
from router.forecast import Capacity, capacity
from router.ledger import Ledger
from router.policy.interface import Decision, Outlook
from router.queue import Entry, Queue
from router.request import Request

BUSY_SHARE: Final = 0.5  # of the capacity: with less demand, a late request stands in nobody's way for long
ROOM: Final = 2.5  # prefills of its own that must fit; between 2.5 and 3 all traffic of docs/benchmarks.md is alike
WIDEST_BAND: Final = 0.5  # relative; with a model that errs more, requests are served and may turn out late
# Promises that a request has waited for: no model is needed to see that more is asked for than can be done. With fewer,
# a cluster that is not known yet, or not as steady as its model, is given the time to show what it can do.
EVIDENT: Final = 4.0
SHORTEST_RETRY_S: Final = 0.05
LONGEST_RETRY_S: Final = 30.0


def admit(ledger: Ledger, request: Request) -> None:
    """A newcomer that could not be placed at once."""
    outlook = request.outlook
    if "refusal" not in ledger.rules or outlook is None or request.request_id not in ledger.queue:
        return
    queue, slo, waited_s = ledger.queue, request.facts.slo, ledger.now_s - request.arrived_s
    entry, fluid = queue.entry(request.request_id), _capacity(ledger)
    before_s, harmed = around(entry, queue, fluid, ledger.now_s)
    start_s, own_s = fluid.start_in_s(before_s), surely_s(outlook.ttft_s, outlook)
    room = ROOM if _is_too_much(ledger, entry, fluid) else 1.0
    retry_s = _clipped(waited_s + start_s + room * outlook.ttft_s - slo.ttft_s)
    if waited_s + start_s + own_s > slo.ttft_s or surely_s(outlook.tpot_s, outlook) > slo.tpot_s:
        message = f"first token predicted after {waited_s + start_s + outlook.ttft_s:.3f} s"
        if not _refuse_late(ledger, request, message, retry_s):
            queue.turn_late(request.request_id)
    elif waited_s + start_s + room * own_s > slo.ttft_s:
        longest_s = max(slo.ttft_s - waited_s - start_s, 0.0) / room
        message = f"more is asked for than can be done: prompts of up to {longest_s:.3f} s have a place"
        _refuse_late(ledger, request, message, retry_s)
    elif harmed and is_trusted(outlook):
        message = f"{harmed} was admitted before and would miss its promised first token"
        turn_away(ledger, request, FailKind.OVERLOADED, message, _clipped(outlook.ttft_s))


def drop_late(ledger: Ledger) -> None:
    """Those whose last moment to start has passed: refused, or served when those have gone who can be on time."""
    for request_id in ledger.queue.late_since(ledger.now_s):
        request = ledger.requests[request_id]
        waited_s = ledger.now_s - request.arrived_s
        if "refusal" in ledger.rules:
            # There is room for it, if at all, when those who wait have been served.
            work_s = sum(ledger.queue.entry(one).prefill_s for one in ledger.queue)
            retry_s = _clipped(_capacity(ledger).start_in_s(work_s))
            _refuse_late(ledger, request, f"has waited {waited_s:.3f} s, which leaves too little", retry_s)


def is_in_vain(ledger: Ledger, request: Request, decision: Decision) -> bool:
    """About to be placed, it is predicted to miss its promise: refused, or behind those who can still keep theirs."""
    outlook, slo, queue = request.outlook, request.facts.slo, ledger.queue
    if "least-slack" not in ledger.rules or outlook is None or not decision.candidates or request.output:
        return False
    if request.request_id not in queue:
        return False
    ttft_s = ledger.now_s - request.arrived_s + decision.candidates[0].ttft_s
    if ttft_s <= slo.ttft_s:
        return False
    if _refuse_late(ledger, request, f"first token predicted after {ttft_s:.3f} s", _clipped(ttft_s - slo.ttft_s)):
        return True
    was_late = queue.is_late(request.request_id)
    queue.turn_late(request.request_id)
    return not was_late and queue.num_on_time > 0


def is_trusted(outlook: Outlook) -> bool:
    """The model knows the worker well enough to turn anybody away for what it says."""
    return outlook.is_sure and outlook.band_s <= WIDEST_BAND * outlook.ttft_s


def surely_s(predicted_s: float, outlook: Outlook) -> float:
    """What it takes at least, by the error band of the model that the outlook is from."""
    if outlook.ttft_s <= 0.0:
        return predicted_s
    return predicted_s * max(1.0 - outlook.band_s / outlook.ttft_s, 0.0)


def around(entry: Entry, queue: Queue, fluid: Capacity, now_s: float) -> tuple[float, str]:
    """Prefill seconds that go before the entry, and somebody behind it who would start too late since it is there."""
    shares = queue.shares
    before: defaultdict[str, float] = defaultdict(float)  # tenant -> prefill seconds that go before the entry
    behind = []
    for one in queue.on_time(entry.level):
        if one < entry:
            before[one.tenant] += one.prefill_s
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
        work_s += sum(one.prefill_s for one in queue.at_level(level))
    before_s, own_s = work_s, entry.prefill_s
    for one in behind:
        spare_s = fluid.done_by(one.late_at_s - now_s) - work_s
        if 0.0 <= spare_s < own_s and not shares.is_ahead(one.tenant, entry.tenant):
            return before_s, one.request_id
        work_s += one.prefill_s
    return before_s, ""


def _is_too_much(ledger: Ledger, entry: Entry, fluid: Capacity) -> bool:
    """More comes than the fluid does, and others of the entry's level wait as well."""
    if "shortest" not in ledger.rules or ledger.demand.rate(ledger.now_s) <= fluid.rate:
        return False
    return any(one is not entry for one in ledger.queue.on_time(entry.level))


def _refuse_late(ledger: Ledger, request: Request, message: str, retry_after_s: float) -> bool:
    """False: it may stay, since that costs nobody who can be on time, or since nothing about it is sure."""
    outlook, queue = request.outlook, ledger.queue
    if "refusal" not in ledger.rules or outlook is None or request.attempt:
        return False
    is_evident = ledger.now_s - request.arrived_s >= EVIDENT * request.facts.slo.ttft_s
    if not is_evident and not is_trusted(outlook):
        return False
    others = queue.num_on_time - (request.request_id in queue and not queue.is_late(request.request_id))
    if others <= 0 and ledger.demand.rate(ledger.now_s) <= BUSY_SHARE * _capacity(ledger).rate:
        return False
    promised_s = request.facts.slo.ttft_s
    turn_away(ledger, request, FailKind.OVERLOADED, f"{message}, promised within {promised_s:.3f} s", retry_after_s)
    return True


def _capacity(ledger: Ledger) -> Capacity:
    prefills, decodes = ledger.fleet.usable(ledger.now_s)
    fluid = capacity(prefills, decodes, ledger.now_s, ledger.pace.share, with_local="path-choice" in ledger.rules)
    ledger.pace.offers(fluid.rate / ledger.pace.share, ledger.now_s)
    return fluid


def _clipped(wait_s: float) -> float:
    return clamped_s(wait_s, SHORTEST_RETRY_S, LONGEST_RETRY_S)
