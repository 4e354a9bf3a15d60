"""When KV is sent: early if that pays by the model, and otherwise at the end."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.cost.latency import CostPrior
from pdserve.core.cost.overlap import exposed_s
from pdserve.core.effects import StepAccount
from prefill_worker.pushing import AT_END, BY_CHUNK, MAX_LINKS, MESSAGE_S, STEP_SHARE, PushPlan, PushRule

COST = CostPrior(prefill_base_s=0.01, prefill_per_token_s=1e-3, prefill_per_token_context_s=1e-7)
CHUNK = 512
BLOCK_BYTES = 400_000
SIZE = 16


def rule(
    choice: str = "auto",
    num_layers: int = 12,
    bandwidth: float | None = None,
    latency_s: float = 1e-3,
    message_s: float = MESSAGE_S,
) -> PushRule:
    made = PushRule(
        COST,
        block_size=SIZE,
        block_bytes=BLOCK_BYTES,
        num_layers=num_layers,
        max_batch_tokens=CHUNK,
        choice=choice,
        message_s=message_s,
    )
    for num_bytes in (10**5, 10**6, 10**7, 10**8) * 8 if bandwidth else ():
        made.sent("d", num_bytes, latency_s + num_bytes / bandwidth)
    return made


def choose(made: PushRule, num_tokens: int, cached: int = 0, receiver_cached_blocks: int = 0) -> PushPlan:
    return made.choose("d", cached=cached, num_tokens=num_tokens, receiver_cached_blocks=receiver_cached_blocks)


def test_a_slow_link_sends_chunks_then_layers() -> None:
    chosen = choose(rule(bandwidth=5e7), 4096)
    assert chosen.is_early
    assert chosen.groups > 1


def test_one_token_beyond_a_chunk_gains_little() -> None:
    prices = rule(bandwidth=5e7).prices("d", cached=0, num_tokens=CHUNK + 1, receiver_cached_blocks=0)
    assert prices[AT_END] - 0.02 < prices[BY_CHUNK] < prices[AT_END], "a step of one token hides little"
    assert prices[PushPlan(True, 6)] > prices[BY_CHUNK], "six messages for one token"


def test_a_short_prompt_over_a_fast_link_is_sent_at_the_end() -> None:
    assert choose(rule(bandwidth=1e10, latency_s=5e-4), 40) == AT_END


def test_a_gain_below_step_variation_is_ignored() -> None:
    made = rule(bandwidth=3e9)  # 34 ms for 100 MB, compared with 5 s of computing.
    prices = made.prices("d", cached=0, num_tokens=4096, receiver_cached_blocks=0)
    assert min(prices.values()) < 0.5 * prices[AT_END]
    assert choose(made, 4096) == AT_END


def test_indivisible_blocks_are_sent_whole() -> None:
    made = rule(num_layers=1, bandwidth=5e7)
    assert choose(made, 4096) == BY_CHUNK
    assert choose(made, 100) == AT_END, "one chunk is one part, early or not"


@pytest.mark.parametrize("choice", ["auto", "layers"])
def test_a_receiver_of_another_shape_gets_whole_blocks(choice: str) -> None:
    made = rule(choice, bandwidth=5e7)
    chosen = made.choose("d", cached=0, num_tokens=4096, receiver_cached_blocks=0, may_divide=False)
    assert chosen == BY_CHUNK


def test_failing_groups_are_not_used() -> None:
    made = rule(bandwidth=5e7)
    tried = []
    for number in range(200):
        chosen = choose(made, 4096)
        if chosen.groups > 1:
            tried.append(number)
        made.ended("d", chosen, is_whole=chosen.groups == 1)
    assert tried == [0, 1, 34, 99]
    assert made.num_withheld == 200 - len(tried)
    assert made.choose("e", cached=0, num_tokens=4096, receiver_cached_blocks=0).groups > 1, "another link"


def test_sent_groups_reset_failures() -> None:
    made = rule(bandwidth=5e7)
    for number in range(40):
        chosen = choose(made, 4096)
        made.ended("d", chosen, is_whole=chosen.groups == 1 or number > 1)
    assert choose(made, 4096).groups > 1
    made.ended("d", choose(made, 4096), is_whole=False)
    assert choose(made, 4096).groups > 1, "one failure"


def test_failure_records_are_bounded() -> None:
    made = rule(bandwidth=5e7)
    for number in range(2 * MAX_LINKS):
        made.ended(f"d{number}", PushPlan(is_early=True, groups=2), is_whole=False)
    assert len(made._failures) == MAX_LINKS


def test_blocks_that_the_receiver_has_cost_nothing() -> None:
    made = rule(bandwidth=5e7)
    prices = made.prices("d", cached=0, num_tokens=4096, receiver_cached_blocks=4096 // SIZE - 1)
    assert prices[AT_END] == pytest.approx(made.link("d").transfer_s(BLOCK_BYTES) + MESSAGE_S)


def test_cached_blocks_are_hidden_by_the_whole_prefill() -> None:
    made = rule(bandwidth=5e7)
    prices = made.prices("d", cached=3584, num_tokens=4096, receiver_cached_blocks=0)
    computing_s = COST.prefill_base_s + 512 * (COST.prefill_per_token_s + COST.prefill_per_token_context_s * 3840)
    exposed_s = 4096 // SIZE * BLOCK_BYTES / made.link("d").bandwidth_bytes_s - computing_s
    assert prices[BY_CHUNK] == pytest.approx(made.link("d").latency_s + exposed_s + 2 * MESSAGE_S, rel=0.02)


def test_expensive_messages_reduce_the_groups() -> None:
    cheap, dear = (
        PushRule(
            COST, block_size=SIZE, block_bytes=BLOCK_BYTES, num_layers=12, max_batch_tokens=CHUNK, message_s=message_s
        )
        for message_s in (MESSAGE_S, 0.02)
    )
    for made in (cheap, dear):
        for num_bytes in (10**5, 10**6, 10**7, 10**8) * 8:
            made.sent("d", num_bytes, 1e-3 + num_bytes / 5e7)
    assert 1 < choose(dear, 4096).groups < choose(cheap, 4096).groups


@given(
    num_tokens=st.integers(1, 9000),
    cached=st.integers(0, 500),
    held_share=st.floats(0, 1),
    bandwidth=st.floats(1e6, 1e11),
    slowdown=st.floats(0, 1e-7),
)
def test_a_chosen_early_plan_costs_less_than_the_end(
    num_tokens: int, cached: int, held_share: float, bandwidth: float, slowdown: float
) -> None:
    made = rule(bandwidth=bandwidth)
    for _ in range(20):
        account = StepAccount(prefill_tokens=CHUNK, prefill_token_context=CHUNK * CHUNK / 2)
        step_s = 0.01 + CHUNK * 1e-3 + 1e-7 * CHUNK * CHUNK / 2
        made.stepped(account, step_s, 0)
        made.stepped(account, step_s + slowdown * 10**7, 10**7)
    cached = min(cached, num_tokens - 1) // SIZE * SIZE
    receiver_cached_blocks = int(held_share * ((num_tokens - 1) // SIZE))
    prices = made.prices("d", cached=cached, num_tokens=num_tokens, receiver_cached_blocks=receiver_cached_blocks)
    chosen = choose(made, num_tokens, cached, receiver_cached_blocks)
    assert prices[chosen] <= prices[AT_END]
    assert all(price >= 0.0 for price in prices.values())


def test_a_learned_slowdown_ends_early_sending() -> None:
    made = rule(bandwidth=4e8)
    assert choose(made, 4096).is_early
    rng = random.Random(1)
    for index in range(200):  # A transfer slows a step down by twice its own duration.
        context = CHUNK * (CHUNK * (index % 8) + CHUNK / 2)
        moved = 0 if index % 8 == 0 else 12_000_000
        step_s = 0.01 + CHUNK * 1e-3 + 1e-7 * context + 2e-9 * moved
        made.stepped(
            StepAccount(prefill_tokens=CHUNK, prefill_token_context=context), step_s * rng.gauss(1, 0.01), moved
        )
    assert made.slowdown_s_per_byte == pytest.approx(2e-9, rel=0.3)
    chosen = [choose(made, 4096) for _ in range(64)]
    assert chosen.count(AT_END) == 62, "twice it is tried again: the machine may have changed"
    assert chosen.count(BY_CHUNK) == 2


def test_steps_without_prompt_tokens_teach_nothing() -> None:
    made = rule()
    made.stepped(StepAccount(decode_rows=3, context_tokens=90), 5.0, 10**9)
    assert made.slowdown_s_per_byte == 0.0


@pytest.mark.parametrize(
    ("choice", "expected"), [("end", AT_END), ("chunk", BY_CHUNK), ("layers", PushPlan(is_early=True, groups=6))]
)
def test_a_measurement_may_choose_itself(choice: str, expected: PushPlan) -> None:
    assert choose(rule(choice, bandwidth=1e12), 40) == expected


def test_groups_divide_the_layers_evenly() -> None:
    assert rule(num_layers=1).groups == []
    assert rule(num_layers=12).groups == [2, 3, 4, 6]
    assert rule(num_layers=31).groups == []
    assert rule(num_layers=80).groups == [2, 4, 5, 8]


def parts_of(cached: int, num_tokens: int, receiver_cached_blocks: int) -> list[tuple[float, float]]:
    """(when it is computed, bytes that the receiver lacks) for the cached part and each chunk, by the prior cost."""
    parts, at_s, sent = (
        [(0.0, max(0, cached // SIZE - receiver_cached_blocks) * BLOCK_BYTES)],
        0.0,
        max(receiver_cached_blocks, cached // SIZE),
    )
    for start in range(cached, num_tokens, CHUNK):
        end = min(start + CHUNK, num_tokens)
        middle = start + (end - start) / 2
        at_s += COST.prefill_base_s
        at_s += (end - start) * (COST.prefill_per_token_s + COST.prefill_per_token_context_s * middle)
        done = max(sent, math.ceil(end / SIZE) if end == num_tokens else end // SIZE)
        parts.append((at_s, (done - sent) * BLOCK_BYTES))
        sent = done
    return parts


@pytest.mark.parametrize("seed", range(30))
def test_prices_match_a_simulated_link(seed: int) -> None:
    rng = random.Random(seed)
    bandwidth, latency_s = rng.choice([5e7, 4e8, 1e10]), rng.choice([1e-4, 5e-3])
    made = rule(bandwidth=bandwidth, latency_s=latency_s)
    free = rule(bandwidth=bandwidth, latency_s=latency_s, message_s=0.0)
    num_tokens = rng.randint(1, 3000)
    cached = rng.randint(0, (num_tokens - 1) // SIZE) * SIZE * rng.randint(0, 1)
    receiver_cached_blocks = rng.randint(0, (num_tokens - 1) // SIZE) * rng.randint(0, 1)
    parts, link = parts_of(cached, num_tokens, receiver_cached_blocks), made.link("d")
    exposed = free.prices("d", cached=cached, num_tokens=num_tokens, receiver_cached_blocks=receiver_cached_blocks)
    prices = made.prices("d", cached=cached, num_tokens=num_tokens, receiver_cached_blocks=receiver_cached_blocks)
    total = sum(num_bytes for _, num_bytes in parts)
    *before, (last_s, last_bytes) = parts
    computing_s = last_s - before[-1][0]
    assert set(prices) == {AT_END, *(PushPlan(is_early=True, groups=groups) for groups in (1, *made.groups))}
    assert exposed[AT_END] == pytest.approx(link.transfer_s(total), rel=1e-6)
    for push in prices.keys() - {AT_END}:
        pieces = [
            (last_s - computing_s * (1 - (index + 1) / push.groups), last_bytes / push.groups)
            for index in range(push.groups)
        ]
        assert exposed[push] == pytest.approx(exposed_s([*before, *pieces], link), rel=1e-6, abs=1e-9)
        num_messages = sum(num_bytes > 0 for _, num_bytes in before[:1]) + len(before) - 1 + push.groups
        assert prices[push] == pytest.approx(exposed[push] + MESSAGE_S * num_messages, rel=1e-6)


def test_hidden_bytes_cost_their_slowdown() -> None:
    made = rule(bandwidth=4e8)
    for index in range(200):
        context, moved = CHUNK * (CHUNK * (index % 8) + CHUNK / 2), 0 if index % 8 == 0 else 12_000_000
        step_s = 0.01 + CHUNK * 1e-3 + 1e-7 * context + 2e-9 * moved
        made.stepped(StepAccount(prefill_tokens=CHUNK, prefill_token_context=context), step_s, moved)
    link = made.link("d")
    free = rule(bandwidth=4e8, message_s=0.0)  # has measured no slowdown
    exposed = free.prices("d", cached=0, num_tokens=4096, receiver_cached_blocks=0)
    prices = made.prices("d", cached=0, num_tokens=4096, receiver_cached_blocks=0)
    hidden = 4096 // SIZE * BLOCK_BYTES - (exposed[BY_CHUNK] - link.latency_s) * link.bandwidth_bytes_s
    assert hidden > 0.0
    assert made.slowdown_s_per_byte > 1e-9
    assert prices[BY_CHUNK] == pytest.approx(exposed[BY_CHUNK] + made.slowdown_s_per_byte * hidden + 8 * MESSAGE_S)


@pytest.mark.parametrize(("share", "is_taken"), [(0.95, False), (1.05, True)])
def test_an_early_plan_must_save_enough(share: float, is_taken: bool) -> None:
    """The bandwidth is chosen such that the gain is this share of the required gain."""
    num_tokens = 4 * CHUNK
    computing_s = parts_of(0, num_tokens, 0)[-1][0]
    num_bytes = num_tokens // SIZE * BLOCK_BYTES
    # At the end it takes bytes / bandwidth, by chunk a fourth of that and three messages more.
    gain_s = share * STEP_SHARE * computing_s + 3 * MESSAGE_S
    made = rule(num_layers=1, bandwidth=0.75 * num_bytes / gain_s, latency_s=1e-5)
    assert choose(made, num_tokens).is_early is is_taken


def test_a_transfer_corrects_its_link_and_the_default() -> None:
    made = rule()
    for _ in range(20):
        made.sent("slow", 10**7, 1.0)
    assert made.link("slow").transfer_s(10**7) == pytest.approx(1.0, rel=0.05)
    assert made.link("unknown").transfer_s(10**7) == pytest.approx(1.0, rel=0.05)
    for number in range(MAX_LINKS):
        made.sent(f"other{number}", 10**7, 0.01)
    assert made.link("slow") is made.link("unknown"), "the one that was used longest ago is forgotten"
    assert made.link(f"other{MAX_LINKS - 1}") is not made.link("unknown")


def test_a_single_chunk_is_never_sent_early_for_measurement() -> None:
    made = rule(bandwidth=1e10)
    assert {choose(made, 1000, cached=608) for _ in range(200)} == {AT_END}
