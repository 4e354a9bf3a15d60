"""The copies of a host tier between a pool on a device and pinned memory: contents, order, memory and failures."""

from __future__ import annotations

import math
import queue
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvtransfer import device_tier as module
from kvtransfer.device_tier import DeviceTier, device_tier, pin_slots
from kvtransfer.devices.cuda import neighbours
from kvtransfer.transports.tcp_staged import TcpStaged
from pdserve.core.errors import ConfigError, TransferFailed
from pdserve.core.kv.fetch import Fetch
from pdserve.core.kv.host_tier import HostTier, LoadRule
from pdserve.engine.memory.host import AUTO
from pdserve.telemetry import metric_names
from tests.support import fake_device
from tests.support.fake_device import DevicePool, FakeDevice, Trouble
from tests.unit.kvtransfer.harness import WAIT_S, wait_for

pytestmark = pytest.mark.gpu_checks

BLOCK_BYTES = 64
NUM_BLOCKS = 12
SLOW = Trouble(late=0.4, late_s=0.01)
ATTEMPT: Any = None  # of no importance here


def nobody(done: int, of: int) -> None: ...


def fetch_of(source: str, number: int, hashes: tuple[bytes, ...], blocks: tuple[int, ...]) -> Fetch:
    return Fetch(
        number=number,
        source=source,
        attempt=ATTEMPT,
        first=0,
        hashes=hashes,
        blocks=blocks,
        started_s=0.0,
        predicted_s=0.0,
    )


