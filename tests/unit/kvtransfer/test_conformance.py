"""The behaviour of every transport, over real sockets and shared memory, and for GPUs over stand-ins of their
libraries.

Tests that change bytes on the wire run only for transports that send them there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from kvtransfer.link.endpoint import make_receiver, make_sender
from kvtransfer.link.receiver import PlainReceiver
from kvtransfer.protocol.frames import HEADER_BYTES, Frame, Kind
from kvtransfer.protocol.plan import DEFAULT_CHUNK_BYTES
from kvtransfer.protocol.transport import EVENTS, ReceiveOutcome, Receiver, Sender, SendOutcome, events
from kvtransfer.reshape.sender import ShapedSender
from kvtransfer.transports import shm, tcp
from kvtransfer.transports.common.registry import TRANSPORTS
from pdserve.core.errors import ConfigError, InvalidRequest, Unavailable
from tests.support.fake_device import DevicePool, FakeDevice
from tests.support.fake_ends import DEVICE_TRANSPORTS
from tests.support.transfer_ends import endpoint_config
from tests.unit.kvtransfer.harness import BLOCK_BYTES, PATIENT, Heard, HostPool, Pair, fingerprint, wait_for

MakePair = Callable[..., Pair]
CHUNK_BLOCKS = {"tcp": tcp.CHUNK_BYTES // BLOCK_BYTES, "shm": shm.CHUNK_BYTES // BLOCK_BYTES}


LISTED = ["tcp", "tcp+tls", "tcp_staged+tls", "shm", *DEVICE_TRANSPORTS, "nixl", "nixl-stand-in"]


@pytest.fixture(params=LISTED + [one.name for one in TRANSPORTS.values() if one.name not in LISTED])
def transport(request: pytest.FixtureRequest, prepared: Callable[[str], str]) -> str:
    return prepared(request.param)


# Runs of bytes of a block of four layers in the sender's and the receiver's pool, between pools in host memory. Each
# case has the transport, these runs, and bytes per block, in turn; those of 4352 bytes have no whole KiB in a run.
LAYERS = 4
IN_RUNS = [
    (name, runs, (BLOCK_BYTES, 4352)[(i + j) % 2])
    for i, name in enumerate(("tcp", "tcp+tls", "shm", "nixl", "nixl-stand-in"))
    for j, runs in enumerate(((LAYERS, LAYERS), (LAYERS, 1), (1, LAYERS)))
]
in_runs = pytest.mark.parametrize(("transport", "runs", "block_bytes"), IN_RUNS, indirect=["transport"])


def test_both_ends_implement_the_protocols(pair: Pair) -> None:
    receiver: Receiver = pair.receiver
    sender: Sender = pair.sender
    assert receiver is not sender


def test_a_transfer_equals_a_plain_copy(pair: Pair) -> None:
    grant, sources = pair.grant(tuple(range(10, 50))), tuple(range(5, 45))
    received, sent = pair.move(grant, sources)
    assert (received.outcome, received.error) == (ReceiveOutcome.VERIFIED, "")
    assert (sent.outcome, sent.error) == (SendOutcome.SENT, "")
    assert received.num_bytes == sent.num_bytes == pair.sender.moved_bytes == 40 * BLOCK_BYTES
    assert received.transfer_s > 0
    assert events(pair.receiver.stats) == dict.fromkeys(EVENTS, 0), "nothing went wrong"
    pair.assert_equal(grant, sources)
    assert pair.target.block(9) == pair.target.block(50) == bytes(BLOCK_BYTES), "neighbours are untouched"


def test_scattered_blocks_arrive_in_the_granted_order(pair: Pair) -> None:
    grant, sources = pair.grant((40, 3, 4, 5, 63, 0, 22, 21)), (9, 8, 7, 50, 51, 1, 2, 33)
    received, _ = pair.move(grant, sources)
    assert received.outcome is ReceiveOutcome.VERIFIED
    pair.assert_equal(grant, sources)


@in_runs
def test_blocks_of_a_run_per_layer_arrive_in_the_granted_order(
    make_pair: MakePair, transport: str, runs: tuple[int, int], block_bytes: int
) -> None:
    pair = make_pair(transport, block_bytes=block_bytes, runs_per_block=runs)
    grant, sources = pair.grant((40, 3, 4, 5, 63, 0, 22, 21)), (9, 8, 7, 50, 51, 1, 2, 33)
    received, sent = pair.move(grant, sources)
    assert (received.outcome, received.error) == (ReceiveOutcome.VERIFIED, "")
    assert received.num_bytes == sent.num_bytes == 8 * block_bytes
    pair.assert_equal(grant, sources)
    others = set(range(64)) - set(grant.blocks)
    assert all(pair.target.block(one) == bytes(block_bytes) for one in others), "other blocks are untouched"
    neighbours = pair.grant(tuple(range(6, 20)))
    assert pair.move(neighbours, tuple(range(30, 44)))[0].outcome is ReceiveOutcome.VERIFIED
    pair.assert_equal(neighbours, tuple(range(30, 44)))
    assert pair.target.block(20) == bytes(block_bytes)


@in_runs
def test_groups_of_layers_of_a_run_per_layer_are_sent_early(
    make_pair: MakePair, transport: str, runs: tuple[int, int], block_bytes: int
) -> None:
    pair = make_pair(transport, block_bytes=block_bytes, runs_per_block=runs)
    for groups in (2, LAYERS):
        grant, sources = pair.grant((4, 5, 6, 60, 0)), (1, 2, 3, 9, 8)
        received, sent = pair.move_in_groups(grant, sources, groups)
        assert (received.outcome, sent.outcome) == (ReceiveOutcome.VERIFIED, SendOutcome.SENT)
        pair.assert_equal(grant, sources)
        pair.target.fill(grant.blocks, 0)
    assert pair.target.memory == bytes(64 * block_bytes), "other blocks are untouched"


@pytest.mark.parametrize(
    ("transport", "runs"),
    [("tcp", (LAYERS, LAYERS)), ("shm", (LAYERS, 1)), ("nixl-stand-in", (1, LAYERS))],
    indirect=["transport"],
)
def test_a_transfer_of_a_run_per_layer_may_exceed_window_and_socket_buffers(
    make_pair: MakePair, transport: str, runs: tuple[int, int]
) -> None:
    pair = make_pair(transport, num_blocks=512, block_bytes=65_536, runs_per_block=runs)
    sources = tuple(reversed(range(512)))
    grant = pair.grant(tuple(range(512)))
    received, _ = pair.move(grant, sources)
    assert (received.outcome, received.num_bytes) == (ReceiveOutcome.VERIFIED, 32 * 2**20)
    pair.assert_equal(grant, sources)


@pytest.mark.parametrize("transport", DEVICE_TRANSPORTS)
@pytest.mark.parametrize("make_end", [make_sender, partial(make_receiver, host="127.0.0.1")])
def test_a_device_rejects_a_pool_of_a_run_per_layer_at_the_start(
    devices: dict[int, FakeDevice], transport: str, make_end: Callable[..., object]
) -> None:
    pool = DevicePool(8, runs_per_block=LAYERS)
    config = endpoint_config(
        pool,
        fingerprint(num_layers=LAYERS),
        worker_id="w",
        incarnation="i",
        transport=transport.removesuffix("_staged"),
    )
    with pytest.raises(ConfigError, match=f"got 4, expected 1 for a pool on a GPU, .* for {transport}") as caught:
        make_end(config)
    assert caught.value.field == "kv_pool.runs_per_block"


def test_blocks_larger_than_a_chunk_are_sent_one_by_one(make_pair: MakePair, transport: str) -> None:
    pair = make_pair(transport, num_blocks=4, block_bytes=DEFAULT_CHUNK_BYTES + 4096)
    grant = pair.grant((2, 0, 1))
    received, _ = pair.move(grant, (1, 2, 3))
    assert received.outcome is ReceiveOutcome.VERIFIED
    pair.assert_equal(grant, (1, 2, 3))
    assert pair.receiver.stats.chunks == 3


def test_a_transfer_may_exceed_window_and_socket_buffers(make_pair: MakePair, transport: str) -> None:
    pair = make_pair(transport, num_blocks=512, block_bytes=65_536)
    sources = tuple(reversed(range(512)))
    grant = pair.grant(tuple(range(512)))
    received, _ = pair.move(grant, sources)
    assert (received.outcome, received.num_bytes) == (ReceiveOutcome.VERIFIED, 32 * 2**20)
    pair.assert_equal(grant, sources)


def test_blocks_pushed_in_any_order_and_in_pieces_make_one_transfer(pair: Pair) -> None:
    grant = pair.grant(tuple(range(20, 30)))
    received, sent = pair.begin(grant)
    pair.sender.push(grant.key, [(7, 7), (8, 8)], False)
    pair.sender.push(grant.key, [], False)
    pair.sender.push(grant.key, [(0, 0), (2, 2), (1, 1)], False)
    wait_for(lambda: pair.receiver.stats.chunks >= 2, "the first chunks")
    assert received.all == []
    pair.sender.push(grant.key, [(9, 9), (3, 3), (4, 4), (5, 5), (6, 6)], True)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    assert sent.wait().outcome is SendOutcome.SENT
    pair.assert_equal(grant, tuple(range(10)))


def test_cached_blocks_are_neither_sent_nor_written(pair: Pair) -> None:
    pair.target.fill(range(4), 0xAA)
    grant = pair.grant((4, 5), num_cached_blocks=4)
    received, _ = pair.move(grant, (10, 11))
    assert (received.outcome, received.num_bytes) == (ReceiveOutcome.VERIFIED, 2 * BLOCK_BYTES)
    assert all(pair.target.block(held) == b"\xaa" * BLOCK_BYTES for held in range(4))


def test_an_empty_transfer_is_verified_at_once(pair: Pair) -> None:
    grant = pair.grant((), num_cached_blocks=4)
    received, sent = pair.begin(grant)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    pair.sender.push(grant.key, [], True)
    assert sent.wait().outcome is SendOutcome.SENT


def test_many_transfers_at_once_from_many_threads(make_pair: MakePair, transport: str) -> None:
    pair = make_pair(transport, num_blocks=512)
    heard: list[tuple[Heard, Heard]] = []

    def send(first: int) -> None:
        grant = pair.grant(tuple(range(first, first + 8)), transfer_id=f"many-{first}")
        heard.append(pair.begin(grant))
        for i in range(8):
            pair.sender.push(grant.key, [(i, first + i)], i == 7)

    threads = [threading.Thread(target=send, args=(first,)) for first in range(0, 512, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {received.wait().outcome for received, _ in heard} == {ReceiveOutcome.VERIFIED}
    assert {sent.wait().outcome for _, sent in heard} == {SendOutcome.SENT}
    assert pair.target.memory == pair.source.memory
    assert pair.receiver.stats.verified == pair.sender.stats.verified == 64


def test_several_senders_share_a_receiver(make_pair: MakePair, transport: str) -> None:
    pair = make_pair(transport)
    pools = [type(pair.source)(64, seed=i) for i in range(3)]
    senders = [
        make_sender(
            endpoint_config(
                pool,
                fingerprint(),
                worker_id=f"p{i + 1}",
                incarnation="1",
                transport=pair.transport,
                tls=pair.sender.config.tls,
                lease=PATIENT,
            )
        )
        for i, pool in enumerate(pools)
    ]
    heard = []
    for i, sender in enumerate(senders):
        grant, received, sent = pair.grant(tuple(range(i * 10, i * 10 + 10))), Heard(), Heard()
        pair.receiver.expect(grant, received)
        sender.start(grant, sent)
        sender.push(grant.key, [(j, j) for j in range(10)], True)
        heard.append((grant, received))
    for i, (grant, received) in enumerate(heard):
        assert received.wait().outcome is ReceiveOutcome.VERIFIED
        assert [pair.target.block(block) for block in grant.blocks] == [pools[i].block(j) for j in range(10)]
    for sender in senders:
        sender.close()


def test_one_sender_serves_several_receivers(make_pair: MakePair, transport: str) -> None:
    first, second = make_pair(transport), make_pair(transport)
    grant = second.grant((1, 2), transfer_id="other", worker_id="d1")
    received, sent = Heard(), Heard()
    second.receiver.expect(grant, received)
    first.sender.start(grant, sent)
    first.sender.push(grant.key, [(0, 0), (1, 1)], True)
    other, _ = first.move(first.grant((5,)), (5,))
    assert received.wait().outcome is other.outcome is ReceiveOutcome.VERIFIED


def test_auto_uses_shared_memory_on_one_host(make_pair: MakePair) -> None:
    pair = make_pair("auto")
    opened = pair.host.open(pair.sender)
    assert opened.transport == 1
    assert pair.move(pair.grant((1,)), (1,))[0].outcome is ReceiveOutcome.VERIFIED


# Wrong bytes and wrong messages.


def flip_in_chunk(number: int) -> Callable[..., bytes | bytearray]:
    seen = [0]

    def hook(frame: Frame, message: bytearray, body: memoryview) -> bytearray:
        if frame.kind is Kind.CHUNK:
            if seen[0] == number:
                body[len(body) // 2] ^= 1
            seen[0] += 1
        return message

    return hook


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("number", [0, 2])
def test_a_flipped_bit_fails_both_sides(make_pair: MakePair, transport: str, number: int) -> None:
    blocks = tuple(range(3 * CHUNK_BLOCKS[transport]))
    pair = make_pair(transport, num_blocks=len(blocks), hook=flip_in_chunk(number))
    grant = pair.grant(blocks)
    received, sent = pair.move(grant, blocks)
    assert received.outcome is ReceiveOutcome.FAILED
    assert sent.outcome is SendOutcome.FAILED
    assert "checksum mismatch in blocks" in received.error
    assert "checksum mismatch in blocks" in sent.error
    assert pair.receiver.stats.checksum_mismatches == 1
    again, _ = pair.move(pair.grant((1, 2), transfer_id=grant.key.transfer_id), (1, 2))
    assert again.outcome is ReceiveOutcome.VERIFIED, "the connection still serves other transfers"


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("runs", [(LAYERS, LAYERS), (LAYERS, 1), (1, LAYERS)])
@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_a_flipped_bit_in_each_run_fails_both_sides(
    make_pair: MakePair, transport: str, runs: tuple[int, int], layer: int
) -> None:
    seen = []

    def hook(frame: Frame, message: bytearray, body: memoryview) -> bytearray:
        if frame.kind is Kind.CHUNK and not seen:
            seen.append(frame)
            body[BLOCK_BYTES + layer * BLOCK_BYTES // LAYERS + 5] ^= 1  # Of the second block.
        return message

    pair = make_pair(transport, hook=hook, runs_per_block=runs)
    received, sent = pair.move(pair.grant((7, 1, 2)), (3, 9, 4))
    assert (received.outcome, sent.outcome) == (ReceiveOutcome.FAILED, SendOutcome.FAILED)
    assert "checksum mismatch in blocks" in received.error
    again = pair.grant((7, 1, 2))
    assert pair.move(again, (3, 9, 4))[0].outcome is ReceiveOutcome.VERIFIED
    pair.assert_equal(again, (3, 9, 4))


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_wrong_checksum_fails_the_transfer(make_pair: MakePair, transport: str) -> None:
    def hook(frame: Frame, message: bytearray, body: memoryview) -> bytes | bytearray:
        if frame.kind is not Kind.CHUNK:
            return message
        return replace(frame, checksum=b"\0" * 8).encode() + message[HEADER_BYTES:]

    pair = make_pair(transport, hook=hook)
    received, _ = pair.move(pair.grant((1,)), (1,))
    assert received.outcome is ReceiveOutcome.FAILED


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_the_last_chunk_reveals_a_lost_one(make_pair: MakePair, transport: str) -> None:
    def hook(frame: Frame, message: bytearray, body: memoryview) -> bytes | bytearray:
        return b"" if frame.kind is Kind.CHUNK and frame.first == 0 else message

    blocks = tuple(range(2 * CHUNK_BLOCKS[transport]))
    pair = make_pair(transport, num_blocks=len(blocks), hook=hook)
    received, sent = pair.move(pair.grant(blocks), blocks)
    assert received.outcome is ReceiveOutcome.FAILED
    assert received.error.endswith(f" of {len(blocks)} blocks did not arrive")
    assert sent.outcome is SendOutcome.FAILED


@pytest.mark.parametrize(
    "changes",
    [{"model": "other"}, {"engine": "x"}, {"protocol": 9}],
)
def test_another_fingerprint_is_rejected_by_field(pair: Pair, changes: dict[str, object]) -> None:
    [(field, theirs)] = changes.items()
    mine = getattr(fingerprint(), field)
    grant, sent = pair.grant((1,), fingerprint=fingerprint(**changes)), Heard()
    pair.sender.start(grant, sent)
    end = sent.wait()
    assert end.outcome is SendOutcome.FAILED
    assert end.error == f"fingerprint.{field}: got {mine!r}, expected {theirs!r}, as on the receiving worker"


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_pool_that_does_not_match_the_fingerprint_is_a_config_error(transport: str) -> None:
    facts = fingerprint(block_bytes=8)
    with pytest.raises(ConfigError, match=r"kv_shape.block_bytes: got 8, expected 4096"):
        make_sender(endpoint_config(HostPool(1), facts, worker_id="p", incarnation="i", transport=transport))
    with pytest.raises(ConfigError, match=r"kv_shape.block_bytes: got 8, expected 4096"):
        make_receiver(
            endpoint_config(HostPool(1), facts, worker_id="d", incarnation="i", transport=transport), host="127.0.0.1"
        )


def test_an_unknown_transport_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="transport: got rdma, expected one of auto, cuda_ipc, nccl, shm, tcp, "):
        make_sender(endpoint_config(HostPool(1), fingerprint(), worker_id="p", incarnation="i", transport="rdma"))
    with pytest.raises(ConfigError, match=r"shm, tcp, .*: the KV pool is in host memory"):
        make_sender(endpoint_config(HostPool(1), fingerprint(), worker_id="p", incarnation="i", transport="nccl"))


def test_nonexistent_indices_and_blocks_are_rejected(pair: Pair) -> None:
    received, bad = Heard(), pair.grant((1, 64))
    with pytest.raises(InvalidRequest, match=r"grant.blocks: got 1\.\.64, expected 0\.\.63"):
        pair.receiver.expect(bad, received)
    with pytest.raises(InvalidRequest, match=r"grant.blocks: got a block twice"):
        pair.receiver.expect(pair.grant((3, 3)), received)
    grant = pair.grant((1, 2))
    _, sent = pair.begin(grant)
    with pytest.raises(InvalidRequest, match=r"blocks: got grant index 2, expected 0\.\.1"):
        pair.sender.push(grant.key, [(2, 0)], False)
    with pytest.raises(InvalidRequest, match=r"blocks: got source block -1, expected 0\.\.63"):
        pair.sender.push(grant.key, [(0, -1)], False)
    pair.sender.push(grant.key, [(0, 0), (1, 1)], True)
    assert sent.wait().outcome is SendOutcome.SENT


def test_an_incomplete_or_repeated_push_fails_both_sides(pair: Pair) -> None:
    grant = pair.grant((1, 2, 3))
    received, sent = pair.begin(grant)
    pair.sender.push(grant.key, [(0, 0)], True)
    assert sent.wait().error == "the last push leaves 2 of 3 blocks out"
    assert received.wait().outcome is ReceiveOutcome.FAILED
    grant = pair.grant((1, 2, 3))
    received, sent = pair.begin(grant)
    pair.sender.push(grant.key, [(0, 0), (1, 1)], False)
    pair.sender.push(grant.key, [(1, 1)], False)
    assert sent.wait().error == "blocks 1..1 of 3 were pushed twice"
    assert received.wait().outcome is ReceiveOutcome.FAILED


# Closing.


def test_closing_the_receiver_fails_open_transfers(pair: Pair) -> None:
    received, sent = pair.begin(pair.grant((1, 2)))
    pair.receiver.close()
    assert received.wait().outcome is ReceiveOutcome.FAILED
    assert sent.wait().outcome is SendOutcome.FAILED
    assert not pair.receiver.is_healthy
    with pytest.raises(Unavailable):
        pair.receiver.expect(pair.grant((1,)), received)


def test_closing_the_sender_fails_open_transfers(pair: Pair) -> None:
    grant = pair.grant((1, 2))
    received, sent = pair.begin(grant)
    pair.sender.push(grant.key, [(0, 0)], False)
    wait_for(lambda: pair.receiver.stats.chunks == 1, "the first chunk")
    pair.sender.close()
    assert sent.wait().outcome is SendOutcome.FAILED
    assert received.wait().outcome is ReceiveOutcome.FAILED
    with pytest.raises(Unavailable):
        pair.sender.start(pair.grant((1,)), sent)


def test_a_raising_callback_affects_no_other_owner(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    def bad(_: object) -> None:
        raise RuntimeError("mine")

    grant = pair.grant((1,))
    pair.receiver.expect(grant, bad)
    pair.sender.start(grant, bad)
    pair.sender.push(grant.key, [(0, 0)], True)
    assert pair.move(pair.grant((2,)), (2,))[0].outcome is ReceiveOutcome.VERIFIED
    wait_for(lambda: caplog.text.count("on_end of a transfer raised") == 2, "two log lines")


def test_programs_and_tests_build_the_same_endpoints(pair: Pair) -> None:
    assert isinstance(pair.receiver, PlainReceiver)
    assert isinstance(pair.sender, ShapedSender)
