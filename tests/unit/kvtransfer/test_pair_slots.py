"""A limited number of NCCL pairs: a new pair replaces the least recently used one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvtransfer.protocol.transport import ReceiveOutcome, SendOutcome
from kvtransfer.transports.common.registry import TRANSPORTS
from kvtransfer.transports.nccl import MAX_PAIRS, NCCL, Nccl, PairSlot, PairSlots
from pdserve.core.errors import TransferFailed
from tests.support.fake_device import FakeDevice
from tests.support.fake_nccl import FakeConnector
from tests.unit.kvtransfer.harness import WAIT_S, Pair, wait_for

MakePair = Callable[..., Pair]


def leaving(pair_slot: PairSlot, asked: list[PairSlot]) -> Callable[[], None]:
    """A pair that closes when it is asked to."""

    def ask() -> None:
        asked.append(pair_slot)
        pair_slot.leave()

    return ask


def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long time limits, for pairs that do close, on a busy machine."""
    monkeypatch.setattr("kvtransfer.transports.nccl.WAIT_S", WAIT_S)
    monkeypatch.setattr("kvtransfer.transports.nccl.ANSWER_S", WAIT_S)


def test_the_least_recently_used_pair_is_asked_first() -> None:
    pair_slots, asked = PairSlots(3), list[PairSlot]()
    first, second, third = (pair_slots.take() for _ in range(3))
    for pair_slot in (first, second, third):
        pair_slot.ask = leaving(pair_slot, asked)
    first.used()
    pair_slots.take()
    assert asked == [second]
    pair_slots.take()
    assert asked == [second, third]
    assert len(pair_slots) == 3


def test_busy_pairs_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.transports.nccl.ANSWER_S", 0.01)
    pair_slots, asked = PairSlots(2), list[PairSlot]()
    busy, idle = pair_slots.take(), pair_slots.take()
    busy.ask, idle.ask = (lambda: asked.append(busy)), leaving(idle, asked)
    pair_slots.take()
    assert asked == [busy, idle]
    with pytest.raises(TransferFailed, match="2 pairs are open"):
        pair_slots.take()
    busy.leave()
    busy.leave()
    assert len(pair_slots) == 1


def test_a_wait_for_all_pairs_has_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    pair_slots, asked = PairSlots(2), list[int]()
    for number in range(2):
        pair_slots.take().ask = lambda number=number: asked.append(number)  # type: ignore[misc]
    monkeypatch.setattr("kvtransfer.transports.nccl.WAIT_S", 0.0)
    with pytest.raises(TransferFailed, match="2 pairs are open"):
        pair_slots.take()
    assert asked == [], "nobody is asked for a place that is not waited for any more"


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch, devices: dict[int, FakeDevice]) -> Callable[[int], Nccl]:
    """bounded(most): the receivers share so many slots. The senders are separate processes and have enough."""

    def make(most: int) -> Nccl:
        def device_of(pool: Any) -> FakeDevice:
            return devices.setdefault(id(pool), FakeDevice(pool))

        connector = FakeConnector()
        receivers, senders = Nccl(device_of, connector, most), Nccl(device_of, connector, 1000)
        monkeypatch.setattr(receivers, "sender", senders.sender)
        monkeypatch.setitem(TRANSPORTS, NCCL, receivers)
        return receivers

    return make


def test_a_new_pair_replaces_the_least_recently_used_one(
    make_pair: MakePair, bounded: Callable[[int], Nccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    patient(monkeypatch)
    most = 5
    transport = bounded(most)
    pairs = [make_pair("nccl", num_blocks=4) for _ in range(most + 1)]
    for pair in pairs:
        received, sent = pair.move(pair.grant((1, 2)), (3, 0))
        assert received.outcome is ReceiveOutcome.VERIFIED, received.error
        assert sent.outcome is SendOutcome.SENT
    assert len(transport.pair_slots) == most
    wait_for(lambda: not pairs[0].receiver.peers, "the first pair to leave")
    assert all(pair.receiver.peers for pair in pairs[1:])
    grant = pairs[0].grant((0, 3))
    received, _ = pairs[0].move(grant, (1, 2))
    assert received.outcome is ReceiveOutcome.VERIFIED, "a pair that had to leave comes back"
    pairs[0].assert_equal(grant, (1, 2))


def test_a_pair_with_an_open_transfer_is_kept(
    make_pair: MakePair, bounded: Callable[[int], Nccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded(2)
    monkeypatch.setattr("kvtransfer.transports.nccl.WAIT_S", WAIT_S)
    # All that the idle pair has, and the cost of the busy one.
    monkeypatch.setattr("kvtransfer.transports.nccl.ANSWER_S", 1.5)
    busy, idle, late = (make_pair("nccl", num_blocks=4) for _ in range(3))
    grant = busy.grant((1, 2))
    received, sent = busy.begin(grant)
    busy.sender.push(grant.key, [(0, 0)], False)
    wait_for(lambda: busy.receiver.stats.chunks == 1, "the first half")
    idle.move(idle.grant((1,)), (0,))
    assert late.move(late.grant((1,)), (0,))[0].outcome is ReceiveOutcome.VERIFIED
    assert not idle.receiver.peers
    busy.sender.push(grant.key, [(1, 3)], True)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    assert sent.wait().outcome is SendOutcome.SENT


def test_a_process_has_32_pair_slots_by_default() -> None:
    assert Nccl().pair_slots.most == MAX_PAIRS == 32


def test_if_every_pair_is_busy_the_transfer_fails(make_pair: MakePair, bounded: Callable[[int], Nccl]) -> None:
    bounded(1)
    busy, late = (make_pair("nccl", num_blocks=4) for _ in range(2))
    grant = busy.grant((1, 2))
    received, _ = busy.begin(grant)
    busy.sender.push(grant.key, [(0, 0)], False)
    wait_for(lambda: busy.receiver.stats.chunks == 1, "the first half")
    refused, sent = late.begin(late.grant((1,)), deadline_s=100.0)
    assert sent.wait().outcome is SendOutcome.FAILED
    assert "did not take the communicator" in sent.all[0].error
    late.receiver.close()
    assert refused.wait().outcome is ReceiveOutcome.FAILED
    busy.sender.push(grant.key, [(1, 3)], True)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED


def test_a_sender_without_room_asks_its_own_pairs(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, devices: dict[int, FakeDevice]
) -> None:
    """Both ends of both pairs are in one process with two slots, so the second pair needs those of the first."""
    patient(monkeypatch)
    transport = Nccl(lambda pool: devices.setdefault(id(pool), FakeDevice(pool)), FakeConnector(), 2)  # type: ignore[arg-type]
    monkeypatch.setitem(TRANSPORTS, NCCL, transport)
    pairs = [make_pair("nccl", num_blocks=4) for _ in range(2)]
    for pair in [*pairs, *pairs]:
        assert pair.move(pair.grant((1,)), (0,))[0].outcome is ReceiveOutcome.VERIFIED
    assert len(transport.pair_slots) == 2
