"""What waiting requests wait for, and what ends the wait."""

from __future__ import annotations

import pytest

from pdserve.core.attempt import FailureKind
from pdserve.core.cost.latency import CostPrior
from pdserve.core.protocol import Load, Reserve
from pdserve.core.types import FinishReason, Role, Slo
from router.state.interface import Command, DrainRequested, FailRequest, RouterSettings, TimePassed, WakeAt
from router.state.state import RouterState
from tests.unit.router.given import Given
from tests.unit.router.router_events import arrival, hello

# 1 ms per prompt token, 100 tokens in a batch.
COST = CostPrior(
    prefill_base_s=0.0,
    prefill_per_token_s=1e-3,
    prefill_per_token_context_s=0.0,
    decode_base_s=0.01,
    decode_per_row_s=1e-3,
    decode_per_context_token_s=0.0,
)


def start(policy: str = "round-robin", **decode_facts: object) -> Given:
    given = Given(RouterSettings(policy=policy, is_strict=True))
    given.connect_prefill("p0", cost=COST, max_batch_tokens=100)
    given.connect_decode("d0", cost=COST, **decode_facts)
    return given


def placed(commands: list[Command]) -> list[str]:
    return [one.request_id for one in commands if isinstance(one, Reserve)]


def test_a_request_waits_until_one_batch_before_the_end() -> None:
    given = start()
    assert placed(given.arrives("a", prompt=300)) == ["a"]
    assert placed(given.arrives("b", prompt=300)) == []
    given.now_s = 0.19
    assert placed(given.submit(TimePassed())) == []
    given.now_s = 0.21
    assert placed(given.submit(TimePassed())) == ["b"]


def test_the_alarm_is_set_for_the_time_when_a_prefill_worker_will_have_room() -> None:
    state = RouterState(RouterSettings(policy="round-robin"))
    given = start()
    given.state = state
    given.connect_prefill("p0", cost=COST, max_batch_tokens=100)
    given.connect_decode("d0", cost=COST)
    given.arrives("a", prompt=300)
    alarms = [one for one in state.handle(arrival("b", prompt=300), 0.0) if isinstance(one, WakeAt)]
    assert [one.at_s for one in alarms] == [pytest.approx(0.2)]


def test_a_first_token_starts_the_next_prefill() -> None:
    given = start()
    given.arrives("a", prompt=300)
    given.arrives("b", prompt=300)
    given.granted(request_id="a")
    assert placed(given.first(request_id="a")) == ["b"]


def test_released_memory_starts_the_next_request() -> None:
    given = start("colocated", num_blocks=10)
    given.arrives("a", prompt=100)
    assert placed(given.arrives("b", prompt=100)) == []
    given.seated(request_id="a")
    assert placed(given.tokens(0, [1], request_id="a", finish=FinishReason.STOP)) == []
    assert placed(given.released("d0", request_id="a")) == ["b"]


def test_a_load_report_starts_the_next_request() -> None:
    given = start("colocated", num_blocks=32)
    given.arrives("a", prompt=100)
    given.submit(Load(worker_id="d0", steps=1, free_blocks=2, running=1, waiting=0))
    assert placed(given.arrives("b", prompt=100)) == []
    assert placed(given.submit(Load(worker_id="d0", steps=2, free_blocks=20, running=1))) == ["b"]


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_memory() -> None:
    given = start("colocated", num_blocks=12)
    given.arrives("a", prompt=100)
    assert placed(given.arrives("large", prompt=150)) == []
    assert placed(given.arrives("small", prompt=16)) == []
    given.seated(request_id="a")
    given.tokens(0, [1], request_id="a", finish=FinishReason.STOP)
    assert placed(given.released("d0", request_id="a")) == ["large", "small"]


def test_a_short_prompt_overtakes_requests_for_prefill_workers() -> None:
    given = start("least-ttft")
    given.arrives("a", prompt=300)
    assert placed(given.arrives("b", prompt=300)) == []
    assert placed(given.arrives("short", prompt=10)) == ["short"]


def test_waiting_requests_go_local_if_the_prefill_worker_dies() -> None:
    given = start("round-robin")
    given.arrives("a")
    given.granted(request_id="a")
    given.refused("p0", request_id="a", retry_after_s=5.0)
    given.released("d0", request_id="a")
    assert placed(given.arrives("b")) == []
    commands = given.lost("p0")
    assert placed(commands) == ["a", "b"]
    assert all(one.is_local for one in commands if isinstance(one, Reserve))


