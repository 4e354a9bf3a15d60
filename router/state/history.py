"""Explanations of recent placements, and the latest ended requests, in bounded memory. Pure.

An explanation has the last decision that placed or rejected a request, with its predictions. `ended` adds the measured
TTFT and TPOT when the request ends. For a running request, `live` adds the values measured so far.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from itertools import islice
from typing import Final, final

from pdserve.core.errors import shortened
from pdserve.core.live import LivePhases, LiveRequest
from pdserve.core.results import Slice
from pdserve.core.types import Slo
from router.policy.interface import Candidate, Choice, Decision
from router.state.interface import Outcome
from router.state.request import Request

MAX_CANDIDATES: Final = 8  # kept for one decision, including the chosen one
NEVER_PLACED: Final = "no worker was needed"


@dataclass(slots=True, kw_only=True)
class DecisionRecord:
    request_id: str
    decision: Decision
    waited_s: float  # from arrival to the decision; predictions count from the decision
    slo: Slo
    tenant: str = ""
    priority: int = 0
    prompt_tokens: int = 0
    attempt: int = 0  # number of the attempt that the decision started; 0: none
    is_resumed: bool = False  # the client already had tokens, so the predicted and the measured TTFT are not comparable
    stage: str = ""  # empty after the request has ended
    outcome: Outcome | None = None  # None until the request ends
    ended_because: str = ""  # if the answer is incomplete
    retry_after_s: float | None = None  # retry time that the client received
    actual_ttft_s: float | None = None  # from arrival
    actual_tpot_s: float | None = None  # over the tokens so far; None before there are two
    adapter: str = ""  # name of its LoRA adapter; empty: the model alone


@final
class Explanations:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[str, DecisionRecord] = OrderedDict()

    def note(self, request: Request, decision: Decision, now_s: float) -> None:
        """Stores a decision. It replaces an earlier one about the same request."""
        if not self._capacity:
            return
        self._kept[request.request_id] = _explanation(request, _cut(decision), now_s)
        self._kept.move_to_end(request.request_id)
        while len(self._kept) > self._capacity:
            self._kept.popitem(last=False)

    def ended(
        self, request: Request, outcome: Outcome, now_s: float, *, why: str = "", retry_after_s: float | None = None
    ) -> None:
        """`why` is the reason for an incomplete answer. If the policy made no decision about the request, `why` is also
        stored as the reason of the decision."""
        if request.request_id not in self._kept:
            choice = Choice.REJECT if outcome is Outcome.REJECTED else Choice.WAIT
            self.note(request, Decision(choice=choice, reason=why or NEVER_PLACED), now_s)
        found = self._kept.get(request.request_id)
        if found is not None:
            found.outcome, found.stage = outcome, ""
            found.ended_because, found.retry_after_s = shortened(why), retry_after_s
            _measure(found, request)

    def last(self, request_id: str) -> DecisionRecord | None:
        """The stored explanation; None if it was dropped."""
        return self._kept.get(request_id)

    def forget(self, request_id: str) -> None:
        """A new request uses the id again."""
        self._kept.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._kept)

    def live(self, request: Request, now_s: float) -> DecisionRecord:
        """The explanation of a request that has not ended."""
        found = self._kept.get(request.request_id)
        if found is None:
            reason = f"queued for {now_s - request.queued_s:.3f} s"
            if request.bound_to:
                reason += f", waiting for prefill worker {request.bound_to}"
            found = _explanation(request, Decision(choice=Choice.WAIT, reason=reason), now_s)
        else:
            found = dataclasses.replace(found)
        found.stage = request.stage.value
        _measure(found, request)
        return found


def _explanation(request: Request, decision: Decision, now_s: float) -> DecisionRecord:
    facts = request.facts
    return DecisionRecord(
        request_id=request.request_id,
        decision=decision,
        waited_s=now_s - request.arrived_s,
        slo=facts.slo,
        tenant=facts.tenant,
        priority=facts.priority,
        prompt_tokens=facts.num_prompt_tokens,
        attempt=request.attempt,
        is_resumed=bool(request.output),
        adapter=facts.adapter_name,
    )


def _measure(explanation: DecisionRecord, request: Request) -> None:
    explanation.actual_ttft_s = request.ttft_s()
    explanation.actual_tpot_s = request.tpot_s() if request.num_emitted > 1 else None


def is_chosen(candidate: Candidate, decision: Decision) -> bool:
    chosen = (decision.prefill_worker, decision.decode_worker)
    return (candidate.prefill_worker, candidate.decode_worker) == chosen


def _cut(decision: Decision) -> Decision:
    """Limits the size of an explanation."""
    shown = decision.candidates
    if len(shown) > MAX_CANDIDATES:
        chosen = [one for one in shown if is_chosen(one, decision)]
        others = [one for one in shown if not is_chosen(one, decision)]
        shown = tuple([*chosen, *others][:MAX_CANDIDATES])
    reason = shortened(decision.reason)
    if shown is decision.candidates and reason is decision.reason:
        return decision
    return dataclasses.replace(decision, candidates=shown, reason=reason)


# --- ended requests -------------------------------------------------------------------------------------------
# Shown in the live view, with counts of all requests that ended.

MAX_ENDED: Final = 512  # ended requests that are kept, and therefore the maximum in one frame
ENDED: Final = "ended"


@final
class LiveLog:
    """Keeps the latest MAX_ENDED requests."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.num_ended = 0
        self._ended: deque[LiveRequest] = deque(maxlen=MAX_ENDED)

    def ended(self, request: Request, outcome: Outcome, record: DecisionRecord | None, now_s: float) -> None:
        row = live_request(request, record, request.timeline.slices, now_s, outcome)
        self.counts[outcome.value] += 1
        self.counts["output_tokens"] += row.output_tokens
        self.counts["transfer_bytes"] += row.transfer_bytes
        self.num_ended += 1
        self._ended.append(row)

    def after(self, number: int) -> list[LiveRequest]:
        """The kept requests among those that ended after the first `number` ones."""
        return list(islice(self._ended, max(len(self._ended) - (self.num_ended - number), 0), None))


