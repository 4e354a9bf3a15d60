"""The threads of the disk tier: what they report, and when, while the device fails, hangs or is slow."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fault_storm.tier_pool import BLOCK_BYTES, CONTENTS, StormPool, content_of, hash_of
from pdserve.core.attempt import Attempt, AttemptKey
from pdserve.core.kv.fetch import Fetch
from pdserve.core.types import Sampling
from pdserve.engine.memory import slow_tier
from pdserve.engine.memory.block_files import BlockFiles, FileCalls
from pdserve.engine.memory.disk import DiskTier

PATIENT_S = 60.0  # longer than any machine needs
ATTEMPT = Attempt(key=AttemptKey(1, "a", 1), prompt_ids=(1,), sampling=Sampling())


class Calls(FileCalls):
    """Reads and writes that wait until they may go on."""

    def __init__(self) -> None:
        self.may_read, self.may_write = threading.Event(), threading.Event()
        self.may_read.set()
        self.may_write.set()
        self.reads, self.writes = threading.Event(), threading.Event()  # one has begun

    def read(self, descriptor: int, parts: Sequence[Any], offset: int) -> int:
        self.reads.set()
        assert self.may_read.wait(PATIENT_S)
        return super().read(descriptor, parts, offset)

    def write(self, descriptor: int, parts: Sequence[Any], offset: int) -> int:
        self.writes.set()
        assert self.may_write.wait(PATIENT_S)
        return super().write(descriptor, parts, offset)


class Tier:
    """A disk tier, and a pool that has the content of `hash_of(n)` in block n."""

    def __init__(self, folder: Path) -> None:
        self.calls, self.pool, self.now_s = Calls(), StormPool(), 0.0
        for block in range(20):
            self.pool.write(block, content_of(hash_of(block)))
        self.changes: list[tuple[list[bytes], list[bytes]]] = []
        self.files = files_in(folder, self.calls)
        self.tier = DiskTier(
            self.files,
            self.pool,  # type: ignore[arg-type]
            None,
            write_bytes_s=1e12,
            now=lambda: self.now_s,
        )
        self.tier.changed = lambda added, removed: self.changes.append((list(added), list(removed)))
        self.ends: list[int] = []
        self.ended = threading.Event()

    def put(self, *numbers: int) -> None:
        for number in numbers:
            self.tier.take_block(hash_of(number), number)
        assert self.tier.flush(PATIENT_S)

    def begin(self, numbers: Sequence[int], blocks: Sequence[int], number: int = 1) -> None:
        fetch = Fetch(
            number=number,
            source="disk",
            attempt=ATTEMPT,
            first=0,
            hashes=tuple(map(hash_of, numbers)),
            blocks=tuple(blocks),
            started_s=0.0,
            predicted_s=0.0,
        )
        self.tier.begin(fetch, self.end)

    def end(self, count: int) -> None:
        self.ends.append(count)
        self.ended.set()

    def close(self) -> None:
        self.calls.may_read.set()
        self.calls.may_write.set()
        self.tier.close()


def files_in(folder: Path, calls: FileCalls | None = None) -> BlockFiles:
    return BlockFiles(
        folder,
        "w",
        block_bytes=BLOCK_BYTES,
        num_bytes=2**22,
        most_slots=10**6,
        contents=CONTENTS,
        calls=calls,
    )


@pytest.fixture
def start(tmp_path: Path) -> Any:
    tiers: list[Tier] = []

    def begin() -> Tier:
        tiers.append(Tier(tmp_path))
        return tiers[-1]

    yield begin
    for one in tiers:
        one.close()


Start = Callable[[], Tier]


def test_no_end_is_reported_while_a_read_runs(start: Start) -> None:
    """One of two reads fails at once, by a defect; the other hangs."""
    tier = start()
    tier.put(0, 1, 2, 3, 4)
    tier.calls.reads.clear()
    tier.calls.may_read.clear()
    tier.begin([0, 3], [10, 10**9])
    assert tier.calls.reads.wait(PATIENT_S)
    assert not tier.ended.wait(0.2)  # if this is too short, the test shows nothing, and does not fail
    tier.calls.may_read.set()
    assert tier.ended.wait(PATIENT_S)
    assert tier.ends == [1]
    assert tier.pool.read(10) == content_of(hash_of(0))
    tier.ended.clear()
    tier.begin([0, 3], [10, 11], 2)  # the threads live on
    assert tier.ended.wait(PATIENT_S)
    assert tier.ends == [1, 2]


def test_a_hung_read_does_not_delay_the_end_of_the_process(
    new_threads: Callable[[], list[threading.Thread]], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_tier, "JOIN_S", 0.05)
    tier = start()
    tier.put(0)
    tier.calls.may_read.clear()
    tier.calls.reads.clear()
    tier.begin([0], [10])
    assert tier.calls.reads.wait(PATIENT_S)
    threads = [one for one in new_threads() if one.name.startswith("kv-disk")]
    assert threads
    assert all(one.daemon for one in threads)  # the interpreter waits for others
    tier.tier.close()
    assert tier.ends == []  # the read still writes to the block
    tier.calls.may_read.set()
    assert tier.ended.wait(PATIENT_S)
    for one in threads:
        one.join(PATIENT_S)
        assert not one.is_alive()


def test_counts_are_copies(start: Start) -> None:
    """The metrics iterate over them while other threads count."""
    tier = start()
    before = tier.tier.events
    tier.put(0, 1)
    assert not any(before.values())
    assert tier.tier.events["written"] == 2
    assert tier.tier.events.keys() == before.keys()


def test_a_read_that_hangs_is_not_waited_for(start: Start) -> None:
    """Neither while it runs, nor soon after a prompt gave it up."""
    tier = start()
    tier.put(0, 1)
    usual_s = tier.tier.predict_s(ATTEMPT, 1)
    tier.calls.may_read.clear()
    tier.calls.reads.clear()
    tier.begin([0], [10])
    assert tier.calls.reads.wait(PATIENT_S)
    assert tier.tier.predict_s(ATTEMPT, 1) < math.inf
    tier.now_s += 10.0
    assert tier.tier.predict_s(ATTEMPT, 1) == math.inf
    tier.tier.abort(1)
    assert tier.tier.read_s(1) > 10 * usual_s
    tier.now_s -= 10.0
    tier.calls.may_read.set()
    assert tier.ended.wait(PATIENT_S)
    assert tier.tier.predict_s(ATTEMPT, 1) < math.inf
    assert tier.tier.read_s(1) > 2 * usual_s


def test_a_clock_that_goes_back_stops_nothing(start: Start) -> None:
    """Neither the end of a pause, nor what is learned of reads: none has taken less than no time."""
    tier = start()
    tier.put(0, 1)
    usual_s = tier.tier.read_s(1)
    tier.tier._paused_until_s = tier.tier._now() + 60.0
    tier.now_s -= 1e6
    assert tier.tier.is_stuck
    tier.now_s += 61.0
    assert not tier.tier.is_stuck
    tier.calls.may_read.clear()
    tier.calls.reads.clear()
    tier.begin([0], [10])
    assert tier.calls.reads.wait(PATIENT_S)
    tier.now_s += 2.0 * usual_s
    tier.now_s -= 1e6
    assert tier.tier._now() >= tier.tier._read_began_s
    tier.now_s += 2.0 * usual_s
    tier.calls.may_read.set()
    assert tier.ended.wait(PATIENT_S)
    assert tier.tier.read_s(1) >= usual_s


def test_a_wrong_block_is_never_found_again(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while the writer has it, and not by the next process; but it may be written anew."""
    tier = start()
    added: list[bytes] = []
    whole = BlockFiles.add
    monkeypatch.setattr(BlockFiles, "add", lambda files, one, place: (added.append(one), whole(files, one, place)))
    tier.put(0, 1, 2)
    tier.tier.drop(hash_of(0))
    tier.put()
    tier.calls.may_write.clear()
    tier.calls.writes.clear()
    tier.tier.take_block(hash_of(3), 3)
    assert tier.calls.writes.wait(PATIENT_S)
    tier.tier.drop(hash_of(3))
    tier.tier.drop(hash_of(1))
    tier.tier.take_block(hash_of(1), 1)
    tier.calls.may_write.set()
    tier.put()
    assert [added.count(hash_of(number)) for number in range(4)] == [1, 2, 1, 0]
    assert set(tier.files.hashes()) == {hash_of(1), hash_of(2)}
    tier.close()
    files = files_in(tmp_path)
    assert set(files.hashes()) == {hash_of(1), hash_of(2)}
    files.close()


def test_a_block_that_was_written_anew_is_not_forgotten(start: Start) -> None:
    """If a read of its earlier place fails."""
    tier = start()
    tier.put(0)
    [group] = tier.files.groups([hash_of(0)], 1)
    tier.files.add(hash_of(0), tier.files.write([(hash_of(0), memoryview(content_of(hash_of(0))))])[0])
    tier.files.forget(hash_of(0), group.segment, group.first_slot)
    assert hash_of(0) in tier.files
    tier.files.forget(hash_of(0), group.segment, group.first_slot + 1)
    assert hash_of(0) not in tier.files
