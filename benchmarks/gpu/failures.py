"""What a GPU program does when one of its cases fails: it says why, and the other cases still run.

    cases = cases_of(flags, names, torch.cuda.synchronize)
    for name in names: cases.run(name, body, failed)

The reason is one line on the screen (`told`); the whole traceback is appended to OUT/traces.txt. After some errors of
CUDA every call of the process raises. So the device is synchronised after each failed case, and if that raises too,
the program replaces itself by a new process that goes on with the next case. So does a case that takes too long.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, final

TRACES: Final = "traces.txt"
CASE_S: Final = 60.0  # of one case, its compilation included
_ROOT: Final = Path(__file__).parents[2]
_MOST_BYTES: Final = 8 * 2**20  # of all traces: a borrowed machine returns files of up to 16 MiB
_MOST_SHOWN: Final = 300  # characters of a reason
#: Lines that follow the reason in messages of torch, and the command after ptxas's own message.
_NO_REASON: Final = (
    "CUDA kernel errors might be asynchronously",
    "For debugging consider",
    "Compile with `TORCH_USE_CUDA_DSA`",
    "Device-side assertion tracking",
    "Search for `cuda",
    "Exception raised from ",
    "frame #",
    "Repro command:",
    "For more information, try",
)


def out_folder() -> Path:
    """$OUT, whose files come back from a borrowed machine."""
    return Path(os.environ.get("OUT") or "gpu-results")


def told(where: str, error: BaseException, folder: Path | None = None) -> str:
    """The reason on one line. Appends the traceback to the traces of `folder`."""
    trace = "".join(traceback.format_exception(error))
    keep_trace(where, trace, folder)
    return reason(error)


def keep_trace(where: str, trace: str, folder: Path | None = None) -> None:
    path = (folder or out_folder()) / TRACES
    path.parent.mkdir(parents=True, exist_ok=True)
    head = f"## {where}\n{time.strftime('%H:%M:%S')} {' '.join(sys.orig_argv[1:])[:500]}\n"
    with path.open("a", encoding="utf-8", errors="replace") as file:  # several processes append at once
        if file.tell() < _MOST_BYTES:
            file.write(f"{head}{trace}\n")


def reason(error: BaseException) -> str:
    """`Type: last meaningful line (file:line)`. An error without a message is told by its cause."""
    cause: BaseException = error
    while not (line := last_line(str(cause))) and cause.__cause__ is not None:
        cause = cause.__cause__
    line = " ".join(line.replace("|", "/").split())
    if len(line) > _MOST_SHOWN:
        line = f"{line[: _MOST_SHOWN // 2]} ... {line[-_MOST_SHOWN // 2 :]}"
    names = [type(error).__name__] + ([type(cause).__name__] if cause is not error else [])
    return ": ".join([*names, line] if line else names) + _place(cause)


def last_line(message: str) -> str:
    """The last line that says something; empty if there is none.

    A compiler's message has the source and a caret under it, before the reason.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    carets = [at for at, line in enumerate(lines) if line == "^"]
    lines = lines[carets[-1] + 1 :] if carets else lines
    meant = [line for line in lines if re.search(r"\w", line) and not line.startswith(_NO_REASON)]
    return meant[-1] if meant else ""