def live_request(
    request: Request,
    record: DecisionRecord | None,
    slices: tuple[Slice, ...],
    ended_s: float | None = None,
    outcome: Outcome | None = None,
) -> LiveRequest:
    """`record` is the last decision about the request. `ended_s` and `outcome` are None while it is in progress."""
    facts, where = request.facts, request.placement or request.last_path
    decision = None if record is None else record.decision
    chosen = None if decision is None else next((one for one in decision.candidates if is_chosen(one, decision)), None)
    return LiveRequest(
        request_id=request.request_id,
        stage=ENDED if outcome is not None else request.stage.value,
        tenant=facts.tenant,
        priority=facts.priority,
        prompt_tokens=facts.num_prompt_tokens,
        cached_tokens=request.cached_tokens or 0,
        output_tokens=len(request.output),
        max_tokens=facts.sampling.max_tokens,
        prefill_worker="" if where is None else where.prefill_worker,
        decode_worker="" if where is None else where.decode_worker,
        attempt=request.attempt,
        preemptions=request.preemptions,
        arrived_s=request.arrived_s,
        ended_s=ended_s,
        outcome="" if outcome is None else outcome.value,
        why="" if record is None or outcome is None else record.ended_because,
        retry_after_s=None if record is None else record.retry_after_s,
        ttft_s=request.ttft_s(),
        tpot_s=request.tpot_s() if request.num_emitted > 1 else None,
        slo_ttft_s=facts.slo.ttft_s,
        slo_tpot_s=facts.slo.tpot_s,
        predicted_ttft_s=None if chosen is None else chosen.ttft_s,
        predicted_tpot_s=None if chosen is None else chosen.tpot_s,
        transfer_bytes=request.reported.get("transfer_bytes", 0),
        transfer_s=request.reported.get("transfer_s", 0.0),
        phases=LivePhases(
            tuple([one.phase.value for one in slices]),
            tuple([one.begin_s for one in slices]),
            tuple([one.seconds for one in slices]),
        ),
    )
