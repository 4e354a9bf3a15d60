"""Simulated tiers below the pool, and the benchmark of what is loaded from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from benchmarks.choice import (
    LENGTHS,
    NEVER,
    OURS,
    PATIENT,
    RULES,
    Compared,
    Figure,
    Mix,
    compare,
    one_for_all,
    overall,
)
from pdserve.core.kv.fetch import Fetch
from pdserve.core.types import Role
from pdserve.profiles import load_profile
from simulator.cluster.agenda import Agenda
from simulator.cluster.tiers import BURST_BYTES, SimulatedDisk, SimulatedQueuedCopies
from simulator.cluster.world import World
from simulator.model import SimConfig, TraceRequest, WorkerShape
from simulator.search.layouts import make_workers

ATTEMPT: Any = None  # the disk does not look at it


@dataclass
class Rig:
    """A disk of 4 blocks, which takes 1 s for each and 0.5 s for each read."""

    def __post_init__(self) -> None:
        self.agenda = Agenda()
        shape = make_workers(load_profile("h100-sxm.llama-3.1-8b.bf16"), 0, 1)[0]
        block_bytes = 16 * shape.kv_bytes_per_token
        shape = replace(shape, disk_bytes=4 * block_bytes, disk_bytes_per_s=float(block_bytes), disk_latency_s=0.5)
        self.changes: list[tuple[bytes, bool]] = []
        self.disk = SimulatedDisk(self.agenda, shape, 16, self._changed)
        self.ends: list[tuple[float, int, int]] = []

    def _changed(self, hashes: Sequence[bytes]) -> None:
        self.changes += [(one, one in self.disk) for one in hashes]

    def read(self, number: int, hashes: Iterable[bytes]) -> None:
        hashes = tuple(hashes)
        fetch = Fetch(
            number=number,
            source="disk",
            attempt=ATTEMPT,
            first=0,
            hashes=hashes,
            blocks=tuple(range(len(hashes))),
            started_s=0.0,
            predicted_s=0.0,
        )
        self.disk.begin(fetch, lambda count: self.ends.append((self.agenda.now_s, number, count)))

    def run(self) -> None:
        while self.agenda.step():
            pass


def names(count: int, first: int = 0) -> list[bytes]:
    return [bytes([first + at]) for at in range(count)]


def test_one_fetch_is_read_after_the_other() -> None:
    rig = Rig()
    for one in names(4):
        rig.disk.take_block(one, 0)
    assert rig.disk.num_found(ATTEMPT, [*names(4), b"none"], 0) == 4
    assert rig.disk.predict_s(ATTEMPT, 2) == pytest.approx(2.5)
    rig.read(1, names(2))
    rig.read(2, names(3))
    assert rig.disk.predict_s(ATTEMPT, 1) == pytest.approx(2.5 + 3.5 + 1.5)
    rig.run()
    assert rig.ends == [(pytest.approx(2.5), 1, 2), (pytest.approx(6.0), 2, 3)]


def test_an_abort_ends_a_read() -> None:
    rig = Rig()
    for one in names(4):
        rig.disk.take_block(one, 0)
    for number in (1, 2, 3):
        rig.read(number, names(4))
    rig.agenda.at(2.75, rig.disk.abort, 1)  # two of its blocks have been read
    rig.agenda.at(3.0, rig.disk.abort, 3)
    rig.run()
    assert rig.ends == [(2.75, 1, 2), (3.0, 3, 0), (pytest.approx(2.75 + 4.5), 2, 4)]


def test_the_oldest_block_leaves() -> None:
    rig = Rig()
    for one in names(4):
        rig.disk.take_block(one, 0)
    rig.disk.take_copy(names(1)[0], 0)  # nearly the next to leave, so it is written anew
    rig.disk.take_block(b"new", 0)
    assert names(1)[0] in rig.disk
    assert rig.changes[-2:] == [(b"new", True), (names(1, 1)[0], False)]
    rig.read(1, names(3))
    rig.run()
    assert [count for _, _, count in rig.ends] == [1]  # not beyond the one that has left


def test_copies_beside_steps_are_staged() -> None:
    agenda = Agenda()
    shape = make_workers(load_profile("h100-sxm.llama-3.1-8b.bf16"), 0, 1)[0]
    assert shape.copies_beside_steps
    block_bytes = 2 * BURST_BYTES // 8
    size = block_bytes // shape.kv_bytes_per_token
    shape = replace(shape, host_bytes=9 * block_bytes, host_bytes_per_s=float(block_bytes))
    copies = SimulatedQueuedCopies(agenda, shape, size)
    assert (copies.num_slots, copies.most_saved, copies.room) == (9, 4, 8)
    for slot in range(4):
        copies.save(slot, slot)
    assert copies.room == 4
    agenda.at(2.5, lambda: None)
    agenda.step()
    assert copies.room == 6  # the link has copied two, and a half


def test_a_mix_is_repeated_until_it_is_decided() -> None:
    def figure(*times_s: float) -> Figure:
        return Figure(times_s, 1.0)

    def compared(*ours_s: float) -> Compared:
        others = {rule: figure(*(10.0 for _ in ours_s)) for rule in RULES}
        return Compared(Mix(LENGTHS[0], 0.1, "disk", 1.0), {**others, OURS: figure(*ours_s)})

    assert compared(5.0).is_within is None  # one seed has no error
    assert compared(10.0, 10.1).is_within
    assert compared(11.0, 11.1).is_within is False
    noisy = compared(9.0, 11.8)
    assert noisy.ratio(NEVER) == pytest.approx(1.04)
    assert noisy.error == pytest.approx(0.14)
    assert noisy.is_within is None
    [one] = compare(
        lengths=[LENGTHS[0]], loads=[0.1], tiers=["disk"], bandwidths_gb_s=[0.3], count=3, seed=1, most_seeds=3
    )
    assert [len(each.times_s) for each in one.figures.values()] == [2] * len(RULES)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE], ids=lambda role: role.value)
def test_prompts_get_from_the_disk_what_has_left_the_pool(role: Role) -> None:
    workers = make_workers(load_profile("h100-sxm.llama-3.1-8b.bf16"), int(role is Role.PREFILL), 1)

    def small(shape: WorkerShape, disk_bytes: int) -> WorkerShape:
        return replace(shape, kv_capacity_tokens=3 * 8_192, disk_bytes=disk_bytes, disk_bytes_per_s=25e9)

    trace = Sessions()
    found = {}
    for disk_bytes in (0, 2**40):
        shapes = tuple(small(one, disk_bytes if one.role is role else 0) for one in workers)
        world = World(trace, SimConfig(workers=shapes, slo=PATIENT, block_size=512))
        result = world.run()
        world.check()
        assert [row.tokens for row in result.requests] == [4] * len(trace.requests)
        found[disk_bytes] = sum(row.cached_tokens for row in result.requests)
    assert found[0] < 0.2 * found[2**40]


class Sessions:
    """Six prompts of 8,000 tokens, three times one after the other."""

    name, block_tokens = "sessions", 512

    def __init__(self) -> None:
        self.requests = [
            TraceRequest(
                arrival_s=2.0 * number,
                prompt_tokens=8_000,
                output_tokens=4,
                block_ids=tuple(range(100 * (number % 6), 100 * (number % 6) + 16)),
            )
            for number in range(18)
        ]

    def __iter__(self) -> Any:
        return iter(self.requests)


def test_the_choice_is_as_good_as_the_best_fixed_rule() -> None:
    short = replace(LENGTHS[0], pool_tokens=4_800)
    several = [
        *compare(lengths=[short], loads=[0.1], tiers=["disk"], bandwidths_gb_s=[0.3, 50.0], count=40, seed=1),
        *compare(lengths=[short], loads=[0.1], tiers=["host"], bandwidths_gb_s=[0.3], count=40, seed=1),
    ]
    assert [set(one.figures) for one in several] == [set(RULES)] * 3
    for one in several:
        assert one.ratio(one.best) < 1.1, one
    slow, fast, slow_host = several
    assert slow.figures["always"].ttft_s > 1.1 * slow.figures[OURS].ttft_s
    assert fast.figures[NEVER].ttft_s > 1.1 * fast.figures[OURS].ttft_s
    assert slow_host.figures["always"].ttft_s > 1.1 * slow_host.figures[OURS].ttft_s
    assert overall(several, one_for_all(several)) > 1.0
