"""`least-loaded`: the prefill worker with the fewest requests, the decode worker with the fewest sequences. Pure.

This is the shortest queue at arrival, as in DistServe's dispatcher. Load is the number of requests, whatever their
length. It includes requests in the worker's queue, and other routers' requests in its reports. Without prefill
workers, the policy takes the worker with the fewest sequences, including those that wait for their prefill.
"""

from __future__ import annotations

from typing import Final

from router.policy.interface import PolicyEntry, PolicyInput
from router.policy.two_stage import TwoStage, sequences
from router.state.view import WorkerView


def requests(request: PolicyInput, view: WorkerView, now_s: float) -> int:
    """Requests of a prefill worker: in its queue, sent to it, or computing there."""
    return view.prefills_ahead


POLICY: Final = PolicyEntry(
    make=lambda settings, links: TwoStage(prefill=requests, decode=sequences, together=sequences, reason="least loaded")
)
