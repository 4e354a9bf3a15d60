"""A worker's side of the registry and the prefix index: publishes its address, heartbeats and cached blocks.

It never blocks or fails the worker: `offer` only records a change, and one task sends it to Redis, with unlimited
retries. Memory is bounded by the worker's own cache: changes are merged into the set of held blocks, and if there are
more changes than held blocks, they are replaced by a snapshot.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any, Final, final

from pdserve.core.kv.hashing import HASH_BYTES
from pdserve.core.kv.tier_reads import Tier
from pdserve.core.urls import hide_password
from pdserve.outage_log import OutageLog, PeerLog
from pdserve.prefix import schema
from pdserve.prefix.connection import TROUBLE, Backoff, connect, heed_cancellation
from pdserve.prefix.registry import REDIS_TIMEOUT_S, Registration
from pdserve.prefix.schema import MAX_SLOTS, fingerprint_of, index_tag, owner_of, registry_tag

# --- leases of one worker incarnation -------------------------------------------------------------------------
# Its name in the registry, its slot in the prefix index. Each call is one script (schema.py), so that a lost lease is
# detected by the write that needs it.

SWEEP_SLOTS: Final = 64  # in a row, so that a sweep never prevents a worker from renewing its lease
GRACE_LEASES: Final = 12  # after this many lease times a silent slot is swept, even if most slots are silent


class LeaseLost(Exception):
    """The slot is no longer leased to this worker."""


class Gap(Exception):
    """Redis and the worker disagree about the applied changes."""


class Superseded(Exception):
    """A newer incarnation has registered under this worker's id."""


@dataclass(frozen=True, slots=True)
class CacheBatch:
    """Changes to a cache: hashes, one after the other."""

    stored: bytes
    removed: bytes
    marked: bytes  # each with the byte of its tier
    unmarked: bytes  # likewise

    @property
    def num_blocks(self) -> int:
        return (len(self.stored) + len(self.removed)) // HASH_BYTES


@final
class RegistryLease:
    def __init__(self, redis: Any, tag: str, registration: Registration, lease_s: float) -> None:
        self._tag, self._of = tag, registration
        self._lease_ms = round(lease_s * 1e3)
        self._register = redis.register_script(schema.REGISTER)
        self._deregister = redis.register_script(schema.DEREGISTER)
        self._is_first = True

    async def take(self) -> None:
        """Registers. The first call takes the name from an earlier incarnation; later calls raise Superseded if it was
        taken."""
        await self._put("1" if self._is_first else "0")
        self._is_first = False

    async def renew(self) -> None:
        await self._put("0")

    async def give_up(self) -> None:
        await self._deregister(keys=[self._tag], args=[self._of.worker_id, self._of.incarnation])

    async def _put(self, is_first: str) -> None:
        args = [self._of.worker_id, self._of.incarnation, self._of.to_json(), self._lease_ms, is_first]
        if not await self._register(keys=[self._tag], args=args):
            raise Superseded(self._of.worker_id)


