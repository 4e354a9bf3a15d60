"""The process of a peer of benchmarks.engine: one JSON order per line on stdin, one answer per line on stdout.

It imports only the standard library, because it also runs in the environment of a peer.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

PR_SET_PDEATHSIG: Final = 1
RESET_PEAK: Final = "5"  # written to /proc/self/clear_refs, resets the peak of resident memory

Orders = Mapping[str, Callable[..., dict[str, Any]]]


def serve(load: Callable[[], Orders]) -> None:
    """Loads, then runs orders until stdin closes. If an order raises, answers with the error and ends the process."""
    # The kernel ends this process when its parent ends, even while it is stopped.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Libraries print to stdout: the answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        began_s = time.perf_counter()
        orders: Orders = {"memory": memory, **load()}
        answer({"load_s": time.perf_counter() - began_s, **memory()})
        for line in sys.stdin:
            order: dict[str, Any] = json.loads(line)
            answer(orders[order.pop("do")](**order))
    # Any error is an answer, because the reader waits for one.
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)


class Stopwatch:
    """Wall and CPU time of steps, each in a `with`. CPU time is that of all threads of this process."""

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self.cpu_s: list[float] = []

    def __enter__(self) -> None:
        self._began = time.process_time(), time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.step_s.append(time.perf_counter() - self._began[1])
        self.cpu_s.append(time.process_time() - self._began[0])

    def steps(self, first: int, count: int) -> dict[str, Any]:
        """The answer to an order: `count` steps from `first` on."""
        return {"step_s": self.step_s[first : first + count], "cpu_s": self.cpu_s[first : first + count]}


def memory() -> dict[str, Any]:
    """The peak of resident memory since the last call, and the private memory now, in bytes."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    peak, own = (int(status[name].split()[0]) * 1024 for name in ("VmHWM", "RssAnon"))
    return {"peak_bytes": peak, "own_bytes": own}


def prompts(batch: int, tokens: int, vocab_size: int, salt: int) -> list[list[int]]:
    """The same prompts for every peer; `salt` differs between turns, so that no prefix cache can help."""
    state = 2_654_435_761 * (salt + 1) % 2**32
    rows = []
    for _ in range(batch):
        row = []
        for _ in range(tokens):
            state = (1_664_525 * state + 1_013_904_223) % 2**32
            row.append(1 + (state >> 8) % (vocab_size - 1))
        rows.append(row)
    return rows
