"""Starts processes and keeps them alive: one that ends is started again on its port and under its name."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

from pdserve.bounded_file import cache_file
from pdserve.config import LOG_LEVEL_ENV, GatewayConfig, RouterConfig, WorkerConfig
from pdserve.config_flags import FLAGS_FILE, live_flags
from pdserve.core.errors import PdserveError
from pdserve.core.progress import PROGRESS_ENV
from pdserve.isolated.process import outcome
from pdserve.launch.child import Child, Spawned, Spawner, StartFailed, TiedSpawner
from pdserve.launch.detached.keeper import KILL_AFTER_S
from pdserve.launch.ports import HeldPorts
from pdserve.launch.report import LauncherReport
from pdserve.launch.spec import Process
from pdserve.listening import HELD_ENV
from pdserve.owned_folder import open_private
from pdserve.prefix.embedded import START_S, server_binary

OF_ROUTERS, OF_WORKERS, OF_REDIS = range(3)  # stages
NOTICE_S: Final = 3.0  # in which a server that ends at once tells its clients
REDIS: Final = "redis"
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
    address: str = ""  # of a server that does not name it
    stage: int = OF_WORKERS  # without a launcher, processes of a lower one end first


def redis_process(path: Path) -> SupervisedProcess:
    """A real Redis, which listens only on the socket file `path`. Raises ConfigError if this host has no server."""
    server_binary()
    return SupervisedProcess(
        name=REDIS,
        program=("pdserve.prefix.embedded", str(path)),
        start_s=START_S,
        drain_s=0.0,
        on_line=lambda line: None,
        address=str(path),
        stage=OF_REDIS,
    )


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
        stage=OF_WORKERS if isinstance(process.config, WorkerConfig) else OF_ROUTERS,
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
        self._keepers: dict[str, asyncio.Task[None]] = {}  # by the name of the process
        self._is_keeping = False
        self._error: BaseException | None = None  # of a keeper
        self._has_failed = asyncio.Event()
        self._flags: dict[str, int] = {}  # descriptor of each process's flags file
        self._spawner: Spawner = TiedSpawner()
        self._folder: Path | None = None  # of flags files that another launcher may open

    def keep_with(self, spawner: Spawner, folder: Path) -> None:
        """Before a start: processes outlive this launcher. `folder`: a private one for their files."""
        self._spawner, self._folder = spawner, folder

    def adopt(self, one: SupervisedProcess, process: Spawned | None, address: str, start_s: float) -> Child | None:
        """A process that an earlier launcher has started, instead of `start`. None: it does not run, and `keep` starts
        it."""
        self._processes[one.name] = one
        if one.has_flags_file:
            self._flags_file(one.name)
        if process is None:
            return None
        child = self._children[one.name] = self._child(one, (), {}, ())
        child.adopt(process, one.address or address, start_s)
        self._report.say(one.name, f"pid {child.pid} listens on {child.address} already")
        return child

    def fail(self, error: BaseException) -> None:
        """`run` raises it."""
        self._error = error
        self._has_failed.set()

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
            if self._folder is not None:
                self._flags_path(name).unlink(missing_ok=True)

    def replace(self, one: SupervisedProcess) -> None:
        """If the process of that name ends, it is started again like this."""
        self._processes[one.name] = one

    def start_s(self, name: str) -> float:
        """How long its last start took; 0 if it has not ended."""
        return self._children[name].start_s if name in self._children else 0.0

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
            if name in self._children and self._children[name].is_running:
                self._children[name].signal(signal.SIGHUP)

    def close(self) -> None:
        while self._flags:
            os.close(self._flags.popitem()[1])

    async def _start(self, one: SupervisedProcess) -> None:
        env = {**dict(one.env), HELD_ENV: ",".join(map(str, self._held.ports))}
        program, files = one.program, []
        if one.has_flags_file:
            descriptor = self._flags_file(one.name)
            path = f"/dev/fd/{descriptor}" if self._folder is None else str(self._flags_path(one.name))
            files = [descriptor] if self._folder is None else []
            program = (*program, f"{FLAGS_FILE}={path}")
        child = self._children[one.name] = self._child(one, program, env, files)
        slow = asyncio.get_running_loop().call_later(
            _SLOW_START_S, self._report.say, one.name, slow_start(is_worker=one.is_worker)
        )
        try:
            await child.start(one.start_s)
        finally:
            slow.cancel()
        if one.is_worker:
            _note_first_start()
        child.address = one.address or child.address
        self._on_start(one.name)
        self._report.say(one.name, f"pid {child.pid} listens on {child.address} after {child.start_s:.2f} s")

    def _child(
        self, one: SupervisedProcess, program: Sequence[str], env: Mapping[str, str], files: Sequence[int]
    ) -> Child:
        relay = one.on_line or self._report.relay(one.name)
        return Child(
            one.name,
            program,
            env,
            relay,
            files,
            one.python,
            spawner=self._spawner,
            stage=one.stage,
            drain_s=one.drain_s,
        )

    def _flags_file(self, name: str) -> int:
        """In memory, so that a killed launcher leaves no file behind, unless another launcher may open it."""
        if name not in self._flags:
            in_memory = self._folder is None
            self._flags[name] = os.memfd_create(f"{name}.flags") if in_memory else open_private(self._flags_path(name))
        return self._flags[name]

    def _flags_path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{name}.flags"

    def _keep_with(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._keepers[name] = keeper = asyncio.create_task(work, name=f"keep-{name}")
        keeper.add_done_callback(self._kept)

    def _kept(self, keeper: asyncio.Task[None]) -> None:
        """Keepers run until they are cancelled."""
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            self.fail(error)

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
