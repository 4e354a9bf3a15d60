"""Blocks of a pool on a device that leave for a disk or a store, and that are read from there."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtransfer import device_staging as module
from kvtransfer import device_tier
from kvtransfer.device_staging import DeviceStaging
from kvtransfer.device_tier import DeviceTier, pin_slots
from pdserve.core.kv.host_tier import HostTier, LoadRule
from pdserve.engine.memory import slow_tier
from pdserve.engine.memory.block_files import BlockFiles
from pdserve.engine.memory.disk import DiskTier
from tests.support import fake_device
from tests.support.fake_device import DevicePool, FakeDevice, Trouble
from tests.unit.kvtransfer.harness import WAIT_S, wait_for
from tests.unit.kvtransfer.test_device_tier import BLOCK_BYTES, NUM_BLOCKS, SLOW, fetch_of, nobody

pytestmark = pytest.mark.gpu_checks

A, B, C = (bytes([number]) * 16 for number in range(3))


class Tiered:
    """A pool of a device, a host tier if `num_slots`, and a disk tier, driven by hand."""

    def __init__(self, folder: Path, num_slots: int, trouble: Trouble) -> None:
        self.pool = DevicePool(NUM_BLOCKS, BLOCK_BYTES, seed=1)
        self.device = FakeDevice(self.pool, trouble)
        self.copies: DeviceTier | None = None
        if num_slots:
            slots = pin_slots(self.device, self.pool, num_slots * BLOCK_BYTES, nobody)
            self.copies = DeviceTier(self.device, self.pool, slots, self.device.staging(num_slots))
        self.staging = DeviceStaging(self.device, self.pool, self.copies, DiskTier.num_readers)
        files = BlockFiles(
            folder, "w", block_bytes=BLOCK_BYTES, num_bytes=2**20, most_slots=2**10, contents=b"the model"
        )
        self.disk = DiskTier(files, self.pool, None, write_bytes_s=1e12, staging=self.staging)
        self.tier: HostTier | None = None
        if self.copies is not None:
            rule = LoadRule(0.0, lambda uncached, cached: 0.0)
            self.tier = HostTier(self.copies, rule, 100, self.disk, queued=self.copies)
        self.num_fetches = 0
        self.num_places = len(self.staging._free)

    def write(self, block: int, value: int) -> None:
        """A step of the engine."""
        contents = bytes([value]) * BLOCK_BYTES
        self.device.run_step(lambda: self._put(block, contents))

    def _put(self, block: int, contents: bytes) -> None:
        self.pool.on_device[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = contents

    def read(self, block: int) -> set[int]:
        return set(self.pool.on_device[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])

    def leave(self, *leaving: tuple[bytes, int]) -> None:
        for block_hash, block in leaving:
            self.disk.take_block(block_hash, block)
        self.disk.start_copies()

    def begin(self, hashes: tuple[bytes, ...], blocks: tuple[int, ...]) -> queue.SimpleQueue[int]:
        self.num_fetches += 1
        ends: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.disk.begin(fetch_of("disk", self.num_fetches, hashes, blocks), ends.put)
        return ends

    def load(self, hashes: tuple[bytes, ...], blocks: tuple[int, ...]) -> int:
        return self.begin(hashes, blocks).get(timeout=WAIT_S)


@pytest.fixture
def tiered(tmp_path: Path) -> Iterator[Callable[..., Tiered]]:
    made: list[Tiered] = []

    def make(num_slots: int = 0, trouble: Trouble = SLOW) -> Tiered:
        made.append(Tiered(tmp_path, num_slots, trouble))
        return made[-1]

    yield make
    for one in made:
        one.disk.close()
        if one.copies is not None:
            one.copies.close()
        one.device.end()
        assert not one.staging._thread.is_alive()
        assert len(one.staging._free) == one.num_places, "places in the staging are lost"


def test_what_leaves_the_pool_has_what_the_last_step_wrote(tiered: Callable[..., Tiered]) -> None:
    one = tiered()
    one.write(3, 1)
    step = one.device.begin_step()
    one.leave((A, 3))
    assert not one.disk.flush(0.05)
    one._put(3, bytes([2]) * BLOCK_BYTES)  # by the step
    step.set()
    one.write(3, 9)  # a later step, which waits
    assert one.disk.flush(WAIT_S)
    assert one.load((A,), (5,)) == 1
    assert (one.read(3), one.read(5)) == ({9}, {2})


def test_a_read_waits_for_the_steps_before_it(tiered: Callable[..., Tiered]) -> None:
    one = tiered()
    one.write(3, 1)
    one.leave((A, 3))
    assert one.disk.flush(WAIT_S)
    step = one.device.begin_step()  # of a sequence that has ended, which still writes to its block
    ends = one.begin((A,), (5,))
    with pytest.raises(queue.Empty):
        ends.get(timeout=0.05)
    one._put(5, bytes([7]) * BLOCK_BYTES)
    step.set()
    assert ends.get(timeout=WAIT_S) == 1
    assert one.read(5) == {1}


def test_slots_of_the_host_tier_are_used_again_at_once(tiered: Callable[..., Tiered]) -> None:
    """The second block is displaced by the allocation that saved it."""
    one = tiered(num_slots=2)
    assert one.tier is not None
    for block, value in ((0, 1), (1, 2), (2, 3)):
        one.write(block, value)
    one.tier.save(0, A)
    one.tier.flush()
    assert one.copies is not None
    assert one.copies.flushed(WAIT_S)
    one.tier.leave(A)
    one.tier.save(1, B)
    one.tier.leave(B)
    one.tier.save(2, C)
    one.tier.flush()
    assert one.disk.flush(WAIT_S)
    assert one.load((A, B), (5, 6)) == 2
    assert (one.read(5), one.read(6)) == ({1}, {2})
    one.tier.leave(C)
    one.tier.flush()
    assert one.disk.flush(WAIT_S)
    assert one.load((C,), (7,)) == 1
    assert one.read(7) == {3}


def test_a_wrong_copy_in_pinned_memory_is_not_written(tiered: Callable[..., Tiered]) -> None:
    one = tiered(num_slots=2)
    assert one.tier is not None
    assert one.copies is not None
    one.tier.save(0, A)
    one.tier.flush()
    assert one.copies.flushed(WAIT_S)
    slot = one.tier.slot_of(A)
    assert slot is not None
    one.copies._slots.view(slot)[5] ^= 1
    one.tier.leave(A)
    one.tier.flush()
    assert one.disk.flush(WAIT_S)
    assert A not in one.disk.files
    assert one.disk.events["dropped"] == 1


def test_bytes_that_change_on_the_way_into_the_pool_are_a_miss(
    tiered: Callable[..., Tiered], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = tiered()
    one.leave((A, 0), (B, 1))
    assert one.disk.flush(WAIT_S)
    move_blocks = FakeDevice.move_blocks

    def move(device: FakeDevice, blocks: Any, numbers: Any, host: Any, slots: Any, *args: Any, **options: Any) -> Any:
        host.view[slots[-1] * BLOCK_BYTES] ^= 1
        return move_blocks(device, blocks, numbers, host, slots, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(FakeDevice, "move_blocks", move)
        assert one.load((A, B), (5, 6)) < 2
    assert one.load((A, B), (5, 6)) == 2


@pytest.mark.parametrize("call", ["gather", "copy", "move_blocks"])
def test_a_call_that_fails_is_a_miss_once_the_device_has_drained(
    tiered: Callable[..., Tiered], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    one = tiered()
    one.leave((A, 0))
    assert one.disk.flush(WAIT_S)
    num_drains = 0

    def fail(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("an illegal access")

    def drain() -> None:
        nonlocal num_drains
        num_drains += 1
        FakeDevice.drain(one.device)

    with monkeypatch.context() as patch:
        patch.setattr(one.device, call, fail)
        patch.setattr(one.device, "drain", drain)
        one.leave((B, 1))
        assert one.disk.flush(WAIT_S)
        assert one.load((A,), (5,)) == (call == "gather")
    assert num_drains > 0
    assert one.load((A,), (6,)) == 1
    assert B not in one.disk.files


def test_a_wrong_block_is_erased_while_its_copy_hangs(
    tiered: Callable[..., Tiered], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_tier, "LOOK_S", 0.01)
    one = tiered(trouble=Trouble())
    one.leave((A, 0))
    assert one.disk.flush(WAIT_S)
    step = one.device.begin_step()
    monkeypatch.setattr(fake_device, "COPY_S", 0.05)
    one.leave((B, 1))
    one.disk.drop(A)
    one.disk.drop(B)
    assert one.disk.flush(WAIT_S), "the copy that hangs holds the writer"
    assert A not in one.disk.files
    wait_for(lambda: any(move.is_late for move in one.staging._moving), "a late copy")
    assert one.disk._num_arriving == 1
    step.set()
    wait_for(lambda: one.disk._num_arriving == 0, "the end of the copy")
    assert one.disk.flush(WAIT_S)
    assert B not in one.disk.files


def test_a_wrong_block_is_erased_while_a_closing_tier_waits_for_a_copy(
    tiered: Callable[..., Tiered], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next process would find it."""
    monkeypatch.setattr(slow_tier, "DRAIN_S", 2 * WAIT_S)
    one = tiered(trouble=Trouble())
    one.leave((A, 0))
    assert one.disk.flush(WAIT_S)
    step = one.device.begin_step()
    one.leave((B, 1))
    one.disk.begin_close()
    one.disk.drop(A)
    wait_for(lambda: not one.disk._wrong and not one.disk._is_erasing, "the end of the erasure")
    assert one.disk._num_arriving == 1
    step.set()


def test_a_read_that_hangs_keeps_its_blocks(tiered: Callable[..., Tiered], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is reported when nothing writes any more."""
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    one = tiered(trouble=Trouble())
    one.leave((A, 0))
    assert one.disk.flush(WAIT_S)
    monkeypatch.setattr(fake_device, "COPY_S", 0.05)
    step, num_moved = one.device.begin_step(), one.device.num_moved
    ends = one.begin((A,), (5,))
    wait_for(lambda: one.device.num_moved > num_moved, "a copy into the pool")
    one.disk.abort(1)
    with pytest.raises(queue.Empty):
        ends.get(timeout=0.2)
    step.set()
    assert ends.get(timeout=WAIT_S) <= 1


def test_blocks_without_room_are_dropped(tiered: Callable[..., Tiered]) -> None:
    one = tiered()
    one.staging._free, one.num_places = one.staging._free[:2], 2
    step = one.device.begin_step()
    one.leave((A, 0), (B, 1), (C, 2))
    assert (one.disk.room, one.disk.events["dropped"]) == (0, 1)
    step.set()
    assert one.disk.flush(WAIT_S)
    assert one.disk.room == 2
    assert one.load((A, B), (5, 6)) == 2
