"""One process of a cluster: starts it, waits until it listens, forwards its output, ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

from pdserve.config import without_secrets
from pdserve.core.errors import PdserveError
from pdserve.core.progress import phase_of
from pdserve.isolated.tied_program import tied_command
from pdserve.launch.detached.keeper import LISTENING, TiedProcess
from pdserve.launch.spec import waiting_env

TAIL_LINES: Final = 40
_LOG_LINE: Final = re.compile(r'[ "](DEBUG|INFO|WARNING|ERROR|CRITICAL)[ "]')
_COMPLAINT: Final = re.compile(r"error(?! in sys\.excepthook)|: got .+, expected ", re.IGNORECASE)
_NOISE: Final = re.compile(r"^(pdserve\.core\.errors\.\w+|prefill_worker|decode_worker|router|gateway): |^error: ")
_EVENT: Final = "@"  # begins a line of Ray's driver on stdout

OnLine = Callable[[str, bool], None]  # a line, and whether it is of stdout


class StartFailed(PdserveError):
    """A process of the cluster ended, or timed out, before it listened."""

    reason = "START_FAILED"


# --- who starts it --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnCommand:
    """`stage`: processes of a lower one end first, if they end without a launcher."""

    name: str
    words: Sequence[str]
    env: Mapping[str, str]
    files: Sequence[int] = ()
    stage: int = 0
    drain_s: float = 0.0


class Spawned(Protocol):
    """A process in a session of its own."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int:
        """The exit status, negative for a signal, once the process has ended and its lines are read. Its own child
        processes have ended then."""
        ...

    def send_signal(self, number: signal.Signals) -> None:
        """Does nothing if it has ended."""
        ...


class Spawner(Protocol):
    @property
    def parent_pid(self) -> int:
        """Of the process whose end also ends those that are spawned."""
        ...

    def spawn(self, command: SpawnCommand, on_line: OnLine) -> Awaitable[Spawned]:
        """Raises OSError."""
        ...


@final
class TiedSpawner:
    """Starts children of this process. They end when it ends, even if it is killed."""

    @property
    def parent_pid(self) -> int:
        return os.getpid()

    async def spawn(self, command: SpawnCommand, on_line: OnLine) -> Spawned:
        return await TiedProcess.start(command.words, command.env, on_line, command.files)


# --- its life -------------------------------------------------------------------------------------------------


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
        *,
        spawner: Spawner | None = None,
        stage: int = 0,
        drain_s: float = 0.0,
    ) -> None:
        """`files`: open descriptors that the process inherits. `python` empty: that of this process. `stage` as of
        SpawnCommand."""
        self.name = name
        self.address = ""
        self.start_s = 0.0
        self._program = tuple(program)
        self._env = env
        self._relay = relay
        self._files, self._python = files, python
        self._spawner, self._stage, self._drain_s = spawner or TiedSpawner(), stage, drain_s
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process: Spawned | None = None
        self._began_s = 0.0
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
        self._began_s = time.monotonic()
        command = SpawnCommand(
            name=self.name,
            words=tied_command(*self._program, python=self._python, parent_pid=self._spawner.parent_pid),
            env={**waiting_env(os.environ), **without_secrets(os.environ), **self._env, "PYTHONUNBUFFERED": "1"},
            files=self._files,
            stage=self._stage,
            drain_s=self._drain_s,
        )
        self._process = await self._spawner.spawn(command, self.take)

    def adopt(self, process: Spawned, address: str, start_s: float) -> None:
        """Instead of `start`: it listens already."""
        self._process, self.address, self.start_s = process, address, start_s
        self._listening.set_result(address)

    async def wait(self) -> int:
        """As of Spawned."""
        assert self._process is not None
        return await self._process.wait()

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
        await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def last_error(self) -> str:
        """The line to show: the last error that is not a log line, otherwise the last error log line, otherwise the
        last line."""
        lines = [line.strip() for line in self._tail if line.strip()]
        complaints = [line for line in lines if _COMPLAINT.search(line)]
        plain = [line for line in complaints if not _LOG_LINE.search(line)]
        return _NOISE.sub("", (plain or complaints or lines or ["it said nothing"])[-1])

    def take(self, line: str, is_stdout: bool) -> None:
        """A line of its output."""
        if is_stdout and not self._listening.done():
            if (found := LISTENING.search(line)) is not None:
                self.start_s = time.monotonic() - self._began_s
                self._listening.set_result(found.group(1) or self.name)
                return
            if not line.startswith(_EVENT):
                self._tail.append(line)
        elif not is_stdout and phase_of(line) is None:
            self._tail.append(line)
        self._relay(line)
