"""A process for work that may never end, seen from the process that starts it. child.py has the inside.

It inherits no sockets, no open files and no secrets of the environment, and it has a process group of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from pdserve.isolated.child import MAX_MESSAGE_BYTES, SIZE, pack, unpack

START_S: Final = 60.0  # to load a vocabulary, on a busy machine
_END_S: Final = 1.0  # between a process's last byte and its status
_READ_BYTES: Final = 2**20  # of an answer, before the pipe is paused
# Everything else may be a secret.
_KEPT: Final = (
    "PATH", "HOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR",
    "PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE",
)  # fmt: skip


class ChildEnded(Exception):
    """The process has ended before it answered. `status` is minus the signal's number, or the exit status."""

    def __init__(self, status: int | None) -> None:
        super().__init__(f"ended with {status}")
        self.status = status


def outcome(status: int) -> str:
    """How a process has ended, `status` as in ChildEnded."""
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):  # most real-time signals have no name
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"


@final
class ChildProcess:
    """Answers messages in their order. It is started for the first message, and after it has ended."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes: _Pipes | None = None
        self._ending: set[asyncio.Task[int]] = set()

    @property
    def pid(self) -> int | None:
        """Also the id of its process group."""
        return None if self._process is None else self._process.pid

    @property
    def is_started(self) -> bool:
        return self._pipes is not None

    def launch(self) -> None:
        """Needs no event loop: the process imports its modules while the caller prepares the first message. end()
        must follow if start() does not."""
        self._process = _launched(self._module)

    async def start(self, load: Mapping[str, Any]) -> dict[str, Any]:
        """Returns its first answer, {"failed": reason or null, ...}. It has been ended if there is a reason.

        Raises ChildEnded and TimeoutError.
        """
        if self._process is None:
            self.launch()
        assert self._process is not None
        try:
            self._pipes = await _connected(self._process)
            async with asyncio.timeout(START_S):
                loaded = await self.ask(load)
        except BaseException:
            self.end()
            raise
        if loaded["failed"] is not None:
            self.end()
        return loaded

    async def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Raises ChildEnded. The caller calls end() if it does not wait for the answer."""
        await self.send([message])
        return await self.receive()

    async def send(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """`receive` returns the answers. Raises ChildEnded."""
        process, pipes = self._running()
        try:
            pipes.writer.write(b"".join([pack(dict(one)) for one in messages]))
            await pipes.writer.drain()
        except (BrokenPipeError, ConnectionResetError):
            raise ChildEnded(await asyncio.to_thread(_status, process)) from None

    async def receive(self) -> dict[str, Any]:
        """The answer to the next message. Raises ChildEnded."""
        process, pipes = self._running()
        try:
            size = SIZE.unpack(await pipes.reader.readexactly(SIZE.size))[0]
            if size > MAX_MESSAGE_BYTES:
                raise ChildEnded(None)
            return unpack(await pipes.reader.readexactly(size))
        except (ConnectionResetError, asyncio.IncompleteReadError, ValueError):
            raise ChildEnded(await asyncio.to_thread(_status, process)) from None

    def end(self) -> None:
        process, self._process = self._process, None
        pipes, self._pipes = self._pipes, None
        if process is None:
            return
        if pipes is None:
            _end(process)
            return
        if process.poll() is None:
            _kill_group(process.pid)
        pipes.close()
        ending = asyncio.create_task(asyncio.to_thread(process.wait), name="child")
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def wait_until_ended(self) -> None:
        if self._ending:
            await asyncio.wait(self._ending)

    def _running(self) -> tuple[subprocess.Popen[bytes], _Pipes]:
        assert self._process is not None
        assert self._pipes is not None
        return self._process, self._pipes


@final
class BlockingChild:
    """For programs without an event loop. It can start while the caller loads something else."""

    def __init__(self, module: str) -> None:
        self._process = _launched(module)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask_all(self, *messages: Mapping[str, Any], limit_s: float = START_S) -> list[dict[str, Any]]:
        """The answers to the first and to further messages, fewer if the first has failed. The process has then ended.

        Raises ChildEnded, also after `limit_s`.
        """
        try:
            answered, _ = self._process.communicate(b"".join(pack(dict(one)) for one in messages), limit_s)
        except subprocess.TimeoutExpired:
            raise ChildEnded(None) from None
        finally:
            self.end()
        answers = []
        while len(answered) >= SIZE.size:
            end = SIZE.size + SIZE.unpack_from(answered)[0]
            if end > len(answered):
                break
            answers.append(unpack(answered[SIZE.size : end]))
            answered = answered[end:]
        if not answers:
            raise ChildEnded(self._process.returncode)
        return answers

    def end(self) -> None:
        _end(self._process)


@final
@dataclass(frozen=True, slots=True)
class _Pipes:
    """Of a process, on the event loop."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    answers: asyncio.ReadTransport

    def close(self) -> None:
        if not self.writer.is_closing():
            self.writer.transport.abort()
        self.answers.close()


async def _connected(process: subprocess.Popen[bytes]) -> _Pipes:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_READ_BYTES)
    answers, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), process.stdout)
    # The protocol makes drain() wait while the pipe is full; nothing is read through it.
    try:
        transport, protocol = await loop.connect_write_pipe(
            lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), process.stdin
        )
    except BaseException:
        answers.close()
        raise
    return _Pipes(reader, asyncio.StreamWriter(transport, protocol, None, loop), answers)


def _launched(module: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", module, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # a panic message could contain a caller's text
        env=_environment(),
        start_new_session=True,
    )


def _status(process: subprocess.Popen[bytes]) -> int | None:
    """Of a process that has closed its pipes, so that it ends at any moment; None if it does not."""
    try:
        return process.wait(_END_S)
    except subprocess.TimeoutExpired:
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        _kill_group(process.pid)
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _kill_group(pid: int) -> None:
    """The processes that it has forked too."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    # Writing a backtrace takes longer than the work, and threads do not survive a fork.
    return kept | {"RUST_BACKTRACE": "0", "TOKENIZERS_PARALLELISM": "false"}
