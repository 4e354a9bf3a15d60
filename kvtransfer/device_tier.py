"""The host tier of a pool on a GPU: pinned memory, and copies behind the engine.

    save   blocks that leave the pool are gathered into staging on the device, behind the steps that were launched, and
           the engine's later work waits for that (microseconds). A copy engine then moves the staging to pinned memory.
    load   a fetch source (core/kv/fetch.py): a copy engine moves slots into the blocks of the fetch, beside the steps
           of other prompts, and the prompt is planned when they have arrived.

The device computes the checksum of each block when it is gathered and, in the pool, when it was loaded. A block whose
checksums differ is a miss, and its copy is dropped.

One thread queues all copies in the order in which the engine's thread asked for them. It waits where a slot is used
again before an earlier copy has ended, so a slot is never read and written at once. The engine's thread never waits.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol, TypeAlias, final

import numpy as np

from kvtransfer.protocol.device import Blocks, Copying, Device, Fence, Pinned
from kvtransfer.transports.common.on_device import wake_nobody
from kvtransfer.transports.common.registry import TRANSPORTS
from kvtransfer.transports.tcp_staged import TCP_STAGED, TcpStaged, word_sum
from pdserve.clock import steady
from pdserve.core.attempt import Attempt
from pdserve.core.errors import ConfigError, TransferFailed
from pdserve.core.kv.fetch import Fetch
from pdserve.core.kv.host_tier import HostTier
from pdserve.core.kv.tier_reads import Tier, TierSpeed
from pdserve.engine.interface import KvPool
from pdserve.engine.memory.host import AUTO, BURST_BYTES, MOST_HASHES, check_room, free_bytes
from pdserve.engine.memory.plan import HOST_PARTS
from pdserve.engine.memory.slow_tier import ReadSpeed

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 2**28  # pinned by one call; torch rounds each up to a power of two
PART_BYTES: Final = 2**26  # of a load, copied by one call
MOST_AUTO_BYTES: Final = 2**36  # by default, because pinned memory is never swapped
FLOOR: Final = 0.5  # of the memory that was free: what workers take by default ends there
TIMED_BYTES: Final = 2**26
TIMED: Final = 3  # times, of which the best counts
POLL_S: Final = 1e-4
LOOK_S: Final = 0.5  # between two looks at copies for which no wake comes, because they took too long
LATE: Final = 4.0  # times its prediction, a load is late, and no other is started;
LATE_S: Final = 0.5  # but not sooner than this, for which a step may run
JOIN_S: Final = 5.0  # of the time that the worker has to end
UNKNOWN: Final = -1  # no checksum: the slot has no valid copy


def device_tier(pool: KvPool, num_bytes: int, report: Callable[[int, int], None]) -> DeviceTier | None:
    """Takes the memory. AUTO: an eighth of what is free, but less if other workers that start meanwhile need it, and
    None if that is no block, or if the device has no memory for staging. Raises ConfigError if `num_bytes` is a
    setting and the host or the device does not have the memory."""
    transport = TRANSPORTS[TCP_STAGED]
    assert isinstance(transport, TcpStaged)
    try:
        device = transport.device(pool)
        staging = device.staging(num_rows(pool, num_bytes))
    except TransferFailed as failed:
        if num_bytes == AUTO:
            log.info("there is no host tier", extra={"reason": failed.message})
            return None
        raise ConfigError("kv_host_bytes", num_bytes, f"0 for this pool: {failed.message}") from failed
    with ExitStack() as opened:
        opened.callback(device.unpin)
        opened.callback(staging.close)
        slots = pin_slots(device, pool, num_bytes, report)
        opened.callback(slots.close)
        if not slots:
            return None
        tier = DeviceTier(device, pool, slots, staging)
        opened.pop_all()
    return tier


def num_rows(pool: KvPool, num_bytes: int) -> int:
    """Of the staging: one burst is gathered while the one before leaves."""
    rows = 2 * most_saved(pool)
    return rows if num_bytes == AUTO else min(rows, max(1, num_bytes // pool.block_bytes))


def most_saved(pool: KvPool) -> int:
    return max(1, BURST_BYTES // pool.block_bytes)


# --- pinned memory --------------------------------------------------------------------------------------------


@final
class PinnedSlots:
    """Slots of one block each, in pieces of pinned memory."""

    def __init__(self, pieces: Sequence[Pinned], block_bytes: int) -> None:
        self.pieces = pieces
        self._block_bytes = block_bytes
        self._sizes = [len(piece.view) // block_bytes for piece in pieces]
        self._piece_size = self._sizes[0] if pieces else 1  # only the last piece is smaller

    def __len__(self) -> int:
        return sum(self._sizes)

    def place(self, slot: int) -> tuple[int, int]:
        """Its piece, and its number in there."""
        return divmod(slot, self._piece_size)

    def view(self, slot: int) -> memoryview:
        piece, at = self.place(slot)
        return self.pieces[piece].view[at * self._block_bytes : (at + 1) * self._block_bytes]

    def close(self) -> None:
        for piece in self.pieces:
            piece.close()


def pin_slots(
    device: Device,
    pool: KvPool,
    num_bytes: int,
    report: Callable[[int, int], None],
    free: Callable[[], int | None] = free_bytes,
) -> PinnedSlots:
    """As in `device_tier`. Workers of a host that start at once each take a piece after the other, and all stop when
    half of what was free is taken, so they get about equal parts."""
    block_bytes, is_auto = pool.block_bytes, num_bytes == AUTO
    least = 0
    if is_auto:
        first = free() or 0
        least = int(FLOOR * first)
        wanted = min(min(first // HOST_PARTS, MOST_AUTO_BYTES) // block_bytes, MOST_HASHES - pool.num_blocks)
    else:
        wanted = check_room(pool, num_bytes)
    piece = max(1, PIECE_BYTES // block_bytes)
    pieces: list[Pinned] = []
    done = 0
    with ExitStack() as opened:
        while done < wanted:
            count = min(piece, wanted - done)
            if is_auto and (free() or 0) - count * block_bytes < least:
                break
            try:
                pieces.append(opened.enter_context(closing(device.pinned(count * block_bytes))))
            except TransferFailed as failed:
                if is_auto:
                    break
                expected = f"at most {done * block_bytes}: {failed.message}"
                raise ConfigError("kv_host_bytes", num_bytes, expected) from failed
            done += count
            report(done * block_bytes, wanted * block_bytes)
        if is_auto and done < wanted:
            report(wanted * block_bytes, wanted * block_bytes)  # the phase has ended
            extra = {"bytes": done * block_bytes}
            log.info("the host tier is smaller, because the host has less memory left", extra=extra)
        slots = PinnedSlots(pieces, block_bytes)
        opened.pop_all()
    return slots


# --- copies ---------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Save:
    """Staging that moves to slots of one piece."""

    gathering: Copying
    moving: Copying
    places: dict[int, int]  # slot -> its place in the gathering
    rows: list[int]  # of the staging, to be freed
    is_late: bool = False

    @property
    def slots(self) -> Iterable[int]:
        return self.places


@dataclass(slots=True, eq=False)
class _Part:
    """A part of a load."""

    load: _Load
    indexes: list[int]  # in the fetch
    slots: list[int]
    expected: list[int]  # checksums
    last: Copying
    is_late: bool = False


@dataclass(slots=True, eq=False)
class _Load:
    fetch: Fetch
    end: Callable[[int], None]
    began_s: float
    good: list[bool]
    num_open: int = 1  # parts that have not ended; one is the loading itself
    wrong: list[bytes] = field(default_factory=list)


Leaving: TypeAlias = tuple[int, Any, Callable[[bool], None]]  # slot, memory, and who is told


@final
class DeviceTier:
    """BlockCopies and a FetchSource, of a worker with one pool. Its methods are called on the engine's thread."""

    name = "host"

    def __init__(
        self,
        device: Device,
        pool: KvPool,
        slots: PinnedSlots,
        staging: Blocks,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_slots, self.most_saved = len(slots), most_saved(pool)
        self._device, self._blocks, self._slots, self._now = device, device.pool(), slots, steady(now)
        self._block_bytes = pool.block_bytes
        self._staging = staging
        self._free_rows = list(range(min(staging.num_blocks, len(slots))))
        self._rows_lock = threading.Lock()
        self._saves: dict[int, int] = {}  # slot -> block
        self._leaving: list[Leaving] = []
        self._tier: HostTier | None = None
        self._drop: Callable[[bytes], None] = lambda block_hash: None
        self._num_pending = 0  # blocks of loads that have not ended
        self._late_at_s: dict[int, float] = {}  # of their fetches, by number: when they take far too long
        self._aborted: set[int] = set()  # of those
        self._loads_lock = threading.Lock()  # guards these three
        self._speed = ReadSpeed(1.0)
        # Only the thread uses these.
        self._sums = [UNKNOWN] * len(slots)
        self._moving: list[_Save | _Part] = []
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-host-copies", daemon=True)
        self._is_closing = False
        self._is_drained = True  # False: a copy that nothing waits for may still use the memory
        self._thread.start()

    def measure_s(self) -> float:
        """Seconds to copy a block, the mean of both directions. Must be called before the first save; overwrites slots
        and the first blocks of the pool. Raises TransferFailed if a block comes back with other bytes."""
        try:
            return self._measured_s()
        except BaseException:
            self._is_drained = is_drained(self._device)
            raise

    def _measured_s(self) -> float:
        device, blocks = self._device, self._blocks
        count = min(blocks.num_blocks, len(self._free_rows), len(self._slots), max(1, TIMED_BYTES // self._block_bytes))
        count = min(count, sum(self._slots.place(slot)[0] == 0 for slot in range(count)))
        numbers, host = list(range(count)), self._slots.pieces[0]
        out_s = in_s = float("inf")
        for _ in range(TIMED):
            began_s = time.perf_counter()
            gathering = device.gather(blocks, numbers, self._staging, numbers, device.fence())
            saving = device.move_blocks(
                self._staging, numbers, host, numbers, wake_nobody, is_to_host=True, behind=gathering
            )
            _wait_for(saving)
            middle_s = time.perf_counter()
            moving = device.move_blocks(blocks, numbers, host, numbers, wake_nobody, is_to_host=False)
            summing = device.copy(blocks, numbers, None, (), wake_nobody, None, behind=moving)
            _wait_for(summing)
            out_s, in_s = min(out_s, middle_s - began_s), min(in_s, time.perf_counter() - middle_s)
            if list(gathering.sums()) != list(summing.sums()):
                raise TransferFailed("blocks come back from pinned memory with other bytes")
        num_bytes = count * self._block_bytes
        rates = {"out_bytes_s": round(num_bytes / out_s), "in_bytes_s": round(num_bytes / in_s)}
        log.info("the copies of the host tier were measured", extra=rates)
        self._speed = ReadSpeed(num_bytes / in_s)
        return (out_s + in_s) / 2 / count

    def serve(self, tier: HostTier, drop: Callable[[bytes], None]) -> None:
        """`tier` says where blocks are. `drop` is called on the thread of the copies, with blocks whose copy is
        wrong."""
        self._tier, self._drop = tier, drop

    # -- blocks that leave the pool ---------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        with self._rows_lock:
            return len(self._free_rows)

    def save(self, block: int, slot: int) -> None:
        self._saves[slot] = block

    def flush(self) -> None:
        if self._leaving:  # before their slots are used again
            leaving, self._leaving = self._leaving, []
            self._tasks.put(partial(self._hand_down, leaving))
        saves, self._saves = sorted(self._saves.items()), {}  # neighbours are moved by one copy
        if not saves:
            return
        slots, blocks = [slot for slot, _ in saves], [block for _, block in saves]
        with self._rows_lock:
            self._free_rows.sort()
            rows, self._free_rows = self._free_rows[: len(saves)], self._free_rows[len(saves) :]
        device = self._device
        try:
            gathering = device.gather(self._blocks, blocks, self._staging, rows, device.fence())
            device.hold_engine(gathering)
        except Exception as error:  # the device has failed, which the engine's step will report
            log.warning("KV blocks were not saved", extra={"error": str(error)})
            self._tasks.put(partial(self._lose, slots, rows))
            return
        self._tasks.put(partial(self._save, gathering, rows, slots))

    def hand_down(self, slot: int, into: Any, ready: Callable[[bool], None]) -> None:
        """Copies a slot, which may be used again at once, to an array of bytes. `ready` is called on the thread of the
        copies: the array has the block, or false."""
        if slot in self._saves:  # it was saved and displaced by one allocation
            self.flush()
        self._leaving.append((slot, into, ready))

    def load(self, slot: int, block: int) -> None:
        raise AssertionError("the tier is read by fetches")

    # -- blocks that prompts wait for -------------------------------------------------------------------------------

    def num_found(self, attempt: Attempt, hashes: Sequence[bytes], first: int) -> int:
        return 0 if self._tier is None else self._tier.num_found(hashes)

    def predict_s(self, attempt: Attempt, num_blocks: int) -> float:
        now_s = self._now()
        with self._loads_lock:
            if now_s >= min(self._late_at_s.values(), default=math.inf):
                return math.inf
            num_blocks += self._num_pending
        return self._speed.predict_s(num_blocks * self._block_bytes, now_s)

    def tier_speed(self) -> TierSpeed | None:
        now_s = self._now()
        with self._loads_lock:
            if now_s >= min(self._late_at_s.values(), default=math.inf):
                return None
            num_pending = self._num_pending
        return self._speed.of_tier(Tier.HOST, self._block_bytes, num_pending, now_s)

    def begin(self, fetch: Fetch, end: Callable[[int], None]) -> None:
        assert self._tier is not None, "something was found"
        slots: list[int] = []
        for block_hash in fetch.hashes:
            slot = self._tier.slot_of(block_hash)
            if slot is None:  # another prompt has displaced it since
                break
            slots.append(slot)
        # Behind the steps that were launched, which may use the blocks, and behind the copies that hold the engine.
        fence = self._device.fence()
        load = _Load(fetch, end, self._now(), [False] * len(slots))
        with self._loads_lock:
            self._num_pending += len(slots)
            predicted_s = self._speed.predict_s(self._num_pending * self._block_bytes, load.began_s)
            self._late_at_s[fetch.number] = load.began_s + max(LATE * predicted_s, LATE_S)
        self._tasks.put(partial(self._load, load, slots, fence))

    def abort(self, number: int) -> None:
        with self._loads_lock:
            if number in self._late_at_s:
                self._aborted.add(number)

    def close(self) -> None:
        """Idempotent. Copies in progress end before."""
        if not self._is_closing:
            self._is_closing = True
            self._tasks.put(None)
            self._thread.join(JOIN_S)
            if not self._thread.is_alive() and self._is_drained:  # else the device hangs, and the process ends soon
                self._staging.close()
                self._slots.close()
                self._device.unpin()  # the worker may go on without the tier

    def flushed(self, timeout_s: float) -> bool:
        """Waits until all copies have ended; for tests and measurements."""
        looks: SimpleQueue[bool] = SimpleQueue()
        ends_s = time.monotonic() + timeout_s
        while time.monotonic() < ends_s:
            self._tasks.put(self._reap)
            self._tasks.put(lambda: looks.put(not self._moving))
            if looks.get():
                return True
            time.sleep(POLL_S)
        return False

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        run_copies(self._tasks, self._moving, self._reap)

    def _wake(self) -> None:
        self._tasks.put(self._reap)

    def _lose(self, slots: Sequence[int], rows: Sequence[int]) -> None:
        """The slots have no valid copy. A call failed, which may have queued a part of its work."""
        drained(self._device)
        self._wait_for_slots(slots)
        for slot in slots:
            self._sums[slot] = UNKNOWN
        with self._rows_lock:
            self._free_rows += rows

    def _save(self, gathering: Copying, rows: Sequence[int], slots: Sequence[int]) -> None:
        at_of = {slot: at for at, slot in enumerate(slots)}
        self._wait_for_slots(slots)
        for slot in slots:
            self._sums[slot] = UNKNOWN
        for piece, part in _by_piece(self._slots, slots, len(slots)):
            taken = [rows[at_of[slot]] for slot in part]
            try:
                moving = self._device.move_blocks(
                    self._staging,
                    taken,
                    self._slots.pieces[piece],
                    [self._slots.place(slot)[1] for slot in part],
                    self._wake,
                    is_to_host=True,
                    behind=gathering,
                )
            except Exception as error:  # the device has failed
                log.warning("KV blocks were not saved", extra={"error": str(error)})
                self._lose(part, taken)
            else:
                self._moving.append(_Save(gathering, moving, {slot: at_of[slot] for slot in part}, taken))

    def _hand_down(self, leaving: Sequence[Leaving]) -> None:
        self._wait_for_slots([slot for slot, _, _ in leaving])
        for slot, into, ready in leaving:
            into[:] = np.frombuffer(self._slots.view(slot), np.uint8)
            ready(self._sums[slot] == word_sum(memoryview(into)))

    def _load(self, load: _Load, slots: Sequence[int], fence: Fence) -> None:
        fetch, device = load.fetch, self._device
        most = max(1, PART_BYTES // self._block_bytes)
        try:
            at_of = {slot: at for at, slot in enumerate(slots)}
            for piece, part in _by_piece(self._slots, slots, most):
                if fetch.number in self._aborted:
                    break
                self._wait_for_slots(part)
                indexes = [at_of[slot] for slot in part]
                blocks = [fetch.blocks[index] for index in indexes]
                moving = device.move_blocks(
                    self._blocks,
                    blocks,
                    self._slots.pieces[piece],
                    [self._slots.place(slot)[1] for slot in part],
                    self._wake,
                    is_to_host=False,
                    after=fence,
                )
                # Without checksums, which may not be queued any more, the part ends with the first copy.
                waiting = _Part(load, indexes, part, [self._sums[slot] for slot in part], moving)
                self._moving.append(waiting)
                load.num_open += 1
                waiting.last = device.copy(self._blocks, blocks, None, (), self._wake, None, behind=moving)
        except Exception as error:  # the device has failed
            log.warning("KV blocks were not loaded", extra={"error": str(error)})
            drained(device)  # of what the call had queued: it may write to blocks of the fetch
        self._ended(load)

    def _reap(self) -> None:
        """Deals with the copies that have ended. One that takes too long, or whose device has failed, may still write:
        its blocks, slots and staging are not used again unless it ends."""
        for one in list(self._moving):
            copying = one.moving if isinstance(one, _Save) else one.last
            if not has_ended(one, copying):
                continue
            try:
                sums = one.gathering.sums() if isinstance(one, _Save) else copying.sums()
            except Exception:  # its checksums were not queued
                sums = []
            self._moving.remove(one)
            if isinstance(one, _Save):
                for slot, at in one.places.items():
                    self._sums[slot] = sums[at] if sums else UNKNOWN
                with self._rows_lock:
                    self._free_rows += one.rows
            else:
                self._loaded(one, sums)

    def _loaded(self, part: _Part, sums: Sequence[int]) -> None:
        load = part.load
        for at, index in enumerate(part.indexes):
            load.good[index] = bool(sums) and sums[at] == part.expected[at]
            if not load.good[index]:
                load.wrong.append(load.fetch.hashes[index])
        self._ended(load)

    def _ended(self, load: _Load) -> None:
        """A part of the load has ended, or its loading."""
        load.num_open -= 1
        if load.num_open:
            return
        fetch, good = load.fetch, load.good
        count = next((at for at, one in enumerate(good) if not one), len(good))
        with self._loads_lock:
            self._num_pending -= len(good)
            self._late_at_s.pop(fetch.number, None)
            self._aborted.discard(fetch.number)
        if count:
            now_s = self._now()
            self._speed.observe(count * self._block_bytes, now_s - load.began_s, now_s)
        if self._tier is not None:
            self._tier.num_loaded += count
        if load.wrong:
            log.warning("copies of KV blocks are wrong", extra={"blocks": len(load.wrong)})
            for block_hash in load.wrong:
                self._drop(block_hash)
        load.end(count)

    def _wait_for_slots(self, slots: Iterable[int]) -> None:
        """Until no copy from or to one of the slots is in progress."""
        wanted = set(slots)
        while any(not wanted.isdisjoint(one.slots) for one in self._moving):
            self._reap()
            if any(not wanted.isdisjoint(one.slots) for one in self._moving):
                time.sleep(POLL_S)


class Late(Protocol):
    """What waits for a copy."""

    is_late: bool  # the copy takes too long, which was logged


def has_ended(one: Late, copying: Copying) -> bool:
    """False also for a copy that takes too long, or whose device has failed: it may still write."""
    try:
        return copying.is_done
    except TransferFailed as failed:
        if not one.is_late:
            one.is_late = True
            log.error("a copy of KV blocks does not end", extra={"error": failed.message})
        return False


def run_copies(
    tasks: SimpleQueue[Callable[[], None] | None], moving: Sequence[object], reap: Callable[[], None]
) -> None:
    """The thread of copies: runs tasks until None comes, and `reap`, which shortens `moving`, until no copy is left."""
    while True:
        try:
            task = tasks.get(timeout=LOOK_S if moving else None)
        except Empty:
            task = reap
        if task is None:
            break
        try:
            task()
        except Exception:  # a defect here must not end the thread, for which fetches would wait
            log.exception("a copy of KV blocks failed")
    while moving:
        reap()
        time.sleep(POLL_S)


def drained(device: Device) -> None:
    """Waits until no work that was queued on the device accesses memory, however long that takes. Never raises."""
    while not is_drained(device):
        time.sleep(LOOK_S)


def is_drained(device: Device) -> bool:
    """Waits for the work that was queued on the device. False if it has failed, so that some may not have ended."""
    try:
        device.drain()
    except Exception as error:
        log.error("the device does not drain", extra={"error": str(error)})
        return False
    return True


def _wait_for(copying: Copying) -> None:
    while not copying.is_done:
        time.sleep(POLL_S / 10)


def _by_piece(slots: PinnedSlots, wanted: Sequence[int], most: int) -> list[tuple[int, list[int]]]:
    """The slots of each piece, in their order, up to `most` together."""
    parts: list[tuple[int, list[int]]] = []
    open_parts: dict[int, list[int]] = {}
    for slot in wanted:
        piece, _ = slots.place(slot)
        part = open_parts.get(piece)
        if part is None or len(part) >= most:
            part = open_parts[piece] = []
            parts.append((piece, part))
        part.append(slot)
    return parts
