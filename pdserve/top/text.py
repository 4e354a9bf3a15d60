"""What `pdserve top` shows, readable without colour: the last minute in numbers; bars and rows as text. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, final

from pdserve.client.results import Explanation
from pdserve.core.installation import versions_text
from pdserve.core.live import LiveFrame, LiveRequest, LiveWorker, LogLine, revisions_text
from pdserve.core.results import nearest_rank

# --- the last minute ------------------------------------------------------------------------------------------
# Rates and percentiles from frames, in bounded memory.

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


# --- numbers, bars and rows -----------------------------------------------------------------------------------

NONE: Final = "-"
#: Letter of each phase in a request's bar.
LETTERS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("prepare", "prefix_lookup", "queue", "reserve", "prefill_queue", "decode_queue"), "."),
    "prefill": "P",
    "transfer_wait": "T",
    "decode": "D",
    "preempted": "x",
    "messages": "-",
    "lost": "!",
}
LEGEND: Final = ". waits  P prefill  T transfer  D decode  - messages  x preempted  ! lost"
_BYTES: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def seconds(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:.2f} s" if value >= 1.0 else f"{value * 1e3:.0f} ms" if value >= 0.01 else f"{value * 1e3:.1f} ms"


def share(value: float | None) -> str:
    return NONE if value is None else f"{value:.0%}"


def num_bytes(value: float) -> str:
    for unit in _BYTES[:-1]:
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {_BYTES[-1]}"


def frame_versions(frame: LiveFrame) -> str:
    versions = versions_text(frame.version, [(one.worker_id[:16], one.version) for one in frame.workers])
    return ", ".join(filter(None, (versions, revisions_text(one.revision for one in frame.workers))))


def tile_lines(tiles: Tiles) -> tuple[str, str]:
    """Two lines of at most 80 characters."""
    return (
        f"{tiles.requests_per_s:.2f} req/s  in time {share(tiles.in_time)}  {tiles.tokens_per_s:.0f} tokens/s  "
        f"KV {num_bytes(tiles.transfer_bytes_per_s)}/s",
        f"TTFT {seconds(tiles.ttft_p50_s)}, p99 {seconds(tiles.ttft_p99_s)}  TPOT {seconds(tiles.tpot_p50_s)}, "
        f"p99 {seconds(tiles.tpot_p99_s)}  queue {tiles.queued}  rejected {tiles.rejected}",
    )


KV_CHARS: Final = 12  # of a worker's bar


def kv_bar(worker: LiveWorker, width: int) -> str:
    """`#` blocks in use, `:` cached, `.` free."""
    total = max(worker.num_blocks, 1)
    used = max(total - worker.free_blocks - worker.cached_blocks, 0)
    num_used = -(-used * width // total)
    num_cached = min(round(worker.cached_blocks * width / total), width - num_used)
    return "#" * num_used + ":" * num_cached + "." * (width - num_used - num_cached)


def worker_state(worker: LiveWorker) -> str:
    if not worker.is_connected:
        return "lost"
    return "drained" if worker.is_drained else "draining" if worker.is_draining else "ready"


def worker_row(worker: LiveWorker) -> tuple[str, ...]:
    return (
        worker.worker_id[:16],
        worker.role.value,
        worker_state(worker),
        str(worker.running),
        str(worker.waiting),
        kv_bar(worker, KV_CHARS),
        seconds(worker.step_s) if worker.step_s else NONE,
    )


def placement(request: LiveRequest) -> str:
    if not request.decode_worker:
        return NONE
    return f"{request.prefill_worker or '(local)'}>{request.decode_worker}"


def state(request: LiveRequest) -> str:
    return request.outcome or request.stage.replace("reserving_local", "reserving")


def bar(request: LiveRequest, now_s: float, window_s: float, width: int) -> str:
    """The phases of a request in the last `window_s` seconds, a letter for each `window_s / width`."""
    cells = [" "] * width
    begin_s, scale = now_s - window_s, width / window_s
    for name, phase_begin_s, seconds in request.phases:
        first = (request.arrived_s + phase_begin_s - begin_s) * scale
        last = first + seconds * scale
        for cell in range(max(int(first), 0), min(max(int(last), int(first) + 1), width)):
            if name != "messages" or cells[cell] == " ":
                cells[cell] = LETTERS.get(name, "-")
    return "".join(cells)


def request_row(request: LiveRequest, now_s: float, window_s: float, width: int) -> tuple[str, ...]:
    return (
        request.request_id[:8],
        state(request)[:10],
        placement(request)[:14],
        f"{request.prompt_tokens}+{request.output_tokens}",
        seconds(request.ttft_s),
        bar(request, now_s, window_s, width),
    )


def explanation_lines(found: Explanation) -> list[str]:
    """Why a request was placed where it was, and what then happened."""
    lines = [
        f"request    {found.request_id}",
        f"decision   {found.decision}: {found.reason}",
        f"targets    TTFT {seconds(found.slo_ttft_s)}, TPOT {seconds(found.slo_tpot_s)}",
        f"measured   TTFT {seconds(found.actual_ttft_s)}, TPOT {seconds(found.actual_tpot_s)}",
        f"state      {found.outcome or found.stage}{f': {found.ended_because}' if found.ended_because else ''}",
        "",
        f"{'':2}{'placement':<22}{'TTFT':>9}{'TPOT':>9}{'slack':>8}",
    ]
    for one in found.candidates:
        slack = NONE if one.slack is None else f"{one.slack:.2f}"
        where = f"{one.prefill_worker or '(local)'}>{one.decode_worker}"[:21]
        mark = ">" if one.is_chosen else " "
        predicted = f"{seconds(one.predicted_ttft_s):>9}{seconds(one.predicted_tpot_s):>9}"
        lines.append(f"{mark} {where:<22}{predicted}{slack:>8}{'' if one.is_feasible else '  misses a target'}")
    return lines


def log_lines(found: Sequence[LogLine]) -> list[str]:
    """Times are UTC."""
    times = [datetime.fromtimestamp(one.at_unix_s, UTC) for one in found]
    lines = [f"{at:%H:%M:%S}Z {one.level:<8} {one.text}" for at, one in zip(times, found, strict=True)]
    return lines or ["The worker has logged nothing yet."]
