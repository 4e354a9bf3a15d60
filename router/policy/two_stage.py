"""The scheme of the published baselines: the prefill worker by one cost, the decode worker by another. Pure.

At arrival, the
request is bound to the prefill worker with the lowest cost. It waits in that worker's queue, even if other workers
become free. The decode worker is chosen when the prefill worker can start, because blocks must be reserved before the
prefill begins. (The published systems choose it after the prefill, and may then have computed a prompt for which there
is no room.) Without prefill workers, one cost over the decode workers decides, and the worker runs both phases, as in
the published aggregated mode.

Deviations, each in the baseline's favour: no request is sent to a decode worker without a free row and memory, and a
worker where the request failed before is avoided while there are others. docs/scheduling.md compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import nsmallest
from typing import Any, Final

from router.policy.availability import (
    is_decode_open,
    is_prefill_open,
    not_avoided,
    opens_in_s,
    wait_for_decode,
)
from router.policy.interface import Candidate, Choice, Decision, Obstacle, PolicyInput
from router.state.view import WorkerView

# The cost of placing the request on a worker: any ordered value. The lowest cost wins, then the lowest id.
Price = Callable[[PolicyInput, WorkerView, float], Any]

SHOWN: Final = 4  # candidates in an explanation, the best first


class TwoStage:
    def __init__(self, *, prefill: Price, decode: Price, together: Price, reason: str) -> None:
        """`together` is the cost on a decode worker that also computes the prompt. Explanations show `reason`."""
        self._prefill = prefill
        self._decode = decode
        self._together = together
        self._reason = reason

    def __call__(
        self, request: PolicyInput, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView], now_s: float
    ) -> Decision:
        able = _not_failed(request, prefills, decodes)
        if not able:
            return self._place_alone(request, decodes, now_s)
        bound = next((view for view in able if view.worker_id == request.bound_to), None) if request.bound_to else None
        if bound is not None:
            return self._start(request, [bound], decodes, now_s)
        ranked = _cheapest(self._prefill, request, able, now_s)
        prefill = ranked[0]
        if not prefill.queue:  # requests in the worker's queue go first
            decision = self._start(request, ranked, decodes, now_s)
            if decision.choice is Choice.REMOTE:
                return decision
        landing = _cheapest(self._decode, request, decodes, now_s)[0]
        return Decision(
            choice=Choice.WAIT,
            reason=f"{self._reason}: waiting for {prefill.worker_id}",
            candidates=tuple([remote_candidate(request, view, landing, now_s) for view in ranked]),
            obstacle=Obstacle.PREFILL,
            bound_to=prefill.worker_id,
            retry_in_s=opens_in_s(prefill, now_s),
        )

    def _start(
        self, request: PolicyInput, ranked: Sequence[WorkerView], decodes: Sequence[WorkerView], now_s: float
    ) -> Decision:
        """Places the request on the first worker of `ranked`, if that worker can start it now."""
        prefill = ranked[0]
        if not is_prefill_open(prefill, request, now_s):
            return Decision(
                choice=Choice.WAIT,
                reason=f"{prefill.worker_id} cannot start it within a batch",
                obstacle=Obstacle.PREFILL,
                bound_to=prefill.worker_id,
                retry_in_s=opens_in_s(prefill, now_s),
            )
        room = [
            view
            for view in with_room(request, decodes, now_s)
            if (prefill.worker_id, view.worker_id) not in request.avoid_pairs
        ]
        if not room:
            return wait_for_decode(decodes, now_s)
        decode = _cheapest(self._decode, request, room, now_s)[0]
        return Decision(
            choice=Choice.REMOTE,
            prefill_worker=prefill.worker_id,
            decode_worker=decode.worker_id,
            reason=self._reason,
            candidates=tuple([remote_candidate(request, view, decode, now_s) for view in ranked]),
        )

    def _place_alone(self, request: PolicyInput, decodes: Sequence[WorkerView], now_s: float) -> Decision:
        room = with_room(request, decodes, now_s)
        if not room:
            return wait_for_decode(decodes, now_s)
        ranked = _cheapest(self._together, request, room, now_s)
        return Decision(
            choice=Choice.LOCAL,
            decode_worker=ranked[0].worker_id,
            reason=self._reason,
            candidates=tuple([local_candidate(request, view, now_s) for view in ranked]),
        )


def with_room(request: PolicyInput, decodes: Sequence[WorkerView], now_s: float) -> list[WorkerView]:
    return [
        view for view in not_avoided(decodes, request) if is_decode_open(view, view.estimated_load(), request, now_s)
    ]


def queued_prefill_s(view: WorkerView, now_s: float) -> float:
    """Predicted seconds of prefill before a new request: reserved there, in its queue, and of other routers."""
    return view.queue_s(now_s) + view.queue.prefill_s


def step_with(request: PolicyInput, view: WorkerView) -> float:
    """Predicted seconds of a decode step that also has this request."""
    rows, _, context, _ = view.estimated_load()
    return view.cost.decode_s(rows + 1, context + request.num_tokens)


def prefill_s(request: PolicyInput, view: WorkerView) -> float:
    """Predicted seconds to prefill this prompt; on a decode worker, in the chunks that its running requests allow."""
    cached = request.cached_on(view)
    return view.prefill_time_s(request.num_tokens - cached, cached)


def remote_candidate(request: PolicyInput, prefill: WorkerView, decode: WorkerView, now_s: float) -> Candidate:
    is_at_head = request.bound_to == prefill.worker_id  # of the worker's queue
    queue_s = prefill.queue_s(now_s) if is_at_head else queued_prefill_s(prefill, now_s)
    wait_s = request.read_wait_s(prefill.worker_id, queue_s)
    ttft_s = queue_s + wait_s + prefill_s(request, prefill) + decode.grant_wait_s
    return _candidate(request, prefill.worker_id, decode, ttft_s)


def local_candidate(request: PolicyInput, view: WorkerView, now_s: float) -> Candidate:
    queue_s = queued_prefill_s(view, now_s)
    wait_s = request.read_wait_s(view.worker_id, queue_s)
    ttft_s = queue_s + wait_s + prefill_s(request, view) + view.grant_wait_s
    return _candidate(request, "", view, ttft_s)


def _candidate(request: PolicyInput, prefill_worker: str, decode: WorkerView, ttft_s: float) -> Candidate:
    slo, tpot_s = request.slo, step_with(request, decode)
    slack = min((slo.ttft_s - request.waited_s - ttft_s) / slo.ttft_s, (slo.tpot_s - tpot_s) / slo.tpot_s)
    return Candidate(
        prefill_worker=prefill_worker,
        decode_worker=decode.worker_id,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        slack=slack,
        is_feasible=tpot_s <= min(slo.tpot_s, decode.tightest_tpot_s),
    )


def _not_failed(
    request: PolicyInput, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView]
) -> Sequence[WorkerView]:
    """Prefill workers that are part of a pair on which the request has not failed."""
    able = not_avoided(prefills, request)
    if not request.avoid_pairs:
        return able
    return [view for view in able if any((view.worker_id, one.worker_id) not in request.avoid_pairs for one in decodes)]


def _cheapest(price: Price, request: PolicyInput, views: Sequence[WorkerView], now_s: float) -> list[WorkerView]:
    priced = [(price(request, view, now_s), view.worker_id, view) for view in views]
    return [view for _, _, view in nsmallest(SHOWN, priced)]  # ids are unique, so views are never compared


# --- costs that several baselines share -----------------------------------------------------------------------


def sequences(request: PolicyInput, view: WorkerView, now_s: float) -> tuple[int, float]:
    """Sequences of a decode worker, including arriving ones; ties are broken by the prompts to compute."""
    return view.estimated_load()[0], queued_prefill_s(view, now_s)


def prompt_cost(request: PolicyInput, view: WorkerView, now_s: float) -> float:
    """`adj` of Dynamo: blocks that the worker must compute until this request's first token."""
    active = view.prefill_tokens_ahead / view.hello.block_size
    overlap = request.cached_on(view) // view.hello.block_size
    return max(active + view.blocks_for(request.num_tokens) - overlap, 0.0)


def decode_blocks(request: PolicyInput, view: WorkerView, now_s: float) -> int:
    """Blocks of the sequences that decode there or are arriving."""
    return view.blocks_for(view.estimated_load()[2])
