"""A storm of faults on the shared store: no wrong block may be used, no prompt may wait for a store that hangs, and no
file of a killed writer may stay.

The prompts are those of tiers.py. The store is a folder, or a real Redis. Its calls fail at random: they
are late, hang, raise, or lose what they should write. Between them, another party damages objects: it tears them, flips
bits, replaces one by another, makes them larger, and deletes them. After some restarts there is no disk tier.
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.fault_storm.tier_pool import BLOCK_BYTES, CONTENTS, FEW, content_of, hash_of
from benchmarks.fault_storm.tiers import TierResult, TierStorm, count_kills, lost_threads
from pdserve.engine.memory.object_stores import open_object_store
from pdserve.engine.memory.object_stores.interface import ObjectStore
from pdserve.engine.memory.sealed_objects import NONCE_BYTES, TAG_BYTES, Seal
from pdserve.engine.memory.slow_tier import ReadSpeed, SlowTier
from pdserve.engine.memory.store import StoreTier
from pdserve.prefix.embedded import EmbeddedRedis

SECRET: Final = "the secret of the storm's cluster"
OBJECT_BYTES: Final = BLOCK_BYTES + NONCE_BYTES + TAG_BYTES
MOST_OBJECTS: Final = 1000
HANG_S: Final = 0.3
DAMAGED: Final = 0.3  # of the calls, objects
SEAL: Final = Seal(SECRET, CONTENTS, BLOCK_BYTES)


class FaultyStore:
    """A store of which a share of the calls fails, and whose objects others damage."""

    def __init__(self, store: ObjectStore, rng: random.Random, share: float, counts: Counter[str]) -> None:
        self._store, self._rng, self._share, self._counts = store, rng, share, counts
        self._guard = threading.Lock()
        self._names: list[str] = []  # that were written lately
        self._is_dead = False

    @property
    def most_got(self) -> int:
        return 4

    def die(self) -> None:
        """Nothing that is written from now on arrives whole."""
        self._is_dead = True

    def _fail(self) -> None:
        with self._guard:
            kind = self._rng.choice(["slow", "hangs", "unreachable"]) if self._rng.random() < self._share else ""
            self._counts[f"store {kind}"] += bool(kind)
            slow_s = self._rng.choice([0.0005, 0.005])
        match kind:
            case "slow":
                time.sleep(slow_s)
            case "hangs":
                time.sleep(HANG_S)
            case "unreachable":
                raise OSError(errno.ECONNREFUSED, "injected")

    def _damage(self) -> None:
        """By a party that may write to the store, and does not know the secret."""
        with self._guard:
            if not self._names or self._rng.random() >= DAMAGED:
                return
            name, other = self._rng.choice(self._names), self._rng.choice(self._names)
            kind = self._rng.choice(["torn", "flipped bit", "replaced", "too large", "deleted", "forged"])
            at, bit = self._rng.randrange(OBJECT_BYTES), 1 << self._rng.randrange(8)
        [found], [source] = self._store.get([name]), self._store.get([other])
        if found is None or source is None:
            return
        self._counts[f"object {kind}"] += 1
        changed = bytearray(found)
        match kind:
            case "torn":
                changed = changed[:at]
            case "flipped bit":
                changed[at] ^= bit
            case "replaced":
                changed = bytearray(source)
            case "too large":
                changed += bytes(2**16)
            case "forged":
                other_seal = Seal("the secret of another cluster", CONTENTS, BLOCK_BYTES)
                changed = bytearray(other_seal.close(hash_of(at), bytes(BLOCK_BYTES)))
            case "deleted":
                self._store.delete([name])
                return
        self._store.put([(name, bytes(changed) or b"x")])

    def num_found(self, names: Sequence[str]) -> int:
        self._fail()
        return self._store.num_found(names)

    def are_there(self, names: Sequence[str]) -> list[bool]:
        self._fail()
        return self._store.are_there(names)

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        self._fail()
        self._damage()  # also between a lookup and its read
        return self._store.get(names)

    def put(self, objects: Sequence[tuple[str, bytes]]) -> None:
        self._fail()
        with self._guard:
            is_full = self._rng.random() < self._share / 4
            is_lost = self._is_dead or self._rng.random() < self._share / 4
            cut = self._rng.randrange(len(objects) + 1)
            self._names = [*self._names, *(name for name, _ in objects)][-256:]
        if is_lost:
            self._counts["written objects lost"] += 1
            self._store.put(objects[:cut]) if cut else None
            return
        if is_full:
            self._counts["store full"] += 1
            self._store.put(objects[:cut]) if cut else None
            raise OSError(errno.ENOSPC, "injected")
        self._store.put(objects)
        self._damage()

    def make_room(self) -> None:
        self._fail()
        self._store.make_room()

    def delete(self, names: Iterable[str]) -> None:
        self._fail()
        self._store.delete(names)

    def close(self) -> None:
        self._store.close()


class StoreStorm(TierStorm):
    """`url`: of the store, or a folder's if it is empty."""

    def __init__(self, folder: Path, seed: int, url: str = "", *, share: float = 0.1) -> None:
        (folder / "shared").mkdir(parents=True)
        self._url = url or f"file://{folder}/shared"
        super().__init__(folder / "disk", seed, share=share)
        self._all_files = folder

    def _open_tiers(self) -> dict[str, SlowTier[Any, Any]]:
        rng = random.Random(self.rng.random())
        store = open_object_store(self._url, SEAL.room, OBJECT_BYTES, MOST_OBJECTS * OBJECT_BYTES)
        self._faulty = FaultyStore(store, rng, self._share, self.result.faults)
        self._store_tier = StoreTier(
            self._faulty,
            SEAL,
            self.pool,
            write_bytes_s=2.0**34,
            now=self.now,
            first_pause_s=0.001,
            speed=ReadSpeed(1e6, 0.001),
            lookup_s=0.001,
            **self._staged(StoreTier.num_readers),
        )
        self._store_tier.looked = lambda: self._calls.put(lambda: self.fetches.looked_up())
        tiers = super()._open_tiers()
        if self.rng.random() < 0.7:  # most of what the store has would be on disk too
            tiers.pop("disk").close()
        return {**tiers, "store": self._store_tier}

    def _reused(self, hashes: Sequence[bytes], blocks: Sequence[int], holds: Callable[[int, bytes], bool]) -> None:
        self._store_tier.take_reused(hashes, blocks, holds)

    def advance(self) -> None:
        super().advance()
        self._pump(0.005)  # a lookup or a fetch takes longer than the next call
        self._act(self.fetches.expire(time.monotonic()))  # lookups that hang

    def close(self, *, is_killed: bool = False) -> None:
        self._faulty.die() if is_killed and self.rng.random() < 0.5 else None
        super().close(is_killed=is_killed)