def test_resumed_requests_go_first() -> None:
    given = start("colocated", inbox_depth=1)
    given.connect_decode("d1", cost=COST, inbox_depth=1)
    given.arrives("begun", slo=Slo(ttft_s=9.0))
    given.seated(request_id="begun")
    given.tokens(0, [1], request_id="begun")
    given.arrives("x")
    given.arrives("y")
    given.arrives("new", slo=Slo(ttft_s=0.1))
    # d0 dies. The inbox of d1 is full with x or y, so both other requests wait.
    given.lost("d0")
    waiting = list(given.state._cluster.queue)
    assert waiting[0] == "begun"
    assert set(waiting) >= {"begun", "new"}


def test_a_dead_workers_cache_is_forgotten() -> None:
    given = start("least-ttft")
    given.arrives("a", prompt=200)
    given.granted(request_id="a")
    given.first(request_id="a")
    given.committed(request_id="a")
    given.lost("d0")
    (again,) = given.connect_decode("d0", cost=COST, generation=2)
    assert isinstance(again, Reserve)
    assert not again.is_local, "the new d0 would have to compute all of it"


def test_a_retry_uses_kv_of_the_failed_attempt() -> None:
    given = start("least-ttft")
    given.arrives("a", prompt=200)
    given.granted(request_id="a")
    given.first(request_id="a")
    given.committed(request_id="a")
    commands = given.lost("p0") + given.failed("d0", kind=FailureKind.TRANSFER, request_id="a")
    (again,) = [one for one in commands if isinstance(one, Reserve)]
    assert again.is_local
    assert given.state._cluster.requests["a"].cached_blocks == {"d0": 200 // 16}


def test_a_request_too_large_for_connected_workers_blocks_no_other() -> None:
    given = start("round-robin", num_blocks=8)
    given.connect_decode("big", num_blocks=64)
    given.submit(DrainRequested(worker_id="big"))
    assert placed(given.arrives("large", prompt=300)) == []
    assert placed(given.arrives("small", prompt=50)) == ["small"]
    given.lost("big")
    assert placed(given.at(5.0)) == []
    back = given.submit(hello("big", Role.DECODE, generation=2))
    assert placed(back + given.at(5.5)) == ["large"]


def test_a_request_too_large_for_all_workers_ends() -> None:
    given = start("round-robin", num_blocks=8)
    given.connect_decode("big", num_blocks=64)
    given.lost("big")
    given.arrives("large", prompt=300)
    (failed,) = [one for one in given.at(61.0) if isinstance(one, FailRequest)]
    assert failed.role == "decode"


def test_an_early_alarm_is_set_again() -> None:
    state = RouterState(RouterSettings(policy="round-robin"))
    state.handle(hello("d0", Role.DECODE), 0.0)
    (alarm,) = [one for one in state.handle(arrival("a", deadline_s=1.0), 0.0) if isinstance(one, WakeAt)]
    (again,) = state.handle(TimePassed(), alarm.at_s - 1e-9)
    assert isinstance(again, WakeAt)
    assert alarm.at_s <= again.at_s <= alarm.at_s + 0.01


def test_the_last_token_frees_the_row() -> None:
    given = start("colocated", max_batch=1)
    given.connect_decode("d0", cost=COST, max_batch=2)
    for name in "ab":
        given.arrives(name)
        given.seated(request_id=name)
        given.tokens(0, [1], request_id=name)
    assert placed(given.arrives("c")) == []
    assert placed(given.tokens(1, [2], request_id="a", finish=FinishReason.STOP)) == ["c"]


def test_a_reconnect_restarts_the_waiting_time() -> None:
    given = start("colocated")
    given.lost("d0")
    given.arrives("a")
    assert any(isinstance(one, FailRequest) for one in given.at(60.0))
    given.connect_decode("d0", cost=COST, generation=2)
    given.at(70.0)
    given.lost("d0")
    assert given.arrives("b") == []


def test_waiting_requests_go_by_priority_then_by_target() -> None:
    given = Given(RouterSettings(policy="least-ttft", is_strict=True))
    given.connect_decode("d0", inbox_depth=1)
    given.arrives("a")
    given.arrives("lazy", slo=Slo(ttft_s=9.0))
    given.arrives("hasty", slo=Slo(ttft_s=0.5))
    given.arrives("vip", slo=Slo(ttft_s=9.0), priority=1)
    order = []
    name = "a"
    for _ in range(3):
        given.seated(request_id=name)
        one = given.tokens(0, [1], request_id=name)[-1]
        assert isinstance(one, Reserve)
        name = one.request_id
        order.append(name)
    assert order == ["vip", "hasty", "lazy"]
