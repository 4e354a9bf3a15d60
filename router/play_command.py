"""`pdserve play FILE`: shows a recording in the live view, as one HTML page that needs no network and no cluster."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.core.errors import ConfigError
from pdserve.core.live import PERIOD_S

if TYPE_CHECKING:
    from router.play import Playback

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

    from pdserve.cli.terminal import require_terminal
    from pdserve.client.results import EXPLANATION
    from pdserve.core.live_json import frame_to_json
    from pdserve.gateway.ui.page import recording_page
    from router.cluster import explain_response

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
        from pdserve.top.app import TopApp
        from pdserve.top.sources import RecordingSource

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
    from router.play import play
    from router.recorded_lines import RecordedLines

    with RecordedLines(path).with_progress("reading") as lines:
        return play(lines, every_s)
