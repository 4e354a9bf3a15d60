"""`pdserve play FILE`: shows a recording in the live view, as one HTML page that needs no network and no cluster.

`play` makes the frames: it feeds the recorded events to a new router state. It is pure; the command reads and writes
files.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Final, final

from pdserve.core.errors import ConfigError
from pdserve.core.live import PERIOD_S, LiveFrame
from pdserve.progress import require_terminal
from router.recording import replay
from router.state.history import DecisionRecord
from router.state.state import RouterState

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


# --- command --------------------------------------------------------------------------------------------------

HELP = "show a recording in the live view: one HTML page with play, pause and scrub"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="recording of `pdserve up --record` or `pdserve simulate --record`"
    )
    parser.add_argument("--html", metavar="OUT", help="page to write (FILE.html)")
    parser.add_argument("--terminal", action="store_true", help="play it in the terminal instead, as `pdserve top`")
    parser.add_argument("--speed", type=float, default=1.0, metavar="X", help="speed in the terminal (1)")
    parser.add_argument(
        "--every",
        type=float,
        default=PERIOD_S,
        metavar="S",
        help=f"seconds between two frames; longer recordings need more ({PERIOD_S})",
    )


def run(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from pdserve.client.results import EXPLANATION
    from pdserve.core.live import frame_to_json
    from pdserve.gateway.ui.page import recording_page
    from router.service.cluster import explain_response

    if not 0.05 <= args.every <= 3600.0:
        raise ConfigError("every", args.every, "seconds from 0.05 to 3600")
    if not 0.01 <= args.speed <= 1000.0:
        raise ConfigError("speed", args.speed, "0.01 to 1000")
    if args.terminal:
        require_terminal("without --terminal, the command writes a page")
    out = Path(args.html or f"{args.file}.html")
    found = _played(Path(args.file), args.every)
    if not found.frames:
        raise ConfigError("file", args.file, "a recording with at least one event")
    explanations = {one.request_id: EXPLANATION.decode(explain_response(one, "")) for one in found.explanations}
    if args.terminal:
        from pdserve.top.app import RecordingSource, TopApp

        return TopApp(RecordingSource(Path(args.file).name, found.frames, explanations, args.speed)).run() or 0
    page = recording_page(
        [frame_to_json(one) for one in found.frames],
        Path(args.file).name,
        {name: asdict(one) for name, one in explanations.items()},
    )
    try:
        out.write_bytes(page)
    except OSError as error:
        raise ConfigError("html", out, f"a file that can be written ({error.strerror})") from None
    span_s = found.frames[-1].at_s - found.frames[0].at_s
    print(f"{out}: {len(found.frames)} frames of {span_s:.1f} s, {len(page) / 2**20:.1f} MiB; open it in a browser")
    return 0


def _played(path: Path, every_s: float) -> Playback:
    from router.recording.replay_command import RecordedLines

    with RecordedLines(path).with_progress("reading") as lines:
        return play(lines, every_s)
