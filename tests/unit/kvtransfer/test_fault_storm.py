"""Some hundreds of transfers of the storm; `make fault-storm` runs 100,000 on each transport."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from pathlib import Path

import pytest

from benchmarks.fault_storm import device
from benchmarks.fault_storm.cases import NO_FAULT, WEIGHTS, case_of
from benchmarks.fault_storm.device import DeviceStoreStorm, DeviceStorm, OnDevice
from benchmarks.fault_storm.pulls import PullStorm, PullWorker
from benchmarks.fault_storm.report import Result, misses, table, verdict
from benchmarks.fault_storm.storage import SHAPES, Storage
from benchmarks.fault_storm.storm import HANGS_AFTER_S, ROLES, Storm
from benchmarks.fault_storm.tiers import lost_threads
from kvtransfer.faults.plan import FaultKind
from tests.support.fake_ends import DEVICE_TRANSPORTS
from tests.support.netns import Network, why_not
from tests.support.slow import slow_except

pytestmark = pytest.mark.timeout(180)


def assert_nothing_was_wrong(result: Result, count: int) -> None:
    """Checks for wrong bytes and leaks, and that blocks of failed transfers were free in time. The limit allows for a
    busy machine; `make fault-storm` checks the limit of one second."""
    assert result.wrong == []
    assert result.transfers == result.ends.total() == count
    assert result.rests == 1
    assert result.lateness()[-1] < HANGS_AFTER_S, verdict(result)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_fault_storm_causes_no_wrong_bytes_or_leaks(transport: str) -> None:
    result = Storm(transport, seed=37).run(400)  # Up to four processes are killed.
    assert_nothing_was_wrong(result, 400)
    assert result.kills >= 1
    committed = {label: count for (label, end), count in result.ends.items() if end == "committed"}
    assert committed[NO_FAULT] >= 10
    kinds = {label.partition(" (")[0] for label, _ in result.ends}
    assert kinds >= {kind.value for kind in WEIGHTS if kind not in (FaultKind.STALL, FaultKind.STOP)}
    assert any(line.startswith(f"| {NO_FAULT} |") for line in table([result]))


@pytest.mark.parametrize("transport", slow_except(["shm", "tcp"], "tcp"))
def test_a_fault_storm_between_pools_of_a_run_per_layer(transport: str) -> None:
    """One worker of each role has such a pool, so there is a pair of each kind."""
    result = Storm(transport, seed=41, is_in_layers=True).run(200)
    assert_nothing_was_wrong(result, 200)
    assert result.ends[NO_FAULT, "committed"] >= 10


@pytest.mark.parametrize("transport", DEVICE_TRANSPORTS)
def test_a_fault_storm_between_devices(transport: str) -> None:
    """Over stand-ins for CUDA and NCCL, between processes, which are also killed during copies."""
    result = Storm(transport, seed=37, device_kills=0.004).run(200)
    assert_nothing_was_wrong(result, 200)
    assert result.kills >= 1
    assert result.ends[NO_FAULT, "committed"] >= 1


@pytest.mark.parametrize(
    ("transport", "ranks"),
    [
        ("tcp", (2, 1, 2, 4)),
        *(pytest.param(transport, (4, 2, 2, 1), marks=pytest.mark.slow) for transport in ("shm", *DEVICE_TRANSPORTS)),
    ],
)
def test_storm_between_ranks(transport: str, ranks: tuple[int, ...]) -> None:
    """Two prefill and two decode workers of these degrees, whose ranks have separate pools, over stand-ins for
    devices."""
    result = Storm(transport, seed=37, ranks=ranks, device_kills=0.002).run(200)
    assert_nothing_was_wrong(result, 200)
    assert result.kills >= 1
    assert result.ends[NO_FAULT, "committed"] >= 10


def test_a_network_cut_causes_no_wrong_bytes_or_leaks() -> None:
    """Processes in network namespaces that are disconnected for up to three seconds, longer than any deadline."""
    if missing := why_not():
        pytest.skip(missing)
    with Network(tuple(ROLES)) as network:
        result = Storm("tcp", seed=5, network=network).run(400)
    assert_nothing_was_wrong(result, 400)
    assert result.cuts >= 1
    assert result.ends[NO_FAULT, "committed"] >= 10


def test_a_storm_case_depends_only_on_seed_and_number() -> None:
    assert [case_of(1, n) for n in range(50)] == [case_of(1, n) for n in range(50)]
    assert [case_of(1, n) for n in range(50)] != [case_of(2, n) for n in range(50)]


def test_the_storm_detects_wrong_bytes_leaks_and_delays() -> None:
    """The storm's own checks work."""
    storage = Storage(SHAPES["small"])
    blocks = storage.take(3)
    assert blocks is not None
    for place, block in enumerate(blocks):
        storage.write(block, 5, place)
        storage.must_hold(block, 5, place)
    assert storage.wrong == []
    storage.pool.buffer[blocks[1] * storage.pool.block_bytes + 77] ^= 1
    storage.must_hold(blocks[1], 5, 1)
    assert "wrong bytes" in storage.wrong.pop()
    storage.must_hold(blocks[2], 5, 0)
    assert "wrong bytes" in storage.wrong.pop(), "another place's contents"
    storage.give_back(blocks, 5)
    storage.check_rest([])
    assert storage.wrong == []
    storage.pool.buffer[blocks[0] * storage.pool.block_bytes] ^= 1
    assert storage.take(storage.allocator.num_blocks) is not None
    assert "while nobody held it" in storage.wrong.pop()
    storage.check_rest([])
    assert "the block accounting does not balance" in storage.wrong[0]
    assert not misses([Result(transport="tcp", seed=1, late_s=[0.2, 1.0])])
    [missed] = misses([Result(transport="tcp", seed=1, late_s=[0.2, 1.1])])
    assert not misses([Result(transport="tcp", seed=1, late_s=[1.1])], 30.0)
    assert "tcp: memory was freed 1.100 s after a deadline" in missed


