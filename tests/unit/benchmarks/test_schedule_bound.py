"""The highest rate that is possible, and its column in the tables of benchmarks.schedule."""

from __future__ import annotations

from benchmarks.schedule import FINAL_TOLERANCE, _goodput_table, _overload_table, highest_possible_rps
from pdserve.core.cost.profile import Profile
from pdserve.core.types import Slo
from simulator.search.goodput import TraceWindow
from simulator.search.plan import Question
from tests.unit.simulator.small import COST, asked


def question(spacing_s: float) -> Question:
    """Prompts of 1000 tokens, which take 0.105 s in steps of 2048 tokens."""
    profile = Profile(name="small", cost=COST, kv_bytes_per_token=1, kv_capacity_tokens=10**6)
    rows = tuple(asked(spacing_s * at, 1000, 1) for at in range(200))
    window = TraceWindow(name="even", block_tokens=0, requests=rows)
    return Question(windows=(window,), profile=profile, num_workers=1, slo=Slo(ttft_s=0.5, tpot_s=1.0))


def test_the_highest_possible_rate_follows_from_the_workers() -> None:
    """The prompts of 180 requests in the time in which 200 arrive, and half a second."""
    expected = 200 / (180 * 0.105 - 0.5)
    for given in (2.0, 9.0):
        found = highest_possible_rps(question(0.2), 0, given)
        assert expected * 0.98 < found < expected * 1.02 * (1.0 + FINAL_TOLERANCE)


def test_no_rate_is_possible_if_none_was_met() -> None:
    assert highest_possible_rps(question(0.2), 0, 0.0) == 0.0


def test_the_tables_show_shares_of_the_bound() -> None:
    peak = {"rate_rps": 30.0, "split": 8, "decode": 8, "token_attainment": 0.9}
    crowd = {
        "cell": "overload.azure.chat-13b.goodput",
        "peak_rps": 10.0,
        "met_rps": 8.0,
        "bound_rps": 10.0,
        "rejected": 0,
        "rejected_within_10ms": 0,
        "rejection_s": {},
        "retry_after_s": {},
    }
    lines = {
        "goodput.mooncake.chat-13b.goodput": {**peak, "bound_rps": 40.0},
        "goodput.mooncake.chat-13b.colocated": peak,
        crowd["cell"]: crowd,
    }
    found = {str(name): line for name, line in lines.items()}
    text = "\n".join([*_goodput_table(found), *_overload_table(found)])
    assert "(8:8, 90%, 75% of bound)" in text
    assert "(8:8, 90%, no bound)" in text
    assert "| azure, chat-13b | goodput | 10 | 8 | 80% | 80% of bound | 0 |" in text
