"""tcp_staged between any two kinds of memory: over a stand-in for the device, and in host memory."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvtransfer.devices.copy_limits import StagingBudget
from kvtransfer.link.endpoint import make_receiver, make_sender
from kvtransfer.protocol.transport import ReceiveOutcome, SendOutcome
from kvtransfer.transports.common.registry import TRANSPORTS, name_of
from kvtransfer.transports.tcp import TCP
from kvtransfer.transports.tcp_staged import (
    MAX_SLOTS,
    SLOT_BYTES,
    TCP_STAGED,
    HostDevice,
    TcpStaged,
    digest_of,
    word_sum,
    zeroed,
)
from pdserve.core.errors import ConfigError, InternalError, TransferFailed
from pdserve.core.kv.stamps import BlockStamps
from pdserve.engine.gpu.kernels.extent import StridedExtent, checksum
from tests.support.fake_device import DevicePool, FakeDevice
from tests.support.transfer_ends import GrpcHost, HostPool, endpoint_config, kinds
from tests.unit.kvtransfer.harness import BLOCK_BYTES, Heard, Pair, fingerprint

MakeEnds = Callable[..., Pair]
POOLS = {"host": HostPool, "device": DevicePool}
pytestmark = pytest.mark.gpu_checks


@pytest.fixture
def make_ends(devices: dict[int, FakeDevice]) -> Iterator[MakeEnds]:
    """make_ends(source, target): a pair between such memories, over the transports that `auto` selects."""
    made: list[Pair] = []

    def make(
        source: str,
        target: str,
        *,
        transport: str = "auto",
        num_layers: int = 1,
        runs_per_block: tuple[int, int] = (1, 1),
    ) -> Pair:
        facts = fingerprint(BLOCK_BYTES)
        if num_layers > 1:
            shape = replace(facts.shape, layout="block-major.v1", dtype="float32", num_layers=num_layers, head_dim=64)
            facts = replace(facts, shape=shape)
        block_bytes = facts.shape.block_bytes
        pools = (
            POOLS[source](64, block_bytes, 7, runs_per_block[0]),
            POOLS[target](64, block_bytes, None, runs_per_block[1]),
        )
        stamps = BlockStamps(64), BlockStamps(64)
        common: dict[str, Any] = {"transport": transport}
        receiver = make_receiver(
            endpoint_config(pools[1], facts, worker_id="d0", incarnation="d0-1", stamps=stamps[1], **common),
            host="127.0.0.1",
        )
        sender = make_sender(
            endpoint_config(pools[0], facts, worker_id="p0", incarnation="p0-1", stamps=stamps[0], **common)
        )
        made.append(Pair(transport, *pools, receiver, sender, GrpcHost(receiver.servicer), *stamps, facts))
        return made[-1]

    yield make
    for pair in made:
        pair.sender.close()
        pair.receiver.close()
        pair.host.stop()
        assert pair.receiver.open_keys == pair.sender.open_keys == []


@pytest.mark.parametrize("transport", ["auto", "tcp_staged"])
@pytest.mark.parametrize("ends", [("host", "device"), ("device", "host")])
def test_a_pair_of_a_gpu_and_a_host_has_a_path(make_ends: MakeEnds, ends: tuple[str, str], transport: str) -> None:
    pair = make_ends(*ends, transport=transport)
    granted, sources = (40, 3, 4, 5, 63, 0), (9, 8, 7, 50, 51, 1)
    for _ in range(2 * MAX_SLOTS):
        received, sent = pair.move(pair.grant(granted), sources)
        assert (received.outcome, received.error) == (ReceiveOutcome.VERIFIED, "")
        assert sent.outcome is SendOutcome.SENT
    for target, source in zip(granted, sources, strict=True):
        assert pair.target.block(target) == pair.source.block(source)
    [link] = pair.sender.links
    assert link.transport == "tcp_staged"


@pytest.mark.parametrize("target", ["host", "device"])
def test_layer_groups_reach_host_and_device(make_ends: MakeEnds, target: str) -> None:
    pair = make_ends("device", target, num_layers=4, transport="tcp_staged")
    shape = pair.sender.plain.config.fingerprint
    grant = pair.grant(tuple(range(63, 3, -3)), fingerprint=shape)
    received, sent = Heard(), Heard()
    pair.receiver.expect(grant, received)
    pair.sender.start(grant, sent, groups=4)
    for group in range(4):
        pair.sender.push(grant.key, list(enumerate(range(5, 25))), group == 3, range(group, group + 1))
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    for index, block in enumerate(grant.blocks):
        assert pair.target.block(block) == pair.source.block(5 + index)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(
    ("ends", "runs"),
    [(("host", "device"), (4, 1)), (("device", "host"), (1, 4)), (("host", "host"), (4, 4))],
)
def test_a_host_pool_of_a_run_per_layer_has_a_path(
    make_ends: MakeEnds, ends: tuple[str, str], runs: tuple[int, int], groups: int
) -> None:
    pair = make_ends(*ends, num_layers=4, transport="tcp_staged", runs_per_block=runs)
    grant, sources = pair.grant((40, 3, 4, 5, 63, 0)), (9, 8, 7, 50, 51, 1)
    received, sent = pair.move_in_groups(grant, sources, groups)
    assert (received.outcome, sent.outcome) == (ReceiveOutcome.VERIFIED, SendOutcome.SENT)
    pair.assert_equal(grant, sources)
    pair.target.fill(grant.blocks, 0)
    assert not any(pair.target.memory), "other blocks are untouched"


def test_two_pools_in_host_memory_need_no_staging(make_ends: MakeEnds) -> None:
    for transport, expected in (("auto", "shm"), ("tcp", "tcp"), ("tcp_staged", "tcp_staged")):
        pair = make_ends("host", "host", transport=transport)
        assert pair.move(pair.grant((1, 2)), (3, 4))[0].outcome is ReceiveOutcome.VERIFIED
        assert pair.sender.links[0].transport == expected


@pytest.mark.parametrize("which", ["gathered", "scattered"])
def test_a_bit_changed_in_pinned_memory_is_detected(
    make_ends: MakeEnds, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """In pinned memory of either end, where a checksum of the socket's bytes would not detect it."""
    pair = make_ends("device", "device", transport="tcp")
    pair.move(pair.grant((1,)), (1,))
    move = FakeDevice.move

    def flip(self: FakeDevice, staging: Any, host: Any, *rest: Any, is_to_host: bool, behind: Any = None) -> Any:
        flipped = _flipped if is_to_host is (which == "gathered") else _plain
        return flipped(move, self, staging, host, *rest, is_to_host=is_to_host, behind=behind)

    monkeypatch.setattr(FakeDevice, "move", flip)
    before = pair.target.block(10)
    received, sent = pair.move(pair.grant((10,)), (3,))
    assert received.outcome is ReceiveOutcome.FAILED
    assert "checksum" in received.error
    assert sent.outcome is SendOutcome.FAILED
    monkeypatch.undo()
    assert before != pair.source.block(3)
    assert pair.move(pair.grant((10,)), (3,))[0].outcome is ReceiveOutcome.VERIFIED