@final
class IndexLease:
    def __init__(self, redis: Any, tag: str, registration: Registration, lease_s: float, block_ttl_s: float) -> None:
        self._tag = tag
        self._worker_id = registration.worker_id
        self._owner = owner_of(registration.worker_id, registration.incarnation)
        self._lease_ms, self._block_ttl_ms = round(lease_s * 1e3), round(block_ttl_s * 1e3)
        self._claim = redis.register_script(schema.CLAIM)
        self._renew = redis.register_script(schema.RENEW)
        self._give_up = redis.register_script(schema.GIVE_UP)
        self._apply = redis.register_script(schema.APPLY)
        self._slot: int | None = None
        self._sequence = 0  # number of the last batch that Redis is known to have applied

    @property
    def slot(self) -> int | None:
        return self._slot

    async def take(self, *, may_resume: bool) -> bool:
        """Leases a slot. False if it is still the same slot, and Redis has applied all confirmed batches, or one more
        whose answer was lost. True: an empty slot, which needs a snapshot."""
        slot, sequence, is_new = await self._ask_for_slot(must_be_new=not may_resume)
        if not is_new:
            if slot == self._slot and sequence in (self._sequence, self._sequence + 1):
                return False
            if self._slot is not None or sequence != 0:
                slot, _, _ = await self._ask_for_slot(must_be_new=True)
        self._slot, self._sequence = slot, 0
        return True

    async def renew(self) -> None:
        """Raises LeaseLost if it was silent for too long."""
        args = [self._slot, self._owner, self._lease_ms, self._block_ttl_ms]
        if not await self._renew(keys=[self._tag], args=args):
            raise LeaseLost(f"slot {self._slot}")

    async def apply(self, batch: CacheBatch) -> None:
        """May be repeated until it has returned. Raises LeaseLost or Gap; the batch is then part of a snapshot."""
        assert self._slot is not None, "take() comes first"
        args = [
            self._slot,
            self._owner,
            self._sequence + 1,
            self._block_ttl_ms,
            batch.stored,
            batch.removed,
            batch.marked,
            batch.unmarked,
        ]
        said = await self._apply(keys=[self._tag], args=args)
        if said == b"lost":
            raise LeaseLost(f"slot {self._slot}")
        if said == b"gap":
            lost, self._slot = self._slot, None  # not to be resumed, even if its sequence number is the expected one
            raise Gap(f"batch {self._sequence + 1} of slot {lost}")
        self._sequence += 1

    async def give_up(self) -> None:
        await self._give_up(keys=[self._tag], args=[self._slot, self._owner])

    async def _ask_for_slot(self, *, must_be_new: bool) -> tuple[int, int, bool]:
        args = [self._owner, self._worker_id, self._lease_ms, MAX_SLOTS, "1" if must_be_new else "0"]
        slot, sequence, is_new = await self._claim(keys=[self._tag], args=args)
        if slot < 0:
            raise LeaseLost(f"all {MAX_SLOTS} slots are leased or wait to be swept")
        return slot, sequence, bool(is_new)


@final
class Sweeper:
    """Deletes the blocks of slots without a lease, and frees the slots.

    Any worker may sweep; a lock avoids simultaneous sweeps, which would be harmless but useless.
    """

    def __init__(self, redis: Any, tag: str, lease_s: float) -> None:
        self._redis, self._tag = redis, tag
        self._lock_ms = round(lease_s * 1e3)
        self._grace_ms = GRACE_LEASES * round(lease_s * 1e3)
        self._sweepable = redis.register_script(schema.SWEEPABLE)
        self._sweep = redis.register_script(schema.SWEEP)
        self.num_swept_slots = 0

    async def sweep(self) -> None:
        """At most SWEEP_SLOTS; what is left waits for the next call."""
        if not await self._redis.set(f"{self._tag}:sweeper", "1", nx=True, px=self._lock_ms):
            return
        try:
            slots = await self._sweepable(keys=[self._tag], args=[self._grace_ms])
            for slot in slots[:SWEEP_SLOTS]:
                self.num_swept_slots += await self._sweep(keys=[self._tag], args=[slot]) == 1
        finally:
            await self._redis.delete(f"{self._tag}:sweeper")


# --- publisher ------------------------------------------------------------------------------------------------

log = logging.getLogger(__name__)

BATCH_S: Final = 0.01
BATCH_BLOCKS: Final = 1024  # sent in one script, during which Redis serves no other client
MIN_NOTES: Final = 4096
STOP_S: Final = 1.0  # time limit for deregistering


