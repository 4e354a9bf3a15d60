"""The one thread that owns the engine and the program: reads its inbox, runs steps, and delivers messages.

All calls of the program run here. If the program raises, the thread informs the routers and ends; `on_death` is called
with the error, and the host ends the process.

The watchdog ends a process whose engine thread is busy but makes no progress.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Protocol, final

from pdserve.core.durations import DAY_S, clamped_s
from pdserve.core.errors import InternalError
from pdserve.core.kv.blocks import CacheChange
from pdserve.v1 import worker_pb2
from pdserve.worker.program import AnyProgram

log = logging.getLogger(__name__)

MAX_DRAINED_CALLS: Final = 256  # maximum of inbox items between two steps, which limits the effect on TPOT
IDLE_S: Final = 0.02  # longest wait of an idle thread with attempts, because of deadlines and heartbeats

Call = Callable[[], None]


class Outlet(Protocol):
    """Takes messages; called from the engine thread, never blocks."""

    def send(self, messages: Mapping[int, list[worker_pb2.AttachResponse]]) -> None:
        """Messages by session, in order."""
        ...

    def offer(self, change: CacheChange) -> None: ...


@final
class EngineThread:
    def __init__(self, outlet: Outlet, heartbeat_s: float, on_death: Callable[[BaseException], None]) -> None:
        self._outlet = outlet
        self._heartbeat_s = heartbeat_s
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._is_stopping = False
        self._program: AnyProgram | None = None
        self._has_started = threading.Event()
        self._start_error: BaseException | None = None
        self._build: Callable[[], AnyProgram] | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.is_busy = False  # for the watchdog, as the next
        self.beats = 0
        self.is_idle = threading.Event()  # draining, and nothing is held for any request
        self.busy_s = -math.inf  # when something was last held for a request
        self.is_draining = False

    def start(self, build: Callable[[], AnyProgram]) -> AnyProgram:
        """Builds the program on the engine thread and returns it. Raises the errors of building."""
        self._build = build
        self._thread.start()
        self._has_started.wait()
        if self._start_error is not None:
            raise self._start_error
        assert self._program is not None
        return self._program

    @property
    def program(self) -> AnyProgram:
        """On the engine thread, after the start."""
        assert self._program is not None
        return self._program

    def exchange(self, make: Callable[[AnyProgram], AnyProgram]) -> Future[AnyProgram]:
        """Replaces the program by what `make` makes of it, on the engine thread, between two steps.

        If that raises, the thread ends as after any error of the program, because both programs may be incomplete.
        """
        done: Future[AnyProgram] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            self.is_busy = False  # the watchdog's limit is one of steps; the caller has its own
            try:
                self._program = make(self.program)
            except BaseException as error:
                done.set_exception(error)
                raise
            done.set_result(self._program)

        self.post(run)
        return done

    def post(self, call: Call) -> None:
        """Runs `call` on the engine thread. From any thread; never blocks. Ignored after the end."""
        self._inbox.put(call)

    @property
    def num_waiting_calls(self) -> int:
        return self._inbox.qsize()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self._start_error is None

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Ends the loop after the current step and the calls that were posted before, such as that a router has left.
        False if the thread does not end in time."""
        self.post(self._set_stopping)
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _set_stopping(self) -> None:
        self._is_stopping = True

    def _run(self) -> None:
        try:
            assert self._build is not None
            self._program = self._build()
        except BaseException as error:  # raised again by start() in the waiting thread
            self._start_error = error
            return
        finally:
            self._build = None
            self._has_started.set()
        try:
            self._loop()
        except BaseException as error:  # the process ends, because no other thread can own the engine
            log.critical("the engine thread died", exc_info=True)
            self._report_death(self.program, error)
            self._on_death(error)
        finally:
            self.is_busy = False
            try:
                self.program.close()
            except Exception:  # the end must be reached despite any error of an engine or a transport
                log.exception("the program did not close cleanly")

    def _loop(self) -> None:
        has_rows = False
        program = self.program
        while True:
            call = None if has_rows else self._wait(program)
            self.is_busy = True
            self.beats += 1
            num_calls = 0
            while call is not None or not self._inbox.empty():
                (call or self._inbox.get())()
                call = None
                num_calls += 1
                if num_calls == MAX_DRAINED_CALLS:
                    break
            if self.program is not program:
                program, has_rows = self.program, False
            if num_calls and not program.is_idle:  # before the step, which may take long
                self.busy_s = time.monotonic()
                self.is_idle.clear()
            if num_calls and (program.has_work or self._is_stopping):
                self._hand_out(program)  # a grant must not wait for a step that does not concern it
            if self._is_stopping:
                program.save()
                return
            program.is_between_steps = has_rows
            has_rows = program.has_work and program.step()
            program.tick()
            self._hand_out(program)
            if not program.is_healthy:
                raise InternalError("a transfer thread or a tensor-parallel rank died, or a tier of KV blocks hangs")
            self.is_draining = program.is_draining
            if not program.is_idle:
                self.busy_s = time.monotonic()
            if program.is_draining and program.is_idle:
                self.is_idle.set()
            elif self.is_idle.is_set():  # an operator has undone a drain
                self.is_idle.clear()

    def _wait(self, program: AnyProgram) -> Call | None:
        self.is_busy = False
        patience_s = clamped_s(self._heartbeat_s, longest_s=DAY_S if program.is_idle else IDLE_S)
        try:
            return self._inbox.get(timeout=patience_s)
        except queue.Empty:
            return None

    def _hand_out(self, program: AnyProgram) -> None:
        change = program.take_changes()
        if change is not None:
            self._outlet.offer(change)
        by_session: dict[int, list[worker_pb2.AttachResponse]] = {}
        for session, message in program.take_messages():
            by_session.setdefault(session, []).append(message)
        if by_session:
            self._outlet.send(by_session)

    def _report_death(self, program: AnyProgram, error: BaseException) -> None:
        try:
            program.fail_all(f"{type(error).__name__}: {error}")
            self._hand_out(program)
        except Exception:  # the program is in an unknown state; routers detect it by the lost stream
            log.exception("the error could not be reported to routers")


