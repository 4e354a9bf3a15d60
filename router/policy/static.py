"""The simplest policies, for comparison and for tests that want one path. Pure.

`round-robin`: each role in turn, remote as long as there is a prefill worker. `colocated`: no prefill worker is
used; the decode worker with the fewest sequences does everything, in chunks between its decode steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policy.interface import Ask, Choice, Decision
from router.policy.rooms import (
    is_decode_open,
    is_prefill_open,
    not_avoided,
    wait_for_decode,
    wait_for_prefill,
)
from router.view import WorkerView


class RoundRobin:
    def __init__(self) -> None:
        self._last_prefill = ""
        self._last_decode = ""

    def __call__(
        self, ask: Ask, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView], now_s: float
    ) -> Decision:
        decode = _after(self._last_decode, _with_room(ask, decodes, now_s))
        if decode is None:
            return wait_for_decode(decodes, now_s)
        pairs = [v for v in not_avoided(prefills, ask) if (v.worker_id, decode.worker_id) not in ask.avoid_pairs]
        if not pairs:
            self._last_decode = decode.worker_id
            return Decision(choice=Choice.LOCAL, decode_worker=decode.worker_id, reason="no prefill worker to turn to")
        prefill = _after(self._last_prefill, [v for v in pairs if is_prefill_open(v, ask, now_s)])
        if prefill is None:
            return wait_for_prefill(pairs, now_s)
        self._last_prefill, self._last_decode = prefill.worker_id, decode.worker_id
        return Decision(
            choice=Choice.REMOTE,
            prefill_worker=prefill.worker_id,
            decode_worker=decode.worker_id,
            reason="next in turn",
        )


def colocated(ask: Ask, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView], now_s: float) -> Decision:
    room = _with_room(ask, decodes, now_s)
    if not room:
        return wait_for_decode(decodes, now_s)
    chosen = min(room, key=lambda view: (view.beliefs()[0], view.queue_s(now_s), view.worker_id))
    return Decision(choice=Choice.LOCAL, decode_worker=chosen.worker_id, reason="fewest sequences")


def _with_room(ask: Ask, decodes: Sequence[WorkerView], now_s: float) -> list[WorkerView]:
    return [view for view in not_avoided(decodes, ask) if is_decode_open(view, view.beliefs(), ask, now_s)]


def _after(last: str, views: Sequence[WorkerView]) -> WorkerView | None:
    """The next worker id in order after `last`, round the circle."""
    return min(views, key=lambda view: (view.worker_id <= last, view.worker_id), default=None)
