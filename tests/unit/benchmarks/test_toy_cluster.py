"""What the benchmarks of roll-outs, routers and random changes count and judge, without a cluster."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from benchmarks.changes import Account
from benchmarks.kill_storm_calls import By
from benchmarks.rollout import Drain, Drains, RolloutResult, render
from benchmarks.routers import RoutersCell, missed, times
from benchmarks.toy_load import Sent, toy_requests
from pdserve import InternalError
from pdserve.client.results import ChangeStep
from pdserve.core.errors import Overloaded, Unavailable
from pdserve.core.types import Slo
from pdserve.engine.toy import answer

SLO = Slo(ttft_s=1.0, tpot_s=0.1)


def sent(
    number: int,
    *,
    phase: str = "before",
    ttft_s: float = 0.5,
    tpot_s: float = 0.05,
    error: Exception | None = None,
    tokens: Sequence[int] | None = None,
) -> Sent:
    *_, request = islice(toy_requests(random.Random(number), [9, 20], 5, tuple(By)), number % 6 + 1)
    right = answer(request.prompt, 5, seed=request.seed)
    seen = list(right if tokens is None else tokens)
    first_s = 10.0 + ttft_s
    ended_s = first_s + tpot_s * (len(seen) - 1)
    return Sent(request=request, phase=phase, began_s=10.0, first_s=first_s, ended_s=ended_s, tokens=seen, error=error)


def test_an_answer_attains_both_targets_with_right_tokens() -> None:
    for number in range(6):
        assert sent(number).attains(SLO)
        assert not sent(number, ttft_s=1.1).attains(SLO)
        assert not sent(number, tpot_s=0.11).attains(SLO)
        assert sent(number).wrong == ""
        assert sent(number, tokens=[1, 2, 3, 4, 5]).wrong
        assert sent(number, tokens=[]).wrong, "an answer without an error is whole"


def test_an_answer_with_an_error_has_a_part_of_the_tokens() -> None:
    whole = sent(0).tokens
    part = sent(0, tokens=whole[:2], error=Unavailable("gone"))
    assert (part.wrong, part.is_failed, part.is_rejected, part.attains(SLO)) == ("", True, False, False)
    assert sent(0, tokens=[1], error=Unavailable("gone")).wrong
    for error in (Overloaded("later", 1.0), InternalError("status 429: later")):
        assert (sent(0, error=error).is_failed, sent(0, error=error).is_rejected) == (False, True)


def result(after: Sequence[Sent]) -> RolloutResult:
    rows = [sent(number, phase=phase) for phase in ("before", "during") for number in range(10)]
    drains = [Drain(worker_id="d0", seconds=0.5, end="drained after 0.5 s")]
    return RolloutResult(
        capacity_rps=10.0, rate_rps=8.0, late_start_s=0.0, sent=[*rows, *after], rolls_s=[9.0], drains=drains
    )


def test_a_roll_out_is_judged() -> None:
    calm = result([sent(number, phase="after") for number in range(10)])
    assert calm.missed(SLO) == []
    assert "bars: met" in render(calm, SLO)
    late = result([sent(number, phase="after", ttft_s=2.0 if number == 3 else 0.5) for number in range(10)])
    assert late.missed(SLO) == ["attainment after the roll-outs 10.0 points below"]
    broken = result([sent(0, phase="after"), sent(1, phase="after", tokens=[7], error=InternalError("broken"))])
    assert broken.missed(SLO)[:2] == ["1 failed", "1 with wrong tokens"]
    assert "InternalError: broken" in render(broken, SLO)


def test_a_change_of_launcher_may_interrupt_no_answer() -> None:
    seen = replace(result([sent(0, phase="after")]), what="changes of launcher", may_resume=False)
    assert seen.missed(SLO) == []
    seen.sent[0].is_resumed = True
    assert seen.missed(SLO) == ["1 interrupted"]
    assert "interrupted and resumed: 1" in render(seen, SLO)


def test_drains_are_timed_by_their_steps() -> None:
    drains = Drains()
    for worker_id, text in (("d1", "starting"), ("d0", "draining, for at most 30 s"), ("d0", "drained after 7.0 s")):
        drains.on_step(ChangeStep(worker_id=worker_id, text=text))
    drains.on_step(ChangeStep(worker_id="d0", text="starting"))
    assert drains.found == [Drain(worker_id="d0", seconds=7.0, end="drained after 7.0 s")]


def cell(routers: int, rate_rps: int, router_ms: float, hit_rate: float = 60.0) -> RoutersCell:
    return RoutersCell(
        routers=routers,
        rate_rps=rate_rps,
        sent=100,
        failed=0,
        attained=100.0,
        hit_rate=hit_rate,
        router_ms=router_ms,
        redis_ms=1.0,
        busiest=1.0,
        ttft_p95_s=0.1,
        late_start_s=0.0,
    )


def test_routers_are_compared_at_the_same_load_of_each() -> None:
    cells = [cell(1, 10, 5.0), cell(1, 40, 3.0), cell(4, 40, 5.1, hit_rate=59.5)]
    assert times(cells, 4, 10) == [4 * 5.0 / 5.1]
    assert times(cells, 4, 10, has_redis=True) == [4 * 6.0 / 6.1]
    assert missed(cells, [1, 4], 10) == []
    cells = [cell(1, 10, 5.0), cell(1, 40, 3.0), cell(4, 40, 6.0, hit_rate=50.0)]
    assert missed(cells, [1, 4], 10) == ["3.33 times as many requests", "hit_rate falls by 10.0 points"]


def test_random_changes_excuse_only_calls_without_retries_while_routers_are_killed() -> None:
    by_kind = {one.request.by: one for one in (sent(number) for number in range(6))}
    for by in (By.SDK, By.PLAIN):
        one = by_kind[by]
        one.error, one.tokens = Unavailable("gone"), one.tokens[:2]
        for has_killed_router in (False, True):
            account = Account()
            account.judge(0, [one], has_killed_router)
            assert bool(account.wrong) is (by is By.SDK or not has_killed_router)
            assert account.errors.total() == 1
