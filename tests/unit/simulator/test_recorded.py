"""A recording, read as a trace and as a cluster: by hand, and from the random world with faults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.core.attempt import AttemptKey, FailureKind
from pdserve.core.cost.latency import CostPrior
from pdserve.core.errors import ConfigError
from pdserve.core.protocol import AttemptFailed, BatchTimed, Granted, Load, Reserve, TokenRow, TokensArrived
from pdserve.core.types import FinishReason, Role, Slo, TokenOut
from router.recording import replay
from router.state.interface import ClientLeft, Event, RouterSettings, WorkerLost
from router.state.state import RouterState
from simulator.model import TraceError, TraceRequest, WorkerFault, WorkerFaultKind
from simulator.traces.files import FileTrace
from simulator.traces.recorded import RecordedCluster, read_cluster, read_recording
from tests.support.slow import slow_except
from tests.unit.router.router_events import arrival, hello
from tests.unit.router.test_random_runs import run
from tests.unit.router.test_replay import recording

SETTINGS = RouterSettings(policy="colocated", is_strict=True)
COST = CostPrior(decode_base_s=0.01, decode_per_row_s=0.001, decode_per_context_token_s=0.0)


def recorded(*events: tuple[float, Event], settings: RouterSettings = SETTINGS) -> list[tuple[int, str]]:
    """A real router's recording of these events. Workers grant every reservation at once."""
    state = RouterState(settings)
    lines = [replay.encode_settings(settings)]
    left = list(events)
    while left:
        now_s, event = left.pop(0)
        commands = state.handle(event, now_s)
        lines.append(replay.encode_step(replay.make_step(now_s, event, commands)))
        seats = [
            Granted(key=AttemptKey(one.worker_id, one.request_id, one.attempt))
            for one in commands
            if isinstance(one, Reserve)
        ]
        left[:0] = [(now_s, one) for one in seats]
    return list(enumerate(lines, start=1))


def requests(*events: tuple[float, Event]) -> list[TraceRequest]:
    return list(read_recording(recorded(*events), "r"))


def answered(request_id: str, tokens: int, *, is_last: bool = True) -> TokensArrived:
    row = TokenRow(
        key=AttemptKey("d0", request_id, 1),
        output_index=0,
        tokens=tuple(TokenOut(token_id=one) for one in range(tokens)),
        finish=FinishReason.STOP if is_last else None,
    )
    return TokensArrived(worker_id="d0", rows=(row,))


D0 = (10.0, hello("d0", Role.DECODE, cost=COST))


def test_a_recorded_request_keeps_its_time_and_length() -> None:
    facts: dict[str, Any] = {"tenant": "blue", "priority": 2, "slo": Slo(ttft_s=3.0)}
    (first, second) = requests(
        D0,
        (12.0, arrival("a", prompt=33, block_hashes=(b"a" * 16, b"b" * 16), **facts)),
        (12.5, arrival("b", prompt=32, block_hashes=(b"a" * 16, b"c" * 16))),
        (13.0, answered("b", 3)),
        (14.0, answered("a", 5)),
    )
    assert (first.arrival_s, first.prompt_tokens, first.output_tokens) == (0.0, 33, 5)
    assert (first.tenant, first.priority, first.slo) == ("blue", 2, Slo(ttft_s=3.0))
    assert (second.arrival_s, second.prompt_tokens, second.output_tokens) == (0.5, 32, 3)
    assert first.block_ids[0] == second.block_ids[0], "an equal prefix"
    assert len({*first.block_ids, *second.block_ids}) == 4
    assert (len(first.block_ids), len(second.block_ids)) == (3, 2), "one for each 16 tokens, begun ones included"


def test_a_cancelled_request_keeps_its_requested_length() -> None:
    (one,) = requests(
        D0,
        (12.0, arrival("a", max_tokens=8)),
        (13.0, answered("a", 2, is_last=False)),
        (13.25, ClientLeft(request_id="a")),
    )
    assert (one.cancel_after_s, one.output_tokens) == (1.25, 8)


