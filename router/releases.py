"""Ended requests for which a worker may still hold memory. Their answers count as in progress until it is free.
Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import final

from pdserve.core.protocol import Load
from router.events import Event, TimePassed, WorkerForgotten, WorkerLost
from router.quotas import AnswerClaim


@final
class PendingReleases:
    def __init__(self, knows: Callable[[str], bool]) -> None:
        """`knows(request_id)` is true until no worker holds memory for the request."""
        self._knows = knows
        self._claims: dict[str, AnswerClaim] = {}

    def ended(self, request_id: str, claim: AnswerClaim, now_s: float) -> None:
        """The request has ended."""
        former = self._claims.get(request_id)
        if former is not None:  # the id was reused before the release was noticed
            former.release(now_s)
        self._claims[request_id] = claim
        self._release((request_id,), now_s)

    def after(self, event: Event, now_s: float) -> None:
        """Called after the state has handled an event. A message about an attempt can free only its own request. The
        passing of time can free any request, because it ends the wait for workers that never answer."""
        if not self._claims:
            return
        key = getattr(event, "key", None)
        if key is not None:
            self._release((key.request_id,), now_s)
        elif isinstance(event, Load | WorkerLost | WorkerForgotten | TimePassed):
            self._release(list(self._claims), now_s)

    def _release(self, request_ids: Iterable[str], now_s: float) -> None:
        for request_id in request_ids:
            if request_id in self._claims and not self._knows(request_id):
                self._claims.pop(request_id).release(now_s)
