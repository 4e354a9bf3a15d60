"""`round-robin`: takes the workers of each role in turn, by worker id, like the proxies of vLLM and Mooncake. Pure.

Deviation: a decode worker without room is skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from router.policy.interface import Choice, Decision, PolicyEntry, PolicyInput
from router.policy.two_stage import TwoStage
from router.state.view import WorkerView


@final
class RoundRobin:
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


POLICY: Final = PolicyEntry(make=lambda settings, links: RoundRobin())