def _place(error: BaseException) -> str:
    """The innermost line of this repository."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if Path(one.filename).is_relative_to(_ROOT)]
    frames = [one for one in frames if "site-packages" not in one.filename]
    return f" ({Path(frames[-1].filename).relative_to(_ROOT)}:{frames[-1].lineno})" if frames else ""


def add_flags(parser: argparse.ArgumentParser, what: str) -> None:
    """`what` the names of the cases are."""
    parser.add_argument("--out", type=Path, default=out_folder(), help="folder for traces.txt; $OUT if it is set")
    parser.add_argument(
        "--only", default="", metavar="REGEX", help=f"{what}: the begin of names, commas between several"
    )
    parser.add_argument("--from", default="", dest="start", metavar="CASE", help="begin with this case")
    parser.add_argument("--failed", type=int, default=0, help=argparse.SUPPRESS)  # before this process


def chosen(names: Sequence[str], only: str, start: str = "") -> list[str]:
    """The names that begin with whole words that match, in order, from `start` on. Raises ValueError."""
    wanted = list(names)
    if only:
        patterns = [re.compile(rf"(?:{part})(?![\w-])") for part in only.split(",")]
        for pattern in patterns:
            if not any(pattern.match(name) for name in names):
                raise ValueError(f"no case begins with {pattern.pattern}: there are {', '.join(names)}")
        wanted = [name for name in names if any(pattern.match(name) for pattern in patterns)]
    if start and start not in wanted:
        raise ValueError(f"no case {start!r}: there are {', '.join(wanted)}")
    return wanted[wanted.index(start) :] if start else wanted


def cases_of(
    flags: argparse.Namespace, names: Sequence[str], synchronise: Callable[[], object] | None, most_s: float = CASE_S
) -> Cases:
    """The chosen cases of a program with `add_flags`. Traces go to `flags.out` from now on. Exits with 2 if a flag is
    wrong."""
    os.environ["OUT"] = str(flags.out)
    try:
        return Cases(chosen(names, flags.only, flags.start), synchronise, most_s, flags.failed)
    except ValueError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


@final
class Cases:
    """`synchronise` None: there is no device, so no case is ended. `num_failed`: with those of earlier processes."""

    def __init__(
        self,
        names: Sequence[str],
        synchronise: Callable[[], object] | None,
        most_s: float = CASE_S,
        num_failed: int = 0,
        restart: Callable[[str, int], object] | None = None,
    ) -> None:
        self.names, self.num_failed = list(names), num_failed
        self._synchronise, self._most_s = synchronise, most_s
        self._restart = restart or replace_process
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def run(self, name: str, body: Callable[[], object], failed: Callable[[Exception], object]) -> None:
        """Runs a case if it was chosen. `failed` says so on the screen."""
        if name not in self.names:
            return
        has_ended = threading.Event()

        def end() -> None:
            with self._lock:
                if not has_ended.is_set():
                    frames = sys._current_frames().get(runs_in, None)
                    keep_trace(name, "".join(traceback.format_stack(frames)))
                    failed(TimeoutError(f"ended after {self._most_s:.0f} s: it hangs"))
                    self.num_failed += 1
                    self._go_on(name)
                    kill_children()
                    os._exit(1)

        runs_in = threading.get_ident()
        timer = threading.Timer(self._most_s, end)
        timer.daemon = True
        if self._synchronise is not None:
            timer.start()
        problem: Exception | None = None
        try:
            body()
        except Exception as error:
            problem = error
        finally:
            with self._lock:
                has_ended.set()
            timer.cancel()
        if problem is not None:
            failed(problem)
            self.num_failed += 1
            if not self._is_alive():
                self._go_on(name)

    def _is_alive(self) -> bool:
        try:
            if self._synchronise is not None:
                self._synchronise()
        except Exception:
            return False
        return True

    def _go_on(self, name: str) -> None:
        after = self.names[self.names.index(name) + 1 :]
        if after:
            print(f"the device is lost to this process: a new one goes on with {after[0]!r}", flush=True)
            self._restart(after[0], self.num_failed)


def replace_process(start: str, num_failed: int) -> None:
    """Runs this program anew from a case on, in the same process of the system: what waits for it goes on waiting."""
    sys.stdout.flush()
    sys.stderr.flush()
    kill_children()
    os.closerange(3, 4096)  # the driver's files, and with them the memory of the lost context
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], "--from", start, "--failed", str(num_failed)])


def kill_children() -> None:
    """Ends the processes that this one started, and theirs: nobody would wait for them, and they hold the device."""
    parent_of: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent_of[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
    below = {os.getpid()}
    while more := {child for child, parent in parent_of.items() if parent in below} - below:
        below |= more
    for process in below - {os.getpid()}:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
