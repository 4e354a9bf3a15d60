"""Requests that a policy binds to a prefill worker at arrival: in which queue they wait, and what ends the wait."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdserve.core.attempt import RefusalReason
from pdserve.core.protocol import Reserve
from pdserve.core.types import FinishReason, Role
from router.policy.availability import is_decode_open, is_prefill_open, wait_for_decode
from router.policy.interface import Choice, Decision, Obstacle, PolicyInput
from router.state.interface import AdaptersChanged, Command, DrainRequested, EndCancelled, FailRequest, RouterSettings
from router.state.view import WorkerView
from tests.support.slow import slow_except
from tests.unit.router.given import Given
from tests.unit.router.router_events import arrival
from tests.unit.router.test_queue import COST
from tests.unit.router.world import World


def binding(ask: PolicyInput, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView], now_s: float) -> Decision:
    """Binds by the number in the request's name: `x-1` waits for p1 whatever its load."""
    if not prefills:
        return Decision(choice=Choice.LOCAL, decode_worker=decodes[0].worker_id)
    wanted = ask.bound_to or f"p{int(ask.request_id.rpartition('-')[2]) % len(prefills)}"
    prefill = next((one for one in prefills if one.worker_id == wanted), prefills[0])
    if not is_prefill_open(prefill, ask, now_s):
        return Decision(choice=Choice.WAIT, obstacle=Obstacle.PREFILL, bound_to=prefill.worker_id)
    room = [one for one in decodes if is_decode_open(one, one.estimated_load(), ask, now_s)]
    if not room:
        return wait_for_decode(decodes, now_s)
    return Decision(choice=Choice.REMOTE, prefill_worker=prefill.worker_id, decode_worker=room[0].worker_id)


def start(prefills: int = 2, **decode_facts: object) -> Given:
    given = Given(RouterSettings(policy="round-robin", is_strict=True))
    given.state._cluster.policy = binding
    for index in range(prefills):
        given.connect_prefill(f"p{index}", cost=COST, max_batch_tokens=100)
    given.connect_decode("d0", cost=COST, **{"inbox_depth": 64, "num_blocks": 1024, **decode_facts})
    return given


def placed(commands: list[Command]) -> list[str]:
    return [one.request_id for one in commands if isinstance(one, Reserve)]


def line(given: Given, worker_id: str) -> list[str]:
    return list(given.state._cluster.fleet.workers[worker_id].queue)


def test_many_requests_for_a_busy_worker_do_not_block_one_for_an_idle_worker() -> None:
    given = start()
    assert placed(given.arrives("a-0", prompt=300)) == ["a-0"]
    for index in range(10):
        assert placed(given.arrives(f"b{index}-0", prompt=300)) == []
    assert given.state.num_queued == 10
    assert placed(given.arrives("c-1", prompt=300)) == ["c-1"]


def test_a_worker_queue_is_served_in_order_of_arrival() -> None:
    given = start()
    for name in ("a-0", "b-0", "c-0"):
        given.arrives(name, prompt=300)
    assert line(given, "p0") == ["b-0", "c-0"]
    given.granted(request_id="a-0")
    assert placed(given.first(request_id="a-0")) == ["b-0"]
    assert line(given, "p0") == ["c-0"]


def test_a_worker_queue_is_served_one_batch_early() -> None:
    given = start()
    given.arrives("a-0", prompt=300)
    given.arrives("b-0", prompt=300)
    assert placed(given.at(0.21)) == ["b-0"]


def test_a_queue_at_a_worker_is_not_overtaken() -> None:
    given = start(num_blocks=26)
    given.arrives("a-0", prompt=300)  # 19 of 26 blocks
    given.arrives("b-0", prompt=300)
    given.granted(request_id="a-0")
    given.first(request_id="a-0")
    assert line(given, "p0") == ["b-0"], "p0 is open, d0 is not"
    assert placed(given.arrives("small-0", prompt=16)) == []
    assert placed(given.arrives("small-1", prompt=16)) == [], "it would take what b waits for"
    assert (line(given, "p0"), line(given, "p1")) == (["b-0", "small-0"], ["small-1"])
    given.committed(request_id="a-0")
    given.released("p0", request_id="a-0")
    given.tokens(1, [2], request_id="a-0", finish=FinishReason.STOP)
    assert placed(given.released("d0", request_id="a-0"))[:1] == ["b-0"]


