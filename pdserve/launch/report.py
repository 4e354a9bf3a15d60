"""The output of `up`: progress and the processes' own lines on stderr, one `ready` line on stdout.

A line that cannot be written (a full disk, a closed stderr) is lost, without further effect: the relay must keep
reading a process's lines, because the process would block otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, final

from pdserve.bounded_file import open_private
from pdserve.core.errors import ConfigError
from pdserve.core.progress import PhaseProgress, Progress, bar_line, log_text, phase_of
from pdserve.core.setting import check_fields, setting
from pdserve.engine.memory.plan import MemoryPlan, plan_from_json
from pdserve.progress import LINE_EVERY_S, StatusLine, first_s
from pdserve.telemetry.logs import json_line

# --- progress -------------------------------------------------------------------------------------------------
# How far the start, or the drain, of a cluster is: its processes, and the phase that each is in.

MAX_SHOWN = 4  # processes in one line


@final
class ClusterProgress:
    """Times are of one clock. `names`: the steps in order, such as the processes that must start."""

    def __init__(self, what: str, names: Sequence[str], began_s: float, limit_s: float | None = None) -> None:
        """`limit_s`: after which it ends anyway."""
        self.what, self.began_s, self._limit_s = what, began_s, limit_s
        self._open = dict.fromkeys(names, False)  # whether it has begun, for what has not ended
        self._total = len(self._open)
        self._phases: dict[str, Progress] = {}  # by process; the current one
        self._texts: dict[str, PhaseProgress] = {}
        self._causes: dict[str, str] = {}  # why a step waits

    def begins(self, name: str) -> None:
        if name in self._open:
            self._open[name] = True

    def phase(self, name: str, one: PhaseProgress, now_s: float) -> None:
        known = self._texts.get(name)
        if known is None or known.phase != one.phase:
            self._phases[name] = Progress(one.total, now_s - one.seconds)
        self._phases[name].update(one.done, now_s)
        self._texts[name] = one

    def waits(self, name: str, cause: str) -> None:
        self._causes[name] = cause

    def ends(self, name: str) -> None:
        self._causes.pop(name, None)
        self._open.pop(name, None)
        self._phases.pop(name, None)
        self._texts.pop(name, None)

    @property
    def is_over(self) -> bool:
        return not self._open

    @property
    def share(self) -> float:
        """A step counts when it has ended."""
        return 1.0 - len(self._open) / self._total if self._total else 1.0

    def time_text(self, now_s: float) -> str:
        spent_s = now_s - self.began_s
        if self._limit_s is not None:
            return f"at most {max(self._limit_s - spent_s, 0.0):.0f} s left"
        return f"{spent_s:.0f} s so far"

    def detail(self, now_s: float) -> str:
        """What runs now, with the rest of a phase where it can be estimated."""
        running = [name for name, has_begun in self._open.items() if has_begun]
        shown = [self._one(name, now_s) for name in running[:MAX_SHOWN]]
        more = [f"{len(running) - MAX_SHOWN} more"] if len(running) > MAX_SHOWN else []
        return "; ".join([f"{self._total - len(self._open)} of {self._total}", *shown, *more])

    def _one(self, name: str, now_s: float) -> str:
        one = self._texts.get(name)
        if one is None or one.is_over:
            return f"{name}: {self._causes[name]}" if name in self._causes else name
        remaining_s = self._phases[name].remaining_s(now_s)
        rest = "" if remaining_s is None else f", {remaining_s:.0f} s left"
        return " ".join(filter(None, (name, one.phase, one.detail))) + rest


# --- report ---------------------------------------------------------------------------------------------------

_WIDTH: Final = 10
_MOST_PARTS: Final = 16  # phases of one worker's start
_MOST_HELD: Final = 1000  # lines
_DETAIL: Final = re.compile(r"[0-9-]+ [0-9:,]+ INFO ")  # the level of a line that FieldFormatter has made
_MEMORY: Final = re.compile(r"(?:^| )memory (\{.*\})$")
_PARTS: Final = {  # parts of a memory plan, with their column names
    "usable": "usable",
    "weights": "weights",
    "activations": "activations",
    "graphs": "graphs",
    "runtime": "runtime",
    "kv pool": "kv_pool",
}
_BACKGROUND: Final = ""  # no process has this name
_IMPORTS: Final = "imports"  # the interpreter and the modules of a worker, until its first phase


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLimits:
    """Of the files in a log folder. Raises ConfigError."""

    log_max_bytes: int = setting("size at which a file is renamed", 64 * 2**20, within=(4096, 2**40))
    log_files: int = setting("number of renamed files to keep of each process", 5, within=(0, 1000))

    def __post_init__(self) -> None:
        check_fields(self)


@final
class LauncherReport:
    """Writes whole lines, so that lines of several processes do not interleave. Used from one thread."""

    def __init__(
        self,
        log_dir: Path | None = None,
        log_limits: LogLimits | None = None,
        *,
        is_json: bool = False,
        holds_details: bool = False,
    ) -> None:
        """`holds_details`: until `ready`, and from `stops` on, lines of level INFO are held back, and shown only by
        `failed`. Those in files or JSON are always written."""
        self._holds_details = holds_details
        self._held: deque[str] | None = deque(maxlen=_MOST_HELD) if holds_details else None
        self._began_s = time.monotonic()
        self._log_dir, self._log_limits = log_dir, log_limits or LogLimits()
        self._is_json = is_json
        self._files: dict[str, LogFile] = {}
        self._phases: list[tuple[str, float]] = []
        self._plans: dict[str, MemoryPlan] = {}
        self._begun_s: dict[str, float] = {}  # when each process began
        self._parts: dict[str, dict[str, float]] = {}  # seconds of each phase of a worker's start, by process
        self._status = StatusLine()
        self._progress: ClusterProgress | None = None
        self._next_s = 0.0
        if log_dir is not None:
            with _a_folder(log_dir):
                log_dir.mkdir(parents=True, exist_ok=True)

    def say(self, name: str, text: str) -> None:
        """A message of the launcher about `name`."""
        if self._is_json:
            fields = {"about": name, "elapsed_s": round(self.elapsed_s, 3), "message": text}
            self._err(json_line("launcher", json.dumps(fields)))
        else:
            self._err(f"{self.elapsed_s:7.2f} s  {name:<{_WIDTH}} {text}")

    def relay(self, name: str) -> Callable[[str], None]:
        """Forwards the lines of process `name` to its file if there is a log folder, otherwise to stderr.

        The line with its memory plan is shown in the start-up table, and lines of progress in the status line.
        """
        write = self._writer(name)

        def take(line: str) -> None:
            phase = phase_of(line)
            plan = memory_of(line) if phase is None else None
            if phase is not None:
                self.worker_phase(name, phase)
            elif plan is None:
                write(line)
            else:
                self.memory(name, plan)

        return take

    def memory(self, name: str, plan: MemoryPlan) -> None:
        self._plans[name] = plan

    def _writer(self, name: str) -> Callable[[str], None]:
        if self._log_dir is None and self._is_json:
            return lambda line: self._err(json_line(name, line))
        if self._log_dir is None:
            return lambda line: self._show(f"{name:<{_WIDTH}} | {line}", is_detail=_DETAIL.match(line) is not None)
        if name not in self._files:
            with _a_folder(self._log_dir):
                path = self._log_dir / f"{name}.log"
                self._files[name] = LogFile(
                    path, lambda why: self.say(name, f"trouble with its log file: {why}"), self._log_limits
                )
        return self._files[name].write

    # -- progress ------------------------------------------------------------------------------------------------

    def expect(self, what: str, names: Sequence[str], limit_s: float | None = None) -> None:
        """From now on, `tick` shows how many of `names` have ended."""
        now_s = time.monotonic()
        self._progress = ClusterProgress(what, names, now_s, limit_s)
        self._next_s = now_s + first_s(is_terminal=self._status.is_terminal and not self._is_json)

    def begins(self, name: str) -> None:
        self._begun_s[name] = time.monotonic()
        if self._progress is not None:
            self._progress.begins(name)

    def waits(self, name: str, cause: str) -> None:
        if self._progress is not None:
            self._progress.waits(name, cause)

    def ends(self, name: str) -> None:
        if self._progress is not None:
            self._progress.ends(name)

    def phase(self, name: str, took_s: float) -> None:
        """A step of the start that has ended."""
        self._phases.append((name, took_s))
        self.ends(name)

    def tick(self) -> None:
        """Draws the status line of a terminal, or writes a line every few seconds."""
        progress, now_s = self._progress, time.monotonic()
        if progress is None or progress.is_over or now_s < self._next_s:
            return
        shown = progress.what, progress.share, progress.time_text(now_s), progress.detail(now_s)
        if self._status.is_terminal and not self._is_json:
            self._status.draw(bar_line(*shown, self._status.columns))
        else:
            self._next_s = now_s + LINE_EVERY_S
            self.say("launcher", log_text(*shown))

    def settled(self) -> None:
        """Ends the status line."""
        self._progress = None
        self._status.clear()

    def worker_phase(self, name: str, one: PhaseProgress) -> None:
        now_s = time.monotonic()
        if name not in self._parts:
            begun_s = self._begun_s.get(name)
            self._parts[name] = {} if begun_s is None else {_IMPORTS: max(now_s - begun_s - one.seconds, 0.0)}
        parts = self._parts[name]
        if one.phase in parts or len(parts) < _MOST_PARTS:
            parts[one.phase] = one.seconds
        if self._progress is not None:
            self._progress.phase(name, one, now_s)

    # -- the end of the start ------------------------------------------------------------------------------------

    def failed(self) -> None:
        """Shows what was held back, which is nothing after `ready`."""
        held, self._held = self._held or (), None
        for line in held:
            self._err(line)

    def _show(self, text: str, *, is_detail: bool) -> None:
        if is_detail and self._held is not None:
            self._held.append(text)
        else:
            self._err(text)

    def _err(self, text: str) -> None:
        if (file := self._files.get(_BACKGROUND)) is not None:
            file.write(text)
            return
        self._status.line(text)
        if self._status.is_terminal:
            self.tick()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def table(self) -> None:
        """The times of the start, and each worker's memory. Workers load in parallel, so the times may add up to more
        than the total."""
        if self._is_json:
            return
        longest_s = max((took_s for _, took_s in self._phases), default=0.0) or 1.0
        lines = [f"start took {self.elapsed_s:.1f} s:"]
        for name, took_s in self._phases:
            lines.append(f"  {name:<14} {took_s:6.2f} s  {'█' * max(1, round(24 * took_s / longest_s))}")
            parts = self._parts.get(name, {})
            lines += [f"    {part:<12} {part_s:6.2f} s" for part, part_s in parts.items()]
        self._err("\n".join([*lines, *memory_table(self._plans)]))

    def ready(self, line: str) -> None:
        self.settled()
        if self._held:
            count = len(self._held)
            self.say("launcher", f"{count} log lines of the start are not shown; --log-level info shows them")
        self._held = None
        if self._is_json:
            line = json_line("launcher", json.dumps({"elapsed_s": round(self.elapsed_s, 3), "message": line}))
        _to_stdout(line)

    def to_background(self, path: Path) -> None:
        """From now on, this process uses neither the terminal nor the pipes of the command that has started it: what it
        would write to stderr goes to `path`, which it names on stdout. Raises ConfigError."""
        with _a_folder(path.parent):
            self._files[_BACKGROUND] = LogFile(path, lambda why: None, self._log_limits)
        self._status.is_terminal = False
        _to_stdout(str(path))
        log = open_private(path, is_appended=True)  # for what Python writes itself if it crashes
        nothing = os.open(os.devnull, os.O_WRONLY)
        for taken, number in ((nothing, 1), (log, 2)):
            os.dup2(taken, number)
            os.close(taken)

    def stops(self) -> None:
        """A planned stop: from now on, processes report connections that end."""
        if self._holds_details:
            self._held = deque(maxlen=_MOST_HELD)

    def reopen(self) -> None:
        """Opens every log file again, after another program has renamed it."""
        for file in self._files.values():
            file.reopen()
        self.say("launcher", f"SIGHUP: {len(self._files)} log files are opened again")

    def limit_files(self, limits: LogLimits) -> None:
        """From each file's next line on."""
        self._log_limits = limits
        for file in self._files.values():
            file.limits = limits

    def close(self) -> None:
        self.settled()
        for file in self._files.values():
            file.close()


