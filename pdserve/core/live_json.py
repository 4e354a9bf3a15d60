"""Converts a frame of the live view to the JSON that the page reads. Pure."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, Final

from pdserve.core.live import LiveFrame, LiveRequest, LiveWorker

DIGITS: Final = 6  # decimals of seconds, that is, microseconds
_WORKER: Final = tuple(one.name for one in fields(LiveWorker) if one.name != "role")
_REQUEST: Final = tuple(one.name for one in fields(LiveRequest) if one.name != "phases")


def frame_to_json(frame: LiveFrame) -> dict[str, Any]:
    return {
        "at_s": frame.at_s,
        "queued": frame.queued,
        "running": frame.running,
        "omitted": frame.omitted,
        "version": frame.version,
        "totals": asdict(frame.totals),
        "workers": [
            {"role": one.role.value, **{name: _rounded(getattr(one, name)) for name in _WORKER}}
            for one in frame.workers
        ],
        "requests": [_request(one) for one in frame.requests],
    }


def _request(one: LiveRequest) -> dict[str, Any]:
    row = {name: _rounded(getattr(one, name)) for name in _REQUEST}
    row["phases"] = [[name, _rounded(begin_s), _rounded(seconds)] for name, begin_s, seconds in one.phases]
    return row


def _rounded(value: Any) -> Any:
    return round(value, DIGITS) if isinstance(value, float) else value