@final
class CacheNotes:
    """The blocks that a worker has cached, and the changes not sent to Redis yet. Thread-safe."""

    def __init__(self, min_notes: int = MIN_NOTES) -> None:
        self._min_notes = min_notes
        self._lock = threading.Lock()
        self._held: dict[bytes, int] = {}  # hash -> tier; its order: parents come before their children
        self._notes: dict[bytes, int | None] = {}  # hash -> tier; None: it is not held
        self._marked: dict[bytes, int] = {}  # hash -> tier of the mark that was sent
        self._has_overflowed = False

    def take_in(self, stored: Iterable[bytes], removed: Iterable[bytes], tiers: bytes = b"") -> int:
        """Records a change. `tiers`: of `stored`; empty: all are in the pool. Returns the number of changes to send."""
        with self._lock:
            for one in removed:
                self._held.pop(one, None)
                self._notes[one] = None
            for one, tier in zip(stored, tiers, strict=True) if tiers else zip(stored, repeat(Tier.POOL), strict=False):
                self._held[one] = self._notes[one] = tier
            if len(self._notes) > self._min_notes + 2 * len(self._held):
                self._notes.clear()
                self._has_overflowed = True
            return len(self._notes) or int(self._has_overflowed)

    def begin_snapshot(self) -> None:
        """Marks everything held to be sent again, and drops the waiting changes."""
        with self._lock:
            self._notes = dict(self._held)
            self._marked.clear()
            self._has_overflowed = False

    def repeat_held(self) -> None:
        """Marks everything held to be sent again, in addition to the waiting changes."""
        with self._lock:
            self._notes.update(self._held)

    def take_out(self, most: int) -> CacheBatch | None:
        """At most this many changes, oldest first; None if there are none. They count as sent from now on."""
        stored: list[bytes] = []
        removed: list[bytes] = []
        marked: list[bytes] = []
        unmarked: list[bytes] = []
        with self._lock:
            taken = list(islice(self._notes.items(), most))
            for one, tier in taken:
                del self._notes[one]
                (removed if tier is None else stored).append(one)
                before = self._marked.pop(one, tier)
                if before and before != tier:
                    unmarked.append(one + bytes((before,)))
                if tier:
                    self._marked[one] = tier
                    marked.append(one + bytes((tier,)))
        if not taken:
            return None
        joined = map(b"".join, (stored, removed, marked, unmarked))
        return CacheBatch(*joined)

    @property
    def has_overflowed(self) -> bool:
        """Whether changes were dropped, so that Redis needs a snapshot."""
        return self._has_overflowed

    def __len__(self) -> int:
        return len(self._notes)