def _plain(move: Any, *rest: Any, **how: Any) -> Any:
    return move(*rest, **how)


def _flipped(move: Any, device: FakeDevice, staging: Any, host: Any, num_bytes: int, wake: Any, **how: Any) -> Any:
    """Flips one bit of the slot: after the copy when sending, before it when receiving."""
    if not how["is_to_host"]:
        host.view[5] ^= 1
        return move(device, staging, host, num_bytes, wake, **how)
    moving = move(device, staging, host, num_bytes, lambda: None, **how)

    def flip() -> bytes:
        host.view[5] ^= 1
        return b""

    return device.streams[moving.stream].queue(flip, wake)


def test_without_pinned_memory_another_transport_is_used(make_ends: MakeEnds, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: FakeDevice, num_bytes: int) -> Any:
        raise TransferFailed(f"the host cannot pin {num_bytes} bytes")

    pair = make_ends("device", "host", transport="tcp_staged")
    monkeypatch.setattr(FakeDevice, "pinned", none)
    received, sent = pair.begin(pair.grant((1,)))
    end = sent.wait()
    assert end.outcome is SendOutcome.FAILED
    assert f"the host cannot pin {SLOT_BYTES // BLOCK_BYTES * BLOCK_BYTES} bytes" in end.error
    pair.receiver.abort(pair.receiver.open_keys[0])
    received.wait()


def test_tcp_for_a_gpu_pool_is_staged(devices: dict[int, FakeDevice]) -> None:
    assert [name_of(kind) for kind in kinds("tcp")] == ["tcp"]
    assert [name_of(kind) for kind in kinds("tcp", is_on_host=False)] == ["tcp_staged"]
    assert kinds("auto", is_on_host=False)[-1] == TCP_STAGED
    assert kinds("auto").index(TCP) < kinds("auto").index(TCP_STAGED)
    assert kinds("tcp_staged") == (TCP_STAGED,)
    with pytest.raises(ConfigError, match="cuda_ipc, nccl, tcp: the KV pool is on a GPU"):
        kinds("shm", is_on_host=False)
    assert TcpStaged().why_not(is_on_host=True) == ""
    assert TRANSPORTS[TCP_STAGED].name == "tcp_staged"


@pytest.mark.parametrize("num_words", [0, 1, 65_535, 65_536, 65_537, 200_000])
def test_host_checksums_match_the_kernels(num_words: int) -> None:
    data = np.random.default_rng(3).integers(0, 256, num_words * 4, dtype=np.uint8).tobytes()
    assert word_sum(memoryview(data)) == checksum(data)


def test_sums_need_whole_words() -> None:
    with pytest.raises(InternalError, match="a multiple of 4"):
        word_sum(memoryview(b"12345"))


def test_a_host_device_copies_and_sums() -> None:
    memory = memoryview(bytearray(range(96)))
    device = HostDevice(memory, 16, StagingBudget(0))
    staging, woken = device.staging(2), []
    copying = device.copy(
        device.pool().narrowed(StridedExtent(4, 8)), [1, 5], staging.cut(0, 1, 8), [1, 0], lambda: woken.append(1), None
    )
    assert copying.is_done
    assert woken
    assert copying.digest() == digest_of([word_sum(memory[20:28]), word_sum(memory[84:92])])
    assert bytes(staging.view(0)) == bytes(memory[84:92]) + bytes(memory[20:28])
    with pytest.raises(InternalError, match="not opened"):
        device.open(b"")


# -- host memory as a device -----------------------------------------------------------------------------------


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_new_memory_is_zero_and_takes_no_pages_until_it_is_used() -> None:
    before = resident_bytes()
    memory = zeroed(2**30)
    assert resident_bytes() - before < 2**28, "some of a connection's staging is never used"
    assert len(memory) == 2**30
    assert memory[0] == memory[2**29] == memory[-1] == 0
    memory[5:7] = b"ab"
    assert bytes(memory[4:8]) == b"\0ab\0"
