"""How the disk tier and the shared store of a worker reach a pool on a GPU, as in pdserve/engine/memory/staging.py.

    out   blocks that leave the pool are gathered into staging on the device, behind the steps that were launched, and
          a copy engine moves them to pinned rows, from which they are written. Blocks that leave the host tier are
          copied from its pinned memory (device_tier.py), without the device.
    in    a read fills pinned memory, and a copy engine moves it into the blocks of the fetch, behind the steps that
          were launched when the fetch began. The thread of the read waits for this, and the engine's does not.

The device computes the checksum of each block when it is gathered and, in the pool, when it was loaded. The host
computes it of the pinned bytes, after the first and before the second. A block whose checksums differ is not written,
or is a miss.

Memory that a copy may still use is not used again: not after a copy that takes too long, and not after a call that
failed, before the device has drained.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from queue import SimpleQueue
from typing import Any, Final, final

import numpy as np

from kvtransfer.device_tier import LOOK_S, DeviceTier, drained, has_ended, run_copies
from kvtransfer.protocol.device import Copying, Device, Fence
from kvtransfer.transports.common.registry import TRANSPORTS
from kvtransfer.transports.tcp_staged import TCP_STAGED, TcpStaged, word_sum
from pdserve.bounded_file import MOST_PARTS, Buffer
from pdserve.core.errors import TransferFailed
from pdserve.engine.interface import KvPool
from pdserve.engine.memory.block_files import GROUP_BYTES
from pdserve.engine.memory.staging import Landing, Ready, is_aligned, most_rows

log = logging.getLogger(__name__)

GATHERED_BYTES: Final = 2**26  # of device memory, for blocks on their way out
MOST_ROWS: Final = 4096


def device_staging(pool: KvPool, copies: DeviceTier | None, num_readers: int) -> DeviceStaging:
    """Takes the memory. `copies`: the host tier. Raises TransferFailed if the host or the device has too little."""
    transport = TRANSPORTS[TCP_STAGED]
    assert isinstance(transport, TcpStaged)
    return DeviceStaging(transport.device(pool), pool, copies, num_readers)


@dataclass(slots=True, eq=False)
class _Move:
    """Staging that moves to pinned rows."""

    gathering: Copying
    moving: Copying
    gathered: Sequence[int]  # places in the staging
    saves: Sequence[tuple[int, int, Ready]]  # block, row
    is_late: bool = False


@final
class DeviceStaging:
    parts_per_block = 1

    def __init__(self, device: Device, pool: KvPool, copies: DeviceTier | None, num_readers: int) -> None:
        self._device, self._blocks, self._copies = device, device.pool(), copies
        self.num_rows = min(most_rows(pool), MOST_ROWS)
        self.most_read = max(1, min(GROUP_BYTES // pool.block_bytes, MOST_PARTS))
        num_gathered = max(1, min(GATHERED_BYTES // pool.block_bytes, self.num_rows))
        num_landings = num_readers * self.most_read
        self._windows: SimpleQueue[int] = SimpleQueue()  # one for each thread that reads
        for first in range(0, num_landings, self.most_read):
            self._windows.put(first)
        self._free = list(range(num_gathered))
        self._lock = threading.Lock()  # guards the free places
        self._saves: list[tuple[int, int, Ready]] = []  # block, row
        self._moving: list[_Move] = []  # only the thread uses these
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kv-staging", daemon=True)
        with ExitStack() as opened:
            opened.callback(device.unpin)
            self._staging = opened.enter_context(closing(device.staging(num_gathered)))
            self._pinned = opened.enter_context(closing(device.pinned(self.num_rows * pool.block_bytes)))
            self._landed = opened.enter_context(closing(device.pinned(num_landings * pool.block_bytes)))
            opened.callback(self._forget_memory)
            self._rows: Any = np.frombuffer(self._pinned.view, np.uint8).reshape(self.num_rows, -1)
            self._landings: Any = np.frombuffer(self._landed.view, np.uint8).reshape(num_landings, -1)
            self.is_aligned = is_aligned(self._landings)
            self._thread.start()
            self._memory = opened.pop_all()

    def _forget_memory(self) -> None:
        self._rows = self._landings = None

    # -- out of the pool --------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        with self._lock:
            return len(self._free) - len(self._saves)

    def row(self, row: int) -> Any:
        return self._rows[row]

    def take_block(self, block: int, row: int, ready: Ready) -> None:
        self._saves.append((block, row, ready))

    def take_copy(self, copy: int, row: int, ready: Ready) -> None:
        assert self._copies is not None, "there is no host tier"
        self._copies.hand_down(copy, self._rows[row], ready)

    def start_copies(self) -> None:
        if self._copies is not None:
            self._copies.flush()
        saves, self._saves = sorted(self._saves, key=itemgetter(1)), []  # neighbours are moved by one copy
        if not saves:
            return
        with self._lock:
            self._free.sort()
            gathered, self._free = self._free[: len(saves)], self._free[len(saves) :]
        device = self._device
        try:
            gathering = device.gather(self._blocks, [one[0] for one in saves], self._staging, gathered, device.fence())
            device.hold_engine(gathering)
        except Exception as error:  # the device has failed, which the engine's step will report
            log.warning("KV blocks were not copied", extra={"error": str(error)})
            self._tasks.put(partial(self._lose, gathered, saves))
            return
        self._tasks.put(partial(self._move, gathering, gathered, saves))

    def _run(self) -> None:
        run_copies(self._tasks, self._moving, self._reap)

    def _move(self, gathering: Copying, gathered: Sequence[int], saves: Sequence[tuple[int, int, Ready]]) -> None:
        rows = [row for _, row, _ in saves]
        try:
            moving = self._device.move_blocks(
                self._staging, gathered, self._pinned, rows, self._wake, is_to_host=True, behind=gathering
            )
        except Exception as error:  # the device has failed
            log.warning("KV blocks were not copied", extra={"error": str(error)})
            self._lose(gathered, saves)
        else:
            self._moving.append(_Move(gathering, moving, gathered, saves))

    def _lose(self, gathered: Sequence[int], saves: Sequence[tuple[int, int, Ready]]) -> None:
        """A call failed, which may have queued a part of its work."""
        drained(self._device)
        with self._lock:
            self._free += gathered
        for _, _, ready in saves:
            ready(False)

    def _wake(self) -> None:
        self._tasks.put(self._reap)

    def _reap(self) -> None:
        """Deals with the copies that have ended. The memory of one that takes too long is not used again unless it
        ends."""
        for one in list(self._moving):
            if not has_ended(one, one.moving):
                continue
            self._moving.remove(one)
            try:
                sums = one.gathering.sums()
            except Exception:  # a defect here must not keep the places
                log.exception("checksums of KV blocks are missing")
                sums = []
            with self._lock:
                self._free += one.gathered
            for at, (_, row, ready) in enumerate(one.saves):
                ready(bool(sums) and word_sum(memoryview(self._rows[row])) == sums[at])

    # -- into the pool ----------------------------------------------------------------------------------------------

    def fence(self) -> Fence:
        return self._device.fence()

    @contextmanager
    def landing(self, blocks: Sequence[int], fence: Fence) -> Iterator[Landing]:
        assert len(blocks) <= self.most_read, "more blocks than are read at once"
        first = self._windows.get()
        try:
            yield _Pinned(self, blocks, fence, first)
        finally:
            self._windows.put(first)

    def memory(self, at: int) -> Any:
        """Of a landing."""
        return self._landings[at]

    def load(self, blocks: Sequence[int], places: Sequence[int], fence: Fence) -> list[bool]:
        """Moves what has landed into the pool. Returns which blocks are verified there, when nothing writes to any."""
        expected = [word_sum(memoryview(self._landings[place])) for place in places]
        device, wakes = self._device, threading.Event()
        try:
            moving = device.move_blocks(
                self._blocks, blocks, self._landed, places, wakes.set, is_to_host=False, after=fence
            )
        except Exception as error:  # the device has failed
            log.warning("KV blocks were not loaded", extra={"error": str(error)})
            drained(device)
            return [False] * len(blocks)
        try:
            last = device.copy(self._blocks, blocks, None, (), wakes.set, None, behind=moving)
        except Exception as error:
            log.warning("KV blocks were not verified", extra={"error": str(error)})
            _wait_for(moving, wakes)
            drained(device)
            return [False] * len(blocks)
        _wait_for(last, wakes)
        return [found == wanted for found, wanted in zip(last.sums(), expected, strict=True)]

    def close(self, within_s: float) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._tasks.put(None)
            self._thread.join(within_s)
            if not self._thread.is_alive():  # else the device hangs, and the process ends soon
                self._memory.close()


@final
class _Pinned:
    """The landing of one read."""

    def __init__(self, staging: DeviceStaging, blocks: Sequence[int], fence: Fence, first: int) -> None:
        self._staging, self._blocks, self._fence, self._first = staging, blocks, fence, first

    @property
    def parts(self) -> list[list[Buffer]]:
        return [[self._staging.memory(self._first + at)] for at in range(len(self._blocks))]

    def put(self, at: int, contents: bytes) -> None:
        self._staging.memory(self._first + at)[:] = np.frombuffer(contents, np.uint8)

    def into_pool(self, good: Sequence[bool]) -> list[bool]:
        results = list(good)
        wanted = [at for at, is_good in enumerate(good) if is_good]
        if wanted:
            blocks, places = [self._blocks[at] for at in wanted], [self._first + at for at in wanted]
            for at, is_right in zip(wanted, self._staging.load(blocks, places, self._fence), strict=True):
                results[at] = is_right
        return results


def _wait_for(copying: Copying, wakes: threading.Event) -> None:
    """Until the copy has ended, however long it takes: until then, it may write."""
    is_late = False
    while True:
        wakes.clear()
        try:
            if copying.is_done:
                return
        except TransferFailed as failed:
            if not is_late:
                is_late = True
                log.error("a copy of KV blocks does not end", extra={"error": failed.message})
        wakes.wait(LOOK_S)