def _to_stdout(line: str) -> None:
    """The cluster goes on if nobody reads it."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def memory_of(line: str) -> MemoryPlan | None:
    found = _MEMORY.search(line)
    return None if found is None else plan_from_json(found.group(1))


def memory_table(plans: Mapping[str, MemoryPlan]) -> list[str]:
    """One row for each worker; a part that was not measured is empty, and has no column if no worker measured it.
    Pure."""
    if not plans:
        return []
    parts = {part: name for part, name in _PARTS.items() if any(getattr(plan, name) for plan in plans.values())}
    rows = [("memory", "total", *parts, "kv tokens")]
    for name, plan in sorted(plans.items()):
        sizes = (plan.total, *(getattr(plan, part) for part in parts.values()))
        values = (size_text(size) if size else "" for size in sizes)
        rows.append((f"{name} {plan.device}", *values, f"{plan.kv_tokens:,}"))
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = []
    for name, *cells in rows:
        aligned = (text.rjust(width) for text, width in zip(cells, widths, strict=True))
        lines.append("  " + "  ".join([name.ljust(first), *aligned]))
    return lines


def size_text(num_bytes: int) -> str:
    """In the largest unit of which there is one or more, so that no size is shown as nothing."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= 0.99995 * scale:  # the smaller unit would show 1000.0
            return f"{num_bytes / scale:.2f} {unit}" if unit == "GB" else f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} B"


