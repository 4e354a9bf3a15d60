"""`least-loaded`: the prefill worker with the fewest requests, the decode worker with the fewest sequences. Pure.

The shortest queue at arrival, as DistServe's dispatcher takes it (scheduling.md 1.1). Load is counted in requests,
whatever their length. Requests in the worker's line count; of other routers' work what its reports tell.
Without prefill workers: the fewest sequences, those that still wait for their prompt included.
"""

from __future__ import annotations

from router.policy.interface import Ask
from router.policy.two_stage import TwoStage, queued_prefill_s
from router.view import WorkerView


def requests(ask: Ask, view: WorkerView, now_s: float) -> int:
    """On a prefill worker: in its line, on their way to it, or computing there."""
    return view.prefills_ahead


def sequences(ask: Ask, view: WorkerView, now_s: float) -> tuple[int, float]:
    """On a decode worker, those on their way included; equal ones by the prompts that are still to be computed."""
    return view.beliefs()[0], queued_prefill_s(view, now_s)


def make_least_loaded() -> TwoStage:
    return TwoStage(prefill=requests, decode=sequences, together=sequences, reason="least loaded")