def test_an_unknown_length_is_the_mean_of_earlier_ones() -> None:
    failed = AttemptFailed(key=AttemptKey("d0", "c", 1), kind=FailureKind.INVALID, message="bad")
    found = requests(
        D0,
        (12.0, arrival("a")),
        (12.1, arrival("b")),
        (13.0, answered("a", 5)),
        (13.1, answered("b", 3)),
        (14.0, arrival("c", max_tokens=8)),
        (14.1, failed),
        (15.0, arrival("d", max_tokens=2)),
        (15.1, arrival("e", max_tokens=20)),
        (15.2, answered("e", 6, is_last=False)),
    )
    assert [one.output_tokens for one in found] == [5, 3, 4, 2, 6]
    assert all(one.cancel_after_s is None for one in found)


def test_the_first_unknown_length_is_the_requested_one() -> None:
    assert [one.output_tokens for one in requests(D0, (12.0, arrival("a", max_tokens=7)))] == [7]


@pytest.mark.parametrize("policy", slow_except(["goodput", "mooncake", "round-robin"], "goodput"))
def test_every_request_of_a_run_with_faults_is_read_once_in_order(policy: str) -> None:
    world = run(11, faults=0.02, policy=policy, requests=200, stirs=10_000)
    lines = [line.rstrip("\n") for line in recording(world)]
    found = list(read_recording(enumerate(lines, start=1), "r"))
    assert len(found) == len(world.clients) == 200
    assert [one.arrival_s for one in found] == sorted(one.arrival_s for one in found)
    for one, client in zip(found, world.clients.values(), strict=True):
        assert one.prompt_tokens == client.request.num_prompt_tokens
        assert len(client.heard) <= one.output_tokens <= client.request.sampling.max_tokens
    assert any(one.cancel_after_s is not None for one in found)


# -- the cluster -------------------------------------------------------------------------------------------------


def cluster(*events: tuple[float, Event]) -> RecordedCluster:
    return read_cluster(recorded(*events), "r")


def batches(worker_id: str, now_s: float, base_s: float) -> list[tuple[float, Event]]:
    """Decode batches of a machine that is slower than its prior cost."""
    return [
        (
            now_s,
            BatchTimed(
                worker_id=worker_id,
                rows=rows,
                prefill_tokens=0,
                prefill_token_context=0.0,
                context_tokens=100 * rows,
                step_s=base_s + 0.001 * rows,
            ),
        )
        for rows in list(range(1, 9)) * 10
    ]


def test_workers_have_their_hello_and_learned_cost() -> None:
    found = cluster(
        D0, (10.0, hello("p0", Role.PREFILL, num_blocks=32)), (11.0, arrival("a")), *batches("d0", 12.0, 0.03)
    )
    d0, p0 = found.workers
    assert (d0.worker_id, d0.role, d0.prior) == ("d0", Role.DECODE, COST)
    assert d0.cost.decode_base_s == pytest.approx(0.03, rel=0.05)
    assert d0.cost.decode_per_row_s == pytest.approx(0.001, rel=0.2)
    assert (p0.role, p0.kv_capacity_tokens, p0.kv_bytes_per_token) == (Role.PREFILL, 32 * 16, 64)
    assert (p0.max_batch_tokens, p0.inbox_depth, p0.max_context_tokens) == (128, 4, 512)
    assert (found.block_size, found.router, found.slo) == (16, SETTINGS, Slo())


def spread(share: float, count: int = 80) -> list[tuple[float, Event]]:
    """Decode steps that deviate by that share, alternately in both directions."""
    return [
        (12.0, replace(event, step_s=event.step_s * (1.0 + (share if index % 4 in (1, 2) else -share))))
        for index, (_, event) in enumerate(batches("d0", 12.0, 0.03)[:count])
        if isinstance(event, BatchTimed)
    ]


def test_noise_matches_the_recording() -> None:
    assert cluster(D0, (11.0, arrival("a")), *spread(0.0)).noise < 0.02
    assert cluster(D0, (11.0, arrival("a")), *spread(0.2)).noise == pytest.approx(1.48 * 0.2, rel=0.25)
    assert cluster(D0, (11.0, arrival("a")), *spread(0.2)).config().noise > 0.2


def test_rare_stalls_hardly_count_as_noise() -> None:
    steps = spread(0.0)
    for index in range(5, len(steps), 10):
        now_s, event = steps[index]
        assert isinstance(event, BatchTimed)
        steps[index] = (now_s, replace(event, step_s=event.step_s * 10.0))
    assert cluster(D0, (11.0, arrival("a")), *steps).noise < 0.15, "their standard deviation is 2.7"


