"""Running answers move from a draining decode worker to others: which ones, when, and how many at a time."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.core.attempt import RefusalReason
from pdserve.core.cost.latency import CostPrior
from pdserve.core.protocol import Cancel, DrainWorker, Load, Reserve
from pdserve.core.types import FinishReason, Slo
from router.policy.availability import LONGEST_WAIT_S
from router.policy.interface import Choice, Decision, Obstacle, PolicyInput
from router.state.interface import Command, DrainRequested, FinishRequest, RouterSettings, UndrainRequested
from router.state.lifecycle import Stage
from router.state.migration import PATIENCE_S, SENDS_AT_ONCE
from tests.unit.router.expected import admit, cancel, emit, prefill, reserve
from tests.unit.router.given import Given

SLOW_PREFILL = CostPrior(prefill_base_s=0.5)  # a decode step takes 10 ms
SLOW_TOKENS = CostPrior(prefill_per_token_s=0.01)  # of a prompt
SO_FAR = tuple(range(100, 160))  # tokens of an answer whose KV is sent


def drain(given: Given, worker_id: str = "d0") -> list[Command]:
    return given.submit(DrainRequested(worker_id=worker_id))


def is_moved(commands: list[Command]) -> bool:
    return any(isinstance(one, Reserve) for one in commands)


def slow_prefill(max_tokens: int, **facts: object) -> Given:
    """An answer with one token on d0. To move it to d1 takes half a second."""
    given = Given(RouterSettings(policy="round-robin", is_strict=True))
    large = {"num_blocks": 1024, "max_context_tokens": 4096, "max_batch_tokens": 4096}
    given.connect_prefill("p0", cost=SLOW_PREFILL, **large)
    for worker_id in ("d0", "d1"):
        given.connect_decode(worker_id, **large)
    given.arrives(max_tokens=max_tokens, **facts)
    given.granted()
    given.first(100)
    given.committed()
    return given


def test_a_running_answer_moves_and_continues_at_the_next_token(given: Given) -> None:
    given.connect_decode("d1")
    given.decoding()
    given.released("p0")
    assert given.tokens(1, [101]) == [emit(1, 101)]
    assert drain(given) == [DrainWorker(worker_id="d0"), cancel("d0"), reserve(2, "d1", (100, 101))]
    assert given.tokens(2, [102]) == [], "a late token of the old worker"
    given.released("d0")
    assert given.granted(2, "d1") == [prefill(2, "p0", (100, 101), "d1")]
    assert given.first(102, 2) == [emit(2, 102), admit(102, 2, "d1")]
    given.committed(attempt=2, worker_id="d1")
    *_, finished = given.tokens(3, [103], 2, "d1", FinishReason.STOP)
    assert isinstance(finished, FinishRequest)
    assert (finished.timings.attempts, finished.timings.migrations, finished.timings.decode_worker) == (2, 1, "d1")
    assert given.state.counters["migrated"] == 1
    assert not [name for name in given.state.counters if name.startswith("lost")]


def test_the_explanation_says_why_an_answer_moved(given: Given) -> None:
    given.connect_decode("d1")
    given.decoding()
    drain(given)
    record = given.state.explain("a")
    assert record is not None
    assert (record.attempt, record.decision.decode_worker) == (2, "d1")
    assert record.decision.reason.startswith("moved from d0, which is drained: the rest would take about 0.07")


def test_an_answer_leaves_a_worker_that_ends(given: Given) -> None:
    """Its own process drains it, so the router learns of that from its report."""
    given.connect_decode("d1")
    given.decoding()
    commands = given.submit(Load(worker_id="d0", steps=1, free_blocks=64, running=1, is_draining=True))
    assert commands[-1] == reserve(2, "d1", (100,))
    record = given.state.explain("a")
    assert record is not None
    assert record.decision.reason.startswith("moved from d0, which is draining: ")


def test_an_answer_of_the_local_path_moves() -> None:
    given = Given(RouterSettings(policy="colocated", is_strict=True))
    given.connect_decode("d0")
    given.arrives()
    given.seated()
    given.connect_decode("d1")
    assert not is_moved(drain(given)), "it has no token yet"
    commands = given.tokens(0, [100])
    assert commands[-1] == reserve(2, "d1", (100,), is_local=True)


@pytest.mark.parametrize("stage", [Stage.PREFILLING, Stage.MOVING, Stage.LANDED])
def test_an_attempt_reaches_the_draining_worker_before_it_moves(given: Given, stage: Stage) -> None:
    given.connect_decode("d1")
    given.prefilling()
    if stage is Stage.MOVING:
        given.first(100)
    elif stage is Stage.LANDED:
        given.committed()
    assert given.state.stage_of("a") is stage
    assert not is_moved(drain(given))
    commands = given.committed() if stage is Stage.MOVING else given.first(100)
    if stage is Stage.PREFILLING:
        assert not is_moved(commands)
        commands = given.committed()
    assert commands[-1] == reserve(2, "d1", (100,))


def test_an_answer_stays_if_no_other_worker_can_take_it(given: Given) -> None:
    given.connect_decode("d1")
    drain(given, "d1")
    given.decoding()
    assert drain(given) == [DrainWorker(worker_id="d0")]
    assert given.tokens(1, [101]) == [emit(1, 101)]
    assert is_moved(given.submit(UndrainRequested(worker_id="d1"))), "another worker is there"


@pytest.mark.parametrize("num_blocks", [6, 7])
def test_an_answer_stays_if_no_other_worker_can_hold_all_of_it(given: Given, num_blocks: int) -> None:
    """Its prompt needs 7 blocks, and the whole answer one more."""
    given.connect_decode("d1", num_blocks=num_blocks)
    given.arrives(max_tokens=20)
    given.granted()
    given.first(100)
    given.committed()
    assert drain(given) == [DrainWorker(worker_id="d0")]
    given.connect_decode("d2")
    given.now_s += 1.0
    assert given.tokens(1, [101])[-1] == reserve(2, "d2", (100, 101), waited_s=1.0)


def test_an_answer_with_few_tokens_left_stays() -> None:
    given = slow_prefill(max_tokens=8)
    assert not is_moved(drain(given))
    given.now_s += 1.0
    assert given.tokens(1, [101]) == [emit(1, 101)]
    assert is_moved(drain(slow_prefill(max_tokens=400)))


def test_a_long_answer_moves_though_most_are_short(given: Given) -> None:
    """By the mean of earlier answers, it should have ended."""
    given.connect_decode("d1")
    given.arrives("short", max_tokens=100)
    given.granted(request_id="short", worker_id="d0")
    given.first(100, request_id="short", finish=FinishReason.STOP)
    given.released("d0", request_id="short")
    given.released("p0", request_id="short")
    given.arrives(max_tokens=100)
    given.granted(worker_id="d1")
    given.first(100)
    given.committed(worker_id="d1")
    given.tokens(1, list(range(101, 120)), worker_id="d1")
    assert is_moved(drain(given, "d1"))


def test_a_gap_that_misses_the_target_waits_for_a_limited_time() -> None:
    given = slow_prefill(max_tokens=2000, slo=Slo(tpot_s=0.0105))
    commands, num_tokens = drain(given), 1
    while not is_moved(commands) and given.now_s < 2 * PATIENCE_S:
        given.now_s += 0.3
        commands = given.tokens(num_tokens, list(range(100 + num_tokens, 129 + num_tokens)))
        commands += given.heard("p0") + given.heard("d1")
        num_tokens += 29
    assert PATIENCE_S <= given.now_s <= PATIENCE_S + 0.6
    assert is_moved(drain(slow_prefill(max_tokens=2000, slo=Slo(tpot_s=0.1)))), "the target allows the gap"


def test_an_answer_stays_if_it_would_miss_its_deadline() -> None:
    given = slow_prefill(max_tokens=300, deadline_s=3.0)
    assert not is_moved(drain(given))
    assert is_moved(drain(slow_prefill(max_tokens=300, deadline_s=4.0)))


def test_as_many_answers_move_at_a_time_as_there_are_prefill_workers(given: Given) -> None:
    given.connect_prefill("p1")
    for name in "abcd":
        given.arrives(name)
        given.granted(request_id=name)
        given.first(100, request_id=name, worker_id="p0" if name in "ac" else "p1")
        given.committed(request_id=name)
    given.connect_decode("d1")
    moved = [one.request_id for one in drain(given) if isinstance(one, Reserve)]
    assert len(moved) == 2
    first = moved[0]
    assert not is_moved(given.tokens(1, [101], request_id=next(name for name in "abcd" if name not in moved)))
    assert given.granted(2, "d1", first) != []
    commands = given.first(101, 2, "p0", request_id=first) + given.first(101, 2, "p1", request_id=first)
    assert [one.attempt for one in commands if isinstance(one, Reserve)] == [2], "the next one"


def test_the_longest_answer_moves_first(given: Given) -> None:
    for name, most in (("a", 10), ("b", 200), ("c", 20)):
        given.arrives(name, max_tokens=most)
        given.granted(request_id=name)
        given.first(100, request_id=name)
        given.committed(request_id=name)
    given.connect_decode("d1")
    assert [one.request_id for one in drain(given) if isinstance(one, Reserve)] == ["b"]


def test_an_answer_that_waits_for_a_prefill_worker_keeps_no_other_on_the_worker(given: Given) -> None:
    """Perhaps only it has its prefix there, or its adapter."""
    for name, most in (("a", 200), ("b", 20)):
        given.arrives(name, max_tokens=most)
        given.granted(request_id=name)
        given.first(100, request_id=name)
        given.committed(request_id=name)
    given.connect_decode("d1")
    cluster = given.state._cluster
    policy = cluster.policy

    def waiting(asked: PolicyInput, *workers: Any) -> Decision:
        if asked.request_id == "a":
            return Decision(choice=Choice.WAIT, reason="its worker is busy", obstacle=Obstacle.PREFILL)
        return policy(asked, *workers)

    cluster.policy = waiting
    assert [one.request_id for one in drain(given) if isinstance(one, Reserve)] == ["b"]


def test_an_answer_needs_progress_before_it_moves_again(given: Given) -> None:
    given.connect_decode("d1")
    given.arrives(max_tokens=200)
    given.granted()
    given.first(100)
    given.committed()
    assert is_moved(drain(given))
    given.connect_decode("d2")
    given.granted(2, "d1")
    given.first(101, 2)
    given.committed(attempt=2, worker_id="d1")
    assert not is_moved(drain(given, "d1"))
    assert not is_moved(given.tokens(2, list(range(102, 108)), 2, "d1"))
    assert given.tokens(8, [108], 2, "d1")[-1] == reserve(3, "d2", tuple(range(100, 109)))


def test_a_refused_answer_is_placed_again_and_counts_until_its_next_token(given: Given) -> None:
    given.connect_decode("d1")
    for name in ("a", "b"):
        given.arrives(name)
        given.granted(request_id=name, worker_id="d0" if name == "a" else "d1")
        given.first(100, request_id=name)
        given.committed(request_id=name, worker_id="d0" if name == "a" else "d1")
    given.connect_decode("d2")
    [moved] = [one for one in drain(given) if isinstance(one, Reserve)]
    assert drain(given, "d1")[0] == DrainWorker(worker_id="d1")
    given.refused(moved.worker_id, 2, RefusalReason.INBOX_FULL)
    assert not is_moved(given.tokens(1, [101], worker_id="d1", request_id="b"))
    given.now_s += 0.2
    again = given.heard("d2")
    assert [(one.request_id, one.attempt) for one in again if isinstance(one, Reserve)] == [("a", 3)]
    given.granted(3, "d2")
    assert is_moved(given.first(101, 3)), "now the other one"


def test_waiting_requests_go_before_answers(given: Given) -> None:
    """A new request waits for the prefill worker. The answer moves only when it has started, or after a while."""
    given.decoding()
    for name in ("b", "c", "d", "e", "f"):  # the inbox of p0 holds four
        given.arrives(name)
    assert given.state.num_queued > 0
    given.connect_decode("d1")
    assert not any(isinstance(one, Reserve) and one.request_id == "a" for one in drain(given))
    assert not any(isinstance(one, Cancel) and one.request_id == "a" for one in given.tokens(1, [101]))


def test_the_end_of_a_drain_keeps_the_answers(given: Given) -> None:
    given.connect_decode("d1")
    given.arrives()
    given.granted()
    drain(given)
    given.first(100)
    given.submit(UndrainRequested(worker_id="d0"))
    assert not is_moved(given.committed())


def test_an_answer_whose_client_leaves_no_longer_counts(given: Given) -> None:
    given.connect_decode("d1")
    for name in ("a", "b"):
        given.arrives(name)
        where = "d0" if name == "a" else "d1"
        given.granted(request_id=name, worker_id=where)
        given.first(100, request_id=name)
        given.committed(request_id=name, worker_id=where)
    given.connect_decode("d2")
    drain(given)
    drain(given, "d1")
    assert is_moved(given.leaves("a") + given.tokens(1, [101], worker_id="d1", request_id="b"))


# -- answers whose KV is sent ----------------------------------------------------------------------------------


@pytest.fixture
def sending(given: Given) -> Given:
    """An answer on d0, which can send its KV to d1. p0 has only the prompt in its cache."""
    given.connect_prefill("p0", cost=SLOW_TOKENS, generation=2)
    for worker_id in ("d0", "d1"):
        given.connect_decode(worker_id, sends_kv=True, cost=SLOW_TOKENS, generation=2)
    given.arrives(max_tokens=200)
    given.granted()
    given.first(100)
    given.committed()
    given.released("p0")
    given.tokens(1, SO_FAR[1:])
    return given


def test_the_draining_worker_sends_the_kv(sending: Given) -> None:
    """It gets the order of a prefill worker, with the tokens so far, and samples the next one."""
    assert drain(sending) == [DrainWorker(worker_id="d0"), cancel("d0"), reserve(2, "d1", SO_FAR)]
    record = sending.state.explain("a")
    assert record is not None
    assert record.decision.prefill_worker == "d0"
    assert "; its KV is sent; " in record.decision.reason
    sending.released("d0")
    assert sending.granted(2, "d1") == [prefill(2, "d0", SO_FAR, "d1")]
    assert sending.first(200, 2, "d0") == [emit(len(SO_FAR), 200), admit(200, 2, "d1")]
    assert sending.state.stage_of("a") is Stage.MOVING
    sending.committed(attempt=2, worker_id="d1")
    sending.released("d0", 2)
    *_, finished = sending.tokens(len(SO_FAR) + 1, [201], 2, "d1", FinishReason.STOP)
    assert isinstance(finished, FinishRequest)
    assert (finished.timings.prefill_worker, finished.timings.decode_worker) == ("d0", "d1")
    assert (sending.state.counters["migrated"], sending.state.counters["migrated_with_kv"]) == (1, 1)


def test_kv_is_computed_again_where_that_is_faster(given: Given) -> None:
    """A block has a gigabyte here, and the link is assumed to move one in a second."""
    for worker_id in ("d0", "d1"):
        given.connect_decode(worker_id, sends_kv=True, block_bytes=10**9)
    given.arrives(max_tokens=200)
    given.granted()
    given.first(100)
    given.committed()
    assert drain(given)[-1] == reserve(2, "d1", (100,))
    assert given.granted(2, "d1") == [prefill(2, "p0", (100,), "d1")]


def test_a_refusal_to_send_leads_to_a_prefill(sending: Given) -> None:
    drain(sending)
    sending.granted(2, "d1")
    commands = sending.refused("d0", 2, RefusalReason.NO_KV)
    assert commands == [cancel("d1", 2), reserve(3, "d1", SO_FAR)]
    assert sending.granted(3, "d1") == [prefill(3, "p0", SO_FAR, "d1")]


@pytest.mark.parametrize("has_token", [False, True])
def test_a_failed_transfer_leads_to_a_prefill(sending: Given, has_token: bool) -> None:
    drain(sending)
    sending.granted(2, "d1")
    tokens = (*SO_FAR, 200) if has_token else SO_FAR
    if has_token:
        sending.first(200, 2, "d0")
    commands = sending.committed(is_committed=False, attempt=2, worker_id="d1")
    assert commands == [cancel("d0", 2), cancel("d1", 2), reserve(3, "d1", tokens)]
    assert sending.granted(3, "d1") == [prefill(3, "p0", tokens, "d1")]


def test_the_death_of_the_sender_leads_to_a_prefill(sending: Given) -> None:
    drain(sending)
    sending.granted(2, "d1")
    sending.first(200, 2, "d0")
    assert sending.lost("d0") == [cancel("d1", 2), reserve(3, "d1", (*SO_FAR, 200))]
    assert sending.granted(3, "d1") == [prefill(3, "p0", (*SO_FAR, 200), "d1")]


def test_the_death_of_the_receiver_leads_to_a_prefill(sending: Given) -> None:
    sending.connect_decode("d2")
    drain(sending)
    sending.granted(2, "d1")
    sending.first(200, 2, "d0")
    assert sending.lost("d1") == [cancel("d0", 2), reserve(3, "d2", (*SO_FAR, 200))]


def test_the_last_attempt_is_not_lost_to_a_transfer(sending: Given) -> None:
    sending.state._cluster.requests["a"].lost_attempts = sending.state.settings.max_attempts - 1
    drain(sending)
    assert sending.granted(2, "d1") == [prefill(2, "p0", SO_FAR, "d1")]


def test_a_few_answers_of_a_worker_are_sent_at_a_time(sending: Given) -> None:
    given = sending
    for number in range(2 * SENDS_AT_ONCE):  # every second one to d0
        name = f"more{number}"
        [placed] = given.arrives(name, prompt=20, max_tokens=100)
        assert isinstance(placed, Reserve)
        given.granted(worker_id=placed.worker_id, request_id=name)
        given.first(100, request_id=name)
        given.committed(worker_id=placed.worker_id, request_id=name)
        given.released("p0", request_id=name)
    given.connect_prefill("p0", cost=CostPrior(prefill_base_s=10.0), generation=3)  # no answer is worth that
    given.connect_decode("d2", inbox_depth=16)
    moved = [one.request_id for one in drain(sending) if isinstance(one, Reserve)]
    assert len(moved) == SENDS_AT_ONCE
    assert moved[0] == "a", "the longest"
    sending.granted(2, "d1")
    assert not is_moved(sending.first(200, 2, "d0")), "its KV has not arrived"
    given.now_s += LONGEST_WAIT_S
    assert is_moved(sending.committed(attempt=2, worker_id="d1"))


def test_an_answer_is_sent_while_requests_wait_for_a_prefill_worker(sending: Given) -> None:
    for name in ("b", "c", "d", "e", "f"):  # the inbox of p0 holds four
        sending.arrives(name)
    assert sending.state.num_queued > 0
    assert any(isinstance(one, Reserve) and one.request_id == "a" for one in drain(sending))


# -- how soon answers are computed again -----------------------------------------------------------------------


def busy(given: Given, num_answers: int) -> list[str]:
    """Answers on d0, and a prompt on p0, whose inbox holds one."""
    given.connect_prefill("p0", inbox_depth=1)
    names = [f"r{number}" for number in range(num_answers)]
    for name in names:
        given.arrives(name, max_tokens=200)
        given.granted(request_id=name)
        given.first(100, request_id=name)
        given.committed(request_id=name)
        given.released("p0", request_id=name)
    given.arrives("other", max_tokens=200)
    given.connect_decode("d1")
    return names


def test_an_answer_moves_as_soon_as_a_prefill_worker_is_free(given: Given) -> None:
    busy(given, 2)
    given.granted(request_id="other")
    assert not is_moved(drain(given)), "p0 computes another prompt"
    given.now_s += 0.001
    commands = given.first(100, request_id="other")
    for attempt in range(2):
        given.now_s += 0.001
        assert is_moved(commands), f"move {attempt}"
        [moved] = [one for one in commands if isinstance(one, Reserve)]
        given.granted(2, "d1", moved.request_id)
        commands = given.first(101, 2, "p0", request_id=moved.request_id)


def test_waiting_requests_do_not_starve_answers_for_long(given: Given) -> None:
    """The prefill worker always has a prompt, and the next one always waits."""
    busy(given, 1)
    drain(given)
    ahead, decode = "other", "d0"
    for number in range(100):
        given.granted(request_id=ahead, worker_id=decode)
        given.arrives(f"next{number}", slo=Slo(ttft_s=100.0))
        given.now_s += 0.1
        commands = given.tokens(number + 1, [101 + number], request_id="r0")
        assert not is_moved(commands), "p0 computes a prompt"
        commands = given.first(100, request_id=ahead, finish=FinishReason.STOP)
        [placed] = [one for one in commands if isinstance(one, Reserve)]
        if placed.request_id == "r0":
            break
        for worker_id in ("p0", decode):
            given.released(worker_id, request_id=ahead)
        ahead, decode = placed.request_id, placed.worker_id
        for worker_id in ("d0", "d1"):
            given.heard(worker_id)
    assert PATIENCE_S <= given.now_s <= PATIENCE_S + 0.2
