"""Starts processes and keeps them alive: one that ends is started again on its port and under its name."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

from pdserve.bounded_file import cache_file
from pdserve.config import LOG_LEVEL_ENV, GatewayConfig, RouterConfig, WorkerConfig, without_secrets
from pdserve.config_flags import FLAGS_FILE, live_flags
from pdserve.core.errors import PdserveError
from pdserve.core.progress import PROGRESS_ENV, phase_of
from pdserve.isolated.process import outcome
from pdserve.isolated.tied_program import tied_command
from pdserve.launch.ports import HeldPorts, session_of
from pdserve.launch.report import LauncherReport
from pdserve.launch.spec import Process, waiting_env
from pdserve.listening import HELD_ENV
from pdserve.prefix.embedded import EmbeddedRedis

# --- one process ----------------------------------------------------------------------------------------------
# Starts it, waits until it listens, forwards its output, ends it.

TAIL_LINES: Final = 40
MAX_LINE_BYTES: Final = 1 << 16
_LISTENING: Final = re.compile(r" listening on (\S+:\d+)$")
_LOG_LINE: Final = re.compile(r'[ "](DEBUG|INFO|WARNING|ERROR|CRITICAL)[ "]')
_COMPLAINT: Final = re.compile(r"error(?! in sys\.excepthook)|: got .+, expected ", re.IGNORECASE)
_NOISE: Final = re.compile(r"^(pdserve\.core\.errors\.\w+|prefill_worker|decode_worker|router|gateway): |^error: ")


class StartFailed(PdserveError):
    """A process of the cluster ended, or timed out, before it listened."""

    reason = "START_FAILED"


@final
class Child:
    """A process in a separate session, so that a Ctrl-C in the terminal reaches only the launcher."""

    def __init__(
        self,
        name: str,
        program: Sequence[str],
        env: Mapping[str, str],
        relay: Callable[[str], None],
        files: Sequence[int] = (),
        python: str = "",
    ) -> None:
        """`files`: open descriptors that the process inherits. `python` empty: that of this process."""
        self.name = name
        self.address = ""
        self.start_s = 0.0
        self._program = tuple(program)
        self._env = env
        self._relay = relay
        self._files, self._python = files, python
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, timeout_s: float) -> str:
        """The address on which the process reports to listen. Raises StartFailed with the process's last error."""
        await self.spawn()
        ended: asyncio.Future[int] = asyncio.ensure_future(self.wait())
        first: set[asyncio.Future[Any]] = {ended, self._listening}
        try:
            await asyncio.wait(first, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if not self._listening.done():
            how = "ended" if not self.is_running else f"did not listen within {timeout_s:.0f} s"
            await self.stop(0.0)
            raise StartFailed(f"{self.name} {how}: {self.last_error()}")
        self.address = self._listening.result()
        return self.address

    async def spawn(self) -> None:
        began_s = time.monotonic()
        self._process = await asyncio.create_subprocess_exec(
            *tied_command(*self._program, python=self._python),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            env={**waiting_env(os.environ), **without_secrets(os.environ), **self._env, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
            pass_fds=self._files,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            asyncio.create_task(self._read(self._process.stdout, is_stdout=True, began_s=began_s)),
            asyncio.create_task(self._read(self._process.stderr, is_stdout=False, began_s=began_s)),
        ]

    async def wait(self) -> int:
        """The exit status, negative for a signal, once the process has ended and its lines are read."""
        assert self._process is not None
        code = await self._process.wait()
        end_session(self._process.pid)  # its own child processes must not outlive it or keep its pipes open
        await asyncio.wait(self._readers, timeout=1.0)
        return code

    async def stop(self, grace_s: float, *, drains: bool = True) -> None:
        """Sends SIGTERM, and SIGKILL if the process has not ended after `grace_s`. Idempotent.

        `drains` False: it also sends SIGINT, the second signal, which ends a process without a drain.
        """
        if self._process is None:
            return
        if self.is_running and grace_s > 0:
            self.signal(signal.SIGTERM)
            if not drains:
                self.signal(signal.SIGINT)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_s)
        if self.is_running:
            self.signal(signal.SIGKILL)
        await self.wait()
        for reader in self._readers:
            reader.cancel()

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def last_error(self) -> str:
        """The line to show: the last error that is not a log line, otherwise the last error log line, otherwise the
        last line."""
        lines = [line.strip() for line in self._tail if line.strip()]
        complaints = [line for line in lines if _COMPLAINT.search(line)]
        plain = [line for line in complaints if not _LOG_LINE.search(line)]
        return _NOISE.sub("", (plain or complaints or lines or ["it said nothing"])[-1])

    async def _read(self, pipe: asyncio.StreamReader, *, is_stdout: bool, began_s: float) -> None:
        while True:
            try:
                raw = await pipe.readline()
            except ValueError:  # a line over the limit: drop its buffered part
                continue
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip()
            found = _LISTENING.search(line) if is_stdout else None
            if found is not None and not self._listening.done():
                self.start_s = time.monotonic() - began_s
                self._listening.set_result(found.group(1))
                continue
            if not is_stdout and phase_of(line) is None:
                self._tail.append(line)
            self._relay(line)


def end_session(leader_pid: int) -> None:
    """Kills the remaining processes in the session of an ended child. Linux only; no-op elsewhere."""
    for pid in session_of(leader_pid):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


# --- all processes --------------------------------------------------------------------------------------------

KILL_AFTER_S: Final = 5.0  # in addition to a process's own drain time
NOTICE_S: Final = 3.0  # in which a server that ends at once tells its clients
REDIS: Final = "redis"
_WATCH_S: Final = 0.2
_FIRST_BACKOFF_S: Final = 0.25
_LONGEST_BACKOFF_S: Final = 10.0
_SLOW_START_S: Final = 8.0
_FIRST_START: Final = "still loading; the first start on a machine compiles kernels, which are kept for the next"
_STARTED: Final = "worker-started"  # a file that exists once a worker of this user has started on this machine
_STEADY_S: Final = 30.0  # after this uptime, the backoff of a process starts again


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedProcess:
    """One supervised process. `on_line` receives its lines; None: the report's relay."""

    name: str
    program: tuple[str, ...]  # a module, and its arguments
    python: str = ""  # empty: that of the launcher
    env: tuple[tuple[str, str], ...] = ()
    start_s: float
    drain_s: float
    notice_s: float = 0.0  # before it is killed, if everything ends at once
    is_worker: bool = False
    has_flags_file: bool = False
    on_line: Callable[[str], None] | None = None


def supervised(process: Process) -> SupervisedProcess:
    return SupervisedProcess(
        name=process.name,
        program=(process.module, *process.argv[2:]),
        python=process.config.engine_python if isinstance(process.config, WorkerConfig) else "",
        env=(*process.env, (PROGRESS_ENV, "1")) if isinstance(process.config, WorkerConfig) else process.env,
        start_s=process.start_s,
        drain_s=process.config.drain_s,
        notice_s=NOTICE_S if isinstance(process.config, RouterConfig | GatewayConfig) else 0.0,
        is_worker=isinstance(process.config, WorkerConfig),
        has_flags_file=True,
    )


@final
class Supervisor:
    """Starts processes and, after `keep` was called, restarts those that end. Belongs to one event loop."""

    def __init__(
        self, report: LauncherReport, held: HeldPorts, on_start: Callable[[str], None] = lambda name: None
    ) -> None:
        """Its processes listen beside the `held` ports. `on_start` is called with the name of each process that has
        started."""
        self._report, self._held, self._on_start = report, held, on_start
        self._children: dict[str, Child] = {}
        self._processes: dict[str, SupervisedProcess] = {}
        self._redis: EmbeddedRedis | None = None
        self._redis_path = Path()
        self._keepers: dict[str, asyncio.Task[None]] = {}  # by the name of the process
        self._is_keeping = False
        self._error: BaseException | None = None  # of a keeper
        self._has_failed = asyncio.Event()
        self._flags: dict[str, int] = {}  # descriptor of each process's flags file

    def address(self, name: str) -> str:
        return self._children[name].address

    async def start(self, one: SupervisedProcess, *, is_retried: bool = False) -> None:
        """Returns when the process listens. Raises StartFailed with its last error, and OSError. `is_retried`: it is
        then started again, like a process that has ended."""
        self._processes[one.name] = one
        self._report.say(one.name, "starting")
        self._report.begins(one.name)
        try:
            await self._start(one)
        except (PdserveError, OSError):
            if is_retried and self._is_keeping:
                self._keep_with(one.name, self._keep(one.name))
            raise
        self._report.phase(one.name, self._children[one.name].start_s)
        if self._is_keeping:
            self._keep_with(one.name, self._keep(one.name))

    async def start_redis(self, path: Path) -> None:
        """A real Redis, which listens only on the socket file `path`."""
        began_s = time.monotonic()
        self._report.begins(REDIS)
        self._redis_path = path
        self._redis = await asyncio.to_thread(EmbeddedRedis.start, path)
        took_s = time.monotonic() - began_s
        self._on_start(REDIS)
        self._report.say(REDIS, f"pid {self._redis.pid} listens on {path} after {took_s:.2f} s")
        self._report.phase(REDIS, took_s)

    async def unless_ended(self, work: Awaitable[Any]) -> Any:
        """The result of `work`. If a process ends in the meantime, the start has failed."""
        working = asyncio.ensure_future(work)
        ends = {asyncio.ensure_future(child.wait()): child for child in self._children.values()}
        everything: set[asyncio.Future[Any]] = {working, *ends}
        try:
            await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
            for end, child in ends.items():
                if end.done():
                    raise StartFailed(f"{child.name} {outcome(end.result())}: {child.last_error()}")
            return await working
        finally:
            for one in everything:
                one.cancel()

    def keep(self) -> None:
        """From now on, processes that end are started again."""
        self._is_keeping = True
        for name in self._processes:
            self._keep_with(name, self._keep(name))
        if self._redis is not None:
            self._keep_with(REDIS, self._keep_redis(self._redis_path))

    async def run(self, stop: asyncio.Event) -> None:
        """Returns when `stop` is set. Raises an error of the supervision itself."""
        stopping = asyncio.ensure_future(stop.wait())
        failing = asyncio.ensure_future(self._has_failed.wait())
        await asyncio.wait([stopping, failing], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        failing.cancel()
        if self._error is not None:
            raise self._error

    async def release(self) -> None:
        """From now on, processes that end are not started again."""
        self._is_keeping = False
        await self._release(list(self._keepers))

    async def end(self, name: str) -> None:
        """Drains a process, for its own time limit at most, and ends it for good: its name may be used again."""
        await self._release([name])
        await self.stop([name], is_graceful=True)
        self._children.pop(name, None)
        self._processes.pop(name, None)
        if (flags := self._flags.pop(name, None)) is not None:
            os.close(flags)

    def replace(self, one: SupervisedProcess) -> None:
        """If the process of that name ends, it is started again like this."""
        self._processes[one.name] = one

    def start_s(self, name: str) -> float:
        """How long its last start took."""
        return self._children[name].start_s

    def drain_s(self, name: str) -> float:
        return self._processes[name].drain_s

    async def stop(self, names: Iterable[str], *, is_graceful: bool) -> None:
        """SIGTERM, time to drain, SIGKILL; all of `names` in parallel."""
        children = [self._children[name] for name in names if name in self._children]

        async def stop(child: Child) -> None:
            self._report.begins(child.name)
            grace_s = self._grace_s(child.name) if is_graceful else self._processes[child.name].notice_s
            await child.stop(grace_s, drains=is_graceful)
            self._report.ends(child.name)

        await asyncio.gather(*map(stop, children))
        for child in children:
            self._report.say(child.name, "stopped")

    def expect_stop(self, stages: Sequence[Sequence[str]], num_requests: int | None) -> None:
        """The report then shows which processes still drain, and how long they may. `stages` stop one after the
        other. `num_requests`: open ones, if known."""
        alive = {name for name, child in self._children.items() if child.is_running}
        running = [[name for name in stage if name in alive] for stage in stages]
        limit_s = sum(max(map(self._grace_s, stage)) for stage in running if stage)
        self._report.stops()
        self._report.say("launcher", drain_text(num_requests, limit_s))
        self._report.expect("draining", [name for stage in running for name in stage], limit_s)

    def reload(self, processes: Iterable[Process]) -> None:
        """Gives running processes, and those that are started later in their place, new values of the settings that
        may change."""
        for process in processes:
            name = process.name
            text = "\n".join(
                [f"--log-level={os.environ.get(LOG_LEVEL_ENV) or 'info'}", *live_flags(process.config)]
            ).encode()
            if name not in self._flags or os.pread(self._flags[name], len(text) + 1, 0) == text:
                continue
            self._processes[name] = replace(self._processes[name], drain_s=process.config.drain_s)
            os.pwrite(self._flags[name], text, 0)
            os.ftruncate(self._flags[name], len(text))
            if self._children[name].is_running:
                self._children[name].signal(signal.SIGHUP)

    def close(self) -> None:
        while self._flags:
            os.close(self._flags.popitem()[1])

    async def stop_redis(self) -> None:
        if self._redis is not None:
            await asyncio.to_thread(self._redis.stop)
            self._report.say(REDIS, "stopped")

    async def _start(self, one: SupervisedProcess) -> None:
        relay = one.on_line or self._report.relay(one.name)
        env = {**dict(one.env), HELD_ENV: ",".join(map(str, self._held.ports))}
        program, files = one.program, []
        if one.has_flags_file:  # in memory, so that a killed launcher leaves no file behind
            if one.name not in self._flags:
                self._flags[one.name] = os.memfd_create(f"{one.name}.flags")
            files = [self._flags[one.name]]
            program = (*program, f"{FLAGS_FILE}=/dev/fd/{files[0]}")
        child = self._children[one.name] = Child(one.name, program, env, relay, files, one.python)
        slow = asyncio.get_running_loop().call_later(
            _SLOW_START_S, self._report.say, one.name, slow_start(is_worker=one.is_worker)
        )
        try:
            await child.start(one.start_s)
        finally:
            slow.cancel()
        if one.is_worker:
            _note_first_start()
        self._on_start(one.name)
        self._report.say(one.name, f"pid {child.pid} listens on {child.address} after {child.start_s:.2f} s")

    def _keep_with(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._keepers[name] = keeper = asyncio.create_task(work, name=f"keep-{name}")
        keeper.add_done_callback(self._kept)

    def _kept(self, keeper: asyncio.Task[None]) -> None:
        """Keepers run until they are cancelled."""
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            self._error = error
            self._has_failed.set()

    async def _release(self, names: Iterable[str]) -> None:
        keepers = [self._keepers.pop(name) for name in names if name in self._keepers]
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)

    async def _keep(self, name: str) -> None:
        backoff = _Backoff()
        while True:
            child, began_s = self._children.get(name), time.monotonic()
            how = "has no process"  # for example, because there was no memory for one
            if child is not None and child.pid:
                how = f"pid {child.pid} {outcome(await child.wait())}"
            backoff_s = backoff.next_s(time.monotonic() - began_s)
            self._report.say(name, f"{how}; starting it again in {backoff_s:.2g} s")
            await asyncio.sleep(backoff_s)
            try:
                await self._start(self._processes[name])
            except (PdserveError, OSError) as error:  # OSError: for example, no memory for a process
                self._report.say(name, f"did not come back: {error}")

    async def _keep_redis(self, path: Path) -> None:
        backoff, began_s = _Backoff(), time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_S)
            if self._redis is None or self._redis.is_alive:
                continue
            backoff_s = backoff.next_s(time.monotonic() - began_s)
            self._report.say(REDIS, f"pid {self._redis.pid} ended; starting it again in {backoff_s:.2g} s")
            await asyncio.sleep(backoff_s)
            began_s = time.monotonic()
            try:
                self._redis = await asyncio.to_thread(EmbeddedRedis.start, path)
                self._on_start(REDIS)
                self._report.say(REDIS, f"pid {self._redis.pid} listens on {path}")
            except PdserveError as error:
                self._report.say(REDIS, f"did not come back: {error}")

    def _grace_s(self, name: str) -> float:
        return self._processes[name].drain_s + KILL_AFTER_S


def drain_text(num_requests: int | None, limit_s: float) -> str:
    open_text = "" if num_requests is None else f"{num_requests} request{'' if num_requests == 1 else 's'}, "
    return f"draining: {open_text}at most {limit_s:.0f} s; a second signal ends everything at once"


def slow_start(*, is_worker: bool) -> str:
    """What is said of a process that has not started after some seconds."""
    if not is_worker:
        return "still starting"
    file = cache_file(_STARTED)
    return "still loading" if file is not None and file.exists() else _FIRST_START


def _note_first_start() -> None:
    if (file := cache_file(_STARTED)) is not None:
        with contextlib.suppress(OSError):  # then the next start is taken for the first one
            file.touch()


class _Backoff:
    def __init__(self) -> None:
        self._next_s = _FIRST_BACKOFF_S

    def next_s(self, lived_s: float) -> float:
        if lived_s > _STEADY_S:
            self._next_s = _FIRST_BACKOFF_S
        chosen_s, self._next_s = self._next_s, min(2 * self._next_s, _LONGEST_BACKOFF_S)
        return chosen_s


async def side_by_side(starts: Iterable[Awaitable[None]]) -> None:
    """Raises the first failure. The other starts are abandoned, and the caller must stop their processes."""
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
