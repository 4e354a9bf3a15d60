"""cuda_ipc and nccl when the other end sends invalid messages, or a device has no resources left."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvtransfer.link.dial import dial
from kvtransfer.link.endpoint import make_receiver, make_sender
from kvtransfer.protocol.frames import BadFrame, Frame, Kind, pack, tag_of
from kvtransfer.protocol.plan import Part, PartLayout
from kvtransfer.protocol.transport import ReceiveOutcome, SendOutcome
from kvtransfer.transports import cuda_ipc, nccl
from kvtransfer.transports.common.on_device import extents_of_part
from kvtransfer.transports.common.registry import TRANSPORTS
from kvtransfer.transports.cuda_ipc import CUDA_IPC
from kvtransfer.transports.nccl import NCCL, Nccl
from pdserve.core.errors import TransferFailed
from pdserve.core.kv.kv_shape import Grant, TransferKey
from tests.support.fake_device import DevicePool, FakeBlocks, FakeDevice
from tests.support.fake_ends import DEVICE_TRANSPORTS
from tests.support.fake_nccl import FakeConnection, FakeConnector
from tests.support.transfer_ends import endpoint_config
from tests.unit.kvtransfer.harness import BLOCK_BYTES, GrpcHost, Heard, Pair, fingerprint, wait_for
from tests.unit.kvtransfer.raw import RawSender, assert_still_serves, expected

MakePair = Callable[..., Pair]
PATHS = pytest.mark.parametrize("transport", DEVICE_TRANSPORTS)


def ends(pair: Pair) -> str:
    """The error of a transfer that fails on the sender's side before the receiver knows of it."""
    received, sent = pair.begin(pair.grant((1,)))
    assert sent.wait().outcome is SendOutcome.FAILED
    pair.receiver.abort(pair.receiver.open_keys[0])
    assert received.wait().outcome is ReceiveOutcome.DRAINED
    error: str = sent.all[0].error
    return error


# Frames.


@pytest.mark.gpu_checks
def test_scattered_parts_are_rejected() -> None:
    floats = replace(fingerprint().shape, layout="block-major.v1", dtype="float32", num_layers=4)
    int8 = replace(floats, layout="block-major-int8.v1", dtype="int8")
    rank = replace(floats, num_kv_heads=2, tp_degree=2)
    for source, target, part, is_taken in [
        (floats, floats, Part(groups=4), True),
        (floats, floats, Part(group=3, groups=4), True),
        (int8, int8, Part(), True),
        (int8, int8, Part(groups=2), False),  # The scales of a group are separate from its values.
        (rank, replace(rank, tp_degree=1), Part(groups=2), True),  # Its heads are at equal distances.
        (floats, replace(floats, block_size=2 * floats.block_size), Part(groups=2), False),
    ]:
        sides = SimpleNamespace(source=PartLayout.to_send(source, source), target=PartLayout.to_receive(target, target))
        if source.tp_degree > 1:
            sides = SimpleNamespace(
                source=PartLayout.to_send(source, target), target=PartLayout.to_receive(source, target)
            )
        link: Any = sides
        if is_taken:
            extents_of_part(link, part)
        else:
            with pytest.raises(BadFrame, match="between devices, a part of a block must be equal runs of bytes"):
                extents_of_part(link, part)


@PATHS
@pytest.mark.gpu_checks
@pytest.mark.parametrize(
    ("groups", "degree", "why"),
    [
        (
            2,
            1,
            "groups: got 2, expected 1: layer groups of these blocks are not runs of bytes, as pools on GPUs require",
        ),
        (
            1,
            2,
            "tensor_parallel: got 1, expected the receiver's: int8 and fp8 blocks on a GPU are not divided by heads",
        ),
    ],
)
def test_scattered_groups_are_not_sent(
    devices: dict[int, FakeDevice], transport: str, groups: int, degree: int, why: str
) -> None:
    shape = replace(fingerprint().shape, layout="block-major-int8.v1", dtype="int8", num_layers=4, num_kv_heads=2)
    facts = replace(fingerprint(), shape=shape)
    sender = make_sender(
        endpoint_config(DevicePool(4, shape.block_bytes), facts, worker_id="p0", incarnation="1", transport=transport)
    )
    sent = Heard()
    key = TransferKey(transfer_id="t", attempt=1, generation=1)
    grant = Grant(
        key=key,
        endpoint="127.0.0.1:1",
        worker_id="d0",
        incarnation="d0-1",
        fingerprint=facts,
        blocks=(1,),
        num_cached_blocks=0,
    )
    theirs = replace(facts, shape=replace(shape, tp_degree=degree))
    sender.start(replace(grant, fingerprint=theirs), sent, groups=groups)
    end = sent.wait()
    assert end.outcome is SendOutcome.FAILED
    assert end.error == why
    sender.close()


