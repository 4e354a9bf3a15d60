"""Frames for tests of the terminal's live view."""

from __future__ import annotations

from typing import Any

from pdserve.core.live import LiveFrame, LivePhases, LiveRequest, LiveTotals, LiveWorker
from pdserve.core.types import Role


def worker(worker_id: str = "d0", **fields: Any) -> LiveWorker:
    values: dict[str, Any] = {
        "role": Role.PREFILL if worker_id.startswith("p") else Role.DECODE,
        "endpoint": "127.0.0.1:1",
        "is_connected": True,
        "is_draining": False,
        "is_drained": False,
        "running": 2,
        "waiting": 1,
        "booked": 3,
        "num_blocks": 100,
        "free_blocks": 60,
        "cached_blocks": 20,
        "context_tokens": 10,
        "pending_prefill_tokens": 0,
        "steps": 5,
        "step_s": 0.02,
        "silent_s": 0.0,
        "preemptions": 0,
    }
    return LiveWorker(worker_id=worker_id, **(values | fields))


def request(request_id: str = "a", **fields: Any) -> LiveRequest:
    values: dict[str, Any] = {
        "stage": "decoding",
        "tenant": "",
        "priority": 0,
        "prompt_tokens": 100,
        "cached_tokens": 0,
        "output_tokens": 5,
        "max_tokens": 50,
        "prefill_worker": "p0",
        "decode_worker": "d0",
        "attempt": 1,
        "preemptions": 0,
        "arrived_s": 100.0,
        "ended_s": None,
        "outcome": "",
        "why": "",
        "retry_after_s": None,
        "ttft_s": 0.25,
        "tpot_s": 0.02,
        "slo_ttft_s": 1.0,
        "slo_tpot_s": 0.1,
        "predicted_ttft_s": 0.2,
        "predicted_tpot_s": 0.02,
        "transfer_bytes": 1024,
        "transfer_s": 0.01,
        "phases": LivePhases(("prefill",), (0.0,), (0.25,)),
    }
    return LiveRequest(request_id=request_id, **(values | fields))


def ended(request_id: str, at_s: float, outcome: str = "served", **fields: Any) -> LiveRequest:
    return request(request_id, stage="ended", outcome=outcome, ended_s=at_s, **fields)


def frame(
    at_s: float, *requests: LiveRequest, workers: tuple[LiveWorker, ...] | None = None, **totals: int
) -> LiveFrame:
    return LiveFrame(
        at_s=at_s,
        queued=0,
        running=sum(one.ended_s is None for one in requests),
        omitted=0,
        totals=LiveTotals(**totals),
        workers=(worker("d0"), worker("p0")) if workers is None else workers,
        requests=requests,
    )
