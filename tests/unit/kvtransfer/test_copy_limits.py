"""Several copy streams and chunks in flight: choice of stream, size of staging, and any order of completion."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.devices.copy_limits import CopyLimits, StagingBudget, StreamLoads, least_loaded, num_slots
from kvtransfer.protocol import plan
from kvtransfer.protocol.transport import ReceiveOutcome, SendOutcome
from kvtransfer.transports import nccl, tcp_staged
from kvtransfer.transports.common.on_device import slot_size
from pdserve.config import WorkerConfig
from pdserve.core.errors import TransferFailed
from tests.support.fake_device import FakeBlocks, FakeCopying, FakeDevice
from tests.support.fake_ends import DEVICE_TRANSPORTS, install
from tests.unit.kvtransfer.harness import BLOCK_BYTES, Pair, wait_for

pytestmark = pytest.mark.gpu_checks
MakePair = Callable[..., Pair]
PATHS = pytest.mark.parametrize("transport", DEVICE_TRANSPORTS)

# Choice of the stream.


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=16))
def test_least_loaded_prefers_the_first_stream(outstanding: list[int]) -> None:
    index = least_loaded(outstanding)
    assert outstanding[index] == min(outstanding)
    assert min(outstanding[:index], default=outstanding[index] + 1) > outstanding[index]


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(1, 100), st.booleans(), st.randoms()), max_size=40))
def test_streams_are_balanced(num_streams: int, steps: list[tuple[int, bool, random.Random]]) -> None:
    """Streams differ by at most one piece of work, except for work behind other work. In the end nothing is
    outstanding."""
    loads, under_way = StreamLoads(num_streams), list[tuple[int, int]]()
    for num_bytes, is_begun, rng in steps:
        if is_begun or not under_way:
            before = loads.outstanding_bytes
            index = loads.begin(num_bytes)
            assert before[index] == min(before)
            under_way.append((index, num_bytes))
        else:
            loads.end(*under_way.pop(rng.randrange(len(under_way))))
        assert sum(loads.outstanding_bytes) == sum(size for _, size in under_way)
    for one in under_way:
        loads.end(*one)
    assert not any(loads.outstanding_bytes)


def test_work_stays_behind_other_work() -> None:
    loads = StreamLoads(3)
    first = loads.begin(1000)
    assert [loads.begin(10, behind=first), loads.begin(10), loads.begin(10)] == [first, 1, 2]
    assert loads.outstanding_bytes == (1010, 10, 10)


def test_settings_have_the_same_defaults() -> None:
    config = WorkerConfig(model="toy", worker_id="w")
    assert CopyLimits(staging_bytes=config.kv_staging_bytes) == CopyLimits()


# Size of the staging.


@given(st.integers(0, 2**31), st.integers(1, 2**26), st.integers(1, 8), st.integers(1, 64))
def test_staging_stays_within_its_budget(limit: int, slot_bytes: int, most: int, num_connections: int) -> None:
    """Beyond one slot for each connection. After connections have closed, their share is free again."""
    budget = StagingBudget(limit)
    shares = [budget.take(slot_bytes, most) for _ in range(num_connections)]
    assert all(1 <= share.num_slots <= most for share in shares)
    assert budget.taken_bytes == sum(share.num_slots for share in shares) * slot_bytes
    assert budget.taken_bytes <= limit + num_connections * slot_bytes
    for number, share in enumerate(shares):
        if number % 2:
            share.shrink(max(1, share.num_slots // 2))
        share.close()
        share.close()
    assert budget.taken_bytes == 0


def test_later_connections_get_some_staging() -> None:
    mib = 2**20
    assert [num_slots(left * mib, 16 * mib, 8) for left in (1024, 256, 128, 64, 32, 16, 0, -64)] == [
        8, 8, 4, 2, 1, 1, 1, 1,
    ]  # fmt: skip


@PATHS
def test_closed_connections_return_their_staging(
    make_pair: MakePair, devices: dict[int, FakeDevice], transport: str
) -> None:
    pair = make_pair(transport)
    pair.move(pair.grant((1, 2)), (3, 4))
    ends = [devices[id(pair.source)], devices[id(pair.target)]]
    module = {"nccl": nccl, "tcp_staged": tcp_staged}.get(transport)
    size = 0 if module is None else module.MAX_SLOTS * slot_size(BLOCK_BYTES, module.SLOT_BYTES)
    assert [device.budget.taken_bytes for device in ends] == [size, size]
    pair.sender.close()
    wait_for(lambda: not any(device.budget.taken_bytes for device in ends), "the staging of both ends")


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("transport", ["nccl", "tcp_staged"])
def test_a_small_budget_leaves_one_slot(
    make_pair: MakePair, devices: dict[int, FakeDevice], transport: str, side: str
) -> None:
    """The two ends of nccl use the smaller number of slots. Each end of tcp_staged has its own number."""
    pair = make_pair(transport)
    small = devices[id(getattr(pair, side))]
    small.budget = StagingBudget(0)
    grant = pair.grant(tuple(range(40)))
    received, sent = pair.move(grant, tuple(range(20, 60)))
    assert (received.outcome, sent.outcome) == (ReceiveOutcome.VERIFIED, SendOutcome.SENT)
    pair.assert_equal(grant, tuple(range(20, 60)))
    module = nccl if transport == "nccl" else tcp_staged
    one = slot_size(BLOCK_BYTES, module.SLOT_BYTES)
    assert small.budget.taken_bytes == one
    [other] = [device for device in devices.values() if device is not small]
    assert other.budget.taken_bytes == (one if transport == "nccl" else module.MAX_SLOTS * one)


def test_a_device_without_memory_for_the_next_slot_keeps_none(
    make_pair: MakePair, devices: dict[int, FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair("nccl")
    device, taken = devices[id(pair.source)], list[FakeBlocks]()
    staging = device.staging

    def third(num_blocks: int) -> FakeBlocks:
        if len(taken) == 2:
            raise TransferFailed("out of memory")
        taken.append(staging(num_blocks))
        return taken[-1]

    with monkeypatch.context() as patch:
        patch.setattr(device, "staging", third)
        received, sent = pair.begin(pair.grant((1,)))
        assert "out of memory" in sent.wait().error
    for key in pair.receiver.open_keys:
        pair.receiver.abort(key)
    received.wait()
    assert [blocks.memory for blocks in taken] == [None, None]
    wait_for(lambda: not any(one.budget.taken_bytes for one in devices.values()), "the staging of both ends")
    assert pair.move(pair.grant((1,)), (1,))[0].outcome is ReceiveOutcome.VERIFIED


# Any order of completion.


#: The order matters in one of several transfers, because threads decide which work waits together. A test ends with the
#: first such transfer.
MAX_TRIES = 200


class Shuffled:
    """Streams whose work runs one piece at a time, from a randomly chosen stream, so every order of real streams is
    possible. Work begins once enough pieces wait, or no piece has come for a moment."""

    def __init__(self, seed: int, count: int) -> None:
        self._rng = random.Random(seed)
        self._changed = threading.Condition()
        self._waiting: list[list[Callable[[], None]]] = [[] for _ in range(count)]
        self._is_running = self._is_over = False
        self.streams = [ShuffledStream(self, number) for number in range(count)]
        self._thread = threading.Thread(target=self._run, name="fake-shuffled", daemon=True)
        self._thread.start()

    def put(self, number: int, work: Callable[[], None]) -> None:
        with self._changed:
            self._waiting[number].append(work)
            self._changed.notify_all()

    def drain(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: not self._is_running and not any(self._waiting), 60.0)

    def end(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._thread.join(60.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_running = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_over or any(self._waiting))
                if self._is_over:
                    return
                while sum(map(len, self._waiting)) < 4 and self._changed.wait(0.01):
                    pass
                number = self._rng.choice([index for index, work in enumerate(self._waiting) if work])
                work, self._is_running = self._waiting[number].pop(0), True
            work()


class ShuffledStream:
    def __init__(self, shuffled: Shuffled, number: int) -> None:
        self._shuffled, self._number = shuffled, number

    def queue(self, work: Any, wake: Any, limit_s: float = 30.0, number: int | None = None) -> FakeCopying:
        copying = FakeCopying(limit_s, number)

        def run() -> None:
            try:
                copying.state = (True, "", work())
            except TransferFailed as failed:
                copying.state = (False, failed.message, b"")
            wake()

        self._shuffled.put(self._number, run)
        return copying

    def drain(self) -> None:
        self._shuffled.drain()

    def end(self) -> None:
        self._shuffled.end()


class ShuffledDevice(FakeDevice):
    keeps_order = True

    def __init__(self, pool: Any, seed: int, limits: CopyLimits | None = None) -> None:
        super().__init__(pool, limits=limits)
        for stream in self.streams:
            stream.end()
        self.streams = Shuffled(seed, len(self.streams)).streams  # type: ignore[assignment]

    def stream_for(self, num_bytes: int, behind: Any) -> int:
        return super().stream_for(num_bytes, behind if self.keeps_order else None)


@pytest.fixture
def shuffled(devices: dict[int, FakeDevice], monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """shuffled(seed): both ends use Shuffled devices, and a chunk has only a few blocks."""
    for module in (nccl, tcp_staged):
        monkeypatch.setattr(module, "SLOT_BYTES", 3 * BLOCK_BYTES)
    monkeypatch.setattr("kvtransfer.transports.cuda_ipc.DEVICE_CHUNK_BYTES", 3 * BLOCK_BYTES)

    def make(seed: int) -> None:
        install(lambda pool: devices.setdefault(id(pool), ShuffledDevice(pool, seed)))

    return make


def moves(pair: Pair, seed: int) -> tuple[ReceiveOutcome, SendOutcome]:
    rng = random.Random(seed)
    count = rng.randint(20, 50)
    granted, sources = rng.sample(range(64), count), rng.sample(range(64), count)
    grant = pair.grant(tuple(granted))
    received, sent = pair.move(grant, tuple(sources))
    if received.outcome is ReceiveOutcome.VERIFIED:
        pair.assert_equal(grant, tuple(sources))
    return received.outcome, sent.outcome


@PATHS
def test_any_order_of_completion_is_right(
    make_pair: MakePair, devices: dict[int, FakeDevice], shuffled: Callable[[int], None], transport: str
) -> None:
    assert plan.blocks_per_chunk(BLOCK_BYTES, 3 * BLOCK_BYTES) == 3
    shuffled(5)
    pair = make_pair(transport)
    for seed in range(MAX_TRIES):
        assert moves(pair, seed) == (ReceiveOutcome.VERIFIED, SendOutcome.SENT)
        if seed >= 11 and sum(device.num_overtakings for device in devices.values()) >= 10:
            break
    else:
        pytest.fail("work of different streams hardly ever changed its order")
    assert not any(any(device.loads.outstanding_bytes) for device in devices.values())


@PATHS
def test_cancels_free_blocks_in_any_order(
    make_pair: MakePair, devices: dict[int, FakeDevice], shuffled: Callable[[int], None], transport: str
) -> None:
    """Whichever side aborts, at any chunk, the next transfer into the same blocks is right."""
    shuffled(6)
    pair = make_pair(transport)
    rng = random.Random(7)
    for number in range(10):
        grant = pair.grant(tuple(range(40)))
        received, sent = pair.begin(grant)
        at = rng.randrange(1, 40)
        pair.sender.push(grant.key, [(i, i) for i in range(at)], False)
        (pair.sender if number % 2 else pair.receiver).abort(grant.key)
        wait_for(lambda: received.all and received.all[-1].outcome is not ReceiveOutcome.QUARANTINED, "its end")  # noqa: B023
        sent.wait()
        assert moves(pair, number) == (ReceiveOutcome.VERIFIED, SendOutcome.SENT)


def test_steps_of_a_slot_in_the_wrong_order_are_detected(
    make_pair: MakePair, shuffled: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant: the second step of a slot is queued without `behind`. Transfers fail, but none commits wrong bytes."""
    monkeypatch.setattr(ShuffledDevice, "keeps_order", False)
    shuffled(5)
    pair = make_pair("tcp_staged")
    assert any(moves(pair, seed)[0] is ReceiveOutcome.FAILED for seed in range(MAX_TRIES))


def test_the_last_chunk_taken_may_be_sent_first(
    make_pair: MakePair, shuffled: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant: the last chunk is the last one pushed. The receiver then reports missing blocks."""
    monkeypatch.setattr(
        "kvtransfer.protocol.transfers.SendTransfer.is_stamped",
        property(lambda transfer: not transfer.pending),
        raising=True,
    )
    shuffled(5)
    pair = make_pair("cuda_ipc")
    assert any(moves(pair, seed)[0] is ReceiveOutcome.FAILED for seed in range(MAX_TRIES))
