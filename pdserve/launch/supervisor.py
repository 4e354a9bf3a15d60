"""Keeps processes alive: one that ends is started again on its port and under its name."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

from pdserve.bounded_file import cache_file
from pdserve.config import GatewayConfig, RouterConfig, WorkerConfig
from pdserve.config_flags import FLAGS_FILE, live_flags
from pdserve.core.errors import PdserveError
from pdserve.core.progress import PROGRESS_ENV
from pdserve.isolated.process import outcome
from pdserve.launch.child import Child, StartFailed
from pdserve.launch.ports import HeldPorts
from pdserve.launch.report import LauncherReport
from pdserve.launch.spec import Process
from pdserve.listening import HELD_ENV
from pdserve.prefix.embedded import EmbeddedRedis

KILL_AFTER_S: Final = 5.0  # in addition to a process's own drain time
LAST_WORDS_S: Final = 3.0  # in which a server that ends at once tells its clients
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
    env: tuple[tuple[str, str], ...] = ()
    start_s: float
    drain_s: float
    last_words_s: float = 0.0  # before it is killed, if everything ends at once
    is_worker: bool = False
    has_flags_file: bool = False
    on_line: Callable[[str], None] | None = None


def supervised(process: Process) -> SupervisedProcess:
    return SupervisedProcess(
        name=process.name,
        program=(process.module, *process.argv[2:]),
        env=(*process.env, (PROGRESS_ENV, "1")) if isinstance(process.config, WorkerConfig) else process.env,
        start_s=process.start_s,
        drain_s=process.config.drain_s,
        last_words_s=LAST_WORDS_S if isinstance(process.config, RouterConfig | GatewayConfig) else 0.0,
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
        self._keepers: list[asyncio.Task[None]] = []
        self._flags: dict[str, int] = {}  # descriptor of each process's flags file

    def address(self, name: str) -> str:
        return self._children[name].address

    async def start(self, one: SupervisedProcess) -> None:
        """Returns when the process listens. Raises StartFailed with its last error."""
        self._processes[one.name] = one
        self._report.say(one.name, "starting")
        self._report.begins(one.name)
        await self._start(one)
        self._report.phase(one.name, self._children[one.name].start_s)

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
        for name in self._processes:
            self._keepers.append(asyncio.create_task(self._keep(name)))
        if self._redis is not None:
            self._keepers.append(asyncio.create_task(self._keep_redis(self._redis_path)))

    async def run(self, stop: asyncio.Event) -> None:
        """Returns when `stop` is set. Raises an error of the supervision itself."""
        stopping = asyncio.ensure_future(stop.wait())
        done, _ = await asyncio.wait([stopping, *self._keepers], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        for task in done:
            task.result()

    async def release(self) -> None:
        """From now on, processes that end are not started again."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers = []

    async def stop(self, names: Iterable[str], *, is_graceful: bool) -> None:
        """SIGTERM, time to drain, SIGKILL; all of `names` in parallel."""
        children = [self._children[name] for name in names if name in self._children]

        async def stop(child: Child) -> None:
            self._report.begins(child.name)
            grace_s = self._grace_s(child.name) if is_graceful else self._processes[child.name].last_words_s
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

    def reload(self, processes: Iterable[Process], log_level: str) -> None:
        """Gives running processes, and those that are started later in their place, new values of the settings that
        may change."""
        for process in processes:
            name = process.name
            text = "\n".join([f"--log-level={log_level}", *live_flags(process.config)]).encode()
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
        child = self._children[one.name] = Child(one.name, program, env, relay, files)
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

    async def _keep(self, name: str) -> None:
        backoff = _Backoff()
        while True:
            child, began_s = self._children[name], time.monotonic()
            how = outcome(await child.wait())
            backoff_s = backoff.next_s(time.monotonic() - began_s)
            self._report.say(name, f"pid {child.pid} {how}; starting it again in {backoff_s:.2g} s")
            await asyncio.sleep(backoff_s)
            try:
                await self._start(self._processes[name])
            except PdserveError as error:
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
