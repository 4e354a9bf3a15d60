"""A decode worker that stops reading holds up its own transfers, and nobody else's."""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from benchmarks.fault_cases import case_of
from benchmarks.fault_storage import SHAPES, Storage
from benchmarks.fault_worker import Setup, main
from benchmarks.transfer_ends import fingerprint
from kvtransfer.endpoint import make_sender
from kvtransfer.grants import grant_from_proto
from pdserve.v1 import transfer_pb2
from tests.unit.kvtransfer.harness import Heard

SEED = 9
SHAPE = "bundled"  # blocks of 96 KiB: a few transfers fill every buffer on the way
START_S = 60.0  # of a process, on a machine that is busy with others
CALM = [n for n in range(1, 4000) if (case := case_of(SEED, n)).fault is None and case.deadline_s > 1.3]


class Peer:
    """A decode process of the storm."""

    def __init__(self, name: str, transport: str) -> None:
        context = multiprocessing.get_context("forkserver")
        self.driver: Connection
        self.driver, theirs = context.Pipe()
        setup = Setup(name=name, role="decode", transport=transport, seed=SEED, shape=SHAPE, host="127.0.0.1")
        self.process = context.Process(target=main, args=(setup, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.hear("ready")

    def hear(self, word: str, number: int | None = None) -> tuple[Any, ...]:
        """The first news of that kind."""
        while self.driver.poll(START_S):
            for news in self.driver.recv():
                if news[0] == word and number in (None, news[1]):
                    return tuple(news)
        raise AssertionError(f"no {word}")

    def grant(self, number: int) -> Any:
        self.driver.send([("grant", number)])
        return grant_from_proto(transfer_pb2.Grant.FromString(self.hear("granted", number)[2]))

    def close(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGCONT)
        self.driver.send([("quit",)])
        self.process.join(10)
        self.driver.close()


@pytest.fixture
def make_peer(transport: str) -> Iterator[Callable[[str], Peer]]:
    peers: list[Peer] = []

    def make(name: str) -> Peer:
        peers.append(Peer(name, transport))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


def test_a_peer_that_stops_reading_delays_only_its_own_transfers(
    make_peer: Callable[[str], Peer], transport: str
) -> None:
    storage = Storage(SHAPES[SHAPE])
    facts = fingerprint(storage.pool.block_bytes)
    sender = make_sender(
        storage.pool, facts, worker_id="p0", incarnation="1", transport=transport, stamps=storage.stamps
    )
    silent, live = make_peer("d0"), make_peer("d1")
    numbers = iter(CALM)

    def begin(grant: Any, number: int, deadline_s: float, sources: int = 0) -> Heard:
        """From blocks `sources` and on, each of which holds what it must."""
        heard = Heard()
        sender.start(grant, heard, deadline_s)
        blocks = range(sources, sources + len(grant.blocks))
        storage.fill(blocks, number)
        sender.push(grant.key, list(enumerate(blocks)), True)
        return heard

    def move() -> float:
        """Seconds per block of a transfer to the live peer."""
        number = next(numbers)
        grant = live.grant(number)
        began_s = time.monotonic()
        assert begin(grant, number, 20.0).wait().outcome.value == "sent"
        return (time.monotonic() - began_s) / len(grant.blocks)

    try:
        move()
        before_s = statistics.median(move() for _ in range(25))
        stuck = [(silent.grant(number), number) for number in [next(numbers) for _ in range(12)]]
        os.kill(silent.process.pid or 0, signal.SIGSTOP)
        began_s = time.monotonic()
        victims = [begin(grant, number, 1.5, 24 * (1 + i)) for i, (grant, number) in enumerate(stuck)]
        during_s = statistics.median(move() for _ in range(25))
        ends = [victim.wait() for victim in victims]
        took_s = time.monotonic() - began_s
    finally:
        sender.close()
    print(f"{transport}: {before_s * 1e6:.0f} us a block before, {during_s * 1e6:.0f} us meanwhile")
    assert during_s < 3 * before_s
    assert {end.outcome.value for end in ends} == {"failed"}, "nothing can have been acknowledged"
    assert all("deadline" in end.error for end in ends)
    assert took_s < 1.5 + 1.0, "the source blocks are free at the deadline"
