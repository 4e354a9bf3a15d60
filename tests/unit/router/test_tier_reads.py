"""The router predicts what workers read from their tiers, and how long prompts wait for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pdserve.core.attempt import AttemptKey
from pdserve.core.cost.latency import CostPrior
from pdserve.core.kv.tier_reads import TierDepths, TierSpeed
from pdserve.core.protocol import Load, Prefill, PullEnded, Reserve
from pdserve.core.types import Slo
from router.policy.interface import Choice, PolicyInput, ReadChoice
from router.state.fleet import entry_of, policy_input_of
from router.state.interface import RouterSettings
from router.state.load import Reservation
from router.state.view import WorkerView
from tests.unit.router.given import Given
from tests.unit.router.test_goodput import ask, decide, place, view, with_queue

SLOW = CostPrior(prefill_per_token_s=0.01)
TOKENS, HELD = 8_000, 7_680
ALL_ON_DISK = TierDepths(0, 0)
DISK = TierSpeed(tier=2, block_s=0.0002, fixed_s=0.01)
HOST = TierSpeed(tier=1, block_s=0.0001, is_at_once=True, most_given=1_000)


def tiered(worker_id: str, *speeds: TierSpeed, **facts: Any) -> WorkerView:
    found = view(worker_id, num_blocks=10_000, **facts)
    found.reported(Load(worker_id=worker_id, free_blocks=10_000, tiers=speeds), 0.0)
    return found


def reading(*views: WorkerView, split: TierDepths = ALL_ON_DISK, **facts: Any) -> PolicyInput:
    """A prompt whose first `HELD` tokens these workers have."""
    reads = {one.worker_id: one.reads(HELD // 16, split, one.queue_s(0.0)) for one in views}
    cached = {name: 16 * found.num_blocks for name, found in reads.items() if found.num_blocks}
    return ask(TOKENS, reads=reads, cached_tokens=cached, **facts)


def test_the_wait_for_a_disk_is_predicted() -> None:
    disk, decode = tiered("p0", DISK), view("d0")
    decision = decide([disk], [decode], reading(disk))
    [shown] = [one for one in decision.candidates if one.prefill_worker]
    pool = decide([disk], [decode], ask(TOKENS, cached_tokens={"p0": HELD}))
    [before] = [one for one in pool.candidates if one.prefill_worker]
    read_s = DISK.read_s(HELD // 16)
    assert shown.ttft_s - before.ttft_s == pytest.approx(read_s)
    assert shown.reads == ReadChoice(HELD, pytest.approx(read_s), disk.prefill_s(HELD, 0))
    assert before.reads is None
    queued = with_queue(tiered("p0", DISK), 1.0)  # it is read until the turn of the prompt
    [hidden] = [one for one in decide([queued], [decode], reading(queued)).candidates if one.prefill_worker]
    assert hidden.ttft_s == pytest.approx(1.0 + before.ttft_s)


def test_copies_take_time_of_the_engine() -> None:
    host, decode = with_queue(tiered("p0", HOST), 1.0), view("d0")
    split = TierDepths(0, HELD // 16)
    [shown] = [one for one in decide([host], [decode], reading(host, split=split)).candidates if one.prefill_worker]
    pool = decide([host], [decode], ask(TOKENS, cached_tokens={"p0": HELD}))
    [before] = [one for one in pool.candidates if one.prefill_worker]
    assert shown.ttft_s - before.ttft_s == pytest.approx(HOST.read_s(HELD // 16))


def test_the_worker_with_the_faster_tier_is_chosen() -> None:
    slow, fast = tiered("p0", replace(DISK, queue_s=0.1)), tiered("p1", DISK)
    assert place(decide([slow, fast], [view("d0")], reading(slow, fast)))[1] == "p1"
    fast.reported(Load(worker_id="p1", free_blocks=10_000), 0.0)  # its disk hangs
    assert place(decide([slow, fast], [view("d0")], reading(slow, fast)))[1] == "p0"


def test_a_local_prefill_waits_for_its_disk_too() -> None:
    decode = tiered("d0", DISK)
    [shown] = decide([], [decode], reading(decode)).candidates
    [before] = decide([], [decode], ask(TOKENS, cached_tokens={"d0": HELD})).candidates
    assert shown.ttft_s - before.ttft_s == pytest.approx(DISK.read_s(HELD // 16))


def test_a_receiver_keeps_what_it_has_without_a_wait() -> None:
    """It reads no disk for KV that it receives."""
    decode = tiered("d0", DISK, HOST)
    request = reading(decode, split=TierDepths(10, 20))
    assert (request.cached_tokens["d0"], request.kept_on(decode)) == (HELD, 320)


def waits(role: str, queue_s: float, *speeds: TierSpeed, ttft_s: float = 60.0) -> bool:
    """Whether a prompt waits in the router for a worker of this role with such a queue."""
    worker, others = with_queue(tiered(role, *speeds), queue_s), [view("d0")]
    # With a single long prompt, a decode worker would get a shorter one at once.
    worker.reserve(Reservation(request_id="r", attempt=1, tokens=0, blocks=0, prefill_tokens=1), 0.0)
    prefills, decodes = ([worker], others) if role == "p0" else ([], [worker])
    request = reading(worker, slo=Slo(ttft_s=ttft_s, tpot_s=1.0))
    decision = decide(prefills, decodes, request, ("path-choice",))
    return decision.choice is Choice.WAIT


@pytest.mark.parametrize("role", ["p0", "d0"])
def test_a_prompt_is_sent_early_enough_for_its_reads(role: str) -> None:
    speed = replace(DISK, fixed_s=1.0)
    batch_s = tiered(role).batch_s
    read_s = speed.read_s(HELD // 16)
    assert waits(role, batch_s + 0.9 * read_s)
    assert not waits(role, batch_s + 0.9 * read_s, speed)
    assert waits(role, batch_s + 1.1 * read_s, speed)
    # It is read after others, so being sent earlier would not help.
    assert waits(role, batch_s + 1.1 * read_s, replace(speed, queue_s=0.5 * read_s))


@pytest.mark.parametrize("role", ["p0", "d0"])
def test_a_prompt_is_sent_at_most_its_target_earlier(role: str) -> None:
    """A tier that is slower than computing is read until the turn of the prompt."""
    slow = replace(DISK, block_s=0.035)
    assert not waits(role, 15.0, slow, ttft_s=16.0)
    assert waits(role, 15.0, slow, ttft_s=14.0)
    assert not waits(role, 2.0, slow, ttft_s=2.0)


# --- through RouterState --------------------------------------------------------------------------------------


@pytest.fixture
def given() -> Given:
    """p0 and p1; p0 has the first 64 of 100 tokens, of which 16 are in its pool."""
    given = Given(RouterSettings(is_strict=True))
    for worker_id in ("p0", "p1"):
        given.connect_prefill(worker_id, pulls_kv=True, cost=SLOW)
    given.connect_decode("d0", cost=SLOW)
    return given


LOAD = Load(worker_id="p0", steps=1, free_blocks=64, tiers=(DISK,))


def reserved(given: Given, *speeds: TierSpeed) -> None:
    given.submit(replace(LOAD, tiers=speeds))
    known = {"cached_blocks": {"p0": 4}, "cached_tiers": {"p0": TierDepths(1, 1)}}
    [reserve] = given.arrives(slo=Slo(ttft_s=100.0, tpot_s=1.0), **known)
    assert isinstance(reserve, Reserve)


def placed(given: Given, *speeds: TierSpeed) -> Prefill:
    reserved(given, *speeds)
    [prefill] = given.granted()
    assert isinstance(prefill, Prefill)
    return prefill


def read_s(given: Given) -> float:
    """Of another prompt with these blocks."""
    return given.state._cluster.fleet.workers["p0"].reads(4, TierDepths(1, 1), 0.0).read_s


def test_the_work_of_a_worker_has_what_it_does_not_read(given: Given) -> None:
    assert placed(given, DISK).key.worker_id == "p0"
    view = given.state._cluster.fleet.workers["p0"]
    assert view.totals.prefill_tokens == 100 - 64
    request = given.state._cluster.requests["a"]
    found = policy_input_of(request, given.state._cluster.fleet, given.state._cluster.lengths, given.now_s)
    assert found.cached_tokens == {"p0": 64}
    assert (found.reads["p0"].num_read, found.reads["p0"].num_kept) == (3, 1)
    given.first(worker_id="p0")  # it has all of the prompt in its pool
    assert request.cached_tiers == {}


def test_reads_are_counted_until_the_worker_reports_them(given: Given) -> None:
    placed(given, DISK)
    assert read_s(given) == pytest.approx(2 * DISK.read_s(3))
    given.submit(LOAD)
    assert read_s(given) == pytest.approx(DISK.read_s(3))


def test_a_source_of_a_pull_reads_for_its_prompts_first(given: Given) -> None:
    placed(given, DISK)
    view = given.state._cluster.fleet.workers["p0"]
    assert view.given(4, TierDepths(1, 1)) == (4, pytest.approx(2 * DISK.read_s(3)))


def test_an_unloaded_worker_reads_at_once(given: Given) -> None:
    """Its queue would change how long the prompt is expected to take, and so the order of waiting prompts."""
    placed(given, DISK)
    cluster = given.state._cluster
    request = cluster.requests["a"]

    def unloaded_s() -> float:
        entry_of(request, cluster.fleet, cluster.lengths, frozenset({"least-slack"}), given.now_s)
        assert request.unloaded is not None
        return request.unloaded.ttft_s

    queued = replace(LOAD, tiers=(replace(DISK, queue_s=0.2),))
    before_s = unloaded_s()
    given.submit(LOAD)
    assert unloaded_s() == before_s
    given.submit(queued)
    assert unloaded_s() == before_s
    assert before_s == pytest.approx(cluster.fleet.workers["p0"].prefill_s(36, 64) + DISK.read_s(3))


def test_a_report_does_not_have_the_reads_of_prompts_that_are_not_sent(given: Given) -> None:
    reserved(given, DISK)
    given.submit(LOAD)
    assert read_s(given) == pytest.approx(2 * DISK.read_s(3))
    given.granted()
    given.submit(LOAD)
    assert read_s(given) == pytest.approx(DISK.read_s(3))


@pytest.mark.parametrize("begin", [reserved, placed])
def test_prompts_that_end_before_a_report_leave_no_reads(given: Given, begin: Callable[..., object]) -> None:
    begin(given, DISK)
    given.leaves()
    assert read_s(given) == pytest.approx(DISK.read_s(3))


def test_a_refused_prompt_leaves_no_reads(given: Given) -> None:
    reserved(given, DISK)
    given.refused("d0")
    assert read_s(given) == pytest.approx(DISK.read_s(3))


def test_blocks_of_a_tier_that_is_too_slow_are_computed(given: Given) -> None:
    placed(given, replace(DISK, fixed_s=50.0))
    assert given.state._cluster.fleet.workers["p0"].totals.prefill_tokens == 100 - 16


@pytest.mark.parametrize("is_bound", [False, True])
def test_waiting_prompts_are_sent_early_enough_after_an_event(is_bound: bool) -> None:
    """Those that are bound to the worker too."""
    given = Given(RouterSettings(is_strict=True))
    given.connect_prefill("p0", cost=SLOW, max_batch_tokens=16)
    given.connect_decode("d0", cost=SLOW)
    given.arrives("first", prompt=50)
    given.granted(request_id="first")
    report = replace(LOAD, tiers=(replace(DISK, fixed_s=0.4),))
    given.submit(replace(report, pending_prefill_tokens=200))  # mostly of other routers
    given.now_s = 0.05
    known = {"cached_blocks": {"p0": 4}, "cached_tiers": {"p0": TierDepths(1, 1)}}
    assert given.arrives(slo=Slo(ttft_s=100.0, tpot_s=1.0), **known) == []
    cluster = given.state._cluster
    if is_bound:
        cluster.bind(cluster.requests["a"], "p0")
    given.now_s = 0.1
    assert given.now_s < cluster.requests["a"].ask_again_s
    [reserve] = given.submit(report)  # only the first prompt is ahead, for more than a batch
    assert isinstance(reserve, Reserve)
    assert reserve.key.request_id == "a"


def busy(given: Given) -> None:
    given.state._cluster.fleet.workers["p0"].closed_until_s = 1e9


def test_a_pull_has_the_time_in_which_its_source_reads(given: Given) -> None:
    busy(given)
    speed = replace(DISK, fixed_s=0.1)
    prefill = placed(given, speed)
    assert prefill.key.worker_id == "p1"
    assert prefill.source is not None
    assert prefill.source.num_tokens == 64
    assert prefill.source.predicted_s > speed.read_s(3)
    key = AttemptKey("p1", "a", 1)
    took = {"num_bytes": 4096, "busy_s": 0.01, "pull_s": speed.read_s(3) + 0.04}
    given.submit(PullEnded(key=key, source="p0", num_tokens=64, **took))
    assert given.state._cluster.fleet.workers["p0"].pulls.typical_s == pytest.approx(0.03)


def test_what_a_source_would_not_read_is_not_pulled(given: Given) -> None:
    busy(given)
    prefill = placed(given, replace(DISK, fixed_s=50.0))
    assert prefill.source is not None
    assert prefill.source.num_tokens == 16  # what is in its pool


def test_a_lost_worker_has_no_tiers(given: Given) -> None:
    placed(given, DISK)
    given.lost("p0")
    assert given.state._cluster.requests["a"].cached_tiers == {}
