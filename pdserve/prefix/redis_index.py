"""Looks up in Redis which workers have cached a prompt's leading blocks, and in which tiers. The schema is in
pdserve/prefix/schema.py.

It fails open: a late or missing answer counts as empty. While Redis cannot be reached, a lookup costs
nothing, because only a background task retries.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from pdserve.core.kv.tier_reads import TierDepths
from pdserve.core.urls import hide_password
from pdserve.outage_log import OutageLog, PeerLog
from pdserve.prefix import schema
from pdserve.prefix.connection import TROUBLE, Backoff, connect, heed_cancellation
from pdserve.prefix.index import PrefixDepths
from pdserve.prefix.schema import fingerprint_of, index_tag, worker_of

log = logging.getLogger(__name__)

REDIS_TIMEOUT_S: Final = 1.0
LOOKUP_SLOTS: Final = 64  # asked for a chain in one script, during which Redis serves no other client
HOLDER_SLOTS: Final = 512  # asked for one block
# Blocks of a chain that each slot is asked for, before it is searched. Fewer if many slots share them.
MAX_PROBES: Final = 64
ALL_PROBES: Final = 512
MAX_IN_FLIGHT: Final = 32
LATE_IN_A_ROW: Final = 3
_NOTHING: Final = PrefixDepths()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slots:
    """The leases of the slots, as of `epoch`."""

    epoch: bytes = b""
    worker_of_slot: Mapping[int, str]  # those with a live lease


_NOBODY: Final = _Slots(worker_of_slot={})


@final
class RedisIndex:
    """A PrefixLookup. Belongs to one event loop; call start() and close() on it."""

    def __init__(
        self, url: str, cluster: str, *, hash_seed: bytes = b"", timeout_s: float = 0.01, refresh_s: float = 0.25
    ) -> None:
        """`timeout_s` limits a lookup; `refresh_s` is the time after the end of its lease until a silent worker is
        masked. Without `hash_seed` nothing is found until bind()."""
        self._redis = connect(url, timeout_s=REDIS_TIMEOUT_S, max_connections=MAX_IN_FLIGHT + 3)
        self._where = hide_password(url)
        self._lookup = self._redis.register_script(schema.LOOKUP)
        self._holders = self._redis.register_script(schema.HOLDERS)
        self._cluster = cluster
        self._timeout_s, self._refresh_s = timeout_s, refresh_s
        self._tag = b""
        self._slots = _NOBODY
        self._is_available = False
        self._in_flight: set[asyncio.Task[PrefixDepths]] = set()
        self._late = 0
        self._outages = OutageLog(log, "the prefix index cannot be reached", "the prefix index answers")
        self._lines = PeerLog(log)
        self._wake = asyncio.Event()
        self._refreshing: asyncio.Task[None] | None = None
        if hash_seed:
            self.bind(hash_seed)

    @property
    def is_available(self) -> bool:
        return self._is_available

    def bind(self, hash_seed: bytes) -> None:
        """Sets the model whose blocks are looked up (WorkerHello.hash_seed). Cheap to repeat."""
        tag = index_tag(self._cluster, fingerprint_of(hash_seed)).encode()
        if tag != self._tag:
            self._tag, self._slots = tag, _NOBODY
            self._wake.set()

    async def start(self) -> None:
        """Begins to follow the slots' leases in the background; never fails if Redis is missing."""
        if self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh_forever(), name="prefix-slots")

    async def close(self) -> None:
        tasks = [task for task in (self._refreshing, *self._in_flight) if task is not None]
        self._refreshing = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._redis.aclose()

    async def lookup(self, hashes: Sequence[bytes]) -> PrefixDepths:
        if not hashes or not self._slots.worker_of_slot or not self._is_available:
            return _NOTHING
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            return _NOTHING
        # A late task is not cancelled, because that would close its connection.
        task = asyncio.create_task(self._ask(hashes))
        self._in_flight.add(task)
        task.add_done_callback(self._ended)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            done, _ = await asyncio.wait((task,), timeout=self._timeout_s)
        except asyncio.CancelledError:
            # A caller's own time limit ends at about the same time. A cancelled lookup is no sign of a slow Redis.
            if loop.time() - began_s > 0.5 * self._timeout_s:
                self._note_late()
            raise
        if not done:
            self._note_late()
            return _NOTHING
        if task.cancelled() or task.exception() is not None:
            return _NOTHING
        self._late = 0
        return task.result()

    async def inspect(self, hashes: Sequence[bytes]) -> PrefixDepths | None:
        """One call at a time: it has a connection of its own."""
        if not self._is_available:
            return None
        if not hashes or not self._slots.worker_of_slot:
            return _NOTHING
        try:
            async with asyncio.timeout(REDIS_TIMEOUT_S):
                return await self._ask(hashes)
        except TROUBLE:
            heed_cancellation()
            return None

    async def _ask(self, hashes: Sequence[bytes]) -> PrefixDepths:
        slots = self._slots
        depths = await self._depths(hashes, slots)
        if depths is None:
            slots = await self._read_slots()
            depths = await self._depths(hashes, slots)
        found: dict[str, tuple[int, ...]] = {}
        for slot, depth in (depths or {}).items():
            worker_id = slots.worker_of_slot[slot]
            if depth > found.get(worker_id, (0,)):
                found[worker_id] = depth
        return PrefixDepths(
            {worker_id: depth[0] for worker_id, depth in found.items()},
            {worker_id: TierDepths(*depth[1:]) for worker_id, depth in found.items() if len(depth) > 1},
        )

    async def _depths(self, hashes: Sequence[bytes], slots: _Slots) -> dict[int, tuple[int, ...]] | None:
        """The number of leading blocks that the slots hold, with those of TierDepths unless the pool has all. None if
        the slots have changed since they were read."""
        asked = list(slots.worker_of_slot)
        if len(asked) > LOOKUP_SLOTS:  # sends the chain only for those that hold its first block
            replies = await self._run(self._holders, [hashes[0]], asked, HOLDER_SLOTS)
            if any(epoch != slots.epoch for epoch, _ in replies):
                return None
            is_held = b"".join(held for _, held in replies)
            asked = [slot for slot, held in zip(asked, is_held, strict=True) if held == ord("1")]
        num_probes = max(1, min(MAX_PROBES, ALL_PROBES // max(1, len(asked))))
        replies = await self._run(self._lookup, [b"".join(hashes), num_probes], asked, LOOKUP_SLOTS)
        if any(epoch != slots.epoch for epoch, _ in replies):
            return None
        found = (tuple(map(int, depth.split(b"/"))) for _, depths in replies for depth in depths.split())
        return dict(zip(asked, found, strict=True))

    async def _run(self, script: Any, asked: list[Any], slots: Sequence[int], most: int) -> list[tuple[bytes, bytes]]:
        """The replies to a script for each `most` of the slots, sent together. Redis serves others in between."""
        parts = [slots[first : first + most] for first in range(0, len(slots), most)]
        if len(parts) == 1:
            return [await script(keys=[self._tag], args=[*asked, *parts[0]])]
        async with self._redis.pipeline(transaction=False) as pipeline:
            for part in parts:
                await script(keys=[self._tag], args=[*asked, *part], client=pipeline)
            replies: list[tuple[bytes, bytes]] = await pipeline.execute()
        return replies

    async def _read_slots(self) -> _Slots:
        tag = self._tag
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.get(tag + b":epoch")
            pipeline.hgetall(tag + b":slots")
            epoch, owners = await pipeline.execute()
        leases = await self._redis.mget([tag + b":w:" + slot for slot in owners]) if owners else []
        alive = {
            int(slot): worker_of(owner)
            for (slot, owner), lease in zip(owners.items(), leases, strict=True)
            if lease == owner
        }
        slots = _Slots(epoch=epoch or b"", worker_of_slot=alive)
        if tag == self._tag:
            self._slots = slots
        return slots

    async def _refresh_forever(self) -> None:
        backoff = Backoff(0.05, 1.0)
        # A server that is this slow would only time out again.
        patience_s = max(0.05, 5.0 * self._timeout_s)
        while True:
            if not self._tag:
                await self._wake.wait()
            self._wake.clear()  # before the read, so that a bind() during the read causes another one
            try:
                async with asyncio.timeout(REDIS_TIMEOUT_S if self._is_available else patience_s):
                    await self._read_slots()
                self._recover()
            except TROUBLE as error:
                self._suspend(repr(error))
            heed_cancellation()
            if self._is_available and self._late == 0:
                backoff.reset()
            wait_s = self._refresh_s if self._is_available else backoff.next_s()
            is_woken = await self._woken_within(wait_s)
            # Woken because lookups were stopped, maybe during a read that succeeded, and not by bind().
            if is_woken and self._slots is not _NOBODY:
                await asyncio.sleep(backoff.next_s())

    async def _woken_within(self, wait_s: float) -> bool:
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    def _recover(self) -> None:
        if not self._is_available:
            self._outages.recovered(redis=self._where)
            self._is_available = True
            # Like a half-open circuit breaker: the next late answer stops lookups again, an answer in time resumes
            # them.
            self._late = min(self._late, LATE_IN_A_ROW - 1)

    def _ended(self, task: asyncio.Task[PrefixDepths]) -> None:
        self._in_flight.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if not isinstance(error, TROUBLE):
            self._lines.line(logging.ERROR, "a prefix lookup failed", exc_info=error)
        self._trip(repr(error))

    def _note_late(self) -> None:
        self._late += 1
        if self._late >= LATE_IN_A_ROW:
            self._trip("answers are late")

    def _trip(self, why: str) -> None:
        """Suspends lookups and makes the background task try at once whether Redis answers."""
        if self._is_available:
            self._suspend(why)
            self._wake.set()

    def _suspend(self, why: str) -> None:
        """Stops lookups until the background task has received an answer from Redis."""
        self._is_available = False
        self._outages.failed(redis=self._where, why=why)
