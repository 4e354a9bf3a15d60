"""The inside of a process for work that may never end. Only the standard library.

The process is started by `process.py` with one message, from which it loads what all of its work shares. Then it forks,
and the work runs in the forked process, with limits on CPU time, wall time and memory. The kernel enforces them: by
SIGPROF, by SIGALRM and by a failed allocation. No code of the interpreter has to run for that. What was loaded stays
loaded when a forked process has been ended, so the next one takes about a millisecond.

Messages are JSON objects on stdin and stdout, with their size before them. Values of type bytes are not written as
JSON, but after the object, because long texts would take milliseconds of the starting process's event loop.

Linux only: other systems have no limit of memory, and a process does not end together with its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

TOO_LONG: Final = -signal.SIGPROF  # the CPU limit
LATE: Final = -signal.SIGALRM  # too little CPU within the wall time
TOO_LARGE: Final = 1  # Python found no memory; an allocator of native code ends the process by a signal of its own
CRASHED: Final = 2
_FINISHED: Final = 3  # stdin was closed
SIZE: Final = struct.Struct("<Q")
MAX_MESSAGE_BYTES: Final = 256 * 2**20
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True)
class Limits:
    cpu_s: float
    wall_s: float
    memory_bytes: int  # in addition to what the process has at its start


def tie_to_parent(parent_pid: int) -> None:
    """Sends SIGKILL when the parent ends, because an orphan that hangs would keep its port and its memory."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before the call above
        os._exit(1)


def pack(message: dict[str, Any]) -> bytes:
    raw = {name: value for name, value in message.items() if isinstance(value, bytes)}
    values = {name: value for name, value in message.items() if name not in raw}
    sizes = [[name, len(value)] for name, value in raw.items()]
    head = json.dumps([values, sizes], ensure_ascii=False).encode("utf-8", "surrogatepass")
    parts = (SIZE.pack(len(head)), head, *raw.values())
    return b"".join((SIZE.pack(sum(map(len, parts))), *parts))


def unpack(data: bytes | bytearray) -> dict[str, Any]:
    """A message without its first size. Raises ValueError."""
    at = SIZE.size
    if len(data) < at:
        raise ValueError("a message without a head")
    end = at + SIZE.unpack_from(data)[0]
    found: dict[str, Any]
    found, sizes = json.loads(data[at:end])
    for name, size in sizes:
        found[name] = bytes(memoryview(data)[end : end + size])
        end += size
    if end != len(data):
        raise ValueError("a message of another size")
    return found


def begin() -> dict[str, Any]:
    """Ties this process to the one that started it, and returns its first message."""
    tie_to_parent(int(sys.argv[1]))
    first = _receive()
    if first is None:
        sys.exit(0)
    return first


def send(message: dict[str, Any]) -> None:
    _write(1, pack(message))


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]], memory_bytes: int, *, is_reused: bool = True) -> None:
    """Answers messages until stdin is closed. Each has `cpu_s`, `wall_s`, and `more_bytes` of memory.

    A message whose work exceeded a limit is answered by {"ended": minus the signal's number, or the exit status}. If
    the forked process is not reused, each message gets a new one, so that none depends on earlier ones. This process
    has one thread, so that it may fork.
    """
    while True:
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            _serve_and_exit(answer, memory_bytes, parent, is_reused=is_reused)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if ended == _FINISHED:
            return
        if ended != 0:
            send({"ended": ended})


def run(work: Callable[[], Any], limits: Limits) -> dict[str, Any]:
    """{"value": what `work` returns}, or {"ended": ...} as above. It runs in a process of its own, so that nothing of
    it is left."""
    parent = os.getpid()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _run_and_exit(work, limits, parent, writer)
    os.close(writer)
    with open(reader, "rb") as answers:
        answer = answers.read()
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {"ended": ended} if ended != 0 else {"value": json.loads(answer)}


def limit_memory(num_bytes: int) -> None:
    """Allocations fail if the process would have more in total."""
    if sys.platform != "linux":
        return
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = num_bytes if most == resource.RLIM_INFINITY else min(num_bytes, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))


def limit_loading(limits: Limits) -> None:
    """For the work before serve() or run(), whose processes replace these limits. A process that exceeds them ends."""
    limit_memory(_held_bytes() + limits.memory_bytes)
    _start_timers(limits.cpu_s, limits.wall_s)


def end_loading() -> None:
    _start_timers(0.0, 0.0)


def _serve_and_exit(
    answer: Callable[[dict[str, Any]], dict[str, Any]], memory_bytes: int, parent: int, *, is_reused: bool
) -> NoReturn:
    try:
        tie_to_parent(parent)
        most_bytes = _held_bytes() + memory_bytes
        limit_memory(most_bytes)
        while (asked := _receive()) is not None:
            limit_memory(most_bytes + asked["more_bytes"])
            _start_timers(asked["cpu_s"], asked["wall_s"])
            answered = pack(answer(asked))
            _start_timers(0.0, 0.0)
            _write(1, answered)
            if not is_reused:
                os._exit(0)
            del asked, answered
    except BaseException as error:  # the parent's remaining work must not continue in the child
        os._exit(TOO_LARGE if isinstance(error, MemoryError) else CRASHED)
    os._exit(_FINISHED)


def _run_and_exit(work: Callable[[], Any], limits: Limits, parent: int, writer: int) -> NoReturn:
    try:
        tie_to_parent(parent)
        _start_timers(limits.cpu_s, limits.wall_s)
        limit_memory(_held_bytes() + limits.memory_bytes)
        answer = json.dumps(work()).encode()
        _start_timers(0.0, 0.0)
        _write(writer, answer)
    except BaseException as error:  # as above
        os._exit(TOO_LARGE if isinstance(error, MemoryError) else CRASHED)
    os._exit(0)


def _start_timers(cpu_s: float, wall_s: float) -> None:
    """No handler is installed: the kernel ends the process, whatever runs in it."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def _held_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def _write(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def _receive() -> dict[str, Any] | None:
    """None at the end of stdin."""
    head = _read(SIZE.size)
    if len(head) < SIZE.size:
        return None
    return unpack(_read(SIZE.unpack(head)[0]))


def _read(size: int) -> bytearray:
    """Unbuffered, because a forked process takes only its own messages from stdin."""
    held = bytearray()
    while len(held) < size and (piece := os.read(0, min(size - len(held), 2**20))):
        held += piece
    return held
