"""Explanations of recent placements, in bounded memory. Pure.

An explanation has the last decision that placed or rejected a request, with its predictions. `ended` adds the measured
TTFT and TPOT when the request ends. For a running request, `live` adds the values measured so far.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, final

from pdserve.core.errors import shortened
from pdserve.core.types import Slo
from router.commands import Outcome
from router.policy.interface import Candidate, Choice, Decision
from router.request import Request

MAX_CANDIDATES: Final = 8  # kept for one decision, including the chosen one
NEVER_PLACED: Final = "no worker was needed"


@dataclass(slots=True, kw_only=True)
class DecisionRecord:
    request_id: str
    decision: Decision
    decided_s: float
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
        decided_s=now_s,
        waited_s=now_s - request.arrived_s,
        slo=facts.slo,
        tenant=facts.tenant,
        priority=facts.priority,
        prompt_tokens=facts.num_prompt_tokens,
        attempt=request.attempt,
        is_resumed=bool(request.output),
    )


def _measure(explanation: DecisionRecord, request: Request) -> None:
    explanation.actual_ttft_s = request.ttft_s()
    explanation.actual_tpot_s = request.tpot_s() if len(request.output) > 1 else None


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
