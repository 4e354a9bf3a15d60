"""The common part of both roles of a fault storm: the loop of a worker process with a pool and a transfer end."""

from __future__ import annotations

import heapq
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Final

from benchmarks.fault_storm.cases import Case, fault_of
from benchmarks.fault_storm.ranks import RANKS_PATIENCE, RankedStorage, StormRanks, fingerprint_of_ranks
from benchmarks.fault_storm.storage import SHAPES, Memory, Storage
from kvtransfer.devices.copy_limits import CopyLimits
from kvtransfer.faults.injector import FaultInjector
from kvtransfer.link.channel import Waker
from kvtransfer.protocol.transport import Received, Sent
from tests.support.fake_device import Trouble
from tests.support.fake_ends import stand_in_each
from tests.support.transfer_ends import fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    name: str
    role: str  # "prefill" or "decode"
    transport: str
    seed: int
    shape: str
    host: str
    netns: str = ""
    device_kills: float = 0.0  # only with stand-ins for CUDA
    memory: Memory = "host"
    runs_per_block: int = 1  # of the pool: 1 or NUM_LAYERS
    ranks: int = 0  # tensor-parallel ranks, each with its own pool; 0: one pool of plain bytes

    def deadline_s(self, case: Case) -> float:
        """Longer for several ranks: each part of a transfer has its own connection and thread."""
        return case.deadline_s * (RANKS_PATIENCE if self.ranks else 1.0)


DEVICE_KILLS: Final = 0.0002  # share of the device copies during which the process is killed
#: Less staging than all connections ask for: some get one slot, and the two ends of nccl get different numbers.
LIMITS: Final = CopyLimits(num_streams=3, staging_bytes=200 * 2**20)
STAGING_BACK_S: Final = 8.0  # the longest wait of a handshake; less than the driver waits
NUM_LAYERS: Final = 2  # of a block, in the fingerprint; every other transfer is sent in that many layer groups


def trouble_of(setup: Setup) -> Trouble:
    """The faults of the stand-ins in this process. Two of a storm's four processes get an error when a peer is
    killed."""
    return Trouble(
        seed=setup.seed + os.getpid(),  # a restarted process fails differently
        late=0.002,
        killed=setup.device_kills,
        hung=0.0005,
        failed=0.002,
        flipped=0.01,
        loses_the_dead=setup.name.endswith("1"),
    )


class StormWorker:
    """The loop that both roles share: commands from the driver, ends from transfer threads, timers."""

    def __init__(self, setup: Setup, driver: Connection) -> None:
        self.setup, self.driver = setup, driver
        if setup.ranks:
            self.storage: Storage = RankedStorage(setup.ranks, setup.memory)
        else:
            self.storage = Storage(SHAPES[setup.shape], setup.memory, setup.runs_per_block)
        self.devices = stand_in_each(trouble_of(setup), LIMITS) if setup.memory == "stand-in" else {}
        if setup.ranks:
            self.fingerprint = fingerprint_of_ranks(setup.ranks)
        else:
            self.fingerprint = fingerprint(self.storage.pool.block_bytes, NUM_LAYERS)
        self.fault_injector = FaultInjector(lambda tag: fault_of(setup.seed, tag))
        self.incarnation = secrets.token_hex(4)
        self._ends: deque[tuple[float, Received | Sent]] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._waker = Waker()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._news: list[tuple[Any, ...]] = []

    def run(self) -> None:
        self._tell("ready", self.greeting())
        while True:
            self._flush()
            timeout_s = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
            ready: list[Any] = wait([self.driver, self._waker.fileno()], timeout_s)
            if self._waker.fileno() in ready:
                self._waker.clear()
            while self._calls:
                self._calls.popleft()()
            while self._ends:
                self.ended(*self._ends.popleft())
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()
            if self.driver in ready:
                for command in self.driver.recv():
                    if not self._obey(*command):
                        return

    def greeting(self) -> str:
        return ""

    def on_end(self, end: Received | Sent) -> None:
        """From any thread."""
        self._ends.append((time.monotonic(), end))
        self._waker.set()

    def soon(self, call: Callable[[], None]) -> None:
        """From any thread."""
        self._calls.append(call)
        self._waker.set()

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._timers, (time.monotonic() + delay_s, self._number, call))

    def late_s(self, deadline_at_s: float) -> float:
        """Seconds since this deadline, without the time for which this process was stopped."""
        now_s = time.monotonic()
        pauses = sum(max(0.0, min(end, now_s) - max(begin, deadline_at_s)) for begin, end in self.fault_injector.pauses)
        return max(0.0, now_s - deadline_at_s - pauses)

    def _check_staging(self) -> None:
        """All connections have ended, so no staging may be in use. Abandoned handshakes end by themselves first."""
        ends_s = time.monotonic() + STAGING_BACK_S
        while held := sum(device.budget.taken_bytes for device in self.devices.values()):
            if time.monotonic() > ends_s:
                sys.exit(f"{self.setup.name} leaked {held} bytes of staging")
            time.sleep(0.01)

    def _tell(self, *news: Any) -> None:
        self._news.append(news)

    def _flush(self) -> None:
        if self._news:
            self.driver.send(self._news)
            self._news = []

    def _obey(self, command: str, *arguments: Any) -> bool:
        if command == "rest":
            self.storage.check_rest(self.held())
            stats = asdict(self.end.stats)
            stats["overtakings"] = sum(device.num_overtakings for device in self.devices.values())
            facts = (len(os.listdir("/proc/self/fd")), threading.active_count())
            self._tell("rest", self.storage.wrong[:20], [repr(key) for key in self.end.open_keys], stats, facts)
            self.storage.wrong.clear()
        elif command == "quit":
            self.close()
            self._check_staging()
            return False
        else:
            getattr(self, command)(*arguments)
        return True

    def ranks(self) -> StormRanks | None:
        """All ranks but the first; None for a pool of plain bytes."""
        if not isinstance(self.storage, RankedStorage):
            return None
        setup = self.setup
        return StormRanks(self.storage, setup.transport, setup.name, self.incarnation, self.fault_injector)

    # Defined by each role.

    end: Any

    def held(self) -> list[Sequence[int]]:
        raise NotImplementedError

    def ended(self, at_s: float, end: Any) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.end.close()
