"""A worker pulls a prefix from another one where that costs less than to compute it, and the router learns how long
pulls take."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from pdserve.core.attempt import PULLS_GIVEN, PULLS_TAKEN, AttemptKey, PrefixSource
from pdserve.core.cost.latency import CostPrior, LinkModel
from pdserve.core.protocol import Load, Prefill, PullEnded, Reserve
from pdserve.core.types import Role, Slo
from router.policy.candidates import local_options, remote_options
from router.policy.interface import Choice, PolicyInput, PullChoice
from router.policy.policies.goodput import Goodput
from router.policy.pulls import PULL_SHARE, WORK_WEIGHT, pull_of, source_of
from router.policy.ranking import LOCALS_PRICED, rank_decodes
from router.policy.ranking import tandem_step_s as step_of
from router.state.fleet import Fleet
from router.state.interface import RouterSettings
from router.state.view import FIRST_PULL_S, FIRST_REST_S, LONGEST_REST_S, WorkerView
from tests.unit.router.given import Given
from tests.unit.router.test_goodput import ask, view, with_queue

TOKENS = 8_000
LINK = LinkModel(0.002, 1e10)


def links(sender: str, receiver: str) -> LinkModel:
    return LINK


def pulling(worker_id: str, **facts: Any) -> WorkerView:
    return view(worker_id, pulls_kv=True, **facts)


def asked(source: WorkerView, held: int, **facts: Any) -> PolicyInput:
    return ask(TOKENS, source=source, source_tokens=held, cached_tokens={source.worker_id: held}, **facts)


def pull_by(
    worker: WorkerView, source: WorkerView, held: int, own: int = 0, work_s: float = 1.0, now_s: float = 0.0
) -> PullChoice | None:
    """Of a prompt of which they have so many tokens."""
    cached = {source.worker_id: held, worker.worker_id: own} if own else {source.worker_id: held}
    request = ask(TOKENS, source=source, source_tokens=held, cached_tokens=cached)
    found = pull_of(request, source, cached, worker, work_s, 0.0, links, now_s)
    return None if found is None else found.choice


def test_seconds_of_a_pull() -> None:
    worker = pulling("p1")
    work_s, rest_s = worker.prefill_s(TOKENS, 0), worker.prefill_s(4_000, 4_000)
    pull = pull_by(worker, pulling("p0"), 4_000, work_s=work_s)
    assert pull is not None
    assert (pull.source, pull.num_tokens, pull.prefix_tokens) == ("p0", 4_000, 4_000)
    assert pull.pull_s == pytest.approx(FIRST_PULL_S + LINK.transfer_s(4_000 // 16 * worker.hello.block_bytes))
    assert pull.recompute_s == pytest.approx(work_s - rest_s)


def test_only_what_is_lacking_is_pulled() -> None:
    pull = pull_by(pulling("p1"), pulling("p0"), 4_000, own=1_600)
    assert pull is not None
    assert (pull.prefix_tokens, pull.num_tokens) == (4_000, 2_400)


@pytest.mark.parametrize(
    ("source", "worker"),
    [
        (pulling("p0"), view("p1")),
        (pulling("p0", weights="old"), pulling("p1", weights="new")),
        (pulling("p0", block_size=32), pulling("p1")),
        (pulling("p0", block_bytes=2**20), pulling("p1")),
    ],
)
def test_workers_that_cannot_exchange_kv(source: WorkerView, worker: WorkerView) -> None:
    assert pull_by(worker, source, 4_000) is None


def test_a_worker_does_not_pull_from_itself_or_what_it_has() -> None:
    source = pulling("p0")
    assert pull_by(source, source, 4_000) is None
    assert pull_by(pulling("p1"), source, 4_000, own=4_000) is None


def test_pulls_of_others_come_first() -> None:
    source, worker = pulling("p0"), pulling("p1")
    before = pull_by(worker, source, 4_000)
    other = with_queue(pulling("p2"), 1.0)
    [reservation] = other.reservations.values()
    other.pulls_from(source, reservation, 1_600)
    after = pull_by(worker, source, 4_000)
    assert before is not None
    assert after is not None
    per_byte_s = LINK.coefficients[1]
    assert after.pull_s - before.pull_s == pytest.approx(per_byte_s * 100 * worker.hello.block_bytes)
    other.pulled(reservation)
    other.pulled(reservation)
    assert pull_by(worker, source, 4_000) == before


@pytest.mark.parametrize("end", ["source", "worker"])
def test_a_pull_that_would_be_refused_for_its_bytes_is_not_chosen(end: str) -> None:
    source, worker = pulling("p0", block_bytes=2**22), pulling("p1", block_bytes=2**22)
    assert pull_by(worker, source, 6_400) is not None, "a pull alone may have more than 1 GiB"
    totals = source.totals if end == "source" else worker.totals
    totals.gives, totals.giving_tokens = (1, 16) if end == "source" else (0, 0)
    totals.pulls, totals.pulling_tokens = (1, 16) if end == "worker" else (0, 0)
    assert pull_by(worker, source, 255 * 16) is not None
    assert pull_by(worker, source, 256 * 16) is None


def test_a_worker_pulls_few_at_a_time() -> None:
    worker = pulling("p1")
    worker.totals.pulls = PULLS_TAKEN
    assert pull_by(worker, pulling("p0"), 4_000) is None


def test_an_idle_worker_pulls_from_a_busy_one() -> None:
    source, worker = with_queue(pulling("p0"), 5.0), pulling("p1")
    request = asked(source, 7_200, slo=Slo(ttft_s=2.0, tpot_s=0.05))
    decision = Goodput(links)(request, [source, worker], [view("d0")], 0.0)
    assert (decision.choice, decision.prefill_worker) == (Choice.REMOTE, "p1")
    assert decision.pull is not None
    assert decision.pull.source == "p0"
    shown = next(one for one in decision.candidates if one.prefill_worker == "p1")
    assert shown.pull == decision.pull
    assert shown.pull.pull_s < shown.pull.recompute_s


def test_a_slow_link_is_explained_and_not_used() -> None:
    source, worker = with_queue(pulling("p0"), 5.0), pulling("p1")
    request = asked(source, 7_200, slo=Slo(ttft_s=2.0, tpot_s=0.05))
    decision = Goodput(lambda a, b: LinkModel(0.002, 1e8))(request, [source, worker], [view("d0")], 0.0)
    assert decision.pull is None
    shown = next(one for one in decision.candidates if one.prefill_worker == "p1")
    assert shown.pull is not None
    assert not shown.pull.is_pulled
    assert shown.pull.pull_s > shown.pull.recompute_s


@pytest.mark.parametrize("seed", range(20))
def test_the_cheaper_way_is_taken(seed: int) -> None:
    rng = random.Random(seed)
    link = LinkModel(rng.choice([0.001, 0.1]), rng.choice([1e9, 1e10, 1e11]))
    prefills = [with_queue(pulling(f"p{i}"), rng.uniform(0.01, 0.5)) for i in range(3)]
    decodes = [pulling(f"d{i}") for i in range(LOCALS_PRICED)]
    held = 16 * rng.randint(1, 500)
    request = asked(prefills[0], held)
    cached = request.cached_tokens
    receivers, local_workers = rank_decodes(request, cached, decodes, 0.0, step_of)
    for option in remote_options(request, cached, prefills, receivers, 0.0, lambda a, b: link):
        worker = option.prefill
        assert worker is not None
        assert (option.pull is None) == (worker is prefills[0])
        if option.pull is None:
            continue
        pull_s = FIRST_PULL_S + link.transfer_s(option.pull.num_tokens // 16 * worker.hello.block_bytes)
        rest = TOKENS - option.pull.prefix_tokens
        work_s, rest_s = worker.prefill_s(TOKENS, 0), worker.prefill_s(rest, TOKENS - rest)
        queue_s = worker.free_at_s
        computed = queue_s + work_s, work_s
        pulled = max(queue_s, pull_s) + rest_s, rest_s + PULL_SHARE * pull_s
        costs_s = [delay_s + WORK_WEIGHT * charged_s for delay_s, charged_s in (computed, pulled)]
        assert option.pull.is_pulled == (costs_s[1] < costs_s[0])
        assert option.ttft_s == pytest.approx((pulled if option.pull.is_pulled else computed)[0])
    for option in local_options(request, cached, local_workers, 0.0, math.inf, lambda a, b: link, is_only=False):
        assert option.pull is not None
        pull_s = FIRST_PULL_S + link.transfer_s(option.pull.num_tokens // 16 * option.decode.hello.block_bytes)
        assert option.pull.pull_s == pytest.approx(pull_s)
        saved_s = 2.0 * option.pull.recompute_s
        assert option.pull.is_pulled == (pull_s * (1.0 + PULL_SHARE) < saved_s)
        rest = TOKENS - option.pull.prefix_tokens if option.pull.is_pulled else TOKENS
        waits_s = pull_s if option.pull.is_pulled else 0.0
        assert option.ttft_s == pytest.approx(waits_s + option.decode.prefill_s(rest, TOKENS - rest))


# --- through RouterState --------------------------------------------------------------------------------------

SLOW = CostPrior(prefill_per_token_s=0.01)


@pytest.fixture
def given() -> Given:
    """p0, with a part of the prompt, is asked to wait; p1 has nothing."""
    given = Given(RouterSettings(is_strict=True))
    for worker_id in ("p0", "p1"):
        given.connect_prefill(worker_id, pulls_kv=True, cost=SLOW)
    given.connect_decode("d0", cost=SLOW)
    return given


def busy(given: Given, worker_id: str = "p0") -> None:
    given.state._cluster.fleet.workers[worker_id].closed_until_s = 1e9


def placed(given: Given, name: str = "a", **facts: Any) -> Any:
    """The Prefill of a request whose first 64 tokens p0 has."""
    [reserve] = given.arrives(name, slo=Slo(ttft_s=100.0, tpot_s=1.0), cached_blocks={"p0": 4}, **facts)
    assert isinstance(reserve, Reserve)
    [prefill] = given.granted(request_id=name)
    assert isinstance(prefill, Prefill)
    return prefill


def ended(given: Given, worker_id: str, num_tokens: int, name: str = "a") -> None:
    key = AttemptKey(worker_id, name, 1)
    event = PullEnded(key=key, source="p0", num_tokens=num_tokens, num_bytes=4096, busy_s=0.01, pull_s=0.04)
    assert given.submit(event) == []


def test_the_router_names_the_source(given: Given) -> None:
    busy(given)
    prefill = placed(given)
    assert prefill.key.worker_id == "p1"
    assert prefill.source == PrefixSource(
        worker_id="p0", incarnation="p0.1", endpoint="p0:1", num_tokens=64, predicted_s=prefill.source.predicted_s
    )
    fleet = given.state._cluster.fleet
    assert fleet.workers["p1"].totals.prefill_tokens == 100 - 64
    assert (fleet.workers["p1"].totals.pulls, fleet.workers["p0"].totals.gives) == (1, 1)
    link_s = fleet.link("p0", "p1").latency_s
    ended(given, "p1", 64)
    assert (fleet.workers["p1"].totals.pulls, fleet.workers["p0"].totals.gives) == (0, 0)
    assert fleet.workers["p0"].pulls.typical_s == pytest.approx(0.03)
    assert fleet.link("p0", "p1").latency_s != link_s
    assert given.state.counters["pulls"] == 1


def test_a_worker_that_pulls_is_not_busy(given: Given) -> None:
    busy(given)
    placed(given)
    view = given.state._cluster.fleet.workers["p1"]
    rest_s = view.prefill_s(36, 64)
    given.submit(Load(worker_id="p1", steps=0, free_blocks=100, waiting=1, pending_prefill_tokens=36))
    assert view.queue_s(given.now_s) == pytest.approx(rest_s)
    # A worker that has not begun the pull counts all tokens, which is too long until its next report.
    given.submit(Load(worker_id="p1", steps=0, free_blocks=100, waiting=1, pending_prefill_tokens=100))
    assert view.queue_s(given.now_s) > rest_s
    ended(given, "p1", 64)
    given.first(worker_id="p1")
    given.submit(Load(worker_id="p1", steps=1, free_blocks=100))
    assert view.queue_s(given.now_s) == 0.0


def test_one_token_is_computed(given: Given) -> None:
    busy(given)
    [_] = given.arrives(prompt=96, slo=Slo(ttft_s=100.0, tpot_s=1.0), cached_blocks={"p0": 6})
    [prefill] = given.granted()
    assert prefill.source.num_tokens == 80


def test_a_worker_that_has_it_does_not_pull(given: Given) -> None:
    prefill = placed(given)
    assert (prefill.key.worker_id, prefill.source) == ("p0", None)


def fails(given: Given, name: str, **facts: Any) -> None:
    """A pull of p1 fails, and p1 computes the prompt."""
    event = PullEnded(key=AttemptKey("p1", name, 1), source="p0", num_tokens=0, error="it has not", **facts)
    assert given.submit(event) == []
    given.first(worker_id="p1", request_id=name)


def test_a_failed_pull_ends_pulls_by_this_worker_from_this_source_for_a_while(given: Given) -> None:
    busy(given)
    placed(given)
    fails(given, "a")
    assert given.state.counters["failed_pulls"] == 1
    assert placed(given, "b").source is None
    given.first(worker_id="p1", request_id="b")
    given.at(given.now_s + FIRST_REST_S + 0.1)
    assert placed(given, "c").source is not None


def test_the_while_doubles() -> None:
    source, worker = pulling("p0"), pulling("p1")
    now_s = 0.0
    for rest_s in (2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_REST_S, LONGEST_REST_S):
        worker.pull_ended("p0", now_s, has_failed=True)
        assert pull_by(worker, source, 4_000, now_s=now_s + 0.99 * rest_s) is None
        now_s += 1.01 * rest_s
        assert pull_by(worker, source, 4_000, now_s=now_s) is not None
    worker.pull_ended("p0", now_s, has_failed=False)
    worker.pull_ended("p0", now_s, has_failed=True)
    assert pull_by(worker, source, 4_000, now_s=now_s + 2.01) is not None


def test_a_pull_that_took_long_in_vain_ends_pulls_for_longer(given: Given) -> None:
    busy(given)
    placed(given)
    fails(given, "a", pull_s=0.5)
    given.at(given.now_s + 9.0)
    assert placed(given, "b").source is None
    given.first(worker_id="p1", request_id="b")
    given.at(given.now_s + 1.1)
    assert placed(given, "c").source is not None


@pytest.mark.parametrize("pull_s", [math.nan, math.inf, 1e300, -1.0])
def test_an_absurd_duration_of_a_pull_is_bounded(pull_s: float) -> None:
    worker = pulling("p1")
    worker.pull_ended("p0", 0.0, has_failed=True, pull_s=pull_s)
    assert FIRST_REST_S <= worker.pull_rests["p0"][0] <= LONGEST_REST_S


@pytest.mark.parametrize("is_unreachable", [False, True])
def test_others_may_ask_a_source_that_answers(given: Given, is_unreachable: bool) -> None:
    busy(given)
    placed(given)
    fails(given, "a", is_unreachable=is_unreachable)
    given.connect_prefill("p2", pulls_kv=True, cost=SLOW)
    busy(given, "p1")
    prefill = placed(given, "b")
    assert prefill.key.worker_id == "p2"
    assert (prefill.source is None) is is_unreachable


def test_slow_pulls_that_were_given_up_count(given: Given) -> None:
    busy(given)
    placed(given)
    fleet = given.state._cluster.fleet
    link_s = fleet.link("p0", "p1").transfer_s(4096)
    fails(given, "a", num_bytes=4096, busy_s=0.9, pull_s=2.0)
    assert fleet.workers["p0"].pulls.typical_s == pytest.approx(1.1)
    assert fleet.link("p0", "p1").transfer_s(4096) > link_s


def test_a_pair_without_a_sample_is_like_the_others() -> None:
    fleet = Fleet(silence_s=5.0)
    fleet.measured("p0", "p1", 4096, 0.0)  # no sample
    for _ in range(5):
        fleet.measured("p2", "p3", 10**8, 1.0)
    assert fleet.link("p0", "p1").transfer_s(10**8) == fleet.link("p4", "p5").transfer_s(10**8)
    assert fleet.link("p0", "p1").transfer_s(10**8) == pytest.approx(1.0, rel=0.1)


def test_a_pull_that_was_given_up_only_shows_that_its_link_is_not_faster() -> None:
    fleet = Fleet(silence_s=5.0)

    def seconds() -> tuple[float, float]:
        return fleet.link("p0", "p1").transfer_s(10**8), fleet.link("p4", "p5").transfer_s(10**8)

    for _ in range(20):
        fleet.measured("p0", "p1", 10**8, 1.0)
    for _ in range(20):
        fleet.measured("p2", "p3", 10**8, 0.1)
    pair_s, shared_s = seconds()
    assert shared_s < 0.3 < pair_s
    fleet.measured("p0", "p1", 10**8, 0.01, is_whole=False)
    assert seconds() == (pair_s, shared_s)
    fleet.measured("p0", "p1", 10**8, 0.5, is_whole=False)
    assert seconds()[0] == pair_s
    assert seconds()[1] > shared_s
    fleet.measured("p0", "p1", 10**8, 5.0, is_whole=False)
    assert seconds()[0] > pair_s


def test_the_router_tells_pulls_that_were_given_up_from_whole_ones(given: Given) -> None:
    busy(given)
    placed(given)
    link_s = given.state._cluster.fleet.link("p0", "p1").transfer_s(10**6)
    fails(given, "a", num_bytes=10**6, busy_s=1e-6, pull_s=2.0)
    assert given.state._cluster.fleet.link("p0", "p1").transfer_s(10**6) == link_s


def test_only_the_worker_that_computes_ends_a_pull(given: Given) -> None:
    busy(given)
    placed(given)
    fleet = given.state._cluster.fleet
    ended(given, "d0", 64)
    assert given.state.counters["wrong_sender"] == 1
    assert fleet.workers["p1"].totals.pulls == 1
    ended(given, "p1", 64)
    assert fleet.workers["p1"].totals.pulls == 0


def test_workers_that_give_nothing_hide_no_source() -> None:
    workers = {name: view(name) for name in ("p0", "p1", "p2", "p3")} | {"p4": pulling("p4"), "p5": pulling("p5")}
    cached = {"p0": 96, "p1": 96, "p2": 96, "p3": 96, "p4": 32, "p5": 64}
    assert source_of(cached, workers, lambda view: True, 0.0) is workers["p5"]
    assert source_of(cached, workers, lambda view: view.worker_id != "p5", 0.0) is workers["p4"]
    assert source_of(cached, workers, lambda view: False, 0.0) is None


def test_a_source_gives_to_few_at_a_time(given: Given) -> None:
    busy(given)
    given.state._cluster.fleet.workers["p0"].totals.gives = PULLS_GIVEN
    given.state._cluster.fleet.workers["p0"].totals.giving_tokens = 1
    assert placed(given).source is None


@pytest.mark.parametrize("state", ["drains", "is lost", "is silent", "gives nothing"])
def test_workers_that_are_no_sources(given: Given, state: str) -> None:
    busy(given)
    source = given.state._cluster.fleet.workers["p0"]
    if state == "drains":
        source.is_drain_requested = True
    elif state == "is lost":
        given.lost("p0")
    elif state == "is silent":
        source.heard_s = -100.0
    else:
        given.connect_prefill("p0", cost=SLOW, generation=2)
        busy(given)
    given.state._cluster.fleet.changed()
    assert placed(given).source is None


def test_a_pull_ends_with_its_attempt(given: Given) -> None:
    busy(given)
    placed(given)
    fleet = given.state._cluster.fleet
    given.lost("p1")
    assert fleet.workers["p0"].totals.gives == 0


def test_a_local_prompt_is_pulled() -> None:
    given = Given(RouterSettings(is_strict=True))
    given.connect_decode("d0", pulls_kv=True, cost=SLOW)
    given.connect_decode("d1", pulls_kv=True, cost=SLOW)
    busy(given, "d0")
    [reserve] = given.arrives(slo=Slo(ttft_s=100.0, tpot_s=1.0), cached_blocks={"d0": 4})
    assert (reserve.key.worker_id, reserve.is_local, reserve.source.worker_id) == ("d1", True, "d0")
    assert given.state._cluster.fleet.workers["d1"].role is Role.DECODE
