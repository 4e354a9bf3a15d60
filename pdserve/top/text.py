"""Numbers, bars and rows of `pdserve top` as text, readable without colour. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from pdserve.client.results import Explanation
from pdserve.core.live import LiveFrame, LiveRequest, LiveWorker
from pdserve.core.log_line import LogLine
from pdserve.core.version import versions_text
from pdserve.top.history import Tiles

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
    return versions_text(frame.version, [(one.worker_id[:16], one.version) for one in frame.workers])


def tile_lines(tiles: Tiles) -> tuple[str, str]:
    """Two lines of at most 80 characters."""
    return (
        f"{tiles.requests_per_s:.2f} req/s  in time {share(tiles.in_time)}  {tiles.tokens_per_s:.0f} tokens/s  "
        f"KV {num_bytes(tiles.transfer_bytes_per_s)}/s",
        f"TTFT {seconds(tiles.ttft_p50_s)}, p99 {seconds(tiles.ttft_p99_s)}  TPOT {seconds(tiles.tpot_p50_s)}, "
        f"p99 {seconds(tiles.tpot_p99_s)}  queue {tiles.queued}  rejected {tiles.rejected}",
    )


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


def worker_row(worker: LiveWorker, width: int = 12) -> tuple[str, ...]:
    return (
        worker.worker_id[:16],
        worker.role.value,
        worker_state(worker),
        str(worker.running),
        str(worker.waiting),
        kv_bar(worker, width),
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