# --- processes that are killed ----------------------------------------------------------------------------------


def write_until_killed(url: str, seed: int) -> None:
    """Ends only if it is killed."""
    store = open_object_store(url, SEAL.room, OBJECT_BYTES, MOST_OBJECTS * OBJECT_BYTES)
    rng = random.Random(seed)
    print("ready", flush=True)
    while True:
        hashes = [hash_of(rng.randrange(FEW)) for _ in range(rng.randrange(1, 20))]
        store.put([(SEAL.name(one), SEAL.close(one, content_of(one))) for one in hashes])
        store.make_room()


def kill_writers(url: str, seed: int, num_kills: int) -> tuple[int, list[str]]:
    """Two writers at a time. Returns how many blocks were read after kills, and what was wrong."""
    rng, num_read, wrong = random.Random(seed), 0, list[str]()
    store = open_object_store(url, SEAL.room, OBJECT_BYTES, MOST_OBJECTS * OBJECT_BYTES)
    for number in range(num_kills):
        command = [sys.executable, "-m", "benchmarks.fault_storm.store", url]
        writers = [subprocess.Popen([*command, str(seed + number + at)], stdout=subprocess.PIPE) for at in (0, 1)]
        for writer in writers:
            assert writer.stdout is not None
            writer.stdout.readline()
        time.sleep(rng.random() * 0.05)
        for writer in writers:
            writer.kill()
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()
        for block_hash in map(hash_of, range(FEW)):
            [sealed] = store.get([SEAL.name(block_hash)])
            if sealed is not None:
                num_read += 1
                if SEAL.open(block_hash, sealed) != content_of(block_hash):
                    wrong.append(f"a torn object after kill {number + 1}")
    store.close()
    return num_read, wrong


def storm(
    num_operations: int, seed: int, num_kills: int, progress: Callable[[TierResult], None] = lambda result: None
) -> TierResult:
    """A folder first, then a real Redis."""
    total, former = TierResult(), set(threading.enumerate())
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis.start() as server:
        for number, url in enumerate(("", server.url)):
            result = StoreStorm(Path(folder) / str(number), seed + number, url).run(num_operations // 2, progress)
            (Path(folder) / f"killed-{number}").mkdir()
            killed = url or f"file://{folder}/killed-{number}"
            count_kills(result, 2 * num_kills, *kill_writers(killed, seed, num_kills))
            total = total + result
    total.wrong += lost_threads(former)
    return total


if __name__ == "__main__":
    os.nice(5)
    write_until_killed(sys.argv[1], int(sys.argv[2]))
