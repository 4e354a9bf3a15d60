"""`least-ttft`: the pair that promises the first token soonest, among those that keep everybody's TPOT. Pure.

    ttft(p, d) = queue(p) + prefill(uncached on p) + what d takes to grant
    tpot(d)    = one step with all residents, all that is on its way to d, and this request

The part of the transfer that the prefill does not hide delays the second token, not the first, which the router
streams at once: it counts in the choice, not in the prediction.

Local, on the decode worker itself: short uncached prompts; no prefill worker; or when that is predicted to take
less than LOCAL_ADVANTAGE of the best remote way (long queues, a prefix that only the decode worker holds). Its
prefill may use only the share of time that the residents' promises leave.

Nothing is refused because an SLO will be missed: a slow machine serves slowly. Only a deadline that is shorter than
the best prediction, band included, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from pdserve.core.latency import LinkModel
from router.policy.interface import Ask, Candidate, Choice, Decision
from router.policy.rooms import (
    is_decode_open,
    is_prefill_open,
    not_avoided,
    wait_for_decode,
    wait_for_prefill,
)
from router.view import WorkerView

Links = Callable[[str, str], LinkModel]

LOCAL_ADVANTAGE: Final = 0.5  # residents pay for a local prefill, so it must be twice as fast
PREFILLS_PAIRED: Final = 4  # cheapest of each role that are priced as pairs
DECODES_PAIRED: Final = 8
TRUSTED_SAMPLES: Final = 16  # batches seen before a deadline is called hopeless
HOPELESS_SIGMAS: Final = 2.0


class _Landing:
    """A decode worker, priced for one request."""

    __slots__ = ("is_open", "keeps", "local_ttft_s", "rank", "tpot_s", "uncached", "view")

    def __init__(self, view: WorkerView, ask: Ask, now_s: float) -> None:
        self.view = view
        self.tpot_s = view.tpot_with_s(ask.num_tokens)
        tightest_s = view.tightest_tpot_s
        self.keeps = self.tpot_s <= ask.slo.tpot_s and self.tpot_s <= tightest_s
        self.is_open = is_decode_open(view, ask, now_s)
        cached = ask.cached_on(view)
        self.uncached = ask.num_tokens - cached
        alone_s = view.prefill_s(self.uncached, cached)
        rows = view.num_rows
        if rows:
            # Chunks run between steps: per promised token time, a step's worth is taken already.
            step_s = view.cost.decode_s(rows, view.context_tokens)
            share = 1.0 - step_s / tightest_s if step_s < tightest_s else 0.0
            alone_s = alone_s / max(share, 0.05)
        self.local_ttft_s = view.queue_s(now_s) + alone_s + view.grant_wait_s
        self.rank = (not self.keeps, view.grant_wait_s, self.tpot_s)


class LeastTtft:
    def __init__(self, local_max_uncached_tokens: int, links: Links) -> None:
        self._local_max_uncached_tokens = local_max_uncached_tokens
        self._links = links

    def __call__(
        self, ask: Ask, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView], now_s: float
    ) -> Decision:
        landings = [_Landing(view, ask, now_s) for view in not_avoided(decodes, ask)]
        landings.sort(key=lambda one: one.rank)
        room = [one for one in landings if one.is_open]
        if not room:
            return wait_for_decode(decodes, now_s)
        local = min(room, key=lambda one: (not one.keeps, one.local_ttft_s, one.tpot_s))
        local_candidate = _candidate(ask, None, local, local.local_ttft_s, is_open=True)
        short = [one for one in room if one.uncached <= self._local_max_uncached_tokens]
        if short:
            best = min(short, key=lambda one: (not one.keeps, one.local_ttft_s, one.tpot_s))
            chosen = _candidate(ask, None, best, best.local_ttft_s, is_open=True)
            return _local(chosen, (chosen,), f"{best.uncached} uncached tokens are cheapest where they are decoded")
        if not prefills:
            return self._or_refuse(ask, local, _local(local_candidate, (local_candidate,), "no prefill worker"))
        return self._or_refuse(ask, local, self._compare(ask, prefills, decodes, room, local_candidate, now_s))

    def _compare(
        self,
        ask: Ask,
        prefills: Sequence[WorkerView],
        decodes: Sequence[WorkerView],
        room: Sequence[_Landing],
        local: Candidate,
        now_s: float,
    ) -> Decision:
        starts = []  # (seconds until the first token is drawn, view, seconds of prefill alone)
        for view in not_avoided(prefills, ask):
            cached = ask.cached_on(view)
            prefill_s = view.prefill_s(ask.num_tokens - cached, cached)
            starts.append((view.queue_s(now_s) + prefill_s, view, prefill_s))
        starts.sort(key=lambda one: (one[0], one[1].worker_id))
        soonest_s = starts[0][0]
        ready = [one for one in starts if is_prefill_open(one[1], ask, now_s)]
        best: tuple[bool, float, float] | None = None
        chosen: Candidate | None = None
        candidates: list[Candidate] = []
        for start_s, prefill, prefill_s in ready[:PREFILLS_PAIRED]:
            for landing in room[:DECODES_PAIRED]:
                pair = (prefill.worker_id, landing.view.worker_id)
                if pair in ask.avoid_pairs:
                    continue
                unhidden_s = max(self._transfer_s(prefill, landing) - prefill_s, 0.0)
                ttft_s = start_s + landing.view.grant_wait_s
                rank = (not landing.keeps, ttft_s + unhidden_s, landing.tpot_s)
                candidate = _candidate(ask, prefill, landing, ttft_s, is_open=True)
                candidates.append(candidate)
                if best is None or rank < best:
                    best, chosen = rank, candidate
        shown = (*candidates, local)
        remote_s = chosen.ttft_s if chosen is not None else soonest_s
        if local.is_feasible and local.ttft_s < LOCAL_ADVANTAGE * remote_s:
            return _local(local, shown, f"local {local.ttft_s:.3f} s, best remote {remote_s:.3f} s")
        if chosen is not None:
            return _remote(chosen, shown)
        if ready and ask.avoid_pairs:
            return _local(local, shown, "every pair that is open has failed this request")
        return wait_for_prefill(prefills, now_s)

    def _transfer_s(self, prefill: WorkerView, landing: _Landing) -> float:
        view = landing.view
        num_bytes = view.blocks_for(landing.uncached) * view.hello.block_bytes
        return self._links(prefill.worker_id, view.worker_id).transfer_s(num_bytes)

    def _or_refuse(self, ask: Ask, local: _Landing, decision: Decision) -> Decision:
        """Refuses what is certain to end in vain; `decision` otherwise."""
        if ask.deadline_left_s is None or ask.is_resumed or decision.choice is Choice.WAIT:
            return decision
        chosen = next((one for one in decision.candidates if _is_chosen(one, decision)), None)
        cost = local.view.cost
        if chosen is None or cost.num_prefill_samples < TRUSTED_SAMPLES:
            return decision
        surely_s = chosen.ttft_s * (1.0 - HOPELESS_SIGMAS * cost.prefill_error)
        if surely_s <= ask.deadline_left_s:
            return decision
        return Decision(
            choice=Choice.REFUSE,
            reason=f"the first token needs at least {surely_s:.3f} s, the deadline leaves {ask.deadline_left_s:.3f} s",
            candidates=decision.candidates,
            retry_in_s=1.0,
        )


def _is_chosen(candidate: Candidate, decision: Decision) -> bool:
    pair = (decision.prefill_worker, decision.decode_worker)
    return (candidate.prefill_worker, candidate.decode_worker) == pair


def _candidate(ask: Ask, prefill: WorkerView | None, landing: _Landing, ttft_s: float, *, is_open: bool) -> Candidate:
    slo = ask.slo
    ttft_slack = (slo.ttft_s - ask.waited_s - ttft_s) / slo.ttft_s
    tpot_slack = (slo.tpot_s - landing.tpot_s) / slo.tpot_s
    return Candidate(
        prefill_worker=prefill.worker_id if prefill is not None else "",
        decode_worker=landing.view.worker_id,
        ttft_s=ttft_s,
        tpot_s=landing.tpot_s,
        slack=min(ttft_slack, tpot_slack),
        is_open=is_open,
        is_feasible=is_open and landing.keeps,
    )


def _local(candidate: Candidate, shown: tuple[Candidate, ...], reason: str) -> Decision:
    return Decision(choice=Choice.LOCAL, decode_worker=candidate.decode_worker, reason=reason, candidates=shown)


def _remote(candidate: Candidate, shown: tuple[Candidate, ...]) -> Decision:
    kept = "keeping TPOT" if candidate.is_feasible else "though TPOT is not kept anywhere"
    return Decision(
        choice=Choice.REMOTE,
        prefill_worker=candidate.prefill_worker,
        decode_worker=candidate.decode_worker,
        reason=f"least predicted TTFT {candidate.ttft_s:.3f} s, {kept}",
        candidates=shown,
    )
