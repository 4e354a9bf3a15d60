"""The latest ended requests, as the live view shows them, and counts of all ended requests. Pure."""

from __future__ import annotations

from collections import Counter, deque
from itertools import islice
from typing import Final, final

from pdserve.core.live import LivePhases, LiveRequest
from pdserve.core.phases import Slice
from router.commands import Outcome
from router.explaining import DecisionRecord, is_chosen
from router.request import Request

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
        tpot_s=request.tpot_s() if len(request.output) > 1 else None,
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
