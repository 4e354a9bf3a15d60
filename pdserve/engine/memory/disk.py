"""The disk tier: blocks that leave memory are written to files (block_files.py) by the threads of slow_tier.py.

The reader reads directly into the blocks of the pool that the fetch holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, final

from pdserve.config import WorkerConfig
from pdserve.core.attempt import Attempt
from pdserve.core.errors import ConfigError
from pdserve.core.kv.fetch import Fetch
from pdserve.core.kv.tier_reads import Tier, TierSpeed
from pdserve.engine.interface import Engine, EngineSpec, KvPool
from pdserve.engine.memory.block_files import BlockFiles, FileCalls, Group, Place
from pdserve.engine.memory.host import MOST_HASHES, HostCopies
from pdserve.engine.memory.slow_tier import FIRST_PAUSE_S, JOIN_S, ReadSpeed, SlowTier, contents_id
from pdserve.engine.memory.staging import CopyCount, OpenStaging, Staging, staging_of

SYNC_BYTES: Final = 64 * 2**20  # written until the system is made to store them, which shows late errors
SLOW_BYTES_S: Final = 50e6  # assumed if the device could not be measured


@final
class DiskTier(SlowTier[Group, Place]):
    """`changed` may be set: it is called on the thread of the writer or a reader, with the hashes that were added and
    removed."""

    name = "disk"
    num_readers = 2  # so that one read is under way while another is verified

    def __init__(
        self,
        files: BlockFiles,
        pool: KvPool,
        copies: HostCopies | None,
        *,
        write_bytes_s: float,
        now: Callable[[], float] = time.monotonic,
        first_pause_s: float = FIRST_PAUSE_S,
        staging: Staging | None = None,
    ) -> None:
        super().__init__(
            pool,
            copies,
            speed=ReadSpeed(files.read_bytes_s() or SLOW_BYTES_S),
            most_staged=files.num_slots,
            write_bytes_s=write_bytes_s,
            now=now,
            first_pause_s=first_pause_s,
            staging=staging,
        )
        self.files = files
        self.changed: Callable[[Sequence[bytes], Sequence[bytes]], None] = lambda added, removed: None
        self._num_unsynced = 0
        self._start()

    def num_found(self, attempt: Attempt, hashes: Sequence[bytes], first: int) -> int:
        files = self.files
        return next((at for at, one in enumerate(hashes) if one not in files), len(hashes))

    def tier_speed(self) -> TierSpeed | None:
        now_s = self._now()
        if now_s >= self._late_at_s:
            return None
        return self._speed.of_tier(Tier.DISK, self._block_bytes, self._num_pending, now_s)

    def _is_kept(self, block_hash: bytes) -> bool:
        return self.files.is_young(block_hash)

    def _forget(self, block_hash: bytes) -> None:
        self.files.forget(block_hash)

    def _parts_of(self, fetch: Fetch) -> Sequence[Group]:
        return self.files.groups(fetch.hashes, self._staging.parts_per_block)

    def _read_part(self, fetch: Fetch, part: Group, fence: Any) -> list[bool]:
        blocks = [fetch.blocks[index] for index in part.indexes]
        with self._staging.landing(blocks, fence) as landing:
            try:
                good = self.files.read(part, landing.parts)
                damaged = [fetch.hashes[index] for index, one in zip(part.indexes, good, strict=True) if not one]
                self._count("damaged", len(damaged))
            except OSError as error:
                self._cannot_read(error)
                good = [False] * len(part.indexes)
                damaged = [fetch.hashes[index] for index in part.indexes]
            in_pool = landing.into_pool(good)
        if damaged:
            for at, index in enumerate(part.indexes):
                if not good[at]:
                    self.files.forget(fetch.hashes[index], part.segment, part.first_slot + at)
            self.changed((), [one for one in damaged if one not in self.files])
        return in_pool

    @property
    def _most_written(self) -> int:
        return self.files.room

    def _write(self, blocks: Sequence[tuple[bytes, Any]]) -> list[Place]:
        places = self.files.write(blocks)
        self._num_unsynced += len(blocks) * self._block_bytes
        if self._num_unsynced >= SYNC_BYTES:
            self._num_unsynced = 0
            self.files.sync()
        return places

    def _add(self, block_hash: bytes, written: Place) -> None:
        self.files.add(block_hash, written)

    def _erase(self, hashes: Collection[bytes]) -> None:
        self.files.erase(hashes)

    def _has_written(self, added: Sequence[bytes]) -> None:
        left = [one for one in self.files.take_left() if one not in self.files]
        if added or left:
            self.changed(added, left)

    def _ended(self) -> None:
        self.files.close()


def disk_tier(
    engine: Engine,
    config: WorkerConfig,
    copies: CopyCount | None,
    report: Callable[[int, int], None] = lambda done, of: None,
    calls: FileCalls | None = None,
    open_staging: OpenStaging | None = None,
) -> DiskTier | None:
    """None if the tier is off. Raises ConfigError if the engine's pool cannot have one, or the folder is not usable."""
    if not config.kv_disk_path:
        return None
    spec, pool = engine.spec, engine.pool
    if not config.is_prefix_cache_on:
        raise ConfigError("kv_disk_path", config.kv_disk_path, "no folder while is_prefix_cache_on is false")
    if spec.tp_degree > 1:
        raise ConfigError("kv_disk_path", config.kv_disk_path, "no folder for a worker of several ranks")
    with ExitStack() as opened:
        staging = staging_of(pool, copies, DiskTier.num_readers, open_staging, "kv_disk_path", config.kv_disk_path)
        opened.callback(staging.close, JOIN_S)
        files = _files(engine, config, copies, report, calls, is_aligned=staging.is_aligned)
        opened.callback(files.close)
        tier = DiskTier(files, pool, None, write_bytes_s=config.kv_disk_write_bytes_s, staging=staging)
        opened.pop_all()
    return tier


def _files(
    engine: Engine,
    config: WorkerConfig,
    copies: CopyCount | None,
    report: Callable[[int, int], None],
    calls: FileCalls | None,
    *,
    is_aligned: bool,
) -> BlockFiles:
    spec, pool = engine.spec, engine.pool
    return BlockFiles(
        Path(config.kv_disk_path),
        config.worker_id,
        block_bytes=pool.block_bytes,
        num_bytes=config.kv_disk_bytes,
        most_slots=MOST_HASHES - pool.num_blocks - (0 if copies is None else copies.num_slots),
        contents=contents_of(spec, Path(config.model)),
        is_aligned=is_aligned,
        calls=calls,
        report=report,
    )


def contents_of(spec: EngineSpec, model: Path) -> bytes:
    """As `contents_id`. Blocks on disk outlive a change of the weights, so the sizes and times of the files in the
    folder `model`, if it is one, are parts of it."""
    files = sorted(model.iterdir()) if model.is_dir() else []
    times = [(file.name, status.st_size, status.st_mtime_ns) for file in files if (status := file.stat())]
    return contents_id(spec, times)