def test_few_batches_give_no_noise() -> None:
    assert cluster(D0, (11.0, arrival("a"))).noise == 0.0
    assert cluster(D0, (11.0, arrival("a")), *spread(0.2, count=15)).noise == 0.0


def test_a_recorded_death_is_repeated() -> None:
    found = cluster(
        D0,
        (10.0, hello("d1", Role.DECODE)),
        (11.0, arrival("a")),
        (12.0, WorkerLost(worker_id="d1")),
        (15.0, hello("d1", Role.DECODE, generation=2)),
        (16.0, WorkerLost(worker_id="d1")),
        (20.0, arrival("b")),
        (21.0, WorkerLost(worker_id="d0")),
    )
    assert found.faults == (
        WorkerFault(at_s=1.0, worker_id="d1", kind=WorkerFaultKind.DIE, for_s=3.0),
        WorkerFault(at_s=5.0, worker_id="d1", kind=WorkerFaultKind.DIE, for_s=math.inf),
    ), "d0 went after the last request: the cluster was ended"


def test_the_heartbeat_follows_from_reports() -> None:
    beats: Sequence[tuple[float, Event]] = [
        (10.0 + 0.25 * number, Load(worker_id="d0", steps=number, free_blocks=64)) for number in range(5)
    ]
    assert cluster(D0, *beats).heartbeat_s == pytest.approx(0.25)


def test_links_match_the_recorded_transfers() -> None:
    world = run(5, faults=0.0, policy="round-robin")  # 10 ms per transfer, 1024 bytes per token.
    lines = [line.rstrip("\n") for line in recording(world)]
    found = read_cluster(enumerate(lines, start=1), "r")
    for worker in found.workers:
        assert worker.link.latency_s + 1024 * 150 / worker.link.bytes_per_s == pytest.approx(0.01, rel=0.2)


def test_a_recording_gives_a_simulator_config() -> None:
    found = cluster(D0, (11.0, arrival("a")))
    config = found.config(seed=7, faults=())
    assert (config.workers, config.seed, config.block_size) == (found.workers, 7, 16)
    assert config.router.policy == "colocated"


def test_a_recording_without_a_decode_worker_is_no_cluster() -> None:
    with pytest.raises(ConfigError, match="no decode worker"):
        cluster((10.0, hello("p0", Role.PREFILL)))


# -- invalid lines -----------------------------------------------------------------------------------------------

GOOD = recorded(D0, (12.0, arrival("a")), (13.0, answered("a", 3)), (14.0, arrival("b")), (15.0, answered("b", 3)))


@pytest.mark.parametrize(
    ("damaged", "column"),
    [
        ("no JSON", "step"),
        ("[]", "step"),
        ('{"now_s":13.0}', "step"),
        ('{"now_s":"noon","event":{"is":"TimePassed"},"commands":[]}', "step"),
        ('{"now_s":13.0,"event":{"is":"RequestArrived"},"commands":[]}', "step"),
        ('{"now_s":1.0,"event":{"is":"TimePassed"},"commands":[]}', "now_s"),
        ('{"now_s":NaN,"event":{"is":"TimePassed"},"commands":[]}', "now_s"),
    ],
)
def test_a_damaged_line_is_an_error_with_its_number(damaged: str, column: str) -> None:
    lines = [*GOOD[:3], (4, damaged), *GOOD[4:]]
    for read in (lambda: list(read_recording(lines, "r")), lambda: read_cluster(lines, "r")):
        with pytest.raises(TraceError) as caught:
            read()
        assert (caught.value.line, caught.value.column) == (4, column)


def test_a_last_line_that_was_cut_off_ends_the_recording() -> None:
    number, text = GOOD[-1]
    found = list(read_recording([*GOOD[:-1], (number, text[: len(text) // 2])], "r"))
    assert [one.output_tokens for one in found] == [3, 3], "b's length is the mean of those that were seen"


def test_a_recording_is_a_trace_with_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    path.write_text("\n".join(text for _, text in GOOD) + "\n")
    trace = FileTrace(path)
    assert (trace.format.name, trace.block_tokens) == ("pdserve recording", 16)
    assert [one.output_tokens for one in trace] == [3, 3]
    found = trace.cluster()
    assert found is not None
    assert [one.worker_id for one in found.workers] == ["d0"]
