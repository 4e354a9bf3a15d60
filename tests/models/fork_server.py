"""Workers of a cluster as forks of one process that has imported vLLM, which saves 15 seconds of CPU time for each.

`forking_python` writes an executable that stands for a worker's python: it asks the server for a fork, which runs the
module in its place with its arguments, environment and files, and ends as the fork ends. A SIGKILL of either ends both.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

_MOST_FILES: Final = 64
_FORWARDED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_UNUSED: Final = 200  # descriptors from here on are nobody's


@contextlib.contextmanager
def forking_python(folder: Path) -> Iterator[Path]:
    """The executable, while its server runs."""
    path, python = folder / "forks", folder / "python"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    own = f'exec "{sys.executable}"'  # also answers the launcher, which asks it what it has
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && {own} "$@"\n{own} -m tests.models.fork_server "{path}" "$@"\n')
    python.chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, "-c", f"from tests.models import fork_server; fork_server.serve({listener.fileno()})"],
        pass_fds=[listener.fileno()],
        stdin=subprocess.PIPE,  # at whose end the server ends
    )
    listener.close()
    try:
        yield python
    finally:
        server.kill()
        server.wait()


# --- the process that stands for a worker ---------------------------------------------------------------------


def stand_in(path: str, arguments: list[str]) -> NoReturn:
    """`arguments` are those of python: -m, tied_program, the parent, the module, and the module's."""
    from pdserve.isolated.child import tie_to_parent

    parent_pid, *program = arguments[2:]
    tie_to_parent(int(parent_pid))
    files = [number for number in map(int, os.listdir("/proc/self/fd")) if _is_open(number)]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        message = json.dumps({"files": files, "program": program, "folder": os.getcwd(), "environ": dict(os.environ)})
        socket.send_fds(connection, [len(message).to_bytes(4, "big")], files)
        connection.sendall(message.encode())
        pid = int.from_bytes(_read(connection, 4), "big")
        for number in _FORWARDED:
            signal.signal(number, lambda number, frame: _send(pid, number))
        status = _read(connection, 4)
    code = os.waitstatus_to_exitcode(int.from_bytes(status, "big")) if status else 1
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _is_open(number: int) -> bool:
    with contextlib.suppress(OSError):
        os.fstat(number)
        return True
    return False


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _read(connection: socket.socket, count: int) -> bytes:
    """Fewer bytes only at the end."""
    data = b""
    while len(data) < count and (part := connection.recv(count - len(data))):
        data += part
    return data


# --- the server -----------------------------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Until stdin ends."""
    import vllm.engine.arg_utils
    import vllm.v1.core.kv_cache_utils
    import vllm.v1.worker.cpu_worker  # noqa: F401

    import pdserve.engine.vllm.start  # noqa: F401

    listener = socket.socket(fileno=descriptor)
    connections: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listener, 0], [], [], 0.02)
        if 0 in ready and not os.read(0, 1):
            return
        if listener in ready:
            connection, _ = listener.accept()
            files: list[int] = []
            try:
                head, files, _, _ = socket.recv_fds(connection, 4, _MOST_FILES)
                asked = json.loads(_read(connection, int.from_bytes(head, "big")))
            except (OSError, ValueError):  # the process that asked was killed meanwhile
                connection.close()
                for number in files:
                    os.close(number)
                continue
            pid = os.fork()
            if pid == 0:
                for other in (listener, *connections.values()):
                    other.close()
                _become(connection, files, asked)
            for number in files:
                os.close(number)
            connections[pid] = connection
            with contextlib.suppress(OSError):
                connection.sendall(pid.to_bytes(4, "big"))
        while connections:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            with connections.pop(pid) as connection, contextlib.suppress(OSError):
                connection.sendall(status.to_bytes(4, "big"))


def _become(connection: socket.socket, files: list[int], asked: dict[str, Any]) -> NoReturn:
    os.setsid()
    # First out of the way of the numbers that they shall have.
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD, _UNUSED) for number in files]
    kept = socket.socket(fileno=fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, _UNUSED))
    connection.close()
    for number in files:
        os.close(number)
    for number, target in zip(moved, asked["files"], strict=True):
        os.dup2(number, target)
        os.close(number)
    threading.Thread(target=_end_with, args=(kept,), daemon=True).start()
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environ"])
    module, *arguments = asked["program"]
    sys.argv = [module, *arguments]
    code = 1
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as tied_program does
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_with(connection: socket.socket) -> None:
    connection.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    stand_in(sys.argv[1], sys.argv[2:])