class Tiered:
    """A pool of a device and its tier, driven by hand."""

    def __init__(self, num_slots: int, trouble: Trouble = SLOW) -> None:
        self.pool = DevicePool(NUM_BLOCKS, BLOCK_BYTES, seed=1)
        self.device = FakeDevice(self.pool, trouble)
        slots = pin_slots(self.device, self.pool, num_slots * BLOCK_BYTES, nobody)
        self.copies = DeviceTier(self.device, self.pool, slots, self.device.staging(num_slots))
        rule = LoadRule(0.0, lambda uncached, cached: 0.0)
        self.tier = HostTier(self.copies, rule, 100, queued=self.copies)
        self.wrong: list[bytes] = []
        self.copies.serve(self.tier, self.wrong.append)
        self.num_fetches = 0

    def save(self, *saves: tuple[int, bytes]) -> None:
        for block, block_hash in saves:
            self.tier.save(block, block_hash)
        self.tier.flush()

    def begin(self, *hashes: bytes, blocks: tuple[int, ...]) -> queue.SimpleQueue[int]:
        self.num_fetches += 1
        ends: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.copies.begin(fetch_of("host", self.num_fetches, hashes, blocks), ends.put)
        return ends

    def load(self, *hashes: bytes, blocks: tuple[int, ...]) -> int:
        return self.begin(*hashes, blocks=blocks).get(timeout=WAIT_S)

    def write(self, block: int, value: int) -> None:
        """A step of the engine."""
        self.device.run_step(lambda: self._put(block, value))

    def _put(self, block: int, value: int) -> None:
        self.pool.on_device[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = bytes([value]) * BLOCK_BYTES

    def read(self, block: int) -> int:
        found = set(self.pool.on_device[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])
        assert len(found) == 1, "a block of two values"
        return found.pop()


@pytest.fixture
def tiered() -> Iterator[Callable[..., Tiered]]:
    made: list[Tiered] = []

    def make(num_slots: int = 8, trouble: Trouble = SLOW) -> Tiered:
        made.append(Tiered(num_slots, trouble))
        return made[-1]

    yield make
    for one in made:
        one.copies.close()
        one.device.end()
        assert one.copies.room == len(one.copies._free_rows), "rows of the staging are lost"


def test_a_copy_has_what_the_last_step_wrote(tiered: Callable[..., Tiered]) -> None:
    one = tiered()
    one.write(3, 1)
    step = one.device.begin_step()
    one.save((3, b"a"))
    assert not one.copies.flushed(0.05)
    one._put(3, 2)  # by the step
    step.set()
    one.write(3, 9)  # a later step, which waits
    assert one.load(b"a", blocks=(5,)) == 1
    assert (one.read(3), one.read(5)) == (9, 2)


def test_a_save_holds_the_engine_for_its_gathering_only(tiered: Callable[..., Tiered]) -> None:
    """All copy streams are busy, as with loads."""
    one = tiered()
    busy = threading.Event()
    for stream in one.device.streams:
        stream.queue(lambda: bytes(busy.wait(2 * WAIT_S)), lambda: None)
    one.write(3, 1)
    one.save((3, b"a"))
    [held] = one.device.take_held()
    wait_for(lambda: held.is_done, "the gathering")
    busy.set()
    assert one.load(b"a", blocks=(5,)) == 1
    assert one.read(5) == 1


def test_what_leaves_at_once_moves_as_one_run(tiered: Callable[..., Tiered], monkeypatch: pytest.MonkeyPatch) -> None:
    one, move_blocks = tiered(), FakeDevice.move_blocks
    runs: list[int] = []

    def move(device: FakeDevice, blocks: Any, numbers: Any, host: Any, slots: Any, *args: Any, **options: Any) -> Any:
        runs.append(len(list(neighbours(numbers, slots))))
        return move_blocks(device, blocks, numbers, host, slots, *args, **options)

    monkeypatch.setattr(FakeDevice, "move_blocks", move)
    one.save((7, b"a"), (2, b"b"), (4, b"c"))
    assert one.copies.flushed(WAIT_S)
    assert runs == [1]


def test_a_load_waits_for_the_steps_before_it(tiered: Callable[..., Tiered]) -> None:
    one = tiered()
    one.write(3, 1)
    one.save((3, b"a"))
    assert one.copies.flushed(WAIT_S)
    step = one.device.begin_step()  # of a sequence that has ended, which still writes to its block
    ends = one.begin(b"a", blocks=(5,))
    with pytest.raises(queue.Empty):
        ends.get(timeout=0.05)
    one._put(5, 7)
    step.set()
    assert ends.get(timeout=WAIT_S) == 1
    assert one.read(5) == 1


@pytest.mark.parametrize("seed", range(4))
def test_slots_are_used_again_while_copies_run(
    tiered: Callable[..., Tiered], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Random saves and loads, whose slots and blocks are reused at once. Every load has the bytes of its hash."""
    monkeypatch.setattr(module, "PIECE_BYTES", 3 * BLOCK_BYTES)
    monkeypatch.setattr(module, "PART_BYTES", 2 * BLOCK_BYTES)
    one, rng = tiered(num_slots=7), random.Random(seed)
    value_of: dict[bytes, int] = {}
    running: list[tuple[queue.SimpleQueue[int], tuple[bytes, ...], tuple[int, ...]]] = []

    def finish(count: int) -> None:
        while len(running) > count:
            ends, hashes, blocks = running.pop(0)
            assert ends.get(timeout=WAIT_S) == len(hashes)
            assert [one.read(block) for block in blocks] == [value_of[each] for each in hashes]

    for number in range(1, 60):
        busy = {block for _, _, blocks in running for block in blocks}
        free = [block for block in range(NUM_BLOCKS) if block not in busy]
        count = min(rng.randint(1, 3), one.copies.room)
        saves = []
        for block in rng.sample(free, count):
            value = (number * 4 + len(saves)) % 251
            block_hash = bytes([number, len(saves)])
            one.write(block, value)
            value_of[block_hash] = value
            saves.append((block, block_hash))
        for _ in range(len(one.tier) + count - one.tier.num_slots):
            one.tier.leave(rng.choice(list(one.tier)))
        one.save(*saves)
        if rng.random() < 0.6:
            hashes = tuple(rng.sample(list(one.tier), min(len(one.tier), rng.randint(1, 4))))
            blocks = tuple(rng.sample(free, len(hashes)))
            running.append((one.begin(*hashes, blocks=blocks), hashes, blocks))
        finish(rng.randint(0, 1))
    finish(0)
    assert one.tier.num_loaded > 0
    assert one.copies.flushed(WAIT_S)
    one.tier.check()


def test_a_wrong_copy_is_a_miss_and_is_dropped(tiered: Callable[..., Tiered]) -> None:
    one = tiered()
    for block, value in enumerate((1, 2, 3)):
        one.write(block, value)
    one.save((0, b"a"), (1, b"b"), (2, b"c"))
    assert one.copies.flushed(WAIT_S)
    slot = one.tier.slot_of(b"b")
    assert slot is not None
    one.copies._slots.view(slot)[7] ^= 1
    assert one.load(b"a", b"b", b"c", blocks=(5, 6, 7)) == 1
    assert (one.read(5), one.wrong) == (1, [b"b"])


def test_what_has_left_is_a_miss(tiered: Callable[..., Tiered]) -> None:
    one = tiered()
    one.save((0, b"a"), (1, b"b"))
    one.tier.leave(b"b")
    assert one.load(b"a", b"b", blocks=(5, 6)) == 1
    assert one.load(b"b", b"a", blocks=(5, 6)) == 0


@pytest.mark.parametrize("calls", [("copy", "gather"), ("move_blocks",)])
def test_a_device_that_fails_is_a_miss(
    tiered: Callable[..., Tiered], monkeypatch: pytest.MonkeyPatch, calls: tuple[str, ...]
) -> None:
    one = tiered()
    one.save((0, b"a"))
    assert one.copies.flushed(WAIT_S)

    def fail(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("an illegal access")

    with monkeypatch.context() as patch:
        for call in calls:
            patch.setattr(one.device, call, fail)
        assert one.load(b"a", blocks=(5,)) == 0
        one.save((1, b"b"))
        assert one.copies.flushed(WAIT_S)
    assert one.load(b"b", blocks=(6,)) == 0
    assert one.load(b"a", blocks=(6,)) == 1


def test_a_copy_that_hangs_keeps_its_blocks(tiered: Callable[..., Tiered], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is reported when nothing writes any more, and nothing else is loaded meanwhile."""
    monkeypatch.setattr(module, "LATE_S", 0.0)
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    one = tiered(trouble=Trouble())
    one.copies.measure_s()
    monkeypatch.setattr(fake_device, "COPY_S", 0.05)
    one.save((0, b"a"))
    assert one.copies.flushed(WAIT_S)
    step = one.device.begin_step()
    ends = one.begin(b"a", blocks=(5,))
    with pytest.raises(queue.Empty):
        ends.get(timeout=0.2)
    wait_for(lambda: one.copies.predict_s(ATTEMPT, 1) == math.inf, "a late load")
    step.set()
    assert ends.get(timeout=WAIT_S) == 1
    assert one.copies.predict_s(ATTEMPT, 1) < math.inf


def test_an_aborted_load_ends_once(tiered: Callable[..., Tiered], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_BYTES", BLOCK_BYTES)
    one = tiered()
    one.save((0, b"a"), (1, b"b"))
    assert one.copies.flushed(WAIT_S)
    step = one.device.begin_step()
    ends = one.begin(b"a", b"b", blocks=(5, 6))
    one.copies.abort(1)
    one.copies.abort(1)
    step.set()
    assert ends.get(timeout=WAIT_S) <= 2
    one.copies.abort(1)
    assert one.copies.flushed(WAIT_S)
    assert ends.empty()
    assert not one.copies._aborted


def test_the_speed_is_measured_and_predicted(tiered: Callable[..., Tiered]) -> None:
    one = tiered(trouble=Trouble(delay_s=0.0))
    assert one.copies.measure_s() > 0.0
    short, long = (one.copies.predict_s(ATTEMPT, count) for count in (1, 1000))
    assert 0.0 < short < long


# -- pinned memory -----------------------------------------------------------------------------------------------------


class Host:
    """A device that pins, and the memory that is left meanwhile. Others take as much with each call."""

    def __init__(self, free: int, others: int = 0, most: int = 2**40) -> None:
        self.left, self.others, self.most = free, others, most
        self.num_open = 0

    def pinned(self, num_bytes: int) -> Any:
        if num_bytes > self.most:
            raise TransferFailed(f"the host cannot pin {num_bytes} bytes")
        self.most -= num_bytes
        self.left -= num_bytes * (1 + self.others)
        self.num_open += 1
        host = self

        class Piece:
            view = memoryview(bytearray(num_bytes))

            def close(self) -> None:
                host.num_open -= 1

        return Piece()


@pytest.mark.parametrize(("others", "expected"), [(0, 100), (3, 100), (7, 60)])
def test_the_default_is_a_part_of_the_free_memory(monkeypatch: pytest.MonkeyPatch, others: int, expected: int) -> None:
    """An eighth of 800 blocks; eight workers that start at once leave half of the host to others."""
    monkeypatch.setattr(module, "PIECE_BYTES", 12 * BLOCK_BYTES)
    host: Any = Host(800 * BLOCK_BYTES, others)
    seen: list[tuple[int, int]] = []
    slots = pin_slots(
        host, DevicePool(4, BLOCK_BYTES), AUTO, lambda done, of: seen.append((done, of)), free=lambda: host.left
    )
    assert len(slots) == expected
    assert seen[0] == (12 * BLOCK_BYTES, 100 * BLOCK_BYTES)
    assert seen[-1] == (100 * BLOCK_BYTES, 100 * BLOCK_BYTES)
    assert [slots.place(slot) for slot in (0, 11, 12)] == [(0, 0), (0, 11), (1, 0)]


def test_memory_that_cannot_be_pinned_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 4 * BLOCK_BYTES)
    host: Any = Host(2**30, most=6 * BLOCK_BYTES)
    with pytest.raises(ConfigError, match="at most 256: the host cannot pin 256 bytes"):
        pin_slots(host, DevicePool(4, BLOCK_BYTES), 9 * BLOCK_BYTES, nobody)
    assert host.num_open == 0
    host.most = 6 * BLOCK_BYTES
    assert len(pin_slots(host, DevicePool(4, BLOCK_BYTES), AUTO, nobody, free=lambda: 2**30)) == 4


def test_the_default_takes_64_gib_at_most() -> None:
    seen: list[int] = []
    host: Any = Host(2**50, most=0)
    pin_slots(host, DevicePool(4, 2**20), AUTO, lambda done, of: seen.append(of), free=lambda: 2**50)
    assert seen == [2**36]


def test_a_device_without_memory_for_staging_has_no_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default. Then the host's memory is not pinned."""
    pool = DevicePool(NUM_BLOCKS, BLOCK_BYTES)
    device: Any = FakeDevice(pool)

    def fail(num: int) -> Any:
        raise TransferFailed("out of memory")

    monkeypatch.setattr(device, "staging", fail)
    monkeypatch.setattr(device, "pinned", None)
    monkeypatch.setattr(TcpStaged, "device", lambda self, pool: device)
    assert device_tier(pool, AUTO, nobody) is None
    with pytest.raises(ConfigError, match="out of memory"):
        device_tier(pool, 8 * BLOCK_BYTES, nobody)


def test_metrics_know_the_tier() -> None:
    assert DeviceTier.name in metric_names.SLOW_TIERS


def test_neighbours_are_copied_together() -> None:
    assert list(neighbours([4, 5, 6, 9, 8], [1, 2, 4, 5, 6])) == [(4, 1, 2), (6, 4, 1), (9, 5, 1), (8, 6, 1)]
    assert list(neighbours([], [])) == []
