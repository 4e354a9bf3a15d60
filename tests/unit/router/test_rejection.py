"""Which requests are rejected, and when, in a cluster whose times are exactly as predicted (clocked.py)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pdserve.core.types import Slo
from router.state.interface import FailKind, FailRequest, FinishRequest, Outcome, RequestArrived, RouterSettings
from tests.support.slow import slow_except
from tests.unit.router.clocked import Clocked
from tests.unit.router.router_events import arrival

#: Every placement is remote, because decode workers of the clocked cluster prefill in no time.
REMOTE = ("path-choice",)
SECOND = Slo(ttft_s=1.0, tpot_s=0.1)
TWO_SECONDS = Slo(ttft_s=2.0, tpot_s=0.1)


def cluster(*off: str, **facts: float) -> Clocked:
    settings = RouterSettings(policy="goodput", rules_off=(*REMOTE, *off), is_strict=True)
    return Clocked(settings, **facts)  # type: ignore[arg-type]


def short(name: str, prompt: int = 100, slo: Slo = SECOND, **facts: object) -> RequestArrived:
    return arrival(name, prompt=prompt, max_tokens=1, slo=slo, **facts)


def outcomes(world: Clocked) -> dict[str, str]:
    return {name: "none" if one.word is None else one.word.outcome.value for name, one in world.told.items()}


def rejected(world: Clocked) -> list[str]:
    return [name for name, outcome in outcomes(world).items() if outcome == "rejected"]


def test_an_idle_cluster_serves_a_late_request() -> None:
    world = cluster()
    world.run([(0.0, short("a", 3000))], 60.0)
    assert outcomes(world) == {"a": "late"}


def test_late_requests_alone_are_all_served() -> None:
    world = cluster()
    world.run([(0.1 * index, short(f"a{index}", 2000)) for index in range(5)], 60.0)
    assert set(outcomes(world).values()) == {"late"}


def test_a_certainly_late_request_is_rejected_at_once() -> None:
    world = cluster()
    world.run([(0.01 * index, short(f"a{index}", 200)) for index in range(12)], 60.0)
    gone = rejected(world)
    assert gone
    assert "a0" not in gone
    # A request that is late by less than the error of the prediction waits, and is served late.
    assert max(waits_s(world)) == 0.0
    told = list(outcomes(world).values())
    assert set(told) <= {"served", "late", "rejected"}
    assert told.count("late") <= 3


def test_a_turn_is_not_rejected_for_its_target_while_its_task_can_be_in_time() -> None:
    """A task of 60 s leaves time for all 2.4 s of work, and one of 1.5 s does not."""
    rows = [(0.01 * index, short(f"a{index}", 200)) for index in range(12)]
    gone = []
    for slo_task_s in (60.0, 1.5):
        world = cluster()
        tasks = [replace(one, session_id=one.request_id, slo_task_s=slo_task_s) for _, one in rows]
        world.run([(at_s, one) for (at_s, _), one in zip(rows, tasks, strict=True)], 60.0)
        assert {"served", "late"} <= set(outcomes(world).values())
        gone.append(rejected(world))
    assert not gone[0]
    assert gone[1]


def test_turns_of_tasks_that_are_late_do_not_delay_others() -> None:
    world = cluster()
    tasks = [short(f"t{index}", 200, session_id=f"t{index}", slo_task_s=60.0) for index in range(12)]
    others = [(0.5 + 0.4 * index, short(f"o{index}", 100)) for index in range(6)]
    world.run([*((0.01 * index, one) for index, one in enumerate(tasks)), *others], 60.0)
    told = outcomes(world)
    assert {told[one.request_id] for _, one in others} == {"served"}
    assert {told[one.request_id] for one in tasks} == {"served", "late"}


def test_a_rejection_says_when_there_will_be_room() -> None:
    world = cluster()
    world.run([(0.001 * index, short(f"a{index}", 200)) for index in range(12)], 60.0)
    word = world.told["a11"].word
    assert isinstance(word, FailRequest)
    assert word.kind is FailKind.OVERLOADED
    # There are 12 * 0.2 s of work. a11 can be admitted when one second of it is done.
    assert word.retry_after_s is not None
    assert 0.05 <= word.retry_after_s <= 1.5
    again = cluster()
    first = [(0.001 * index, short(f"a{index}", 200)) for index in range(12)]
    again.run([*first, (0.011 + word.retry_after_s, short("again", 200))], 60.0)
    assert outcomes(again)["again"] == "served"


def test_a_request_that_would_delay_a_waiting_one_is_served_late() -> None:
    world = cluster()
    before = [(0.0, short("runs", 500)), (0.01, short("waits", 300, Slo(ttft_s=1.0, tpot_s=0.1)))]
    tight = (0.02, short("tight", 350, Slo(ttft_s=0.9, tpot_s=0.1)))
    world.run([*before, tight], 60.0)
    assert outcomes(world) == {"runs": "served", "waits": "served", "tight": "late"}


def test_a_request_with_slack_is_admitted_behind_others() -> None:
    world = cluster()
    before = [(0.0, short("runs", 500)), (0.01, short("waits", 300))]
    world.run([*before, (0.02, short("patient", 350, Slo(ttft_s=3.0, tpot_s=0.1)))], 60.0)
    assert set(outcomes(world).values()) == {"served"}


def waits_s(world: Clocked, since_s: float = 0.0) -> list[float]:
    """Sorted times from arrival to rejection, for rejected requests that arrived after `since_s`."""
    gone = [world.told[name] for name in rejected(world)]
    return sorted(one.ended_s - one.arrived_s for one in gone if one.ended_s is not None and one.arrived_s >= since_s)


def test_a_model_without_samples_rejects_nothing() -> None:
    """Twelve seconds of work arrive at once on a worker that has reported no batch."""
    world = cluster(trust=False)
    world.run([(0.001 * index, short(f"a{index}", 200)) for index in range(60)], 60.0)
    waited_s = waits_s(world)
    assert len(waited_s) > 40
    assert waited_s[0] >= SECOND.ttft_s - 0.2, "until then each could still start in time"
    assert waited_s[-1] <= 2.0 * SECOND.ttft_s
    assert "served" in outcomes(world).values()


def test_noisy_steps_are_judged_by_the_drain_rate() -> None:
    """Single steps differ by half of their mean, so single predictions are inaccurate, but the queue's is not."""
    world = cluster(spread=0.5)
    prefill = world.routers[0]._cluster.fleet.workers["p0"].cost
    assert prefill.prefill_error > 0.25, "the model must be uncertain"
    world.run([(0.02 * index, short(f"a{index}", 100)) for index in range(1000)], 60.0)  # Five times the capacity.
    waited_s = waits_s(world, since_s=5.0)
    assert len(waited_s) > 500
    assert waited_s[len(waited_s) // 2] == 0.0
    assert waited_s[int(0.95 * len(waited_s))] <= 0.2 * SECOND.ttft_s
    kept = [name for name, outcome in outcomes(world).items() if outcome == "served"]
    assert len(kept) >= 0.9 * 20.0 / 0.1, "20 s of 0.1 s each"


def test_every_rejection_says_when_to_retry() -> None:
    world = cluster(spread=0.5)
    world.run([(0.02 * index, short(f"a{index}", 100)) for index in range(300)], 60.0)
    words = [world.told[name].word for name in rejected(world)]
    assert words
    assert all(isinstance(one, FailRequest) and one.retry_after_s is not None for one in words)


def long_tail(seed: int, seconds: float = 60.0) -> list[tuple[float, RequestArrived]]:
    """Three of a hundred prompts take most of their target. The load is 70 % of two workers."""
    rng, at_s, arrivals = random.Random(seed), 0.0, []
    while (at_s := at_s + rng.expovariate(18.0)) < seconds:
        prompt = rng.randint(500, 950) if rng.random() < 0.03 else rng.randint(20, 100)
        arrivals.append((at_s, short(f"r{len(arrivals)}", prompt)))
    return arrivals


@pytest.mark.parametrize("seed", slow_except(range(4), 0))
def test_below_capacity_admission_rejects_nothing(seed: int) -> None:
    arrivals = long_tail(seed)
    worlds = cluster(prefills=2), cluster("rejection", prefills=2)
    for world in worlds:
        world.run(arrivals, 200.0)
    kept, kept_without = (list(outcomes(world).values()).count("served") for world in worlds)
    assert kept >= kept_without - 0.003 * len(arrivals), (kept, kept_without)


@pytest.mark.parametrize("seed", slow_except([1, 2, 3], 1))
def test_rejecting_the_longest_meets_more_targets(seed: int) -> None:
    rng = random.Random(seed)
    prompts = [rng.randint(50, 500) for _ in range(600)]  # 2.75 times the capacity of one worker.
    arrivals = [(0.1 * index, short(f"{index}", prompt, TWO_SECONDS)) for index, prompt in enumerate(prompts)]
    worlds = cluster(), cluster("shortest")
    for world in worlds:
        world.run(arrivals, 120.0)
    kept, kept_without = (list(outcomes(world).values()).count("served") for world in worlds)
    assert kept > kept_without


def behind_a_long_step(begin_s: float = 0.0) -> list[tuple[float, RequestArrived]]:
    """1.2 s of running work, and a request that waits for its end."""
    prompts = {"first": 50, "runs": 1200, "waits": 50}
    return [
        (begin_s + 0.001 * index, short(name, prompt, TWO_SECONDS))
        for index, (name, prompt) in enumerate(prompts.items())
    ]


def test_overload_rejects_long_prompts_first() -> None:
    """Ten seconds at three times the capacity. The queue then leaves no room for 2.5 times half a second."""
    crowd = [(0.03 * index, short(f"a{index}", 100, TWO_SECONDS)) for index in range(400)]
    told = {}
    for name, prompt in {"long": 500, "brief": 20}.items():
        world = cluster()
        world.run([*crowd, (10.001, short(name, prompt, TWO_SECONDS))], 60.0)
        told[name] = outcomes(world)[name]
        if told[name] == "rejected":
            assert world.told[name].ended_s == world.told[name].arrived_s
    assert told == {"long": "rejected", "brief": "served"}


def test_a_burst_rejects_no_timely_long_prompt() -> None:
    """1.2 s of work runs and 0.5 s arrives. The worker cannot do both at once, but all requests are in time."""
    world = cluster()
    world.run([*behind_a_long_step(), (0.02, short("long", 500, TWO_SECONDS))], 60.0)
    assert set(outcomes(world).values()) == {"served"}


def test_below_capacity_a_long_prompt_may_wait() -> None:
    quiet = [(0.5 * index, short(f"a{index}", 100, TWO_SECONDS)) for index in range(100)]
    world = cluster()
    world.run([*quiet, *behind_a_long_step(50.0), (50.02, short("long", 500, TWO_SECONDS))], 90.0)
    assert outcomes(world)["long"] == "served"


def test_lower_classes_cause_no_rejection_of_higher_ones() -> None:
    world = cluster()
    world.run([*behind_a_long_step(), (0.02, short("long", 500, TWO_SECONDS, priority=1))], 60.0)
    assert outcomes(world)["long"] == "served"


def test_without_the_rule_no_request_is_rejected() -> None:
    world = cluster("rejection")
    world.run([(0.001 * index, short(f"a{index}", 200)) for index in range(30)], 60.0)
    assert rejected(world) == []
    assert all(isinstance(one.word, FinishRequest) for one in world.told.values())


def test_a_light_tenant_is_admitted_beside_a_heavy_one() -> None:
    heavy = [(0.02 * index, short(f"h{index}", 200, tenant="heavy")) for index in range(200)]
    light = [(1.0 + 0.5 * index, short(f"l{index}", 100, tenant="light")) for index in range(6)]
    # The rule that favours short prompts is off, because the light tenant sends short ones.
    fair, unfair = cluster("shortest"), cluster("shortest", "fairness")
    fair.run([*heavy, *light], 60.0)
    unfair.run([*heavy, *light], 60.0)
    names = [request.request_id for _, request in light]
    kept, kept_without = ([outcomes(one)[name] for name in names].count("served") for one in (fair, unfair))
    assert kept >= 5
    assert kept > kept_without


def test_a_higher_class_is_served_under_overload() -> None:
    low = [(0.02 * index, short(f"h{index}", 200)) for index in range(200)]
    high = [(1.0 + 0.5 * index, short(f"v{index}", 100, priority=1)) for index in range(6)]
    world = cluster()
    world.run([*low, *high], 60.0)
    assert [outcomes(world)[request.request_id] for _, request in high] == ["served"] * 6


def test_a_new_request_does_not_overtake_the_queue() -> None:
    """Requests of a higher class wait. Requests of a lower class arrive when the worker's batch is nearly done."""
    low = [(0.02 * index, short(f"h{index}", 200)) for index in range(100)]
    world = cluster("rejection")
    world.run([*low, (1.0, short("high", 100, priority=1))], 60.0)
    assert world.told["high"].ttft_s <= 0.2 + 0.2 + 0.1 + 1e-6, "what is reserved, one batch, its own"


def order_of(world: Clocked, *arrivals: RequestArrived) -> list[str]:
    """The order of placement behind a request that occupies the only prefill worker for half a second."""
    world.run([(0.0, short("first", 500)), *((0.01, one) for one in arrivals)], 60.0)
    return world.placed[1:]


def test_each_rule_of_the_order_can_be_switched_off_alone() -> None:
    tight, loose = short("tight", slo=Slo(ttft_s=2.0)), short("loose", slo=Slo(ttft_s=9.0))
    high = short("high", slo=Slo(ttft_s=9.5), priority=1)
    assert order_of(cluster("rejection"), loose, tight, high) == ["high", "tight", "loose"]
    assert order_of(cluster("rejection", "least-slack"), loose, tight, high) == ["high", "loose", "tight"]
    assert order_of(cluster("rejection", "priority"), loose, tight, high) == ["tight", "loose", "high"]


def test_ageing_serves_a_late_request_under_overload() -> None:
    late = (0.0, short("late", 300, Slo(ttft_s=0.2)))
    others = [(0.05 * index, short(f"a{index}", 100, Slo(ttft_s=0.9 + 0.05 * index))) for index in range(200)]
    aged, ageless = cluster("rejection"), cluster("rejection", "ageing")
    for world in (aged, ageless):
        world.run([(0.0, short("first", 500)), late, *others], 200.0)
    assert aged.placed.index("late") <= 0.3 / (0.05 * 0.1) + 2, "5 % of 0.1 s each make up its 0.3 s"
    assert ageless.placed.index("late") > aged.placed.index("late")


def test_expired_requests_are_dropped_before_prefill() -> None:
    arrivals = [(0.0, short("a", 500)), (0.0, short("b", 400, Slo(ttft_s=9.0), deadline_s=0.3))]
    world, off = cluster(), cluster("deadline-drop")
    world.run(arrivals, 60.0)
    assert (outcomes(world)["b"], world.placed) == ("expired", ["a"])
    off.run(arrivals, 60.0)
    assert off.placed == ["a", "b"]


def test_a_deadline_that_passes_in_the_prefill_ends_it_before_the_hand_off() -> None:
    world = cluster()
    world.run([(0.0, arrival("a", prompt=500, max_tokens=20, deadline_s=0.4))], 60.0)
    told = world.told["a"]
    assert (outcomes(world)["a"], told.tokens) == ("expired", 0)
    assert told.ended_s == pytest.approx(0.4)


def poisson(rate: float, requests: int, seed: int = 1) -> list[tuple[float, RequestArrived]]:
    rng, at_s, arrivals = random.Random(seed), 0.0, []
    for index in range(requests):
        at_s += rng.expovariate(rate)
        prompt = int(min(rng.lognormvariate(4.6, 0.7), 900))
        arrivals.append((at_s, short(f"r{index}", prompt)))
    return arrivals


def goodput(world: Clocked, arrivals: list[tuple[float, RequestArrived]]) -> float:
    served = sum(1 for outcome in outcomes(world).values() if outcome == Outcome.SERVED.value)
    return served / (arrivals[-1][0] - arrivals[0][0])


def test_goodput_holds_at_three_times_the_capacity() -> None:
    rates = {}
    for rate in (22.0, 28.0, 72.0):  # The capacity is 4 workers / 0.127 s.
        world, arrivals = cluster(prefills=4), poisson(rate, 500)
        world.run(arrivals, 200.0)
        rates[rate] = goodput(world, arrivals)
        in_time = [world.told[name].ended_s == world.told[name].arrived_s for name in rejected(world)]
        assert sum(in_time) >= 0.5 * len(in_time), "most refusals come at arrival"
    assert rates[72.0] >= 0.9 * max(rates.values()), rates


def test_equal_arrivals_give_equal_commands() -> None:
    first, second = cluster(prefills=3, routers=2), cluster(prefills=3, routers=2)
    for world in (first, second):
        world.run(poisson(40.0, 150), 60.0)
    assert first.commands == second.commands


@pytest.mark.parametrize("seed", slow_except(range(5), 0, 1))
def test_four_routers_never_over_admit(seed: int) -> None:
    rng = random.Random(seed)
    arrivals = []
    at_s = 0.0
    for index in range(120):
        at_s += rng.expovariate(60.0)
        request = arrival(f"r{index}", prompt=rng.choice([50, 100, 300]), max_tokens=rng.choice([1, 16, 64]))
        arrivals.append((at_s, request))
    world = cluster("rejection", prefills=3, decodes=2, routers=4, num_blocks=60)
    world.run(arrivals, 300.0)
    assert all(machine.most_held <= machine.num_blocks for machine in world.machines.values())
    assert max(machine.most_held for machine in world.machines.values()) > 40, "capacity was never contended for"
    for name, told in world.told.items():
        assert isinstance(told.word, FinishRequest), (name, told)
        assert told.tokens == world.asked[name].sampling.max_tokens
    for router in world.routers:
        router.check()


def test_a_long_request_that_displaces_many_is_rejected() -> None:
    """It must start the soonest, so it would be placed at once, before forty waiting requests."""
    crowd = [(0.03 * index, short(f"a{index}", 60, TWO_SECONDS)) for index in range(80)]
    told = {}
    for name, prompt in {"long": 1700, "brief": 20}.items():
        world = cluster()
        world.run([*crowd, (2.4, short(name, prompt, TWO_SECONDS))], 60.0)
        told[name] = outcomes(world)[name]
        if name == "long":
            word = world.told[name].word
            assert isinstance(word, FailRequest)
            assert "leave no time for its prefill" in word.message
            assert world.told[name].ended_s == world.told[name].arrived_s
            assert "served" in outcomes(world).values()
    assert told == {"long": "rejected", "brief": "served"}


def test_a_long_request_is_served_if_the_queue_is_short() -> None:
    few = [(0.2 * index, short(f"a{index}", 60, TWO_SECONDS)) for index in range(40)]
    world = cluster()
    world.run([*few, (4.001, short("first", 60, TWO_SECONDS)), (4.002, short("long", 1700, TWO_SECONDS))], 60.0)
    assert outcomes(world)["long"] == "served"


def test_late_requests_leave_a_worker_free() -> None:
    world = cluster(prefills=2)
    hopeless = [(0.0, short("a", 3000)), (0.01, short("b", 3000))]
    world.run([*hopeless, (0.1, short("hopeful", 600))], 60.0)
    assert outcomes(world) == {"a": "late", "b": "late", "hopeful": "served"}
