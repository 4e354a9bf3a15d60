"""A launcher's connection to the keeper of its processes, and how a command finds the keepers of this user."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from pdserve.core.errors import PdserveError, Unavailable
from pdserve.launch.child import OnLine, SpawnCommand
from pdserve.launch.detached.keeper import MAX_MESSAGE_BYTES, PROTOCOL, receive, send
from pdserve.owned_folder import PREFIX, OwnedFolder, is_private, open_private, temporary_folders

KEEPER_SOCKET: Final = "keeper.sock"
KEEPER_LOG: Final = "keeper.log"
log = logging.getLogger(__name__)
_LOOK_S: Final = 5.0
_ATTACH_S: Final = 60.0  # more than the launcher that is replaced may take


@final
class KeptProcess:
    """A process that the keeper has started."""

    def __init__(self, link: KeeperLink, key: int, pid: int, on_line: OnLine) -> None:
        self._link, self._key, self._pid = link, key, pid
        self.on_line = on_line
        self._code: int | None = None
        self._has_ended = asyncio.Event()

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def returncode(self) -> int | None:
        return self._code

    async def wait(self) -> int:
        await self._has_ended.wait()
        assert self._code is not None
        return self._code

    def send_signal(self, number: signal.Signals) -> None:
        self._link.send({"signal": [self._key, int(number)]})

    def ended(self, code: int) -> None:
        self._code = code
        self._has_ended.set()


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """A process that runs when a launcher attaches. `address` empty: it does not listen yet."""

    process: KeptProcess
    address: str
    start_s: float


@dataclass(frozen=True, slots=True)
class Attached:
    """What the keeper knows."""

    state: Any
    running: Mapping[str, RunningProcess]  # by name
    ports: Sequence[int]
    lines: Sequence[tuple[str, str]]  # of processes, while there was no launcher


@final
class KeeperLink:
    """Starts processes through a keeper.

    `on_leave` is called when another launcher asks for the place of this one, and returns why it stays; empty: it can
    leave. `on_go` is called when it must. `set_on_down` is for the end of the cluster, and `on_lost` for that of the
    keeper.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._processes: dict[int, KeptProcess] = {}
        self._spawning: dict[int, tuple[OnLine, asyncio.Future[KeptProcess]]] = {}
        self._next_key = 1
        self._is_closed = False
        self._parent_pid = 0
        self._keeper: subprocess.Popen[bytes] | None = None  # if this process has started it
        self._reading: asyncio.Task[None] | None = None
        self.on_leave: Callable[[], str] = lambda: "the launcher is still starting; try again when it has"
        self.on_go: Callable[[], None] = lambda: None
        self._on_down: Callable[[], None] = lambda: None
        self._is_down = False
        self.on_lost: Callable[[], None] = lambda: None

    @classmethod
    async def start(cls, sockets: OwnedFolder, orphan_s: float, folders: Sequence[OwnedFolder]) -> KeeperLink:
        """Starts a keeper, which owns the folders too, and listens in `sockets`. Raises OSError and Unavailable."""
        path = sockets.path / KEEPER_SOCKET
        locks = [lock for folder in folders for lock in folder.locks]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen()
            log = open_private(sockets.path / KEEPER_LOG)
            try:
                # Not by asyncio, which would kill it when this process ends.
                keeper = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "pdserve.launch.detached.keeper"),
                        *(str(listener.fileno()), str(orphan_s)),
                        *(str(folder.path) for folder in folders),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={name: value for name, value in os.environ.items() if _is_of_python(name)},
                    start_new_session=True,
                    pass_fds=(listener.fileno(), *locks),
                )
            finally:
                os.close(log)
        try:
            link, _ = await cls.attach(path)
        except BaseException:
            keeper.kill()
            keeper.wait()
            raise
        link._keeper = keeper
        return link

    @classmethod
    async def attach(cls, path: Path) -> tuple[KeeperLink, Attached]:
        """Takes the place of the launcher, if there is one. Raises Unavailable if it stays, or if no keeper answers."""
        with _speaking(path):
            reader, writer = await asyncio.open_unix_connection(path, limit=MAX_MESSAGE_BYTES)
            try:
                async with asyncio.timeout(_ATTACH_S):
                    send(writer, {"ask": "attach"})
                    first = await receive(reader)
                if first is None:
                    raise EOFError
                if why := first.get("error"):
                    raise Unavailable(str(why))
                _check_protocol(first)
                link = cls(reader, writer)
                return link, link._attached(first)
            except BaseException:
                writer.close()
                raise

    @property
    def parent_pid(self) -> int:
        return self._parent_pid

    def set_on_down(self, on_down: Callable[[], None]) -> None:
        """Calls it at once if the cluster shall end already."""
        self._on_down = on_down
        if self._is_down:
            on_down()

    async def spawn(self, command: SpawnCommand, on_line: OnLine) -> KeptProcess:
        """Raises OSError."""
        if self._is_closed:
            raise OSError(0, "the keeper of the processes has ended")
        key, self._next_key = self._next_key, self._next_key + 1
        started: asyncio.Future[KeptProcess] = asyncio.get_running_loop().create_future()
        self._spawning[key] = on_line, started
        asked = {"key": key, "name": command.name, "command": list(command.words), "env": dict(command.env)}
        self.send({"spawn": {**asked, "stage": command.stage, "drain_s": command.drain_s}})
        return await asyncio.shield(started)

    def send(self, message: dict[str, Any]) -> None:
        """Does nothing after the end of the keeper."""
        if not self._is_closed:
            send(self._writer, message)

    def save(self, state: Any) -> None:
        """What a new launcher gets."""
        self.send({"state": state})

    def hold(self, port: int, places: Sequence[tuple[int, str, int]]) -> None:
        self.send({"hold": [port, list(places)]})

    def release(self, port: int) -> None:
        self.send({"release": port})

    async def close(self, *, ends: bool) -> None:
        """`ends`: the keeper ends, and kills the processes that are left. Otherwise they go on. Idempotent."""
        if self._is_closed:
            return
        if ends:
            self.send({"end": True})
        self._is_closed = True
        if not ends and self._reading is not None:
            self._reading.cancel()
        with contextlib.suppress(OSError):
            await self._writer.drain()
            if ends and self._reading is not None:
                await self._reading  # until the keeper has ended
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        if ends and self._keeper is not None:
            await asyncio.to_thread(self._keeper.wait)

    def _attached(self, first: Mapping[str, Any]) -> Attached:
        self._parent_pid = int(first["pid"])
        running = {}
        for key, name, pid, address, start_s in first["running"]:
            process = self._processes[key] = KeptProcess(self, key, pid, lambda line, is_stdout: None)
            running[str(name)] = RunningProcess(process, str(address), float(start_s))
            self._next_key = max(self._next_key, key + 1)
        self._reading = asyncio.create_task(self._read(), name="keeper")
        return Attached(first["state"], running, tuple(first["ports"]), [(name, line) for name, line in first["lines"]])

    async def _read(self) -> None:
        while (message := await self._receive()) is not None:
            try:
                self._take(message)
            except Exception:  # of whoever takes a line: the keeper and the processes are well
                log.exception("a message of the keeper has failed: %s", ", ".join(message))
        self.send({"end": True})  # if only the connection is lost, nothing may be left of what is reported as ended
        for _, started in self._spawning.values():
            started.set_exception(OSError(0, "the keeper of the processes has ended"))
        for process in self._processes.values():
            process.ended(-signal.SIGKILL)  # by the kernel, with their parent
        self._spawning.clear()
        self._processes.clear()
        if not self._is_closed:
            self._is_closed = True
            self.on_lost()

    async def _receive(self) -> dict[str, Any] | None:
        """None: the connection is lost."""
        with contextlib.suppress(OSError, ValueError):
            return await receive(self._reader)
        return None

    def _take(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"line": [key, is_stdout, line]}:
                if key in self._processes:
                    self._processes[key].on_line(line, is_stdout)
            case {"spawned": [key, pid]}:
                on_line, started = self._spawning.pop(key)
                process = self._processes[key] = KeptProcess(self, key, pid, on_line)
                started.set_result(process)
            case {"failed": [key, number, text, file]}:
                self._spawning.pop(key)[1].set_exception(OSError(number, text, file))
            case {"ended": [key, code]}:
                if key in self._processes:
                    self._processes.pop(key).ended(code)
            case {"leave": number}:
                why = self.on_leave()
                self.send({"stays": [number, why]} if why else {"ready_to_leave": number})
            case {"go": number}:
                if why := self.on_leave():  # since it was ready to
                    self.send({"stays": [number, why]})
                else:
                    self.on_go()
            case {"down": True}:
                self._is_down = True
                self._on_down()