@pytest.mark.parametrize("how", ["lost", "draining"])
def test_a_lost_workers_queue_returns_to_the_router(how: str) -> None:
    given = start()
    given.arrives("a-0", prompt=300)
    given.arrives("b-0", prompt=300)
    given.arrives("c-0", prompt=300)
    commands = given.lost("p0") if how == "lost" else given.submit(DrainRequested(worker_id="p0")) + given.heard("d0")
    assert "b-0" in placed(commands) or "a-0" in placed(commands)
    assert line(given, "p0") == []
    assert line(given, "p1")


def test_a_silent_workers_queue_returns_to_the_router() -> None:
    given = start()
    given.arrives("a-0", prompt=300)
    given.arrives("b-0", prompt=300)
    given.state._cluster.fleet.workers["p0"].free_at_s = 1e6
    given.state._cluster.fleet.workers["p0"].heard_s = -5.0
    given.state._cluster.fleet.changed()
    assert placed(given.heard("d0")) == ["b-0"]


def test_queued_requests_can_be_cancelled_and_expire() -> None:
    given = start()
    given.arrives("a-0", prompt=300)
    given.arrives("b-0", prompt=300)
    given.arrives("c-0", prompt=300, deadline_s=0.05)
    given.state._cluster.fleet.workers["p0"].free_at_s = 1e6
    assert [type(one) for one in given.leaves("b-0")] == [EndCancelled]
    (failed,) = given.at(0.06)
    assert isinstance(failed, FailRequest)
    assert (given.state.num_queued, line(given, "p0")) == (0, [])


def test_a_resumed_request_goes_to_the_head_of_the_worker_queue() -> None:
    given = start(prefills=1, inbox_depth=64)
    given.connect_decode("d1", cost=COST, num_blocks=1024, inbox_depth=64)
    given.arrives("begun-0", prompt=300)
    given.granted(request_id="begun-0")
    given.first(request_id="begun-0")
    for name in ("a-0", "b-0", "c-0"):
        given.arrives(name, prompt=300)
    given.committed(request_id="begun-0")
    given.lost("d0")
    assert line(given, "p0")[0] == "begun-0"


def test_worker_queues_count_towards_the_queue_limit() -> None:
    given = Given(RouterSettings(policy="round-robin", is_strict=True, max_queue=2))
    given.state._cluster.policy = binding
    given.connect_prefill("p0", cost=COST, max_batch_tokens=100)
    given.connect_decode("d0", cost=COST)
    for name in ("a-0", "b-0", "c-0"):
        given.arrives(name, prompt=300)
    (failed,) = given.arrives("d-0", prompt=300)
    assert isinstance(failed, FailRequest)
    assert "queue is full" in failed.message


def test_a_declined_request_is_bound_again() -> None:
    given = start()
    given.arrives("a-0", prompt=300)
    given.arrives("b-0", prompt=300)
    given.granted(request_id="a-0")
    given.refused("p0", request_id="a-0", reason=RefusalReason.INBOX_FULL, retry_after_s=1.0)
    assert line(given, "p0") == ["a-0", "b-0"]


@pytest.mark.parametrize("seed", slow_except(range(20), *range(6)))
def test_bound_requests_end_once_under_random_failures(seed: int) -> None:
    world = World(
        seed, RouterSettings(policy="round-robin", is_strict=True, max_attempts=5, worker_silence_s=1.0), 0.02
    )
    world.state._cluster.policy = binding
    for index in range(3):
        world.start(f"p{index}", Role.PREFILL)
    world.start("d0", Role.DECODE)
    world.start("d1", Role.DECODE)
    for turn in range(1500):
        if turn % 40 == 0:
            deadline_s = world.rng.choice([None, None, 5.0])
            prompt = world.rng.choice([5, 100, 300])
            world.arrive(arrival(f"r-{turn // 40}", prompt=prompt, deadline_s=deadline_s), length=4)
        world.stir()
    world.settle()
    assert all(client.last_word is not None for client in world.clients.values())
    assert world.state.num_queued == 0


def test_a_worker_queue_does_not_wait_for_the_only_worker_with_an_adapter() -> None:
    given = start(prefills=1, adapters=("f1",), num_blocks=30)
    given.submit(AdaptersChanged(worker_id="p0", adapters=("f1",)))
    given.connect_decode("d1", cost=COST, inbox_depth=64, num_blocks=1024)
    facts = {"prompt": 300, "adapter": "f1", "adapter_name": "sql"}
    assert placed(given.arrives("a-0", **facts)) == ["a-0"]
    assert placed(given.arrives("b-0", **facts)) == []
    assert placed(given.arrives("c-0", prompt=300)) == []
    assert line(given, "p0") == ["b-0", "c-0"]
    given.granted(request_id="a-0")
    assert placed(given.first(request_id="a-0")) == ["c-0"], "d1 has room"