# --- watchdog -------------------------------------------------------------------------------------------------
# A hung worker is worse than a restarted one.

STALL_EXIT_CODE: Final = 70
SHORTEST_LOOK_S: Final = 0.001
LONGEST_LOOK_S: Final = 1.0


class EngineProgress(Protocol):
    @property
    def is_busy(self) -> bool:
        """Whether the thread should make progress; False while it waits for work."""
        ...

    @property
    def beats(self) -> int:
        """Grows with each piece of work."""
        ...


@final
@dataclass(slots=True, kw_only=True)
class StallRule:
    """Decides from samples of a thread's progress whether it hangs. Pure."""

    stall_s: float
    _beats: int = -1
    _moved_at_s: float = 0.0

    def look(self, *, is_busy: bool, beats: int, now_s: float) -> bool:
        """True if the thread was busy with the same beat for `stall_s`."""
        if not is_busy or beats != self._beats:
            self._beats, self._moved_at_s = beats, now_s
            return False
        return now_s - self._moved_at_s >= self.stall_s


def dump_and_exit() -> None:
    """Writes the stacks of all threads to stderr, then ends the process: a hung thread cannot be stopped."""
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    os._exit(STALL_EXIT_CODE)


@final
class Watchdog:
    """A thread that observes the engine thread; `on_stall` is called once."""

    def __init__(self, progress: EngineProgress, stall_s: float, on_stall: Callable[[], None] = dump_and_exit) -> None:
        self._progress = progress
        self._rule = StallRule(stall_s=stall_s)
        self.stall_s = stall_s
        self._on_stall = on_stall
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    @property
    def stall_s(self) -> float:
        return self._rule.stall_s

    @stall_s.setter
    def stall_s(self, stall_s: float) -> None:
        self._rule.stall_s = stall_s
        self._interval_s = clamped_s(stall_s / 10, SHORTEST_LOOK_S, LONGEST_LOOK_S)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            progress = self._progress
            if self._rule.look(is_busy=progress.is_busy, beats=progress.beats, now_s=time.monotonic()):
                log.critical("the engine thread hangs", extra={"stall_s": self._rule.stall_s})
                self._on_stall()
                return
