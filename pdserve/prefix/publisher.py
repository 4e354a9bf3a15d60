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
from itertools import islice
from typing import Final, final

from pdserve.core.kv.hashing import HASH_BYTES
from pdserve.core.urls import hide_password
from pdserve.outage_log import OutageLog, PeerLog
from pdserve.prefix.connection import TROUBLE, Backoff, connect, heed_cancellation
from pdserve.prefix.keys import fingerprint_of, index_tag, registry_tag
from pdserve.prefix.lease import CacheBatch, Gap, IndexLease, LeaseLost, RegistryLease, Superseded, Sweeper
from pdserve.prefix.registry import REDIS_TIMEOUT_S, Registration

log = logging.getLogger(__name__)

BATCH_S: Final = 0.01
BATCH_BLOCKS: Final = 256
MIN_NOTES: Final = 4096
STOP_S: Final = 1.0  # time limit for deregistering


@final
class CacheNotes:
    """The blocks that a worker has cached, and the changes not sent to Redis yet. Thread-safe."""

    def __init__(self, min_notes: int = MIN_NOTES) -> None:
        self._min_notes = min_notes
        self._lock = threading.Lock()
        self._held: dict[bytes, None] = {}  # a dict for its order: parents come before their children
        self._notes: dict[bytes, bool] = {}  # hash -> whether it is held
        self._has_overflowed = False

    def take_in(self, stored: Iterable[bytes], removed: Iterable[bytes]) -> int:
        """Records a change. Returns the number of changes to send."""
        with self._lock:
            for one in removed:
                self._held.pop(one, None)
                self._notes[one] = False
            for one in stored:
                self._held[one] = None
                self._notes[one] = True
            if len(self._notes) > self._min_notes + 2 * len(self._held):
                self._notes.clear()
                self._has_overflowed = True
            return len(self._notes) or int(self._has_overflowed)

    def begin_snapshot(self) -> None:
        """Marks everything held to be sent again, and drops the waiting changes."""
        with self._lock:
            self._notes = dict.fromkeys(self._held, True)
            self._has_overflowed = False

    def repeat_held(self) -> None:
        """Marks everything held to be sent again, in addition to the waiting changes."""
        with self._lock:
            for one in self._held:
                self._notes[one] = True

    def take_out(self, most: int) -> tuple[list[bytes], list[bytes]]:
        """At most this many changes, oldest first: (stored, removed)."""
        with self._lock:
            taken = list(islice(self._notes.items(), most))
            for one, _ in taken:
                del self._notes[one]
        return [one for one, is_held in taken if is_held], [one for one, is_held in taken if not is_held]

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
        Redis forgets a block that was not sent again; each block is sent three times in that time."""
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

    def offer(self, stored: Iterable[bytes] = (), removed: Iterable[bytes] = ()) -> None:
        """The worker's cache has changed: `removed`, then `stored`. From any thread, at any time."""
        if self._notes.take_in(stored, removed) and not self._has_notes.is_set() and self._loop is not None:
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
            stored, removed = self._notes.take_out(BATCH_BLOCKS)
            if not stored and not removed:
                return False
            self._in_flight = CacheBatch(stored=b"".join(stored), removed=b"".join(removed))
        await self._index.apply(self._in_flight)
        self._in_flight = None
        self.num_sent_batches += 1
        return True


assert HASH_BYTES == 16, "the scripts cut hashes at 16 bytes"
