"""`mooncake`: Algorithm 1 of Mooncake's paper, in seconds of the shared cost model. Pure.

    TTFT(p) = T_queue(p) + T_prefill(len, prefix on p)         the prefill worker with the least is chosen
    TBT(d)  = a decode step that also has this request         the decode worker with the least is chosen
    rejected if the predicted TTFT or TBT is over the request's SLO

Deviations:

- Mooncake may copy the best prefix from another worker (T_transfer), if best / local prefix is above a manual
  threshold. Here only the policy goodput lets workers pull prefixes, so a prefix counts only on the worker that has it.
- The paper checks TBT at arrival. Here the decode worker is chosen when the prefill can start, so TBT is checked
  then as well, still before any computation.
- The TTFT that is compared with the target includes the mean wait for a decode worker's grant, and the time that
  the request has waited.
- A started request is not rejected. Without prefill workers, one worker's TTFT and TBT are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from router.policy.interface import Candidate, Choice, Decision, PolicyEntry, PolicyInput
from router.policy.two_stage import TwoStage, prefill_s, queued_prefill_s, step_with
from router.state.view import WorkerView


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


POLICY: Final = PolicyEntry(make=lambda settings, links: Mooncake())
