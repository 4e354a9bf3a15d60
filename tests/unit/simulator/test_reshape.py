"""Traces made from other traces, and generated ones."""

from __future__ import annotations

import math
from collections import Counter
from itertools import count, islice

import pytest

from pdserve.core.errors import ConfigError
from simulator.model import TraceRequest
from simulator.traces.reshaped import Joined, Reshaped, first, jittered, rate_scaled, window
from simulator.traces.workloads import Poisson, chat, log_normal


class Listed:
    def __init__(self, *arrivals_s: float, ids: tuple[int, ...] = (), block_tokens: int = 0) -> None:
        self.name = "listed"
        self.block_tokens = block_tokens
        self._requests = [
            TraceRequest(arrival_s=at_s, prompt_tokens=10 + number, output_tokens=1, block_ids=ids)
            for number, at_s in enumerate(arrivals_s)
        ]

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._requests)


def arrivals(trace: object) -> list[float]:
    return [one.arrival_s for one in trace]  # type: ignore[attr-defined]


def test_a_rate_scale_divides_arrivals_only() -> None:
    before = Listed(0.0, 1.0, 4.0)
    after = Reshaped(before, rate_scaled(2.0))
    assert arrivals(after) == [0.0, 0.5, 2.0]
    assert [one.prompt_tokens for one in after] == [10, 11, 12]
    assert arrivals(after) == [0.0, 0.5, 2.0]


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_an_invalid_rate_scale_is_rejected(scale: float) -> None:
    with pytest.raises(ConfigError, match="rate_scale"):
        rate_scaled(scale)


def test_jitter_spreads_each_group_over_its_quantum_and_keeps_the_order() -> None:
    stamps = [3.0 * (number // 40) for number in range(4000)]
    spread = Reshaped(Listed(*stamps), jittered(7, 3.0))
    seen = arrivals(spread)
    assert seen == sorted(seen)
    assert [one.prompt_tokens for one in spread] == list(range(10, 4010))
    offsets = [after - before for before, after in zip(stamps, seen, strict=True)]
    assert min(offsets) >= 0.0
    assert max(offsets) < 3.0
    assert sum(offsets) / len(offsets) == pytest.approx(1.5, abs=0.1)
    assert len(set(seen)) == len(seen)
    assert arrivals(spread) == seen
    assert arrivals(Reshaped(Listed(*stamps), jittered(8, 3.0))) != seen


def test_jitter_stops_at_the_next_group() -> None:
    seen = arrivals(Reshaped(Listed(*[0.0] * 50, *[0.5] * 50), jittered(1, 3.0)))
    assert max(seen[:50]) < 0.5
    assert max(seen[50:]) > 2.0


def test_a_limit_reads_no_further_than_needed() -> None:
    endless = (TraceRequest(arrival_s=float(at), prompt_tokens=1, output_tokens=1) for at in count())
    assert [one.arrival_s for one in first(3)(endless)] == [0.0, 1.0, 2.0]
    assert next(endless).arrival_s == 3.0
    with pytest.raises(ConfigError, match="limit"):
        first(0)


def test_a_window_begins_at_zero() -> None:
    assert arrivals(Reshaped(Listed(0.0, 1.0, 2.0, 3.0, 4.0), window(1.0, 3.0))) == [0.0, 1.0]
    with pytest.raises(ConfigError, match="window"):
        window(3.0, 3.0)


def test_steps_are_taken_in_their_order() -> None:
    assert arrivals(Reshaped(Listed(0.0, 2.0, 4.0), rate_scaled(2.0), window(1.0, 9.0))) == [0.0, 1.0]
    assert arrivals(Reshaped(Listed(0.0, 2.0, 4.0), window(1.0, 9.0), rate_scaled(2.0))) == [0.5, 1.5]


def test_consecutive_traces_share_no_prefix() -> None:
    before = Listed(0.0, 5.0, 10.0, ids=(0, 1), block_tokens=512)
    joined = Joined(before, Listed(0.0, 1.0, ids=(0, 1)), at_s=10.0)
    assert arrivals(joined) == [0.0, 5.0, 10.0, 11.0]
    assert [one.block_ids for one in joined] == [(0, 2), (0, 2), (1, 3), (1, 3)]
    assert joined.block_tokens == 512
    with pytest.raises(ConfigError, match="block_tokens"):
        Joined(before, Listed(block_tokens=16), at_s=1.0)


def test_poisson_arrivals_have_their_rate_and_their_spread() -> None:
    trace = Poisson(
        rate_rps=20.0, duration_s=500.0, prompts=lambda rng: rng.choice((5, 7)), outputs=lambda rng: 3, seed=4
    )
    requests = list(trace)
    assert len(requests) == pytest.approx(10_000, rel=0.05)
    assert {one.prompt_tokens for one in requests} == {5, 7}
    assert {one.output_tokens for one in requests} == {3}
    gaps = [after - before for before, after in zip(arrivals(trace), arrivals(trace)[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation / mean == pytest.approx(1.0, abs=0.05)  # It is 1 for an exponential distribution.


def test_log_normal_lengths_have_their_median_and_limits() -> None:
    trace = chat(rate_rps=100.0, duration_s=60.0, seed=2)
    own = sorted(one.prompt_tokens - trace.prefix_tokens for one in trace)
    assert own[len(own) // 2] == pytest.approx(1000, rel=0.1)
    assert own[0] >= 1
    assert own[-1] <= 32_000
    with pytest.raises(ConfigError, match="lengths"):
        log_normal(median=10.0, spread=1.0, most=5)


def test_prompts_with_the_same_prefix_share_its_blocks_and_no_other() -> None:
    trace = chat(rate_rps=50.0, seed=1)
    uses = Counter(block for one in trace for block in one.block_ids)
    shared = {block for block, times in uses.items() if times > 1}
    assert shared == set(range(trace.num_prefixes * trace.prefix_tokens // trace.block_tokens))
    for one in islice(trace, 100):
        assert len(one.block_ids) == -(-one.prompt_tokens // trace.block_tokens)


def test_equal_seeds_give_equal_workloads() -> None:
    assert list(chat(seed=3)) == list(chat(seed=3))
    assert list(chat(seed=3)) != list(chat(seed=4))
