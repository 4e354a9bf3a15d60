"""`least-loaded`: the prefill worker with the fewest requests, the decode worker with the fewest sequences. Pure.

The shortest queue at arrival, as in DistServe's dispatcher (scheduling.md 1.1). Load is the number of requests,
whatever their length. It includes requests in the worker's queue, and other routers' requests in its reports. Without
prefill workers, the policy takes the worker with the fewest sequences, including those that wait for their prefill.
"""

from __future__ import annotations

from router.policy.interface import PolicyInput
from router.policy.two_stage import TwoStage, queued_prefill_s
from router.view import WorkerView


def requests(request: PolicyInput, view: WorkerView, now_s: float) -> int:
    """Requests of a prefill worker: in its queue, sent to it, or computing there."""
    return view.prefills_ahead


def sequences(request: PolicyInput, view: WorkerView, now_s: float) -> tuple[int, float]:
    """Sequences of a decode worker, including arriving ones; ties are broken by the prompts to compute."""
    return view.estimated_load()[0], queued_prefill_s(view, now_s)


def make_least_loaded() -> TwoStage:
    return TwoStage(prefill=requests, decode=sequences, together=sequences, reason="least loaded")
