"""Makes frames of the live view from a recording, by feeding its events to a new router state. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, final

from pdserve.core.live import PERIOD_S, LiveFrame
from router import replay
from router.explaining import DecisionRecord
from router.state import RouterState

MAX_FRAMES: Final = 2400  # ten minutes; a longer recording has a longer period
MAX_ROWS: Final = 64  # requests in progress in one frame
MAX_EXPLAINED: Final = 1000  # the latest requests, with their explanations


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Playback:
    frames: tuple[LiveFrame, ...]
    explanations: tuple[DecisionRecord, ...]
    period_s: float


def play(lines: Iterable[str], period_s: float = PERIOD_S, most_frames: int = MAX_FRAMES) -> Playback:
    """Makes a frame every `period_s`, or less often if there would be more than `most_frames`. Raises
    RecordingError."""
    rows = iter(lines)
    settings = replay.read_settings(next(rows, ""))
    state = RouterState(replace(settings, explain_capacity=max(settings.explain_capacity, MAX_EXPLAINED)))
    frames: list[LiveFrame] = []
    for frame in _frames(state, replay.read(rows), period_s):
        frames.append(frame)
        if len(frames) > most_frames:
            frames = _halved(frames)
    span_s = frames[-1].at_s - frames[0].at_s if frames else 0.0
    return Playback(
        frames=tuple(frames),
        explanations=tuple(_explanations(state, frames)),
        period_s=max(period_s, span_s / max(len(frames) - 1, 1)),
    )


def _frames(state: RouterState, steps: Iterator[replay.Step], period_s: float) -> Iterator[LiveFrame]:
    """A frame after each period in which something happened, and one of the last state."""
    shown_s: float | None = None
    at_s, num_seen, is_new = 0.0, 0, False
    for step in steps:
        if shown_s is None:
            shown_s = step.now_s
        if is_new and step.now_s >= shown_s + period_s:
            yield state.live_frame(at_s, num_seen, MAX_ROWS)
            num_seen, shown_s, is_new = state.num_ended, step.now_s, False
        state.handle(step.event, step.now_s)
        at_s, is_new = step.now_s, True
    if is_new:
        yield state.live_frame(at_s, num_seen, MAX_ROWS)


def _halved(frames: list[LiveFrame]) -> list[LiveFrame]:
    """Every second frame, with the requests that ended in the dropped ones."""
    kept = []
    for first, second in zip(frames[::2], frames[1::2], strict=False):
        ended = (one for one in first.requests if one.ended_s is not None)
        kept.append(replace(second, requests=tuple(chain(second.requests, ended))))
    if len(frames) % 2:
        kept.append(frames[-1])
    return kept


def _explanations(state: RouterState, frames: Iterable[LiveFrame]) -> Iterator[DecisionRecord]:
    names = dict.fromkeys(one.request_id for frame in frames for one in frame.requests)
    for name in list(names)[-MAX_EXPLAINED:]:
        if (found := state.explain(name)) is not None:
            yield found
