"""Which cached blocks leave first."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest

from pdserve.core.kv import retention as retention_module
from pdserve.core.kv.blocks import BlockAllocator
from pdserve.core.kv.cache import KvCache
from pdserve.core.kv.host_tier import HostTier, LoadRule
from pdserve.core.kv.retention import EvictionQueue, Retention, Segment, block_cost
from pdserve.core.kv.reuse_rates import _WIDTHS_S as WIDTHS_S
from pdserve.core.kv.reuse_rates import Kind, ReuseClass, ReuseRates
from pdserve.core.kv.reuse_rates import _values as values_of

ONCE, OFTEN = (Kind.PRIVATE, 1), (Kind.PRIVATE, 2)


def names(text: int, count: int) -> list[bytes]:
    return [bytes([text]) * 8 + at.to_bytes(8, "big") for at in range(count)]


def use(kv: KvCache, hashes: list[bytes], now_s: float, reuse_within_s: float | None = None) -> int:
    """Computes a text of these blocks of one token. Returns how many were cached."""
    kv.advance(now_s)
    found = kv.allocate(len(hashes) + 1, hashes)
    assert found is not None
    kv.commit(found.blocks, hashes, found.cached_tokens, len(hashes))
    kv.release(found.blocks, reuse_within_s)
    kv.blocks.check(holders=[])
    return found.cached_tokens


def cached(kv: KvCache, hashes: list[bytes]) -> int:
    return kv.blocks.num_matched(hashes)


def pool(num_blocks: int) -> KvCache:
    return KvCache(BlockAllocator(num_blocks), 1)


def test_values_follow_the_rate_of_reuse_and_the_age() -> None:
    rates = ReuseRates()
    for _ in range(200):
        rates.used(OFTEN, 10.0, 1)
        rates.unused(OFTEN, 500.0, 0.1)
        rates.used(ONCE, 10.0, 0.1)
        rates.unused(ONCE, 500.0, 1)
    assert rates.value(OFTEN, 0.0) == 0.0, "nothing is known before an update"
    rates.learn([])
    assert rates.value(OFTEN, 0.0) > 4 * rates.value(ONCE, 0.0) > 0.0
    assert rates.value(OFTEN, 9.0) > rates.value(OFTEN, 0.0), "its use is nearer"
    assert rates.value(OFTEN, 60.0) < 0.1 * rates.value(OFTEN, 9.0), "it was not used when it should have been"


def test_old_observations_lose_weight() -> None:
    rates = ReuseRates()
    rates.used(ONCE, 10.0, 100)
    rates.learn([])
    before = rates.value(ONCE, 0.0)
    for _ in range(300):
        rates.unused(ONCE, 100.0, 1)
        rates.learn([])
    assert rates.value(ONCE, 0.0) < 0.1 * before


def test_the_least_recently_used_text_leaves_first_while_nothing_is_known() -> None:
    kv = pool(9)
    for text in (1, 2):
        use(kv, names(text, 4), now_s=float(text))
    use(kv, names(3, 2), now_s=3.0)  # takes three blocks, of which one was free
    assert [cached(kv, names(text, 4)) for text in (1, 2)] == [2, 4], "the deepest blocks of the older text left"


def test_a_session_that_has_ended_leaves_first() -> None:
    kv = pool(9)
    use(kv, names(1, 4), now_s=1.0)
    use(kv, names(2, 4), now_s=2.0, reuse_within_s=0.0)
    use(kv, names(3, 2), now_s=3.0)
    assert [cached(kv, names(text, 4)) for text in (1, 2)] == [4, 2]


def end(kv: KvCache, hashes: list[bytes]) -> None:
    kv.blocks.end(hashes)
    kv.blocks.check(holders=[])


def test_a_text_whose_session_ends_later_leaves_first() -> None:
    """Also the blocks between and after those that are named: its answer, and those that a router does not keep."""
    kv = pool(17)
    use(kv, names(1, 8), now_s=1.0, reuse_within_s=600.0)
    use(kv, names(2, 8), now_s=2.0, reuse_within_s=600.0)
    end(kv, names(2, 8)[1:6:4])
    use(kv, names(3, 7), now_s=3.0)  # takes eight blocks, of which one was free
    assert [cached(kv, names(text, 8)) for text in (1, 2)] == [8, 1], "the block before the first named one stayed"


def test_the_end_of_a_session_spares_what_other_texts_have_used() -> None:
    kv = pool(32)
    system = names(9, 3)
    for text in (1, 2, 3):
        use(kv, system + names(text, 3), now_s=float(text))
    end(kv, system + names(3, 3))
    known = kv.blocks._retention._known
    assert {known[one].reuse_class[0] for one in system} == {Kind.SHARED}
    assert {known[one].reuse_class[0] for one in names(3, 3)} == {Kind.ENDED}
    assert {known[one].reuse_class[0] for text in (1, 2) for one in names(text, 3)} == {Kind.PRIVATE}


def test_the_end_of_a_session_spares_another_one_with_the_same_beginning() -> None:
    """Two texts have used the beginning, which is too few for a shared one."""
    kv = pool(32)
    system = names(9, 3)
    for text in (1, 2):
        use(kv, system + names(text, 3), now_s=float(text))
    end(kv, system + names(1, 3))
    known = kv.blocks._retention._known
    assert {known[one].reuse_class[0] for one in names(1, 3)} == {Kind.ENDED}
    assert Kind.ENDED not in {known[one].reuse_class[0] for one in system + names(2, 3)}


def test_the_end_of_a_session_spares_what_a_text_uses() -> None:
    kv = pool(16)
    hashes = names(1, 6)
    use(kv, hashes, now_s=1.0)
    kv.advance(2.0)
    found = kv.allocate(4, hashes[:4])
    assert found is not None
    kv.blocks.end(hashes)
    known = kv.blocks._retention._known
    kinds = [known[one].reuse_class[0] for one in hashes]
    kv.release(found.blocks)
    assert kinds.count(Kind.ENDED) == 6 - found.cached_tokens
    assert kinds[0] is Kind.PRIVATE
    kv.blocks.check(holders=[])


def test_the_end_of_a_session_is_idempotent_and_ignores_unknown_blocks() -> None:
    kv = pool(9)
    use(kv, names(1, 4), now_s=1.0)
    end(kv, names(7, 100))
    for _ in range(2):
        end(kv, names(1, 4))
    assert {one.reuse_class for one in kv.blocks._retention._segments} == {(Kind.ENDED, 0)}
    assert use(kv, names(1, 4), now_s=5.0) == 4, "it comes back"
    assert kv.blocks._retention._known[names(1, 4)[0]].reuse_class[0] is not Kind.ENDED


def test_a_text_whose_use_is_announced_stays() -> None:
    kv = pool(9)
    use(kv, names(1, 4), now_s=1.0, reuse_within_s=10.0)
    use(kv, names(2, 4), now_s=2.0)
    use(kv, names(3, 2), now_s=3.0)
    assert [cached(kv, names(text, 4)) for text in (1, 2)] == [4, 2]


def test_announcements_that_do_not_come_true_are_not_believed() -> None:
    retention = Retention(4)
    for number in range(300):
        retention.released([b"%15d." % number], 10.0 * number, 1.0)
    announced = retention._known[b"%15d." % 299].reuse_class
    assert announced[0] is Kind.WITHIN
    fresh = ReuseRates().value(announced, 0.0)
    assert retention.rates.value(announced, 0.0) < 0.1 * fresh


def test_a_session_with_the_same_long_prefix_is_no_later_turn() -> None:
    retention = Retention(1000)
    prefix = names(0, 30)
    for text in range(1, 5):
        retention.released([*prefix, *names(text, 5)], float(text))
    assert retention._known[names(4, 5)[0]].turn == 1
    retention.released([*prefix, *names(4, 5), *names(9, 5)], 6.0)
    assert retention._known[names(9, 5)[0]].turn == 2
    retention.released([*prefix, *names(4, 5), *names(10, 20)], 7.0)
    assert retention._known[names(10, 5)[0]].turn == 2, "the second turn again, with another end"


def test_the_beginning_of_a_text_stays_as_long_as_what_follows_it() -> None:
    kv = pool(10)
    shared = names(0, 4)
    for text in range(1, 4):  # the beginning is shared, and nothing is known of such blocks
        use(kv, [*shared, *names(text, 2)], float(text), reuse_within_s=60.0)
    announced = [*shared, *names(3, 2)]
    for left in range(10, 0, -1):
        assert kv.blocks.num_matched(announced) == min(left, 6), "a block has left before those behind it"
        kv.blocks.allocate(1)


@pytest.mark.parametrize("reuse_within_s", [None, 0.0])
def test_a_beginning_stays_for_an_announced_text_while_others_use_it(reuse_within_s: float | None) -> None:
    kv = pool(14)
    shared = names(0, 4)
    for text in range(1, 4):
        use(kv, [*shared, *names(text, 2)], float(text))
    announced = [*shared, *names(4, 2)]
    use(kv, announced, 4.0, reuse_within_s=60.0)
    use(kv, [*shared, *names(5, 2)], 5.0, reuse_within_s)
    kv.blocks.allocate(8)
    assert kv.blocks.num_matched(announced) == 6


def test_segments_of_a_class_that_end_differently_are_compared() -> None:
    """The worthless ones are neither the oldest nor the newest of their class."""
    rates = ReuseRates()
    queue, announced = EvictionQueue(rates), (Kind.WITHIN, 9)
    shared = (Kind.SHARED, 2)
    for number, end in enumerate((announced, ONCE, announced)):
        queue.add(
            names(number, 1), Segment((shared, end), float(number), number, 1, 1, 1, 0, 1.0, tuple(names(number, 1)))
        )
    assert queue.pop(1, 4.0) == names(1, 1)


def test_a_prefix_of_many_texts_is_shared() -> None:
    retention = Retention(1000)
    for text in range(1, 6):
        retention.released([*names(0, 3), *names(text, 20)], float(text))
    assert retention._known[names(0, 3)[0]].reuse_class[0] is Kind.SHARED
    assert retention._known[names(5, 20)[0]].reuse_class == (Kind.PRIVATE, 1)


@pytest.mark.parametrize(("few", "most"), [(100, 2.5 * 50), (400, 400), (2000, 20 * 50)])
def test_what_is_watched_is_limited(few: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention_module, "FEW_WATCHED", few)
    kv = pool(50)
    draw = random.Random(0)
    for number in range(400):
        use(kv, names(draw.randrange(200), draw.randrange(1, 20)), now_s=float(number))
        assert len(kv.blocks._retention) <= most + 20
    assert len(kv.blocks._retention) > most - 20
    assert kv.blocks.num_free + kv.blocks.num_evictable == 50


def test_texts_that_return_are_kept_among_many_that_do_not() -> None:
    """A scan of texts that are used once, larger than the pool, passes between the uses of ten texts."""
    kv, hits, number = pool(100), 0, 0
    for turn in range(60):
        for text in range(10):
            now_s = 100.0 * turn + 10.0 * text
            found = use(kv, names(text, 5), now_s)
            hits += found if turn >= 30 else 0
            for _ in range(4):
                number += 1
                use(kv, [number.to_bytes(16, "big")[::-1] for number in range(3 * number, 3 * number + 3)], now_s + 1.0)
    assert hits >= 0.9 * 30 * 10 * 5, "with the least recently used order, none"


class Slots:
    num_slots = 2

    def save(self, block: int, slot: int) -> None: ...

    def load(self, slot: int, block: int) -> None: ...


@pytest.mark.parametrize("ends", [True, False])
def test_a_full_host_tier_keeps_what_is_worth_more(ends: bool) -> None:
    tier = HostTier(Slots(), LoadRule(0.0, lambda num_tokens, cached_tokens: 1.0), 100)
    kv = KvCache(BlockAllocator(3, tier=tier), 1)
    use(kv, names(1, 2), 1.0)
    use(kv, names(2, 2), 2.0, 0.0 if ends else None)  # the first text moves to the tier
    use(kv, names(3, 2), 3.0)  # the second leaves the pool
    assert set(tier) == set(names(1 if ends else 2, 2))


class Read(tuple[bytes, ...]):
    num_read = 0

    def __getitem__(self, at: Any) -> Any:
        self.num_read += 1
        return super().__getitem__(at)


def test_blocks_that_come_and_leave_in_turn_cost_the_same_in_long_texts() -> None:
    hashes = Read(names(1, 1000))
    queue = EvictionQueue(ReuseRates())
    segment = Segment((ONCE, ONCE), 1.0, 1, 1, 1, len(hashes), 0, 1.0, hashes)
    left = []
    for at, block_hash in enumerate(reversed(names(1, 1000))):
        queue.add([block_hash], segment)
        if at % 2:
            left += queue.pop(1, 2.0)
    left += queue.pop(len(queue), 2.0)
    assert sorted(left) == names(1, 1000)
    assert hashes.num_read <= 3 * 1000


def test_a_class_that_was_not_seen_yet_is_worth_what_all_are() -> None:
    rates = ReuseRates()
    for _ in range(200):
        rates.used(ONCE, 10.0, 1)
        rates.unused(ONCE, 500.0, 1)
    rates.learn([])
    known, unseen = rates.value(ONCE, 0.0), rates.value(OFTEN, 0.0)
    assert 0.5 * known < unseen < 2.0 * known


def test_values_do_not_depend_on_the_seed_of_hashes() -> None:
    script = (
        "import random\n"
        "from pdserve.core.kv.reuse_rates import Kind, ReuseRates\n"
        "rates, draw = ReuseRates(), random.Random(0)\n"
        "for number in range(500):\n"
        "    reuse_class = (draw.choice((Kind.PRIVATE, Kind.SHARED)), draw.randrange(10))\n"
        "    draw.choice((rates.used, rates.unused))(reuse_class, 2.0 ** draw.randrange(12), draw.random())\n"
        "rates.learn([])\n"
        "print([rates.value((Kind.PRIVATE, number), 2.0 ** age) for number in range(10) for age in range(12)])\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
        ).stdout
        for seed in (1, 2, 3)
    }
    assert len(printed) == 1


def test_no_text_waits_while_all_others_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention_module, "_LEARN_SHARE", 16)  # of fewer texts than usual

    class Watched(ReuseRates):
        num_updates = 0

        def learn(self, present: Iterable[tuple[ReuseClass, float, float]]) -> None:
            self.num_updates += 1
            counts = [count for _, _, count in present]
            assert len(counts) <= 1024
            assert sum(counts) == pytest.approx(min(number + 1, len(retention)))

    retention = Retention(200)
    retention.rates = rates = Watched()
    for number in range(8000):
        before = len(retention)
        retention.released([number.to_bytes(16, "big")], float(number))
        assert len(retention) >= before - 4
    assert len(retention) <= 20 * 200 + 4
    assert rates.num_updates < 45, "updates are as frequent as with few texts"
    retention.check()


def test_the_cost_of_a_block_grows_with_its_depth() -> None:
    cost = block_cost(lambda num_tokens, cached: 0.01 + 1e-8 * num_tokens * (1e4 + cached), 16)
    assert cost(4096) > 4 * cost(0), "one step for each block would hide it"


def test_a_block_that_costs_more_stays() -> None:
    retention = Retention(8, computed_s=lambda first: 1.0 if first == 0 else 10.0)
    retention.rates.used(ONCE, 50.0, 1)
    retention.rates.learn([])
    for at_s, hashes in ((1.0, names(1, 3)), (2.0, names(2, 1))):  # the first text's cost is that of its middle
        retention.released(hashes, at_s)
        retention.may_leave_pool(reversed(hashes), at_s)
    assert retention.pool.pop(1, 3.0) == names(2, 1)


def queue_of(rates: ReuseRates, *segments: tuple[float, float]) -> EvictionQueue:
    """Of segments of one block: the time of their use, and the cost."""
    queue = EvictionQueue(rates)
    for number, (at_s, cost) in enumerate(segments):
        hashes = tuple(names(number, 1))
        queue.add(hashes, Segment((ONCE, ONCE), at_s, number, 1, 1, 1, 0, cost, hashes))
    return queue


def test_the_newest_block_of_a_class_may_be_the_least_valuable() -> None:
    rates = ReuseRates()
    rates.used(ONCE, 10.0, 200)
    rates.learn([])
    assert queue_of(rates, (1.0, 1.0), (2.0, 1.0), (10.0, 1.0)).pop(1, 10.0) == names(2, 1), "the others' use is near"


def test_values_that_hardly_differ_leave_in_the_order_of_use() -> None:
    rates = ReuseRates()
    rates.used(ONCE, 10.0, 200)
    rates.learn([])
    one = 1.0 / rates.value(ONCE, 0.0)
    assert queue_of(rates, (1.0, 1.7 * one), (1.0, 1.1 * one)).pop(1, 1.0) == names(0, 1)
    assert queue_of(rates, (1.0, 2.3 * one), (1.0, 1.1 * one)).pop(1, 1.0) == names(1, 1)


def test_ended_sessions_leave_first_as_long_as_none_was_used() -> None:
    rates = ReuseRates()
    for kind in (Kind.PRIVATE, Kind.ENDED):
        rates.unused((kind, 0), 10.0, 100)
    rates.learn([])
    assert rates.value((Kind.ENDED, 0), 0.0) < rates.value((Kind.PRIVATE, 0), 0.0)
    rates.used((Kind.ENDED, 0), 10.0, 100)
    rates.learn([])
    assert rates.value((Kind.ENDED, 0), 0.0) > rates.value((Kind.PRIVATE, 0), 0.0)


def test_blocks_that_a_text_uses_are_neither_forgotten_nor_at_risk() -> None:
    class Watched(ReuseRates):
        num_seen = 0

        def learn(self, present: Iterable[tuple[ReuseClass, float, float]]) -> None:
            self.num_seen = sum(1 for _ in present)

    kv = pool(8)
    kv.blocks._retention.rates = rates = Watched()
    running = names(1, 4)
    use(kv, running, 1.0)
    assert kv.allocate(5, running) is not None
    for number in range(2, 258):
        kv.advance(float(number))
        kv.blocks._retention.released([number.to_bytes(16, "big")], float(number))
        if number == 256:
            assert rates.num_seen == len(kv.blocks._retention._segments) - 1
    assert all(one in kv.blocks._retention._known for one in running)


def test_values_are_the_highest_ratios() -> None:
    draw = random.Random(0)
    for _ in range(50):
        used = [draw.choice((0.0, draw.random())) for _ in WIDTHS_S]
        risk = [sum(used[age:]) + draw.random() for age in range(len(used))]
        stays = [1.0]
        for count, at_risk in zip(used, risk, strict=True):
            stays.append(stays[-1] * (1.0 - count / (at_risk + 4.0)))
        for first, value in enumerate(values_of(used, risk, [0.0] * len(used))):
            spent_s, ratios = 0.0, []
            for age in range(first, len(used)):
                spent_s += WIDTHS_S[age] * 0.5 * (stays[age] + stays[age + 1])
                ratios.append((stays[first] - stays[age + 1]) / spent_s)
            assert value == pytest.approx(max(ratios))
