"""What several benchmarks share: values of flags, spreads, tables, CPU time, orders to processes, a cluster at rest.

It imports only the standard library: on a borrowed GPU some parts run without gRPC.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from ctypes.util import find_library
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdserve import Client


def numbers(text: str) -> list[int]:
    """The value of a flag: numbers separated by commas."""
    return [int(word) for word in text.split(",") if word]


def span(values: Sequence[float]) -> tuple[float, float, float]:
    """The minimum, the median and the maximum."""
    return min(values), statistics.median(values), max(values)


def spread(values: Sequence[float], form: str) -> str:
    """The median, with the minimum and the maximum in brackets."""
    low, middle, high = span(values)
    return f"{form.format(middle)} ({form.format(low)}-{form.format(high)})"


def table_row(cells: Iterable[object]) -> str:
    """A row of a markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def table_head(columns: Sequence[str]) -> str:
    """The first two lines of a markdown table."""
    return f"{table_row(columns)}\n{'|---' * len(columns)}|"


def table(rows: Sequence[Sequence[str]]) -> str:
    """A markdown table with columns of equal width."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [table_row(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) for cells in rows]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def vllm_env(python: Path, threads: int) -> dict[str, str]:
    """Environment variables of a process with vLLM for CPUs: this checkout, the OpenMP runtime and the allocator that
    vLLM's documentation asks for, where they are installed, and the thread settings that it gives its own workers."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    runtime, allocator = python.parent.parent / "lib/libiomp5.so", find_library("tcmalloc_minimal")
    return {
        "LD_PRELOAD": ":".join(filter(None, (allocator, str(runtime) if runtime.exists() else None))),
        "OMP_NUM_THREADS": str(threads),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }


class JsonProcess:
    """A process that answers each JSON line with one.

    `is_alone`: it and its children stand stopped (SIGSTOP) except while it answers. A stopped process cannot poll or
    spin in its thread pool, and so takes no time from the one that is measured.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] = os.environ,
        *,
        stderr: IO[str] | int | None = None,
        fds: Sequence[int] = (),
        is_alone: bool = False,
    ) -> None:
        self._is_alone = is_alone
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=dict(env),
            pass_fds=fds,
            start_new_session=is_alone,
        )

    def tell(self, order: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Raises OSError if it ends without an answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise OSError(f"{self._process.args!r} ended with {self._process.wait()} and no answer")
        self._signal(signal.SIGSTOP)
        said: dict[str, Any] = json.loads(line)
        return said

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        self.tell(order)
        return self.hear()

    def close(self) -> None:
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._is_alone:
            os.killpg(self._process.pid, number)


def cpu_s(pid: int, *, has_children: bool = False) -> float:
    """CPU time of a process with all its threads, and of its running children if `has_children`; 0 if it has ended."""
    try:
        total = time.clock_gettime(~pid << 3 | 2)  # the id that clock_getcpuclockid(3) returns
    except OSError:
        total = 0.0
    if has_children:
        import psutil  # type: ignore[import-untyped]

        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(cpu_s(one.pid) for one in psutil.Process(pid).children(recursive=True))
    return total


def unrest(client: Client, num_workers: int, within_s: float) -> str:
    """Empty once all workers are attached, nothing runs, and every block is free or cached; else what is not so."""
    ends_s = time.monotonic() + within_s
    while True:
        seen = client.topology()
        there = [one.worker_id for one in seen.workers if one.is_connected]
        busy = [one.worker_id for one in seen.workers if one.running or one.waiting]
        held = [one.worker_id for one in seen.workers if one.free_blocks + one.evictable_blocks != one.num_blocks]
        requests = seen.running_requests + seen.queued_requests
        if len(there) == num_workers and not busy and not held and not requests:
            return ""
        if time.monotonic() > ends_s:
            what = f"{requests} requests, workers {there}, busy {busy}, blocks held by {held}"
            return f"not at rest after {within_s:.0f} s: {what}"
        time.sleep(0.1)
