"""The parent of a detached cluster's processes, which stays while the launcher is replaced. Standard library only.

    python -m pdserve.launch.detached.keeper SOCKET_FD ORPHAN_S FOLDER ...

It starts processes, reads their output and waits for their ends, as the connected launcher asks (`link.py`). So each
process has a parent that knows whether it runs, and the kernel ends all of them if the keeper is killed. What a new
launcher needs stays in the keeper's memory: no file names a process, and none holds a secret of it. Without a launcher
the processes go on for ORPHAN_S; then they drain and end, those of the lowest stage first. At its end it removes the
folders, which it keeps locked until then.

Messages are JSON objects, one on each line. The first line of a connection has `ask`: "look", "attach" or "down". The
socket is in a folder of this user, and only processes of this user are answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

from pdserve.isolated.tied_program import end_session

PROTOCOL: Final = 1
MAX_LINE_BYTES: Final = 1 << 16  # of a process
MAX_MESSAGE_BYTES: Final = 1 << 24
KILL_AFTER_S: Final = 5.0  # in addition to a process's own drain time
LISTENING: Final = re.compile(r" listening on (\S+:\d+)$|eady to accept connections( )?")  # the latter of Redis
_FIRST_S: Final = 5.0  # for the first message of a connection
_FIRST_LAUNCHER_S: Final = 60.0  # for the launcher that starts the keeper
_LEAVE_S: Final = 30.0  # for the launcher that is to be replaced
_LAST_LINES_S: Final = 1.0  # for the output of a process that has ended
_MOST_CONNECTIONS: Final = 32
_MOST_WAITING_BYTES: Final = 1 << 20  # of lines, while there is no launcher
_LINE_BYTES: Final = 64  # of a line that waits, beside its characters
_MOST_UNSENT_BYTES: Final = 1 << 23  # of a launcher that reads nothing; further lines are lost
_PEER: Final = struct.Struct("3i")  # pid, uid, gid


@final
class TiedProcess:
    """A child of this process, in a session of its own."""

    def __init__(self, process: asyncio.subprocess.Process, on_line: Callable[[str, bool], None]) -> None:
        """`on_line` gets each line, and whether it is of stdout."""
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._readers = [
            asyncio.create_task(_read_lines(process.stdout, lambda line: on_line(line, True))),
            asyncio.create_task(_read_lines(process.stderr, lambda line: on_line(line, False))),
        ]

    @classmethod
    async def start(
        cls,
        words: Sequence[str],
        env: Mapping[str, str],
        on_line: Callable[[str, bool], None],
        files: Sequence[int] = (),
    ) -> TiedProcess:
        """`files`: open descriptors that it inherits. Raises OSError and ValueError."""
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            env=env,
            start_new_session=True,
            pass_fds=files,
        )
        return cls(process, on_line)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        """The exit status, once the process has ended and its lines are read. The rest of its session is ended."""
        status = await self._process.wait()
        end_session(self._process.pid)
        _, late = await asyncio.wait(self._readers, timeout=_LAST_LINES_S)
        for one in late:
            one.cancel()
        return status

    def send_signal(self, number: int) -> None:
        """Does nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)


async def _read_lines(pipe: asyncio.StreamReader, take: Callable[[str], None]) -> None:
    while True:
        try:
            raw = await pipe.readline()
        except ValueError:  # a line over the limit: drop its buffered part
            continue
        if not raw:
            return
        take(raw.decode(errors="replace").rstrip())


@dataclass(slots=True, kw_only=True)
class _Kept:
    """A process that runs."""

    key: int  # chosen by the launcher
    name: str
    stage: int
    drain_s: float
    process: TiedProcess
    began_s: float = field(default_factory=time.monotonic)
    address: str = ""  # once it listens
    start_s: float = 0.0


