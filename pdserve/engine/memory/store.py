"""The shared store: blocks that other workers may need are written to a store of object_stores/ by the threads of
slow_tier.py, and read from it. One object for each block.

Others may write to the store, so each object is sealed (sealed_objects.py): one that does not open is a miss.

Nothing here writes to the pool before a block is verified, so a fetch can be given up at any moment, also if the store
hangs. Whether the store has a block is known only after a lookup, which a thread of its own makes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

from pdserve.config import WorkerConfig
from pdserve.core.attempt import Attempt
from pdserve.core.errors import ConfigError
from pdserve.core.kv.fetch import Fetch, Lookup
from pdserve.core.urls import hide_password
from pdserve.engine.interface import Engine, EngineSpec, KvPool
from pdserve.engine.memory.host import HostCopies
from pdserve.engine.memory.object_stores import open_object_store
from pdserve.engine.memory.object_stores.interface import FULL, ObjectStore
from pdserve.engine.memory.sealed_objects import NONCE_BYTES, TAG_BYTES, Seal, measure
from pdserve.engine.memory.slow_tier import (
    FIRST_PAUSE_S,
    JOIN_S,
    LATE,
    LATE_S,
    LONGEST_PAUSE_S,
    ReadSpeed,
    SlowTier,
    contents_id,
)
from pdserve.engine.memory.staging import CopyCount, OpenStaging, Staging, staging_of

log = logging.getLogger(__name__)

MOST_STAGED: Final = 4096
REUSE_BYTES: Final = 16 * 2**20  # copied for one prompt that uses blocks again, while the engine waits
PRESENT_S: Final = 60.0  # how long a block that was seen in the store is believed to be there by readers,
KEPT_S: Final = 600.0  # and by the writer;
ABSENT_S: Final = 10.0  # and how long one that was not is not looked for
MOST_KNOWN: Final = 2**18
MOST_LOOKUPS: Final = 64  # that wait
FIRST_SHARE: Final = 0.5  # of blocks that a lookup finds, until some were made
SHARE_GAIN: Final = 0.1


@dataclass(frozen=True, slots=True)
class StorePart:
    indexes: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Open:
    """A fetch that has not ended."""

    fetch: Fetch
    end: Callable[[int], None]
    num_filling: int = 0  # threads that write to its blocks
    is_given_up: bool = False


@final
class StoreTier(SlowTier[StorePart, bool]):
    """`looked` may be set: it is called on the thread of lookups when one has ended."""

    name = "store"
    num_readers = 4

    def __init__(
        self,
        store: ObjectStore,
        seal: Seal,
        pool: KvPool,
        copies: HostCopies | None,
        *,
        write_bytes_s: float,
        now: Callable[[], float] = time.monotonic,
        first_pause_s: float = FIRST_PAUSE_S,
        speed: ReadSpeed | None = None,
        lookup_s: float | None = None,
        staging: Staging | None = None,
    ) -> None:
        """`speed` and `lookup_s`: measured if they are not given. Raises OSError if the store does not work."""
        self.store, self._seal = store, seal
        if speed is None or lookup_s is None:
            speed, lookup_s = measure(store, seal, pool.block_bytes, self.num_readers)
        super().__init__(
            pool,
            copies,
            speed=speed,
            most_staged=MOST_STAGED,
            write_bytes_s=write_bytes_s,
            now=now,
            first_pause_s=first_pause_s,
            staging=staging,
        )
        self.looked: Callable[[], None] = lambda: None
        self._first_lookup_s = self._lookup_s = lookup_s
        self._found_share = FIRST_SHARE
        self._known: dict[bytes, tuple[bool, float]] = {}  # whether a block was there, and when
        self._lookups: deque[tuple[bytes, ...]] = deque()
        self._in_lookups: set[bytes] = set()  # the first block of each
        self._may_look = threading.Condition(self._guard)
        self._conditions.append(self._may_look)
        self._looking_since_s: float | None = None
        self._no_lookups_until_s = 0.0
        self._lookup_pause_s = first_pause_s
        self._open: dict[int, _Open] = {}  # the fetches that may write to the pool
        self._into_pool = threading.Lock()
        self._start(lookups=self._look_up_all)

    # -- what is there ----------------------------------------------------------------------------------------------

    def num_found(self, attempt: Attempt, hashes: Sequence[bytes], first: int) -> int:
        return next((at for at, one in enumerate(hashes) if not self._was_seen(one, PRESENT_S)), len(hashes))

    def lookup(self, attempt: Attempt, hashes: Sequence[bytes], first: int) -> Lookup | None:
        """As in `LookupSource`."""
        rest = tuple(hashes[self.num_found(attempt, hashes, first) :])
        now_s = self._now()
        if not rest or self._is_absent(rest[0], now_s):
            return None
        with self._guard:
            if now_s < self._no_lookups_until_s or self._is_closing:
                return None
            if rest[0] not in self._in_lookups:
                if len(self._lookups) >= MOST_LOOKUPS:
                    return None
                self._in_lookups.add(rest[0])
                self._lookups.append(rest)
                self._may_look.notify()
            since_s = self._looking_since_s
            if since_s is not None and now_s - since_s > max(LATE * self._lookup_s, LATE_S):
                return None  # the store hangs
            return Lookup((len(self._lookups) + 1) * self._lookup_s, self._found_share)

    def _was_seen(self, block_hash: bytes, within_s: float) -> bool:
        is_there, seen_s = self._known.get(block_hash, (False, 0.0))
        return is_there and self._now() - seen_s < within_s

    def _is_absent(self, block_hash: bytes, now_s: float) -> bool:
        is_there, seen_s = self._known.get(block_hash, (True, 0.0))
        return not is_there and 0.0 <= now_s - seen_s < ABSENT_S

    def _note(self, block_hash: bytes, is_there: bool) -> None:
        """`_guard` is held."""
        self._known.pop(block_hash, None)  # the newest stands last
        self._known[block_hash] = is_there, self._now()
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]

    def _look_up_all(self) -> None:
        while True:
            with self._guard:
                while not self._lookups and not self._is_closing:
                    self._may_look.wait()
                if self._is_closing:
                    return
                hashes = self._lookups.popleft()
                began_s = self._looking_since_s = self._now()
            found, error = 0, None
            try:
                found = self.store.num_found([self._seal.name(one) for one in hashes])
            except OSError as failure:
                error = failure
            except Exception as failure:  # a defect here must not end the thread, for which prompts would wait
                log.exception("a lookup failed")
                error = OSError(str(failure))
            with self._guard:
                now_s = self._now()
                self._looking_since_s = None
                self._in_lookups.discard(hashes[0])
                if error is None:
                    for one in hashes[:found]:
                        self._note(one, True)
                    if found < len(hashes):
                        self._note(hashes[found], False)
                    self._lookup_pause_s = self._first_pause_s
                    self._lookup_s += SHARE_GAIN * (max(0.0, now_s - began_s) - self._lookup_s)
                    self._found_share += SHARE_GAIN * (found / len(hashes) - self._found_share)
                else:
                    self._counts["failed_reads"] += 1
                    self._no_lookups_until_s = now_s + self._lookup_pause_s
                    pause_s, self._lookup_pause_s = self._lookup_pause_s, min(2 * self._lookup_pause_s, LONGEST_PAUSE_S)
                    self._lookups.clear()
                    self._in_lookups.clear()
            if error is not None:
                extra = {"tier": self.name, "error": str(error), "pause_s": pause_s}
                log.warning("a tier cannot be searched; lookups pause", extra=extra)
            self.looked()

    # -- what is written --------------------------------------------------------------------------------------------

    def take_reused(self, hashes: Sequence[bytes], blocks: Sequence[int], holds: Callable[[int, bytes], bool]) -> None:
        """A further text uses these blocks of the pool, so others may need them too. Copies a part of them; the rest
        may follow at their next use. `holds` tells whether a block still has its contents."""
        left = max(1, REUSE_BYTES // self._block_bytes)
        known, queued, since_s = self._known, self._queued, self._now() - KEPT_S  # there may be thousands of blocks
        for block_hash, block in zip(hashes, blocks, strict=True):
            is_there, seen_s = known.get(block_hash, (False, 0.0))
            if (is_there and seen_s > since_s) or block_hash in queued:
                continue
            if left == 0 or self.room == 0 or not holds(block, block_hash):
                break
            left -= 1
            self.take_block(block_hash, block)
        self.start_copies()

    def _is_kept(self, block_hash: bytes) -> bool:
        return self._was_seen(block_hash, KEPT_S)

    def _forget(self, block_hash: bytes) -> None:
        self._known.pop(block_hash, None)

    @property
    def _most_written(self) -> int:
        return MOST_STAGED

    def _write(self, blocks: Sequence[tuple[bytes, Any]]) -> list[bool]:
        """False for those that are there, which another worker may have written."""
        names = [self._seal.name(block_hash) for block_hash, _ in blocks]
        are_there = self.store.are_there(names)
        missing = [
            (name, self._seal.close(block_hash, contents))
            for name, (block_hash, contents), is_there in zip(names, blocks, are_there, strict=True)
            if not is_there
        ]
        if missing:
            try:
                self.store.put(missing)
            except OSError as error:
                if error.errno in FULL:  # it may be so below its bound, so that later blocks have room
                    self.store.make_room()
                raise
            self.store.make_room()
        return [not is_there for is_there in are_there]

    def _add(self, block_hash: bytes, written: bool) -> None:
        self._note(block_hash, True)

    def _erase(self, hashes: Collection[bytes]) -> None:
        self.store.delete([self._seal.name(one) for one in hashes])

    # -- what is read -----------------------------------------------------------------------------------------------

    def begin(self, fetch: Fetch, end: Callable[[int], None]) -> None:
        opened = _Open(fetch, end)
        with self._into_pool:
            self._open[fetch.number] = opened
        try:
            super().begin(fetch, partial(self._end, opened))
        except BaseException:
            with self._into_pool:
                del self._open[fetch.number]
            raise

    def abort(self, number: int) -> None:
        super().abort(number)
        opened = self._open.get(number)
        if opened is not None:
            self._end(opened, 0)  # at once, unless blocks are just being written

    def _end(self, opened: _Open, num_blocks: int) -> None:
        with self._into_pool:
            opened.is_given_up = True
            # Its reader may still run when it has ended, and must not take another one for it.
            if opened.num_filling or self._open.get(opened.fetch.number) is not opened:
                return
            del self._open[opened.fetch.number]
        opened.end(num_blocks)

    def close(self, within_s: float | None = None) -> None:
        super().close(within_s)
        with self._into_pool:
            running = list(self._open.values())
        for opened in running:
            self._end(opened, 0)

    def _ended(self) -> None:
        self.store.close()

    def _parts_of(self, fetch: Fetch) -> list[StorePart]:
        count = len(fetch.blocks)
        most = max(1, min(self.store.most_got, self._staging.most_read, -(-count // self.num_readers)))
        return [StorePart(tuple(range(at, min(at + most, count)))) for at in range(0, count, most)]

    def _read_part(self, fetch: Fetch, part: StorePart, fence: Any) -> list[bool]:
        hashes = [fetch.hashes[index] for index in part.indexes]
        try:
            found = self.store.get([self._seal.name(one) for one in hashes])
        except OSError as error:
            self._cannot_read(error)
            with self._guard:
                for one in hashes:
                    self._known.pop(one, None)
            return [False] * len(hashes)
        opened = [
            None if sealed is None else self._seal.open(block_hash, sealed)
            for block_hash, sealed in zip(hashes, found, strict=True)
        ]
        missing = [one for one, sealed in zip(hashes, found, strict=True) if sealed is None]
        damaged = [
            one
            for one, sealed, contents in zip(hashes, found, opened, strict=True)
            if sealed is not None and contents is None
        ]
        with self._guard:
            self._counts["damaged"] += len(damaged)
            for block_hash in (*missing, *damaged):
                self._note(block_hash, False)
            if damaged:  # else nobody would write it anew
                self._wrong.update(damaged)
                self._may_write.notify()
        return self._fill(fetch, [fetch.blocks[index] for index in part.indexes], opened, fence)

    def _fill(self, fetch: Fetch, blocks: Sequence[int], contents: Sequence[bytes | None], fence: Any) -> list[bool]:
        """Which of the blocks are in the pool. A fetch that is given up meanwhile ends after it."""
        with self._into_pool:
            opened = self._open.get(fetch.number)
            if opened is None or opened.fetch is not fetch or opened.is_given_up:
                return [False] * len(blocks)
            opened.num_filling += 1
        try:
            with self._staging.landing(blocks, fence) as landing:
                for at, one in enumerate(contents):
                    if one is not None:
                        landing.put(at, one)
                return landing.into_pool([one is not None for one in contents])
        finally:
            with self._into_pool:
                opened.num_filling -= 1
                is_over = opened.is_given_up
            if is_over:
                self._end(opened, 0)


# --- at the start -----------------------------------------------------------------------------------------------


def store_tier(
    engine: Engine, config: WorkerConfig, copies: CopyCount | None, open_staging: OpenStaging | None = None
) -> StoreTier | None:
    """None if the tier is off. Raises ConfigError if the engine's pool cannot have one, or the store does not work."""
    if not config.kv_store:
        return None
    spec, pool, shown = engine.spec, engine.pool, hide_password(config.kv_store)
    if not config.is_prefix_cache_on:
        raise ConfigError("kv_store", shown, "no store while is_prefix_cache_on is false")
    if spec.tp_degree > 1:
        raise ConfigError("kv_store", shown, "no store for a worker of several ranks")
    with ExitStack() as opened:
        staging = staging_of(pool, copies, StoreTier.num_readers, open_staging, "kv_store", shown)
        opened.callback(staging.close, JOIN_S)
        seal = Seal(config.cluster_secret, contents_of(spec, Path(config.model)), pool.block_bytes)
        object_bytes = pool.block_bytes + NONCE_BYTES + TAG_BYTES
        store = open_object_store(config.kv_store, seal.room, object_bytes, config.kv_store_bytes)
        opened.callback(store.close)
        try:
            tier = StoreTier(store, seal, pool, None, write_bytes_s=config.kv_store_write_bytes_s, staging=staging)
        except OSError as error:
            expected = f"a store that answers, and that this worker may write to ({str(error) or type(error).__name__})"
            raise ConfigError("kv_store", shown, expected) from None
        opened.pop_all()
    return tier


def contents_of(spec: EngineSpec, model: Path) -> bytes:
    """As `contents_id`, the same on every host that has this model: so names and sizes of the files in the folder
    `model` are parts of it, and their times are not."""
    files = sorted(model.iterdir()) if model.is_dir() else []
    sizes = [(file.name, file.stat().st_size) for file in files if file.is_file()]
    return contents_id(spec, sizes, person=b"pdserve.kvstore")