def test_an_unknown_slot_ends_an_nccl_pair(make_pair: MakePair) -> None:
    pair = make_pair("nccl")
    raw = RawSender(pair)
    _, tag, received = expected(pair, (1,))
    raw.announce(tag)
    frame = Frame(Kind.CHUNK, tag, 0, 1, nccl.MAX_SLOTS, 0, b"c" * 8)
    raw.send(frame.encode() + pack([0], tag.generation, 1))
    assert received.wait().error == "sender raw: protocol error: 1 blocks in slot 8 with 0 bytes behind the header"
    raw.close()
    assert_still_serves(pair)


@PATHS
def test_a_credit_without_an_announcement_ends_the_pair(make_pair: MakePair, transport: str) -> None:
    pair = make_pair(transport)
    received, sent = pair.begin(grant := pair.grant((1, 2)))
    pair.sender.push(grant.key, [(0, 5)], False)
    wait_for(lambda: pair.receiver.stats.chunks == 1 and pair.sender.stats.chunks == 1, "the first block")
    [connection] = pair.receiver._connections.values()
    connection.post(Frame(Kind.CREDIT, tag_of(grant.key), slot=2).encode())
    no_credit = "a CREDIT frame, which tcp_staged does not use"
    assert (no_credit if transport == "tcp_staged" else "credit for slot 2, which is not") in sent.wait().error
    assert received.wait().outcome is ReceiveOutcome.FAILED
    assert_still_serves(pair)


def test_conversion_on_a_device_is_rejected(devices: dict[int, FakeDevice], caplog: pytest.LogCaptureFixture) -> None:
    shape = replace(fingerprint().shape, layout="block-major.v1", dtype="float32", head_dim=4)
    facts, size = replace(fingerprint(), shape=shape), shape.block_bytes
    receiver = make_receiver(
        endpoint_config(DevicePool(4, size), facts, worker_id="d0", incarnation="d0-1", transport="cuda_ipc"),
        host="127.0.0.1",
    )
    host = GrpcHost(receiver.servicer)
    sender = make_sender(
        endpoint_config(DevicePool(4, size), facts, worker_id="p0", incarnation="1", transport="cuda_ipc")
    )
    caplog.set_level(logging.INFO)
    with pytest.raises(TransferFailed):
        dial(replace(sender.config, wire_dtype="int8"), host.endpoint, "d0-1")
    wait_for(lambda: not receiver.peers, "its end")
    errors = [vars(record).get("error") for record in caplog.records]
    assert "int8 for float32: blocks on a GPU cannot be converted" in errors
    assert receiver.is_healthy
    sender.close()
    receiver.close()
    host.stop()


