"""The tiers below a simulated worker's pool: host memory and a disk. Pure.

The tables are those of live workers: HostTier and Fetches. Here are only the times of copies and reads, and what the
disk has. On a CPU, copies of the host tier delay the next step. On a GPU they are made beside steps, and prompts wait
for them, as for reads of a disk. Writes to the disk take no time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, final

from pdserve.core.attempt import Attempt
from pdserve.core.kv.fetch import BlockSource, Fetch
from pdserve.core.kv.host_tier import HostTier, LoadRule, is_disk_worthwhile, long_blocks
from pdserve.core.kv.tier_reads import Tier, TierSpeed
from simulator.cluster.agenda import Agenda
from simulator.model import WorkerShape

BURST_BYTES: Final = 2**27  # saved by a GPU at once; twice as much is on its way to the host
YOUNG_SHARE: Final = 0.75  # of the disk: a block that is evicted again while it is older than that is written anew


class TierRules:
    """What is loaded from the tiers: as in a live worker, what is predicted to be sooner than computing. Benchmarks
    compare it with other rules, which change what the tiers say of themselves."""

    def host(self, rule: LoadRule) -> LoadRule:
        return rule

    def has_disk(self, read_s: float, computed_s: float) -> bool:
        """Whether to have a disk tier, from the times of a long prompt."""
        return is_disk_worthwhile(read_s, computed_s)

    def source(self, source: SimulatedSource) -> BlockSource:
        return source


@dataclass(slots=True)
class _Read:
    fetch: Fetch
    end: Callable[[int], None]


class SimulatedSource(ABC):
    """A tier for which prompts wait. One fetch is read after the other."""

    def __init__(self, tier: Tier, agenda: Agenda, block_s: float, latency_s: float) -> None:
        self.name, self._tier = tier.name.lower(), tier
        self._agenda, self._block_s, self._latency_s = agenda, block_s, latency_s
        self._queue: deque[_Read] = deque()
        self._reading: _Read | None = None
        self._began_s = 0.0
        self._num_queued = 0  # blocks
        self.num_read = 0

    @abstractmethod
    def __contains__(self, block_hash: bytes) -> bool: ...

    def read_s(self, num_blocks: int) -> float:
        """To read so many blocks, without a queue."""
        return self._latency_s + num_blocks * self._block_s

    def num_found(self, attempt: Attempt, hashes: Sequence[bytes], first: int) -> int:
        return self._count(hashes)

    def predict_s(self, attempt: Attempt, num_blocks: int) -> float:
        return self._queue_s() + self.read_s(num_blocks)

    def _queue_s(self) -> float:
        queued_s = len(self._queue) * self._latency_s + self._num_queued * self._block_s
        if self._reading is not None:
            queued_s += max(0.0, self._began_s + self.read_s(len(self._reading.fetch.blocks)) - self._agenda.now_s)
        return queued_s

    def tier_speed(self) -> TierSpeed | None:
        queue_s = self._queue_s()
        return TierSpeed(tier=self._tier, block_s=self._block_s, fixed_s=self._latency_s, queue_s=queue_s)

    def begin(self, fetch: Fetch, end: Callable[[int], None]) -> None:
        """`end` is called when nothing writes to the blocks any more, with the number of those that were read."""
        self._queue.append(_Read(fetch, end))
        self._num_queued += len(fetch.blocks)
        self._next()

    def abort(self, number: int) -> None:
        reading = self._reading
        if reading is not None and reading.fetch.number == number:
            since_s = self._agenda.now_s - self._began_s - self._latency_s
            self._end(reading, min(len(reading.fetch.blocks), max(0, int(since_s / self._block_s))))
            return
        for one in self._queue:
            if one.fetch.number == number:
                self._queue.remove(one)
                self._num_queued -= len(one.fetch.blocks)
                one.end(0)
                return

    def _next(self) -> None:
        if self._reading is None and self._queue:
            one = self._reading = self._queue.popleft()
            self._num_queued -= len(one.fetch.blocks)
            self._began_s = self._agenda.now_s
            self._agenda.after(self.read_s(len(one.fetch.blocks)), self._read, one)

    def _read(self, one: _Read) -> None:
        if one is self._reading:  # not aborted
            self._end(one, len(one.fetch.blocks))

    def _end(self, one: _Read, num_blocks: int) -> None:
        self._reading = None
        found = self._count(one.fetch.hashes[:num_blocks])
        self.num_read += found
        one.end(found)
        self._next()

    def _count(self, hashes: Iterable[bytes]) -> int:
        """The leading blocks that have not left meanwhile."""
        count = 0
        for one in hashes:
            if one not in self:
                break
            count += 1
        return count


@final
class SimulatedDisk(SimulatedSource):
    """The oldest blocks leave."""

    def __init__(
        self, agenda: Agenda, shape: WorkerShape, block_size: int, changed: Callable[[Sequence[bytes]], None]
    ) -> None:
        """`changed` gets the hashes that have been removed, or are added if the disk has them."""
        block_bytes = block_size * shape.kv_bytes_per_token
        super().__init__(Tier.DISK, agenda, block_bytes / shape.disk_bytes_per_s, shape.disk_latency_s)
        self._changed = changed
        self.num_slots = shape.disk_bytes // block_bytes
        self._written: dict[bytes, int] = {}  # number of the write of each block, ascending
        self._num_written = 0

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._written

    @property
    def room(self) -> int:
        return self.num_slots

    def take_block(self, block_hash: bytes, block: int) -> None:
        self._write(block_hash)

    def take_copy(self, block_hash: bytes, slot: int) -> None:
        self._write(block_hash)

    def start_copies(self) -> None:
        pass

    def drop(self, block_hash: bytes) -> None:
        self._written.pop(block_hash, None)

    def _write(self, block_hash: bytes) -> None:
        before = self._written.get(block_hash)
        if before is not None and self._num_written - before < YOUNG_SHARE * self.num_slots:
            return
        self._written.pop(block_hash, None)
        changed = [block_hash]
        if len(self._written) >= self.num_slots:
            oldest = next(iter(self._written))
            del self._written[oldest]
            changed.append(oldest)
        self._num_written += 1
        self._written[block_hash] = self._num_written
        self._changed(changed)


@final
class SimulatedCopies:
    """Copies of a host tier that the engine's thread makes before the next step. Their number for one allocation is not
    limited."""

    def __init__(self, shape: WorkerShape, block_size: int) -> None:
        block_bytes = block_size * shape.kv_bytes_per_token
        self.num_slots = shape.host_bytes // block_bytes
        self._block_s = block_bytes / shape.host_bytes_per_s
        self._due_s = 0.0

    def save(self, block: int, slot: int) -> None:
        self._due_s += self._block_s

    def load(self, slot: int, block: int) -> None:
        self._due_s += self._block_s

    def take_s(self) -> float:
        """Seconds of the copies since the last call."""
        due_s, self._due_s = self._due_s, 0.0
        return due_s


@final
class SimulatedQueuedCopies(SimulatedSource):
    """Copies of a host tier beside steps, by a link with two directions. Blocks are staged before they are reused."""

    def __init__(self, agenda: Agenda, shape: WorkerShape, block_size: int) -> None:
        block_bytes = block_size * shape.kv_bytes_per_token
        super().__init__(Tier.HOST, agenda, block_bytes / shape.host_bytes_per_s, 0.0)
        self.num_slots = shape.host_bytes // block_bytes
        self.tier: HostTier | None = None
        self.most_saved = max(1, BURST_BYTES // block_bytes)
        self._saved_at_s = 0.0  # when the link has copied all that is staged

    def __contains__(self, block_hash: bytes) -> bool:
        return self.tier is not None and block_hash in self.tier

    @property
    def room(self) -> int:
        staged_s = max(0.0, self._saved_at_s - self._agenda.now_s)
        return max(0, 2 * self.most_saved - math.ceil(staged_s / self._block_s))

    def flush(self) -> None:
        """Blocks are staged at once."""

    def save(self, block: int, slot: int) -> None:
        self._saved_at_s = max(self._saved_at_s, self._agenda.now_s) + self._block_s

    def load(self, slot: int, block: int) -> None:
        raise AssertionError("nothing is loaded at once")


@dataclass(frozen=True, slots=True)
class SimulatedTiers:
    host: HostTier | None
    disk: SimulatedDisk | None
    copies: SimulatedCopies
    sources: tuple[SimulatedSource, ...]


def simulated_tiers(
    agenda: Agenda,
    shape: WorkerShape,
    block_size: int,
    prefill_s: Callable[[int, int], float],
    rules: TierRules,
    changed: Callable[[Sequence[bytes]], None],
) -> SimulatedTiers:
    """Those that have memory and are worthwhile. `changed`: of the disk."""
    any_disk = SimulatedDisk(agenda, shape, block_size, changed)
    num_long = long_blocks(block_size)
    is_on = rules.has_disk(any_disk.read_s(num_long), prefill_s(num_long * block_size, 0))
    disk = any_disk if any_disk.num_slots and is_on else None
    copies = SimulatedCopies(shape, block_size)
    queued = SimulatedQueuedCopies(agenda, shape, block_size) if shape.copies_beside_steps else None
    rule = rules.host(LoadRule(block_size * shape.kv_bytes_per_token / shape.host_bytes_per_s, prefill_s, bool(queued)))
    host = None
    if copies.num_slots and rule.is_worthwhile(block_size):
        most_saved = copies.num_slots if queued is None else queued.most_saved
        host = HostTier(queued or copies, rule, most_saved, disk, queued=queued)
    sources: list[SimulatedSource] = []
    if queued is not None and host is not None:
        queued.tier = host
        sources.append(queued)
    return SimulatedTiers(host, disk, copies, (*sources, *([] if disk is None else [disk])))
