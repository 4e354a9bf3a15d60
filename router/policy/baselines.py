"""The published baselines, and policies without predictions. Pure.

Most of them share one scheme, TwoStage: the prefill worker by one cost, the decode worker by another. At arrival, the
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
from typing import Any, Final, final

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
    """Predicted seconds of prefill before a new request: booked there, in its queue, and of other routers."""
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
    ttft_s = queue_s + prefill_s(request, prefill) + decode.grant_wait_s
    return _candidate(request, prefill.worker_id, decode, ttft_s)


def local_candidate(request: PolicyInput, view: WorkerView, now_s: float) -> Candidate:
    ttft_s = queued_prefill_s(view, now_s) + prefill_s(request, view) + view.grant_wait_s
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


# --- least-loaded ---------------------------------------------------------------------------------------------
# The prefill worker with the fewest requests, the decode worker with the fewest sequences.
#
# This is the shortest queue at arrival, as in DistServe's dispatcher. Load is the number of requests, whatever their
# length. It includes requests in the worker's queue, and other routers' requests in its reports. Without prefill
# workers, the policy takes the worker with the fewest sequences, including those that wait for their prefill.


def requests(request: PolicyInput, view: WorkerView, now_s: float) -> int:
    """Requests of a prefill worker: in its queue, sent to it, or computing there."""
    return view.prefills_ahead


def sequences(request: PolicyInput, view: WorkerView, now_s: float) -> tuple[int, float]:
    """Sequences of a decode worker, including arriving ones; ties are broken by the prompts to compute."""
    return view.estimated_load()[0], queued_prefill_s(view, now_s)


def make_least_loaded() -> TwoStage:
    return TwoStage(prefill=requests, decode=sequences, together=sequences, reason="least loaded")


# --- round-robin and colocated --------------------------------------------------------------------------------
# Policies without predictions.


@final
class RoundRobin:
    """Takes the workers of each role in turn, by worker id, like the proxies of vLLM and Mooncake (scheduling.md 1.4,
    1.5).

    Deviation: a decode worker without room is skipped.
    """

    def __init__(self) -> None:
        self._last_prefill = ""
        self._last_decode = ""
        self._stages = TwoStage(
            prefill=lambda request, view, now_s: _turn(view, self._last_prefill),
            decode=lambda request, view, now_s: _turn(view, self._last_decode),
            together=lambda request, view, now_s: _turn(view, self._last_decode),
            reason="next in turn",
        )

    def __call__(
        self, request: PolicyInput, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView], now_s: float
    ) -> Decision:
        decision = self._stages(request, prefills, decodes, now_s)
        if not request.bound_to:  # a bound request was counted when it was bound
            self._last_prefill = decision.prefill_worker or decision.bound_to or self._last_prefill
        if decision.choice is not Choice.WAIT:
            self._last_decode = decision.decode_worker
        return decision


def _turn(view: WorkerView, last: str) -> bool:
    """The rank of a worker: workers after `last` come first, then the others from the beginning."""
    return view.worker_id <= last


_COLOCATED: Final = TwoStage(prefill=sequences, decode=sequences, together=sequences, reason="fewest sequences")


def colocated(
    request: PolicyInput, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView], now_s: float
) -> Decision:
    """Uses no prefill worker: the decode worker with the fewest sequences also computes the prompt, in chunks within
    its decode steps. This is the baseline of scheduling.md 1.6, on the same engine as all others. It is best on a
    cluster without prefill workers.
    """
    return _COLOCATED(request, (), decodes, now_s)


# --- dynamo ---------------------------------------------------------------------------------------------------
# The cost of NVIDIA Dynamo's KV router, in blocks:
#
#     adj  = max(active_prefill_blocks + prompt_blocks - overlap_blocks, 0)
#     cost = prefill_load_scale * adj + decode_blocks            the lowest wins
#
# With its defaults: prefill_load_scale 1, full credit for blocks in device memory, no decay, temperature 0 (no
# softmax). Prefill workers hold no decode blocks, so the prefill stage compares only `adj`. The decode stage ignores
# overlap, so `adj` is the prompt on every worker and decode_blocks decides. Without prefill workers, both count.
#
# Deviations: there are no host, disk or shared tiers here, so their credits are zero; prefill load falls when a prefill
# ends, as in Dynamo without its optional decay.

PREFILL_LOAD_SCALE: Final = 1.0


def prompt_cost(request: PolicyInput, view: WorkerView, now_s: float) -> float:
    """`adj`: blocks that the worker must compute until this request's first token."""
    active = view.prefill_tokens_ahead / view.hello.block_size
    overlap = request.cached_on(view) // view.hello.block_size
    return max(active + view.blocks_for(request.num_tokens) - overlap, 0.0)


