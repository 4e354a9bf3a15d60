"""One supervised process: starts it, waits until it listens, forwards its output, ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

from pdserve.config import without_secrets
from pdserve.core.errors import PdserveError
from pdserve.core.progress import phase_of
from pdserve.isolated.tied_program import tied_command
from pdserve.launch.ports import session_of
from pdserve.launch.spec import waiting_env

TAIL_LINES: Final = 40
MAX_LINE_BYTES: Final = 1 << 16
_LISTENING: Final = re.compile(r" listening on (\S+:\d+)$")
_LOG_LINE: Final = re.compile(r'[ "](DEBUG|INFO|WARNING|ERROR|CRITICAL)[ "]')
_COMPLAINT: Final = re.compile(r"error|: got .+, expected ", re.IGNORECASE)
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
    ) -> None:
        """`files`: open descriptors that the process inherits."""
        self.name = name
        self.address = ""
        self.start_s = 0.0
        self._program = tuple(program)
        self._env = env
        self._relay = relay
        self._files = files
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
            *tied_command(*self._program),
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