# Handshakes.


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
def test_a_sender_with_an_incomplete_offer_is_disconnected(
    make_pair: MakePair, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, kind = (cuda_ipc, CUDA_IPC) if transport == "cuda_ipc" else (nccl, NCCL)
    monkeypatch.setattr(module, "HANDSHAKE_S", 0.05)
    pair = make_pair(transport)

    def halting(sock: Any, pool: Any) -> Any:
        sock.settimeout(60.0)
        sock.sendall(b"PDK")
        assert sock.recv(1) == b"", "it is not waited for"
        raise OSError("it hung up")

    monkeypatch.setattr(TRANSPORTS[kind], "sender", halting)
    assert "it hung up" in ends(pair)
    assert pair.receiver.stats.protocol_errors == 1


def test_a_pool_without_a_handle_is_not_offered(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair("cuda_ipc")
    with monkeypatch.context() as patch:
        patch.setattr(FakeDevice, "export", failing("the pool's memory cannot be shared"))
        assert ends(pair).endswith("the pool's memory cannot be shared")
    assert_still_serves(pair)


def test_an_unusable_offered_pool_is_rejected(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair("cuda_ipc")
    with monkeypatch.context() as patch:
        patch.setattr(FakeDevice, "open", failing("the sender's pool cannot be opened"))
        ends(pair)
    wait_for(lambda: pair.receiver.stats.protocol_errors == 1, "the count")
    closed: list[bool] = []

    class Short(FakeBlocks):
        def close(self) -> None:
            closed.append(True)

    with monkeypatch.context() as patch:
        patch.setattr(FakeDevice, "open", lambda *_: Short(bytearray(BLOCK_BYTES), 1, BLOCK_BYTES))
        ends(pair)
    wait_for(lambda: pair.receiver.stats.protocol_errors == 2, "the count")
    assert closed == [True]
    assert_still_serves(pair)


def failing(why: str) -> Callable[..., Any]:
    def fails(*_: Any) -> Any:
        raise TransferFailed(why)

    return fails


# Resources of an NCCL pair.


@pytest.fixture
def pair_slots(monkeypatch: pytest.MonkeyPatch, devices: dict[int, FakeDevice]) -> Nccl:
    """The transport of both ends, with its counted slots."""

    def device_of(pool: Any) -> FakeDevice:
        return devices.setdefault(id(pool), FakeDevice(pool))

    transport = Nccl(device_of, FakeConnector())
    monkeypatch.setitem(TRANSPORTS, NCCL, transport)
    return transport


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_join_frees_its_slot(
    make_pair: MakePair, pair_slots: Nccl, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    pair = make_pair("nccl")
    join = FakeConnector.join

    def one_cannot(connector: FakeConnector, device: Any, unique_id: bytes, which: int) -> FakeConnection:
        if which == rank:
            raise TransferFailed("the other NCCL rank has not come")
        return join(connector, device, unique_id, which)

    with monkeypatch.context() as patch:
        patch.setattr(FakeConnector, "join", one_cannot)
        patch.setattr("tests.support.fake_nccl.JOIN_S", 0.2)
        ends(pair)
        wait_for(lambda: len(pair_slots.pair_slots) == 0, "both places")
    assert_still_serves(pair)
    assert len(pair_slots.pair_slots) == 2


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_pair_without_staging_memory_is_closed(
    make_pair: MakePair, pair_slots: Nccl, devices: dict[int, FakeDevice], monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    pair = make_pair("nccl")
    device = devices[id(getattr(pair, side))]
    with monkeypatch.context() as patch:
        patch.setattr(device, "staging", failing("out of memory"))
        received, sent = pair.begin(pair.grant((1,)))
        assert sent.wait().outcome is SendOutcome.FAILED
        for key in pair.receiver.open_keys:
            pair.receiver.abort(key)
        assert received.wait().outcome in (ReceiveOutcome.DRAINED, ReceiveOutcome.FAILED)
        wait_for(lambda: len(pair_slots.pair_slots) == 0, "both places")
    assert_still_serves(pair)


def test_a_hanging_pair_keeps_its_staging_and_slot(
    make_pair: MakePair, pair_slots: Nccl, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The library may still write there, so the memory is not reused until the process ends."""
    pair = make_pair("nccl")
    assert_still_serves(pair)
    kept: list[FakeBlocks] = []
    close, give_up = FakeBlocks.close, FakeConnection.close

    def closed(blocks: FakeBlocks) -> None:
        kept.append(blocks)
        close(blocks)

    def never(connection: FakeConnection) -> None:
        give_up(connection)
        raise TransferFailed("an NCCL communicator's abort has not returned")

    monkeypatch.setattr(FakeBlocks, "close", closed)
    monkeypatch.setattr(FakeConnection, "close", never)
    pair.sender.close()
    pair.receiver.close()
    assert caplog.text.count("an NCCL pair does not end") == 2
    assert (len(pair_slots.pair_slots), kept) == (2, [])