# --- commands -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DetachedCluster:
    """One that runs. `launcher_pid` 0: it has no launcher. `state` None: it is still starting."""

    socket: Path
    launcher_pid: int
    pids: Mapping[str, int]  # of its processes, by name
    state: Any


def sockets() -> list[Path]:
    """Of the keepers of this user. Folders that others can enter are left alone."""
    found = []
    for parent in temporary_folders():
        for folder in sorted(parent.glob(f"{PREFIX}*-*")):
            with contextlib.suppress(OSError):
                if is_private(folder.lstat()) and (folder / KEEPER_SOCKET).is_socket():
                    found.append(folder / KEEPER_SOCKET)
    return found


async def look(path: Path) -> DetachedCluster:
    """Raises Unavailable if no keeper answers."""
    with _speaking(path):
        async with asyncio.timeout(_LOOK_S):
            reader, writer = await asyncio.open_unix_connection(path, limit=MAX_MESSAGE_BYTES)
            try:
                send(writer, {"ask": "look"})
                found = await receive(reader)
            finally:
                writer.close()
        if found is None:
            raise EOFError
        _check_protocol(found)
        return DetachedCluster(path, int(found["launcher"]), dict(found["pids"]), found["state"])


async def down(path: Path) -> None:
    """Returns when the cluster has ended."""
    with _speaking(path):
        reader, writer = await asyncio.open_unix_connection(path)
        try:
            send(writer, {"ask": "down"})
            await receive(reader)
        finally:
            writer.close()


@contextlib.contextmanager
def _speaking(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, TimeoutError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, PdserveError):
            raise
        raise Unavailable(f"the keeper of the cluster at {path} does not answer") from error


def _check_protocol(first: Mapping[str, Any]) -> None:
    if first.get("keeper") != PROTOCOL:
        expected = "start it with the version of pdserve that has started the cluster"
        raise Unavailable(f"the cluster has a keeper of another version of pdserve: {expected}")


def _is_of_python(name: str) -> bool:
    """Variables with which this Python finds its packages."""
    return name.startswith("PYTHON") or name in ("PATH", "LD_LIBRARY_PATH", "HOME")
