"""`pdserve replay FILE`: checks that this version decides like the recorded router.

It feeds a recording (`pdserve up --record FILE`) to a new router, event by event, and compares the commands. The exit
status is 1 if any differ. To run the recorded requests on another cluster or policy, use pdserve simulate --trace FILE.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from pdserve.core.json_text import to_json

HELP = "replay a recording and check that the router decides the same"
SHOWN: Final = 5  # differences that are printed


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="recording of `pdserve up --record`")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from router import replay
    from router.recorded_lines import RecordedLines

    lines = RecordedLines(Path(args.file))
    differing = 0
    shown: list[replay.Difference] = []
    with lines.with_progress("replaying") as rows:
        for difference in replay.replay(rows):
            differing += 1
            if len(shown) < SHOWN:
                shown.append(difference)
    events = max(lines.count - 1, 0)
    if args.json:
        steps = [one.number for one in shown]
        print(to_json({"events": events, "differing": differing, "first_differing": steps}))
        return 1 if differing else 0
    for one in shown:
        print(f"event {one.number} at {one.step.now_s:.6f} s: {one.step.event}")
        print(f"  recorded {list(one.step.commands)}")
        print(f"  replayed {list(one.replayed)}")
    print(f"{events} events, {differing} with other commands")
    return 1 if differing else 0
