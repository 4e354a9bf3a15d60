"""The leases of one worker incarnation in Redis: its name in the registry, its slot in the prefix index.

Each call is one script (scripts.py), so that a lost lease is detected by the write that needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, final

from pdserve.core.kv.hashing import HASH_BYTES
from pdserve.prefix import scripts
from pdserve.prefix.keys import MAX_SLOTS, bit_offset, owner_of
from pdserve.prefix.registry import Registration

SWEEP_BLOCKS: Final = 512  # cleared in one script, during which Redis serves no other client
SWEEP_CHUNKS: Final = 64  # in a row, so that a sweep never prevents a worker from renewing its lease
GRACE_LEASES: Final = 12  # after this many lease times a silent slot is swept, even if most slots are silent


class LeaseLost(Exception):
    """The slot is no longer leased to this worker."""


class Gap(Exception):
    """Redis and the worker disagree about the applied changes."""


class Superseded(Exception):
    """A newer incarnation has registered under this worker's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBatch:
    """Changes to a cache: hashes, one after the other."""

    stored: bytes
    removed: bytes

    @property
    def num_blocks(self) -> int:
        return (len(self.stored) + len(self.removed)) // HASH_BYTES


@final
class RegistryLease:
    def __init__(self, redis: Any, tag: str, registration: Registration, lease_s: float) -> None:
        self._tag, self._of = tag, registration
        self._lease_ms = round(lease_s * 1e3)
        self._register = redis.register_script(scripts.REGISTER)
        self._deregister = redis.register_script(scripts.DEREGISTER)
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
        self._claim = redis.register_script(scripts.CLAIM)
        self._renew = redis.register_script(scripts.RENEW)
        self._give_up = redis.register_script(scripts.GIVE_UP)
        self._apply = redis.register_script(scripts.APPLY)
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
        if not await self._renew(keys=[self._tag], args=[self._slot, self._owner, self._lease_ms]):
            raise LeaseLost(f"slot {self._slot}")

    async def apply(self, batch: CacheBatch) -> None:
        """May be repeated until it has returned. Raises LeaseLost or Gap; the batch is then part of a snapshot."""
        assert self._slot is not None, "take() comes first"
        args = [
            self._slot,
            self._owner,
            self._sequence + 1,
            bit_offset(self._slot),
            self._block_ttl_ms,
            batch.stored,
            batch.removed,
        ]
        said = await self._apply(keys=[self._tag], args=args)
        if said == b"lost":
            raise LeaseLost(f"slot {self._slot}")
        if said == b"gap":
            raise Gap(f"batch {self._sequence + 1} of slot {self._slot}")
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
    """Clears the bits of slots without a lease, and frees the slots.

    Any worker may sweep; a lock avoids simultaneous sweeps, which would be harmless but useless.
    """

    def __init__(self, redis: Any, tag: str, lease_s: float) -> None:
        self._redis, self._tag = redis, tag
        self._lock_ms = round(lease_s * 1e3)
        self._grace_ms = GRACE_LEASES * round(lease_s * 1e3)
        self._sweepable = redis.register_script(scripts.SWEEPABLE)
        self._sweep = redis.register_script(scripts.SWEEP)
        self.num_swept_slots = 0

    async def sweep(self) -> None:
        """At most SWEEP_CHUNKS scripts; what is left waits for the next call."""
        if not await self._redis.set(f"{self._tag}:sweeper", "1", nx=True, px=self._lock_ms):
            return
        try:
            left = SWEEP_CHUNKS
            for slot in await self._sweepable(keys=[self._tag], args=[self._grace_ms]):
                while left:
                    left -= 1
                    done = await self._sweep(keys=[self._tag], args=[slot, bit_offset(slot), SWEEP_BLOCKS])
                    if done:
                        self.num_swept_slots += done == 1
                        break
        finally:
            await self._redis.delete(f"{self._tag}:sweeper")