def decode_blocks(request: PolicyInput, view: WorkerView, now_s: float) -> int:
    """Blocks of the sequences that decode there or are arriving."""
    return view.blocks_for(view.estimated_load()[2])


def cost(request: PolicyInput, view: WorkerView, now_s: float) -> float:
    return PREFILL_LOAD_SCALE * prompt_cost(request, view, now_s) + decode_blocks(request, view, now_s)


def make_dynamo() -> TwoStage:
    return TwoStage(prefill=prompt_cost, decode=decode_blocks, together=cost, reason="least blocks")


# --- lmetric --------------------------------------------------------------------------------------------------
# Dynamo's alternative cost without a weight: adj * (decode_blocks + 1), with the terms of `dynamo`.
#
# A prefill worker has no decode blocks, and in the decode stage `adj` is the same everywhere, so with separate workers
# it chooses like `dynamo`. Without prefill workers it differs.


def product(request: PolicyInput, view: WorkerView, now_s: float) -> float:
    return prompt_cost(request, view, now_s) * (decode_blocks(request, view, now_s) + 1)


def make_lmetric() -> TwoStage:
    return TwoStage(prefill=prompt_cost, decode=decode_blocks, together=product, reason="least blocks times blocks")


# --- mooncake -------------------------------------------------------------------------------------------------
# Algorithm 1 of Mooncake's paper, in seconds of the shared cost model:
#
#     TTFT(p) = T_queue(p) + T_prefill(len, prefix on p)         the prefill worker with the least is chosen
#     TBT(d)  = a decode step that also has this request         the decode worker with the least is chosen
#     rejected if the predicted TTFT or TBT is over the request's SLO
#
# Deviations:
#
# - Mooncake may copy the best prefix from another worker (T_transfer), if best / local prefix is above a manual
#   threshold. Workers here do not copy prefixes from each other, so a prefix counts only on the worker that has it.
# - The paper checks TBT at arrival. Here the decode worker is chosen when the prefill can start, so TBT is checked
#   then as well, still before any computation.
# - The TTFT that is compared with the target includes the mean wait for a decode worker's grant, and the time that
#   the request has waited.
# - A started request is not rejected. Without prefill workers, one worker's TTFT and TBT are used.


def ttft_s(request: PolicyInput, view: WorkerView, now_s: float) -> float:
    return queued_prefill_s(view, now_s) + prefill_s(request, view)


def tbt_s(request: PolicyInput, view: WorkerView, now_s: float) -> float:
    return step_with(request, view)


@final
class Mooncake:
    def __init__(self) -> None:
        self._stages = TwoStage(prefill=ttft_s, decode=tbt_s, together=ttft_s, reason="least predicted TTFT")

    def __call__(
        self, request: PolicyInput, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView], now_s: float
    ) -> Decision:
        decision = self._stages(request, prefills, decodes, now_s)
        if request.is_resumed or not decision.candidates:
            return decision
        chosen = decision.candidates[0]
        over = _over(request, chosen)
        if over is None:
            return decision
        reason, retry_in_s = over
        return Decision(choice=Choice.REJECT, reason=reason, candidates=decision.candidates, retry_in_s=retry_in_s)


def _over(request: PolicyInput, chosen: Candidate) -> tuple[str, float] | None:
    """The reason for a rejection, and the retry time: when the queue is expected to be short enough."""
    slo = request.slo
    late_s = request.waited_s + chosen.ttft_s - slo.ttft_s
    if late_s > 0.0 and not request.bound_to:
        return f"predicted TTFT {request.waited_s + chosen.ttft_s:.3f} s is over {slo.ttft_s:.3f} s", late_s
    if chosen.tpot_s > slo.tpot_s:
        return f"predicted TBT {chosen.tpot_s:.4f} s is over {slo.tpot_s:.4f} s", 1.0
    return None
