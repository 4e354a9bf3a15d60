"""The slower tiers of a worker: which it has, and what they tell the program that runs. They stay if the worker changes
its role. Used on the engine thread only.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count, islice
from typing import Final, Protocol, TypeAlias, final

from pdserve.config import WorkerConfig
from pdserve.core.cost.latency import CostModel, CostPrior
from pdserve.core.errors import TransferFailed
from pdserve.core.kv.blocks import BlockAllocator
from pdserve.core.kv.cache import KvCache
from pdserve.core.kv.fetch import BlockSource, Fetch
from pdserve.core.kv.host_tier import (
    HostTier,
    LoadRule,
    LowerTier,
    LowerTiers,
    QueuedCopies,
    is_disk_worthwhile,
    long_blocks,
)
from pdserve.core.kv.retention import block_cost
from pdserve.core.kv.stamps import BlockStamps
from pdserve.engine.interface import Engine, KvPool
from pdserve.engine.load_engine import VLLM
from pdserve.engine.memory.disk import DiskTier, disk_tier
from pdserve.engine.memory.host import AUTO, HostCopies, host_bytes_of, host_copies
from pdserve.engine.memory.slow_tier import JOIN_S
from pdserve.engine.memory.staging import OpenStaging
from pdserve.engine.memory.store import StoreTier, store_tier
from pdserve.progress import PhaseReport

log = logging.getLogger(__name__)

SAVE_S: Final = 2.0  # of the time that a process has to end
SAVE_POLL_S: Final = 0.002
SAVED_AT_ONCE: Final = 16  # blocks for one tier, before another one is asked


class FetchSource(BlockSource, Protocol):
    """A slower tier, whose blocks a thread of its own writes into the pool. Called on the engine thread."""

    def begin(self, fetch: Fetch, end: Callable[[int], None]) -> None:
        """Starts to fill the blocks of the fetch. `end` must be called exactly once, on any thread, when nothing writes
        to them any more, with the number of leading blocks that are verified. If this raises, nothing writes, and `end`
        is never called."""
        ...

    def abort(self, number: int) -> None:
        """Nobody waits for the fetch any more: it should end soon. Ignored if it has ended."""
        ...

    def close(self) -> None:
        """Nothing writes to the pool after it. Ends of fetches may still be reported."""
        ...


class DeviceTier(QueuedCopies, FetchSource, Protocol):
    """The host tier of a pool on a GPU."""

    @property
    def most_saved(self) -> int:
        """Copies for one allocation."""
        ...

    def measure_s(self) -> float:
        """Seconds to copy a block, the mean of both directions. Overwrites the first blocks of the pool. Raises
        TransferFailed if copies go wrong."""
        ...

    def serve(self, tier: HostTier, drop: Callable[[bytes], None]) -> None:
        """`tier` says where blocks are. `drop` is called on any thread, with blocks whose copy is wrong."""
        ...


#: Takes the memory of a host tier for a pool on a GPU: so many bytes or AUTO, with progress. None: there is none.
OpenDeviceTier: TypeAlias = Callable[[KvPool, int, Callable[[int, int], None]], DeviceTier | None]


@final
class Tiers:
    def __init__(
        self,
        engine: Engine,
        config: WorkerConfig,
        open_device_tier: OpenDeviceTier,
        open_staging: OpenStaging | None,
    ) -> None:
        """Takes the memory of the host tier. `open` must follow, or `close`. Raises ConfigError."""
        self._engine, self._config, self._open_staging = engine, config, open_staging
        self.sources: dict[str, FetchSource] = {}  # by name
        self.fetch_numbers: Iterator[int] = count(1)  # that the sources have not had
        report = PhaseReport(config.worker_id, "host tier", "bytes")
        self._copies = host_copies(engine, config, report)
        self._on_device: DeviceTier | None = None
        num_bytes = 0 if engine.pool.is_on_host else host_bytes_of(engine, config)
        # By default not with vLLM, whose own stream must wait for the copies: no GPU has run that yet.
        if num_bytes and (num_bytes != AUTO or config.engine != VLLM):
            self._on_device = open_device_tier(engine.pool, num_bytes, report)

    def open(self, cost: CostPrior, stamps: BlockStamps | None) -> KvCache:
        """Opens the tiers that are worthwhile beside computing. Overwrites the pool. Raises ConfigError. Then some may
        be open, so `close` must follow."""
        config, spec = self._config, self._engine.spec
        size, prefill_s = spec.block_size, CostModel(cost).prefill_s
        rule = None if self._copies is None else _load_rule(self._copies, cost, size)
        if self._on_device is not None:
            rule = self._device_rule(self._on_device, cost)
        disk, store = self._disk_tier(cost), self._store_tier(cost)
        lowers: list[LowerTier] = [one for one in (disk, store) if one is not None]
        lower = LowerTiers(*lowers) if len(lowers) > 1 else next(iter(lowers), None)
        tier, copies = None, self._on_device or self._copies
        if rule is not None and copies is not None:
            tier = HostTier(copies, rule, copies.most_saved, lower, queued=self._on_device)
        self._blocks = BlockAllocator(
            spec.num_blocks,
            is_cache_on=config.is_prefix_cache_on,
            stamps=stamps,
            tier=tier,
            lower=lower,
            computed_s=block_cost(prefill_s, size),
            on_reuse=None if store is None else store.take_reused,
        )
        if disk is not None:
            self._blocks.lower_changed(disk.files.hashes(), ())
        return KvCache(self._blocks, size)

    def bind(self, post: Callable[[Callable[[], None]], None]) -> None:
        """What the tiers report from now on is handled by calls that `post` runs on the engine's thread."""
        self._post = post
        if self.disk is not None:
            self.disk.changed = self._disk_changed
        if self._on_device is not None and self._blocks.tier is not None:
            self._on_device.serve(self._blocks.tier, self._copy_is_wrong)

    @property
    def disk(self) -> DiskTier | None:
        disk = self.sources.get(DiskTier.name)
        return disk if isinstance(disk, DiskTier) else None

    @property
    def store(self) -> StoreTier | None:
        store = self.sources.get(StoreTier.name)
        return store if isinstance(store, StoreTier) else None

    # -- which there are ----------------------------------------------------------------------------------------

    def _disk_tier(self, cost: CostPrior) -> DiskTier | None:
        """None if it is off, or if computing is sooner: routers would count on blocks that are computed again."""
        report = PhaseReport(self._config.worker_id, "disk tier", "files")
        disk = disk_tier(
            self._engine, self._config, self._on_device or self._copies, report, open_staging=self._open_staging
        )
        if disk is not None:
            self.sources[disk.name] = disk  # at once, so that it is closed if anything fails
            self._close_unless_worthwhile(disk, cost)
        return self.disk

    def _store_tier(self, cost: CostPrior) -> StoreTier | None:
        """None if it is off, or if computing is sooner. Its blocks are not announced: all workers can read them."""
        store = store_tier(self._engine, self._config, self._on_device or self._copies, self._open_staging)
        if store is not None:
            self.sources[store.name] = store
            self._close_unless_worthwhile(store, cost)
        return self.store

    def _close_unless_worthwhile(self, tier: DiskTier | StoreTier, cost: CostPrior) -> None:
        block_size = self._engine.spec.block_size
        num_blocks = long_blocks(block_size)
        computed_s = CostModel(cost).prefill_s(num_blocks * block_size)
        if not is_disk_worthwhile(tier.read_s(num_blocks), computed_s):
            log.warning("a tier is off, because computing takes much less time than reading", extra={"tier": tier.name})
            self.sources.pop(tier.name).close()

    def _device_rule(self, copies: DeviceTier, cost: CostPrior) -> LoadRule | None:
        """None, and no memory is taken, if copies are not worthwhile or go wrong."""
        try:
            rule = _load_rule(copies, cost, self._engine.spec.block_size, is_beside=True)
        except TransferFailed as failed:
            log.warning("there is no host tier", extra={"reason": failed.message})
            rule = None
        if rule is None:
            copies.close()
            self._on_device = None
        else:
            self.sources[copies.name] = copies
        return rule

    # -- what they report ---------------------------------------------------------------------------------------

    def _disk_changed(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        def act() -> None:
            files = () if self.disk is None else self.disk.files
            # A block that was found to be wrong meanwhile is no longer there.
            self._blocks.lower_changed([one for one in added if one in files], removed)

        self._post(act)

    def _copy_is_wrong(self, block_hash: bytes) -> None:
        self._post(lambda: self._blocks.drop_copy(block_hash))

    # -- the end ------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Hands what memory has cached to each of the tiers below, as it has room, before a regular end. Takes SAVE_S
        at most, and does not wait for a tier that is stuck."""
        until_s = time.monotonic() + SAVE_S
        saves = {tier: self._blocks.save_all(tier) for tier in self._written}
        num_saved = Counter[str]()
        while saves and time.monotonic() < until_s:
            for tier, save in list(saves.items()):
                if tier.is_stuck:
                    del saves[tier]
                    continue
                most = min(tier.room, SAVED_AT_ONCE)
                taken = list(islice(save, most))
                tier.start_copies()
                if taken:
                    num_saved[tier.name] += len(taken)
                elif most:
                    del saves[tier]
            if not any(tier.room for tier in saves):
                time.sleep(SAVE_POLL_S)
        if num_saved:
            log.info("cached KV blocks were handed to slower tiers", extra={"blocks": dict(num_saved)})

    def begin_close(self) -> None:
        for tier in self._written:  # each writes while another one is waited for
            tier.begin_close()

    def close(self) -> None:
        """Nothing writes to the pool after it, except for a call that hangs. Also of tiers that are partly open."""
        until_s = time.monotonic() + JOIN_S
        with ExitStack() as closing:  # closes all, even if one raises: disk and store first, the host tier last
            if self._on_device is not None:  # it may not be a source yet
                closing.callback(self._on_device.close)
            for source in self.sources.values():
                if not isinstance(source, DiskTier | StoreTier):
                    closing.callback(source.close)
            for tier in self._written:
                closing.callback(partial(_close_until, tier, until_s))

    @property
    def _written(self) -> list[DiskTier | StoreTier]:
        return [tier for tier in (self.disk, self.store) if tier is not None]


def _close_until(tier: DiskTier | StoreTier, until_s: float) -> None:
    tier.close(max(0.0, until_s - time.monotonic()))


def _load_rule(
    copies: HostCopies | DeviceTier, cost: CostPrior, block_size: int, *, is_beside: bool = False
) -> LoadRule | None:
    """None if computing is sooner: routers would count on blocks that are computed again. Overwrites the pool."""
    rule = LoadRule(copies.measure_s(), CostModel(cost).prefill_s, is_beside=is_beside)
    if not rule.is_worthwhile(block_size):
        log.warning("copying KV blocks would take longer than computing them, so there is no host tier")
        return None
    return rule
