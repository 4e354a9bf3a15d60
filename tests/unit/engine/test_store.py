"""The threads of the shared store: what they write into the pool, and when, while the store hangs or is damaged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest

from benchmarks.fault_storm.store import SEAL
from benchmarks.fault_storm.tier_pool import BLOCK_BYTES, StormPool, content_of, hash_of
from pdserve.core.attempt import Attempt, AttemptKey
from pdserve.core.kv.fetch import Fetch
from pdserve.core.types import Sampling
from pdserve.engine.memory.slow_tier import ReadSpeed
from pdserve.engine.memory.store import StoreTier

PATIENT_S = 60.0  # longer than any machine needs
ATTEMPT = Attempt(key=AttemptKey(1, "a", 1), prompt_ids=(1,), sampling=Sampling())
OTHER = b"\x77" * BLOCK_BYTES  # what another prompt has in a block


class Store:
    """An ObjectStore with the blocks 0 to 19, whose reads wait until they may go on."""

    most_got = 4

    def __init__(self) -> None:
        self.objects = {SEAL.name(one): SEAL.close(one, content_of(one)) for one in map(hash_of, range(20))}
        self.may_read, self.reads = threading.Event(), threading.Event()
        self.may_write, self.writes = threading.Event(), threading.Event()
        self.may_read.set()
        self.may_write.set()

    def num_found(self, names: Sequence[str]) -> int:
        return next((at for at, one in enumerate(names) if one not in self.objects), len(names))

    def are_there(self, names: Sequence[str]) -> list[bool]:
        return [one in self.objects for one in names]

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        self.reads.set()
        assert self.may_read.wait(PATIENT_S)
        return [self.objects.get(one) for one in names]

    def put(self, objects: Sequence[tuple[str, bytes]]) -> None:
        self.writes.set()
        assert self.may_write.wait(PATIENT_S)
        self.objects.update(objects)

    def make_room(self) -> None:
        pass

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self.objects.pop(name, None)

    def close(self) -> None:
        pass


class Tier:
    def __init__(self) -> None:
        self.store, self.pool, self.now_s = Store(), StormPool(), 0.0
        self.tier = StoreTier(
            self.store,
            SEAL,
            self.pool,  # type: ignore[arg-type]
            None,
            write_bytes_s=1e12,
            now=lambda: self.now_s,
            speed=ReadSpeed(1e9),
            lookup_s=0.001,
        )
        self.ends: list[tuple[str, int]] = []

    def begin(self, name: str, numbers: Sequence[int], blocks: Sequence[int], number: int = 1) -> None:
        fetch = Fetch(
            number=number,
            source="store",
            attempt=ATTEMPT,
            first=0,
            hashes=tuple(map(hash_of, numbers)),
            blocks=tuple(blocks),
            started_s=0.0,
            predicted_s=0.0,
        )
        self.tier.begin(fetch, lambda count: self.ends.append((name, count)))

    def until_read(self) -> None:
        """No reader has a fetch any more."""
        until(lambda: self.tier._num_pending == 0)

    def close(self) -> None:
        self.store.may_read.set()
        self.store.may_write.set()
        self.tier.close()


def until(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENT_S
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.001)


@pytest.fixture
def tier() -> Iterator[Tier]:
    opened = Tier()
    yield opened
    opened.close()


def test_an_object_is_opened_as_its_own_block_only() -> None:
    one, other = hash_of(1), hash_of(2)
    sealed = SEAL.close(one, content_of(one))
    assert SEAL.open(one, sealed) == content_of(one)
    assert SEAL.open(other, sealed) is None
    for at in (0, len(sealed) // 2, len(sealed) - 1):
        damaged = bytearray(sealed)
        damaged[at] ^= 1
        assert SEAL.open(one, bytes(damaged)) is None


@pytest.mark.parametrize("number", [1, 2])
def test_a_fetch_that_was_given_up_writes_nothing(tier: Tier, number: int) -> None:
    """Its blocks have other contents before its read ends, also if another fetch runs, be it of the same number."""
    tier.store.may_read.clear()
    tier.begin("given up", [0, 1], [10, 11])
    assert tier.store.reads.wait(PATIENT_S)
    tier.tier.abort(1)
    assert tier.ends == [("given up", 0)]
    tier.pool.write(10, OTHER)
    tier.pool.write(11, OTHER)
    tier.begin("next", [2, 3], [20, 21], number)
    tier.store.may_read.set()
    tier.until_read()
    assert tier.pool.read(10) == tier.pool.read(11) == OTHER
    assert tier.ends == [("given up", 0), ("next", 2)]
    assert [tier.pool.read(block) for block in (20, 21)] == [content_of(hash_of(one)) for one in (2, 3)]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_what_follows_a_damaged_block_is_a_miss(tier: Tier, at: int) -> None:
    """An object under the name of another one, which has the right size and a valid tag."""
    name = SEAL.name(hash_of(at))
    tier.store.objects[name] = tier.store.objects[SEAL.name(hash_of(9))]
    tier.pool.write(10 + at, OTHER)
    tier.begin("damaged", range(3), range(10, 13))
    until(lambda: len(tier.ends) == 1)
    assert tier.ends == [("damaged", at)]
    assert tier.pool.read(10 + at) == OTHER
    assert tier.tier.events["damaged"] == 1
    assert tier.tier.flush(PATIENT_S)
    assert name not in tier.store.objects


def test_a_hung_write_does_not_delay_the_end_of_the_process(tier: Tier) -> None:
    tier.store.objects.clear()
    tier.store.may_write.clear()
    tier.tier.take_block(hash_of(0), 0)
    assert tier.store.writes.wait(PATIENT_S)
    assert not tier.tier.is_stuck
    tier.now_s += 10.0
    assert tier.tier.is_stuck
    began_s = time.monotonic()
    tier.tier.close(0.01)
    assert time.monotonic() - began_s < PATIENT_S / 2
    tier.store.may_write.set()
    until(lambda: not any(thread.is_alive() for thread in tier.tier._threads))