@final
class WorkerPublisher:
    """start() and stop() on the worker's event loop; offer() from any thread."""

    def __init__(
        self,
        url: str,
        cluster: str,
        registration: Registration,
        *,
        hash_seed: bytes,
        lease_s: float = 5.0,
        block_ttl_s: float = 3600.0,
    ) -> None:
        """`lease_s`: how long Redis keeps the worker after its last heartbeat. `block_ttl_s`: a backstop after which
        Redis forgets the blocks of a worker that sends nothing; each block is sent three times in that time."""
        self._redis = connect(url, timeout_s=REDIS_TIMEOUT_S, max_connections=2)
        self._where = hide_password(url)
        self._registry = RegistryLease(self._redis, registry_tag(cluster), registration, lease_s)
        tag = index_tag(cluster, fingerprint_of(hash_seed))
        self._index = IndexLease(self._redis, tag, registration, lease_s, block_ttl_s)
        self._sweeper = Sweeper(self._redis, tag, lease_s)
        self._heartbeat_s = lease_s / 4
        self._repeat_s = block_ttl_s / 3
        self._notes = CacheNotes()
        self._outages = OutageLog(log, "Redis cannot be reached", "registered in Redis")
        self._lines = PeerLog(log)
        self._in_flight: CacheBatch | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_notes = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_connected = False
        self.num_sent_batches = 0
        self.num_failures = 0
        self.num_snapshots = 0

    @property
    def is_connected(self) -> bool:
        """Whether Redis has this worker, according to its last answer."""
        return self._is_connected

    @property
    def num_waiting(self) -> int:
        """Number of blocks whose change was not sent to Redis."""
        return len(self._notes) + (0 if self._in_flight is None else self._in_flight.num_blocks)

    def offer(self, stored: Iterable[bytes] = (), removed: Iterable[bytes] = (), tiers: bytes = b"") -> None:
        """The worker's cache has changed: `removed`, then `stored`, with the tier of each; without, all are in the
        pool. From any thread, at any time."""
        if self._notes.take_in(stored, removed, tiers) and not self._has_notes.is_set() and self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._has_notes.set)
            except RuntimeError:  # the loop has ended, so nothing can be sent any more
                return

    async def start(self) -> None:
        """Returns immediately; is_connected shows whether Redis can be reached."""
        self._loop = asyncio.get_running_loop()
        if len(self._notes):
            self._has_notes.set()
        self._task = asyncio.create_task(self._publish_forever(), name="prefix-publisher")

    async def stop(self) -> None:
        """Removes the worker from Redis, if Redis answers within a second."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._is_connected:
            try:
                async with asyncio.timeout(STOP_S):
                    await self._index.give_up()
                    await self._registry.give_up()
            except TROUBLE as error:
                log.info("could not deregister from Redis", extra={"redis": self._where, "why": repr(error)})
            self._is_connected = False
        await self._redis.aclose()

    async def _publish_forever(self) -> None:
        backoff = Backoff(0.05, 2.0)
        while True:
            try:
                await self._register()
                backoff.reset()
                await self._publish()
            except (LeaseLost, Gap) as error:
                # A new slot and a snapshot repair everything that Redis missed; the old slot is masked and swept.
                why = repr(error)
                self._lines.line(logging.INFO, "the index lost track of this worker", redis=self._where, why=why)
            except Superseded:
                log.error("another process took this worker's name; it is no longer published")
                self._is_connected = False
                return
            except TROUBLE as error:
                self._outages.failed(redis=self._where, why=repr(error))
            self._is_connected = False
            self.num_failures += 1
            heed_cancellation()
            await asyncio.sleep(backoff.next_s())

    async def _register(self) -> None:
        await self._registry.take()
        is_fresh = await self._index.take(may_resume=not self._notes.has_overflowed)
        if is_fresh:
            self._in_flight = None
            self._notes.begin_snapshot()
            self.num_snapshots += 1
        if len(self._notes):
            self._has_notes.set()
        if not self._is_connected:
            self._outages.recovered(redis=self._where, slot=self._index.slot)
        self._is_connected = True

    async def _publish(self) -> None:
        """Sends changes as they come and heartbeats in between, until an error occurs."""
        loop = asyncio.get_running_loop()
        next_beat_s, next_repeat_s = loop.time() + self._heartbeat_s, loop.time() + self._repeat_s
        while True:
            now_s = loop.time()
            if now_s >= next_beat_s:
                await self._registry.renew()
                await self._index.renew()
                await self._sweeper.sweep()
                next_beat_s = loop.time() + self._heartbeat_s
            if now_s >= next_repeat_s:
                self._notes.repeat_held()
                next_repeat_s = now_s + self._repeat_s
            was_sent = await self._send_batch()
            heed_cancellation()
            if was_sent:
                continue
            self._has_notes.clear()
            if len(self._notes):  # offered between the two lines above
                continue
            try:
                async with asyncio.timeout(max(0.0, next_beat_s - loop.time())):
                    await self._has_notes.wait()
            except TimeoutError:
                continue
            if len(self._notes) < BATCH_BLOCKS:
                await asyncio.sleep(BATCH_S)

    async def _send_batch(self) -> bool:
        """Returns True if there was anything to send."""
        if self._notes.has_overflowed:
            raise Gap("more changed than is remembered")
        if self._in_flight is None:
            self._in_flight = self._notes.take_out(BATCH_BLOCKS)
            if self._in_flight is None:
                return False
        await self._index.apply(self._in_flight)
        self._in_flight = None
        self.num_sent_batches += 1
        return True


assert HASH_BYTES == 16, "the scripts cut hashes at 16 bytes"
