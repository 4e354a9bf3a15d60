"""`least-ttft`: the pair with the earliest predicted first token, among those that meet every TPOT target. Pure.

    ttft(p, d) = queue(p) + prefill(uncached on p) + time until d grants blocks
    tpot(d)    = one step with all running and arriving requests of d, and this request

The first token is streamed immediately, so the part of the transfer that prefill does not hide delays the second token.
It counts in the choice, not in the predicted TTFT.

A prompt is placed local if it has few uncached tokens, if there is no prefill worker, or if that takes less than
LOCAL_ADVANTAGE of the best remote time (long queues, or a prefix that only the decode worker has). A local prefill may
use only the share of time that the targets of running requests leave.

The policy rejects a request only if its deadline is shorter than the best prediction, including the error band.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

from router.policy.availability import (
    is_decode_open,
    is_prefill_open,
    not_avoided,
    wait_for_decode,
    wait_for_prefill,
)
from router.policy.interface import PLAIN, Candidate, Choice, Decision, Links, PolicyEntry, PolicyInput
from router.state.load import TRUSTED_SAMPLES
from router.state.view import LoadEstimate, WorkerView

LOCAL_ADVANTAGE: Final = 0.5  # a local prefill delays running requests, so it must be twice as fast
PREFILLS_PAIRED: Final = 4  # cheapest of each role that are compared as pairs
DECODES_PAIRED: Final = 8
PAIRS_SHOWN: Final = 4  # in explanations, the best first
SMALLEST_SHARE: Final = 0.05  # minimum share of a decode worker's time for local prefills
HOPELESS_SIGMAS: Final = 2.0


class _Landing:
    """The costs of one request on a decode worker with room. Created for every worker, so it must be cheap."""

    __slots__ = ("keeps", "local_ttft_s", "num_bytes", "rank", "tpot_s", "uncached", "view")

    def __init__(self, view: WorkerView, estimated_load: LoadEstimate, request: PolicyInput, now_s: float) -> None:
        self.view = view
        tokens, hello = request.num_tokens, view.hello
        rows, _, context, _ = estimated_load
        base_s, per_row_s, per_context_token_s = view.cost.decode_coefficients
        step_s = base_s + per_row_s * rows + per_context_token_s * context
        self.tpot_s = tpot_s = step_s + per_row_s + per_context_token_s * tokens
        tightest_s = view.tightest_tpot_s
        self.keeps = keeps = tpot_s <= request.slo.tpot_s and tpot_s <= tightest_s
        cached = request.cached_tokens.get(view.worker_id, 0)
        self.uncached = uncached = tokens - cached if cached < tokens else 1
        self.num_bytes = -(-uncached // hello.block_size) * hello.block_bytes
        alone_s = view.cost.prefill_s(uncached, tokens - uncached, hello.max_batch_tokens)
        if rows:
            # Chunks run between steps, so one step must fit into each interval of the TPOT target.
            share = 1.0 - step_s / tightest_s
            alone_s /= share if share > SMALLEST_SHARE else SMALLEST_SHARE
        grant_s, queue_s = view.grant_wait_s, view.free_at_s - now_s
        self.local_ttft_s = alone_s + grant_s + queue_s if queue_s > 0.0 else alone_s + grant_s
        if request.reads:
            self.local_ttft_s += request.read_wait_s(view.worker_id, view.queue_s(now_s))
            lacking = tokens - request.kept_on(view)
            self.num_bytes = -(-max(lacking, 1) // hello.block_size) * hello.block_bytes
        self.rank = (not keeps, grant_s, tpot_s)


class LeastTtft:
    def __init__(self, local_max_uncached_tokens: int, links: Links) -> None:
        self._local_max_uncached_tokens = local_max_uncached_tokens
        self._links = links

    def __call__(
        self, request: PolicyInput, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView], now_s: float
    ) -> Decision:
        room = []
        for view in not_avoided(decodes, request):
            estimated_load = view.estimated_load()
            if is_decode_open(view, estimated_load, request, now_s):
                room.append(_Landing(view, estimated_load, request, now_s))
        if not room:
            return wait_for_decode(decodes, now_s)
        room.sort(key=_rank)
        local = min(room, key=_local_rank)
        short = [one for one in room if one.uncached <= self._local_max_uncached_tokens]
        if short:
            local = min(short, key=_local_rank)
            reason = f"{local.uncached} uncached tokens are cheapest where they are decoded"
            return _local(_candidate(request, None, local, local.local_ttft_s), (), reason)
        candidate = _candidate(request, None, local, local.local_ttft_s)
        if not prefills:
            return _unless_hopeless(request, local.view, _local(candidate, (), "no prefill worker"))
        return _unless_hopeless(request, local.view, self._compare(request, prefills, room, candidate, now_s))

    def _compare(
        self,
        request: PolicyInput,
        prefills: Sequence[WorkerView],
        room: Sequence[_Landing],
        local: Candidate,
        now_s: float,
    ) -> Decision:
        starts = []  # (seconds until the first token is sampled, worker id, seconds of prefill only, view)
        tokens = request.num_tokens
        for view in not_avoided(prefills, request):
            cached = request.cached_on(view)
            prefill_s = view.prefill_s(tokens - cached, cached)
            queue_s = view.queue_s(now_s)
            start_s = queue_s + request.read_wait_s(view.worker_id, queue_s) + prefill_s
            starts.append((start_s, view.hello.worker_id, prefill_s, view))
        starts.sort()  # worker ids are unique, so views are never compared
        ready = list(islice((one for one in starts if is_prefill_open(one[3], request, now_s)), PREFILLS_PAIRED))
        pairs = []
        for start_s, prefill_id, prefill_s, prefill in ready:
            for order, landing in enumerate(room[:DECODES_PAIRED]):
                view = landing.view
                if request.avoid_pairs and (prefill_id, view.worker_id) in request.avoid_pairs:
                    continue
                unhidden_s = self._links(prefill_id, view.worker_id).transfer_s(landing.num_bytes) - prefill_s
                ttft_s = start_s + view.grant_wait_s
                whole_s = ttft_s + unhidden_s if unhidden_s > 0.0 else ttft_s
                pairs.append((not landing.keeps, whole_s, landing.tpot_s, prefill_id, order, ttft_s, prefill, landing))
        pairs.sort()  # prefill id and order make each one unique
        shown = tuple([_candidate(request, one[6], one[7], one[5]) for one in pairs[:PAIRS_SHOWN]])
        remote_s = shown[0].ttft_s if shown else starts[0][0]
        if local.is_feasible and local.ttft_s < LOCAL_ADVANTAGE * remote_s:
            return _local(local, shown, f"local {local.ttft_s:.3f} s, best remote {remote_s:.3f} s")
        if shown:
            return _remote(shown[0], (*shown, local))
        if ready:
            return _local(local, shown, "this request has failed on every available pair")
        return wait_for_prefill(prefills, now_s)


def _rank(landing: _Landing) -> tuple[bool, float, float]:
    return landing.rank


def _local_rank(landing: _Landing) -> tuple[bool, float, float]:
    return (not landing.keeps, landing.local_ttft_s, landing.tpot_s)


def _unless_hopeless(request: PolicyInput, decode: WorkerView, decision: Decision) -> Decision:
    """Rejects a request that is certain to miss its deadline; otherwise returns `decision`. A started request is not
    rejected."""
    left_s, cost = request.deadline_left_s, decode.cost
    if left_s is None or request.is_resumed or not decision.candidates or cost.num_prefill_samples < TRUSTED_SAMPLES:
        return decision
    surely_s = min(one.ttft_s for one in decision.candidates) * (1.0 - HOPELESS_SIGMAS * cost.prefill_error)
    if surely_s <= left_s:
        return decision
    return Decision(
        choice=Choice.REJECT,
        reason=f"the first token needs at least {surely_s:.3f} s, the deadline leaves {left_s:.3f} s",
        candidates=decision.candidates,
        retry_in_s=1.0,
    )


def _candidate(request: PolicyInput, prefill: WorkerView | None, landing: _Landing, ttft_s: float) -> Candidate:
    slo = request.slo
    ttft_slack = (slo.ttft_s - request.waited_s - ttft_s) / slo.ttft_s
    tpot_slack = (slo.tpot_s - landing.tpot_s) / slo.tpot_s
    return Candidate(
        prefill_worker=prefill.worker_id if prefill is not None else "",
        decode_worker=landing.view.worker_id,
        ttft_s=ttft_s,
        tpot_s=landing.tpot_s,
        slack=min(ttft_slack, tpot_slack),
        is_feasible=landing.keeps,
    )


def _local(candidate: Candidate, others: tuple[Candidate, ...], reason: str) -> Decision:
    shown = (candidate, *others)
    return Decision(choice=Choice.LOCAL, decode_worker=candidate.decode_worker, reason=reason, candidates=shown)


def _remote(candidate: Candidate, shown: tuple[Candidate, ...]) -> Decision:
    kept = "keeping TPOT" if candidate.is_feasible else "although no decode worker meets every TPOT target"
    return Decision(
        choice=Choice.REMOTE,
        prefill_worker=candidate.prefill_worker,
        decode_worker=candidate.decode_worker,
        reason=f"least predicted TTFT {candidate.ttft_s:.3f} s, {kept}",
        candidates=shown,
    )


POLICY: Final = PolicyEntry(
    make=lambda settings, links: LeastTtft(settings.local_max_uncached_tokens, links),
    rules=PLAIN | {"least-slack", "ageing"},  # the order of the queue, without tenants and rejections
)
