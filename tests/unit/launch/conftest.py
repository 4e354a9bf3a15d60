from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdserve.launch.running import Running

WAIT_S = 60.0


def is_alive(pid: int) -> bool:
    """Whether the process runs. A zombie has ended, but its parent has not waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(holds: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def toy() -> Iterator[Running]:
    """One prefill and one decode worker on the toy engine, as real processes.

    A test may kill any of them, and then waits until it has been restarted.
    """
    with Running.start("--model", "toy") as cluster:
        yield cluster