def open_log(path: Path) -> BinaryIO:
    return os.fdopen(open_private(path, is_appended=True), "ab", 0)


@final
class LogFile:
    """Appends whole lines to an unbuffered file. Lost lines are counted, and reported once writing succeeds again.

    A file that would grow beyond `limits.log_max_bytes` is renamed to NAME.1, an earlier NAME.1 to NAME.2, and so on
    up to NAME.`limits.log_files`; older ones are deleted.
    """

    def __init__(
        self,
        path: Path,
        on_loss: Callable[[str], None],
        limits: LogLimits,
        *,
        open_file: Callable[[Path], BinaryIO] = open_log,
    ) -> None:
        """`on_loss` is called with the reason when lines begin to be lost, or the file cannot be renamed. Raises
        OSError."""
        self._path, self.limits = path, limits
        self._on_loss, self._open_file = on_loss, open_file
        self._num_lost = 0
        self._open()

    def write(self, line: str) -> None:
        if self._is_closed:
            return
        gap = f"({self._num_lost} lines could not be written)\n" if self._num_lost else ""
        data = f"{gap}{line}\n".encode(errors="replace")
        try:
            if self._file.closed:  # it could not be opened again
                self._open()
            if self._size and self._size + len(data) > self.limits.log_max_bytes:
                self._rotate()
            self._file.write(data)
            self._size += len(data)
            self._num_lost = 0
        except OSError as error:
            self._num_lost += 1
            if self._num_lost == 1:
                self._on_loss(error.strerror or "the disk failed")

    def reopen(self) -> None:
        """Creates the file again if it was renamed or deleted; if that fails, the next line tries it."""
        self._file.close()
        with contextlib.suppress(OSError):
            self._open()

    def close(self) -> None:
        self._is_closed = True
        self._file.close()

    def _open(self) -> None:
        self._file = self._open_file(self._path)
        self._size = self._file.tell()
        self._is_closed = False

    def _rotate(self) -> None:
        self._file.close()
        try:
            kept = self.limits.log_files
            for number in range(kept, 0, -1):
                with contextlib.suppress(FileNotFoundError):
                    self._numbered(number - 1).replace(self._numbered(number))
            if not kept:
                self._path.unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):  # those of an earlier, higher limit
                while True:
                    self._numbered(kept := kept + 1).unlink()
        except OSError as error:  # a long log is better than lost lines
            self._on_loss(f"it cannot be renamed ({error.strerror}), and grows")
            self._open()
            self._size = 0  # until the next attempt
        else:
            self._open()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}") if number else self._path


@contextlib.contextmanager
def _a_folder(log_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError("log_dir", log_dir, f"a folder that can be written to ({error.strerror})") from None
