"""What the terminal shows of the last minute: rates and percentiles from frames, in bounded memory. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from pdserve.core.live import LiveFrame, LiveRequest
from pdserve.core.percentiles import nearest_rank

WINDOW_S: Final = 60.0  # of ended requests
RATE_S: Final = 5.0  # of tokens and bytes
MAX_ENDED: Final = 2000
MAX_NOTES: Final = 50
FINISHED: Final = ("served", "late")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Of the last minute, except tokens, bytes and what is in progress now. None: no request says so."""

    requests_per_s: float
    in_time: float | None  # share of the requests that ended, without cancelled ones
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    tokens_per_s: float
    transfer_bytes_per_s: float
    queued: int
    running: int
    rejected: int


@dataclass(frozen=True, slots=True)
class Note:
    at_s: float
    text: str


@final
class History:
    def __init__(self) -> None:
        self.frame: LiveFrame | None = None
        self.notes: deque[Note] = deque(maxlen=MAX_NOTES)
        self._ended: deque[LiveRequest] = deque(maxlen=MAX_ENDED)
        self._counts: deque[tuple[float, int, int]] = deque()  # time, output tokens, bytes
        self._began_s: float | None = None

    def ingest(self, frame: LiveFrame) -> None:
        self._note_workers(frame)
        self.frame = frame
        if self._began_s is None:
            self._began_s = min([one.arrived_s for one in frame.requests], default=frame.at_s)
        live = [one for one in frame.requests if one.ended_s is None]
        for one in frame.requests:
            if one.ended_s is not None:
                self._ended.append(one)
                self._note_end(one, one.ended_s)
        while self._ended and (self._ended[0].ended_s or 0.0) < frame.at_s - WINDOW_S:
            self._ended.popleft()
        tokens = frame.totals.output_tokens + sum(one.output_tokens for one in live)
        transferred = frame.totals.transfer_bytes + sum(one.transfer_bytes for one in live)
        self._counts.append((frame.at_s, tokens, transferred))
        while len(self._counts) > 2 and self._counts[1][0] <= frame.at_s - RATE_S:
            self._counts.popleft()

    def requests(self) -> list[LiveRequest]:
        """Those in progress by arrival, then the ended ones, the last first."""
        if self.frame is None:
            return []
        live = sorted((one for one in self.frame.requests if one.ended_s is None), key=lambda one: one.arrived_s)
        return [*live, *reversed(self._ended)]

    def tiles(self) -> Tiles | None:
        """None before the first frame."""
        frame = self.frame
        if frame is None or self._began_s is None:
            return None
        span_s = max(min(frame.at_s - self._began_s, WINDOW_S), 1.0)
        judged = [one for one in self._ended if one.outcome != "cancelled"]
        finished = [one for one in self._ended if one.outcome in FINISHED]
        ttfts = [one.ttft_s for one in finished if one.ttft_s is not None]
        tpots = [one.tpot_s for one in finished if one.tpot_s is not None]
        (first_s, tokens, transferred), (last_s, tokens_now, transferred_now) = self._counts[0], self._counts[-1]
        passed_s = max(last_s - first_s, 1e-9)
        has_rate = last_s > first_s
        return Tiles(
            requests_per_s=len(self._ended) / span_s,
            in_time=sum(one.outcome == "served" for one in judged) / len(judged) if judged else None,
            ttft_p50_s=percentile(ttfts, 0.5),
            ttft_p99_s=percentile(ttfts, 0.99),
            tpot_p50_s=percentile(tpots, 0.5),
            tpot_p99_s=percentile(tpots, 0.99),
            # A cancelled request's tokens leave the sum, so it may fall.
            tokens_per_s=max(tokens_now - tokens, 0) / passed_s if has_rate else 0.0,
            transfer_bytes_per_s=max(transferred_now - transferred, 0) / passed_s if has_rate else 0.0,
            queued=frame.queued,
            running=frame.running,
            rejected=sum(one.outcome == "rejected" for one in self._ended),
        )

    # -- notes -----------------------------------------------------------------------------------------------------

    def _note_workers(self, frame: LiveFrame) -> None:
        if self.frame is None:
            return
        before = {one.worker_id: one for one in self.frame.workers}
        for one in frame.workers:
            was = before.pop(one.worker_id, None)
            if was is None or (one.is_connected and not was.is_connected):
                self._note(frame.at_s, f"{one.worker_id} connected")
            elif was.is_connected and not one.is_connected:
                self._note(frame.at_s, f"{one.worker_id} lost")
            elif one.preemptions > was.preemptions:
                count = one.preemptions - was.preemptions
                self._note(frame.at_s, f"{one.worker_id} preempted {count} for lack of KV blocks")
            elif one.is_drained != was.is_drained:
                self._note(frame.at_s, f"{one.worker_id} {'drained' if one.is_drained else 'resumed'} by an operator")
        for worker_id in before:
            self._note(frame.at_s, f"{worker_id} gone")

    def _note_end(self, one: LiveRequest, ended_s: float) -> None:
        if one.outcome in ("rejected", "failed", "expired"):
            self._note(ended_s, f"{one.request_id[:16]} {one.outcome}: {one.why or 'no reason was given'}")

    def _note(self, at_s: float, text: str) -> None:
        self.notes.append(Note(at_s, text))


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest rank; None without values."""
    if not values:
        return None
    return nearest_rank(sorted(values), share)