@final
class Keeper:
    def __init__(self, orphan_s: float) -> None:
        self._orphan_s = orphan_s
        self._kept: dict[int, _Kept] = {}
        self._lives: dict[int, asyncio.Task[None]] = {}
        self._held: dict[int, list[socket.socket]] = {}
        self._state: Any = None
        self._launcher: asyncio.StreamWriter | None = None
        self._launcher_pid = 0
        self._is_free = asyncio.Event()  # no launcher is connected
        self._is_free.set()
        self._is_replacing = False
        self._leave_number = 0  # of the last request to leave
        self._refusal = ""  # of the launcher that is to be replaced; empty: it can leave
        self._has_answered = asyncio.Event()
        self._waiting: deque[tuple[str, str]] = deque()  # lines for the next launcher, each with its process
        self._waiting_bytes = 0
        self._orphaned: asyncio.TimerHandle | None = None
        self._num_connections = 0
        self._is_down = False  # the cluster shall end
        self._ending: asyncio.Task[None] | None = None
        self.has_ended = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self._num_connections += 1
        try:
            pid, uid, _ = _PEER.unpack(
                writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            )
            if uid != os.geteuid() or self._num_connections > _MOST_CONNECTIONS:
                return
            async with asyncio.timeout(_FIRST_S):
                first = await receive(reader)
            match (first or {}).get("ask"):
                case "look":
                    pids = {one.name: one.process.pid for one in self._kept.values()}
                    about = {"keeper": PROTOCOL, "launcher": self._launcher_pid, "pids": pids}
                    send(writer, {**about, "state": self._state})
                    await writer.drain()
                case "attach":
                    await self._attach(pid, reader, writer)
                case "down":
                    self.down()
                    await _first_of(self.has_ended.wait(), _closed(reader))
        except (OSError, ValueError, TimeoutError):
            pass  # the other side is told by the end of the connection
        finally:
            self._num_connections -= 1
            writer.close()

    def down(self) -> None:
        """The launcher drains and ends the cluster; without one, or if it ends without that, the keeper does."""
        self._is_down = True
        if self._launcher is not None:
            send(self._launcher, {"down": True})
        elif self._ending is None:
            self._ending = asyncio.create_task(self._finish(is_graceful=self._state is not None))

    def expect_launcher(self, limit_s: float) -> None:
        """The cluster ends unless one attaches in that time."""
        self._orphaned = asyncio.get_running_loop().call_later(limit_s, self.down)

    # -- launchers -----------------------------------------------------------------------------------------------

    async def _attach(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if why := await self._why_not(reader):
            send(writer, {"error": why})
            await writer.drain()
            return
        if _is_closed(reader):  # it has not waited
            return
        self._launcher, self._launcher_pid = writer, pid
        self._is_free.clear()
        if self._orphaned is not None:
            self._orphaned.cancel()
        running = [[one.key, one.name, one.process.pid, one.address, one.start_s] for one in self._kept.values()]
        lines, self._waiting_bytes = list(self._waiting), 0
        self._waiting.clear()
        send(
            writer,
            {
                "keeper": PROTOCOL,
                "pid": os.getpid(),
                "state": self._state,
                "running": running,
                "ports": list(self._held),
                "lines": lines,
            },
        )
        try:
            while (message := await receive(reader)) is not None:
                await self._do(message)
        finally:
            self._launcher, self._launcher_pid = None, 0
            self._is_free.set()
            if self._is_down or self._state is None:  # the latter: the cluster was not ready yet
                self.down()
            else:
                self.expect_launcher(self._orphan_s)

    async def _why_not(self, reader: asyncio.StreamReader) -> str:
        """Why the launcher that `reader` receives from may not connect now; empty: no other is connected any more.

        In two steps, so that a launcher that answers late stays if its successor has given up."""
        if self._is_down or self._ending is not None:
            return "the cluster is ending"
        if self._is_replacing:
            return "another launcher is just taking over"
        if self._launcher is None:
            return ""
        self._is_replacing, self._refusal = True, ""
        self._leave_number += 1
        self._has_answered.clear()
        send(self._launcher, {"leave": self._leave_number})
        try:
            await _first_of(self._is_free.wait(), self._has_answered.wait(), _closed(reader), limit_s=_LEAVE_S)
            if self._has_answered.is_set() and not self._refusal and not _is_closed(reader):
                self._has_answered.clear()
                self._tell({"go": self._leave_number})
                await _first_of(self._is_free.wait(), self._has_answered.wait(), limit_s=_LEAVE_S)
        finally:
            self._is_replacing = False
        if self._is_down:
            return "the cluster is ending"
        if self._launcher is None:
            return ""
        return self._refusal or (
            f"the launcher (pid {self._launcher_pid}) has not left within {_LEAVE_S:.0f} s; kill it, and try again"
        )

    async def _do(self, message: dict[str, Any]) -> None:
        match message:
            case {"spawn": dict(asked)}:
                await self._spawn(**asked)
            case {"signal": [int(key), int(number)]}:
                if key in self._kept:
                    self._kept[key].process.send_signal(number)
            case {"state": state}:
                self._state = state
                if self._is_down:  # the launcher may not have been able to end it before
                    self._tell({"down": True})
            case {"hold": [int(port), list(addresses)]}:
                self._hold(port, addresses)
            case {"release": int(port)}:
                for one in self._held.pop(port, ()):
                    one.close()
            case {"ready_to_leave": int(number)} if number == self._leave_number:
                self._has_answered.set()
            case {"stays": [int(number), str(why)]} if number == self._leave_number:
                self._refusal = why
                self._has_answered.set()
            case {"end": True}:
                if self._ending is None:
                    self._ending = asyncio.create_task(self._finish(is_graceful=False))

    def _hold(self, port: int, addresses: Iterable[tuple[int, str, int]]) -> None:
        """Binds it beside the launcher, so that no other user can while neither the launcher nor the server runs."""
        held = self._held.setdefault(port, [])
        for family, address, only_v6 in addresses:
            one = socket.socket(family, socket.SOCK_STREAM)
            try:
                if family == socket.AF_INET6:
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only_v6)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                one.bind((address, port))
            except OSError:
                one.close()
            else:
                held.append(one)

    def _tell(self, message: dict[str, Any]) -> None:
        if self._launcher is not None:
            send(self._launcher, message)

    # -- processes -----------------------------------------------------------------------------------------------

    async def _spawn(
        self, key: int, name: str, command: list[str], env: dict[str, str], stage: int, drain_s: float
    ) -> None:
        try:
            if self._ending is not None:
                raise OSError(0, "the cluster is ending")
            process = await TiedProcess.start(
                command, env, lambda line, is_stdout: self._line(self._kept[key], line, is_stdout=is_stdout)
            )
        except (OSError, ValueError) as error:
            number, text = (error.errno or 0, error.strerror) if isinstance(error, OSError) else (0, None)
            self._tell({"failed": [key, number, text or str(error), command[0]]})
            return
        self._kept[key] = kept = _Kept(key=key, name=name, stage=stage, drain_s=drain_s, process=process)
        self._tell({"spawned": [key, process.pid]})
        self._lives[key] = asyncio.create_task(self._live(kept))

    async def _live(self, kept: _Kept) -> None:
        status = await kept.process.wait()
        del self._kept[kept.key], self._lives[kept.key]
        self._tell({"ended": [kept.key, status]})

    def _line(self, kept: _Kept, line: str, *, is_stdout: bool) -> None:
        if is_stdout and not kept.address and (found := LISTENING.search(line)) is not None:
            kept.address, kept.start_s = found.group(1) or kept.name, time.monotonic() - kept.began_s
        if self._launcher is None:
            self._waiting.append((kept.name, line))
            self._waiting_bytes += len(line) + _LINE_BYTES
            while self._waiting_bytes > _MOST_WAITING_BYTES:
                self._waiting_bytes -= len(self._waiting.popleft()[1]) + _LINE_BYTES
        elif self._launcher.transport.get_write_buffer_size() < _MOST_UNSENT_BYTES:
            send(self._launcher, {"line": [kept.key, is_stdout, line]})

    async def _finish(self, *, is_graceful: bool) -> None:
        """`is_graceful`: each process may drain for its time limit."""
        while self._kept and is_graceful:
            first = min(one.stage for one in self._kept.values())
            stage = [one for one in self._kept.values() if one.stage == first]
            for one in stage:
                one.process.send_signal(signal.SIGTERM)
            limit_s = max(one.drain_s for one in stage) + KILL_AFTER_S
            await asyncio.wait([self._lives[one.key] for one in stage], timeout=limit_s)
            for one in stage:
                if one.key in self._kept:
                    one.process.send_signal(signal.SIGKILL)
                    await self._lives[one.key]
        for one in list(self._kept.values()):
            one.process.send_signal(signal.SIGKILL)
            await self._lives[one.key]
        self.has_ended.set()


async def _first_of(*waits: Coroutine[Any, Any, object], limit_s: float | None = None) -> None:
    tasks = [asyncio.ensure_future(one) for one in waits]
    try:
        await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _closed(reader: asyncio.StreamReader) -> None:
    """Returns when the other side has closed the connection, or sends something out of turn."""
    with contextlib.suppress(OSError):
        await reader.read(1)


def _is_closed(reader: asyncio.StreamReader) -> bool:
    return reader.at_eof() or reader.exception() is not None


def send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


async def receive(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """None: the connection has ended. Raises ValueError, also for a line over the limit, and OSError."""
    raw = await reader.readline()
    if not raw.endswith(b"\n"):
        return None
    found = json.loads(raw)
    if not isinstance(found, dict):
        raise ValueError("a message that is no object")
    return found


async def main(descriptor: int, orphan_s: float, folders: list[str]) -> None:
    keeper = Keeper(orphan_s)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, keeper.down)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    listener = socket.socket(fileno=descriptor)
    keeper.expect_launcher(_FIRST_LAUNCHER_S)
    server = await asyncio.start_unix_server(keeper.serve, sock=listener, limit=MAX_MESSAGE_BYTES)
    await keeper.has_ended.wait()
    server.close()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