def test_a_storm_of_pulls_causes_no_wrong_or_lost_block() -> None:
    result = PullStorm(seed=1).run(1500)
    assert not result.wrong
    assert result.filled > 0
    assert sum(count for name, count in result.faults.items() if name.startswith("frames: ")) > 0


def test_a_worker_of_the_storm_keeps_its_port_while_it_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the storm fails if another process takes the port."""
    storm, taken = PullStorm(seed=1), list[int]()
    close = PullWorker.close

    def close_and_lose_port(worker: PullWorker, **named: bool) -> None:
        close(worker, **named)
        with socket.socket() as other, contextlib.suppress(OSError):
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", worker.server.port))
            taken.append(worker.server.port)

    with monkeypatch.context() as patch:
        patch.setattr(PullWorker, "close", close_and_lose_port)
        storm._restart(0)
    assert not storm.run(0).wrong
    assert not taken


@pytest.mark.parametrize("kind", [DeviceStorm, DeviceStoreStorm])
def test_a_storm_of_faults_on_the_tiers_of_a_device(
    kind: type[OnDevice], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Over a stand-in. `python -m benchmarks.fault_storm --tiers` runs it in full."""
    caplog.set_level(logging.CRITICAL)
    former = set(threading.enumerate())
    result = kind(tmp_path / "kv", 5).run(1500)
    assert result.wrong + lost_threads(former) == []
    assert min(result.filled, result.written, result.saved, result.restarts) > 0
    assert {"a call fails", "a call fails that has queued its work", "a copy is overdue"} <= set(+result.faults)


@pytest.mark.slow
def test_a_long_storm_of_faults_on_the_tiers_of_a_device(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    result = device.storm(100_000, 6, 5)
    assert result.wrong == []
    assert min(result.faults[f"found damaged, {tier}"] for tier in ("host", "disk", "store")) > 0
