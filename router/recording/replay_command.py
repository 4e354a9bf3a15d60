"""`pdserve replay FILE`: checks that this version decides like the recorded router.

It feeds a recording (`pdserve up --record FILE`) to a new router, event by event, and compares the commands. A
recording of the decisions about the number of workers goes to a new controller in the same way. The exit status is 1 if
any differ. To run the recorded requests on another cluster or policy, use pdserve simulate --trace FILE.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from pdserve.bounded_file import opened
from pdserve.core.errors import ConfigError
from pdserve.core.json_text import to_json
from pdserve.progress import ProgressLine

if TYPE_CHECKING:
    from router.recording.replay import Difference, OtherDecision

HELP = "replay a recording and check that the router decides the same"
SHOWN: Final = 5  # differences that are printed


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="recording of `pdserve up --record`")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from router.recording import replay

    lines = RecordedLines(Path(args.file))
    differing = 0
    shown: list[Difference | OtherDecision] = []
    with lines.with_progress("replaying") as rows:
        first = next(rows, "")
        is_scaling = replay.is_scaling(first)
        decided = replay.replay_scaling if is_scaling else replay.replay
        for difference in decided(chain([first], rows)):
            differing += 1
            if len(shown) < SHOWN:
                shown.append(difference)
    steps = max(lines.count - 1, 0)
    who, what = ("controller", "decisions") if is_scaling else ("router", "events")
    if args.json:
        print(to_json({what: steps, "differing": differing, "first_differing": [one.number for one in shown]}))
        return 1 if differing else 0
    for one in shown:
        print("\n  ".join(_lines(one)))
    same = f"the {who} decided the same in all {steps} {what}"
    print(f"the {who} decided otherwise in {differing} of {steps} {what}" if differing else same)
    return 1 if differing else 0


def _lines(one: Difference | OtherDecision) -> list[str]:
    """What is shown of a difference."""
    from router.recording.replay import Difference

    at = f"{one.number} at {one.step.now_s:.6f} s"
    if isinstance(one, Difference):
        recorded, replayed = list(one.step.commands), list(one.replayed)
        return [f"event {at}: {one.step.event}", f"recorded {recorded}", f"replayed {replayed}"]
    return [f"decision {at}", f"recorded {one.step.decision}", f"replayed {one.replayed}"]


# --- lines of a recording -------------------------------------------------------------------------------------

MAX_LINE_CHARS: Final = 64 * 2**20  # so that a file without line ends does not fill the memory


@final
class RecordedLines:
    """The lines of a file, counted while they are read. Invalid UTF-8 is reported as invalid JSON, with its line
    number."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.count = 0
        self.bytes_read = 0

    def __iter__(self) -> Iterator[str]:
        with (
            opened(self._path, "file") as raw,
            io.TextIOWrapper(raw, encoding="utf-8", errors="replace") as file,
        ):
            is_file = raw.seekable()  # a pipe, which a shell opens, has no position
            for line in iter(lambda: file.readline(MAX_LINE_CHARS), ""):
                if len(line) == MAX_LINE_CHARS:
                    raise ConfigError(
                        "file", f"line {self.count + 1} of {self._path}", f"at most {MAX_LINE_CHARS} characters"
                    )
                self.count += 1
                self.bytes_read = raw.tell() if is_file else 0
                yield line

    @contextmanager
    def with_progress(self, verb: str) -> Iterator[Iterator[str]]:
        """The lines, with a bar of the bytes read."""
        size = self._path.stat().st_size if self._path.is_file() else None
        with ProgressLine(f"{verb} {self._path.name}", size) as progress:
            yield self._counted(progress)

    def _counted(self, progress: ProgressLine) -> Iterator[str]:
        for line in self:
            yield line
            progress.update_bytes(self.bytes_read)
