"""Tiny runs whose times are computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.core.types import Path, Role
from simulator.model import NetworkLink, RequestRow, WorkerFault, WorkerFaultKind, WorkerShape
from tests.unit.simulator.small import BLOCK_BYTES, COST, EASY, LINK, MESSAGE_S, asked, cluster, run


def prefill_s(tokens: int) -> float:
    return 0.01 + 1e-4 * tokens


def decode_s(context: int, steps: int, rows: int = 1) -> float:
    """Time of `steps` decode steps, the first with `context` tokens in total."""
    return sum(0.01 + 1e-3 * rows + 1e-6 * (context + rows * i) for i in range(steps))


def test_one_remote_request_takes_the_sum_of_its_parts() -> None:
    _, [row] = run([asked(1.0, 1500, 101)], cluster())
    # Reserve, Granted, Prefill and FirstToken: one message each.
    assert row.ttft_s == pytest.approx(4 * MESSAGE_S + prefill_s(1500))
    assert (row.path, row.tokens, row.outcome) == (Path.REMOTE, 101, "served")
    transfer_s = 3 * BLOCK_BYTES / LINK.bytes_per_s + LINK.latency_s
    assert row.transfer_s == pytest.approx(transfer_s)
    assert row.transfer_bytes == 3 * BLOCK_BYTES
    # The second token waits for the KV, which takes longer than Admit; then each step has a context one longer.
    assert row.tpot_s == pytest.approx((transfer_s + decode_s(1500, 100)) / 100)
    assert row.ended_s == pytest.approx(1.0 + row.ttft_s + transfer_s + decode_s(1500, 100))


@pytest.mark.parametrize("report_s", [0.0, 0.003, 0.25])
def test_one_local_request_takes_a_prefill_and_its_steps(report_s: float) -> None:
    _, [row] = run([asked(0.0, 1500, 101)], cluster(0, policy="colocated", report_s=report_s))
    assert row.ttft_s == pytest.approx(2 * MESSAGE_S + prefill_s(1500))
    assert row.tpot_s == pytest.approx(decode_s(1500, 100) / 100)
    assert (row.path, row.tokens, row.attempts) == (Path.LOCAL, 101, 1)


def test_a_long_prompt_is_sent_while_it_is_prefilled() -> None:
    _, [row] = run([asked(0.0, 5000, 2)], cluster())
    assert row.ttft_s == pytest.approx(4 * MESSAGE_S + 2 * prefill_s(2048) + prefill_s(904))
    # 4 and 4 blocks are sent when the last two are computed. Bandwidth is the bottleneck from the first block on.
    moved_s = 10 * BLOCK_BYTES / LINK.bytes_per_s + LINK.latency_s
    assert row.transfer_s == pytest.approx(moved_s)
    after_first_s = moved_s - prefill_s(2048) - prefill_s(904)
    assert row.tpot_s == pytest.approx(after_first_s + decode_s(5000, 1))


def test_an_answer_of_one_token_never_decodes() -> None:
    world, [row] = run([asked(0.0, 600, 1)], cluster())
    assert (row.outcome, row.tpot_s, row.tokens) == ("served", 0.0, 1)
    assert world.stations["d0"].tally.row.steps == 0


def test_concurrent_requests_share_steps() -> None:
    config = cluster(0, policy="colocated")
    _, [first, second] = run([asked(0.0, 1000, 50), asked(0.0, 1000, 50)], config)
    # The first prompt is prefilled alone. The second is prefilled in decode steps of the first.
    assert first.ttft_s == pytest.approx(2 * MESSAGE_S + prefill_s(1000))
    mixed_s = prefill_s(1000) + 1e-3 + 1e-6 * 1000
    assert second.ttft_s == pytest.approx(first.ttft_s + mixed_s)
    assert first.tpot_s == pytest.approx((mixed_s + decode_s(2001, 48, rows=2)) / 49)
    last_alone_s = decode_s(1048, 1)
    assert second.tpot_s == pytest.approx((decode_s(2001, 48, rows=2) + last_alone_s) / 49)


def test_a_slow_worker_multiplies_its_steps() -> None:
    config = cluster(0, policy="colocated")
    config = replace(config, workers=(replace(config.workers[0], slowness=3.0),))
    _, [row] = run([asked(0.0, 1500, 11)], config)
    assert row.ttft_s == pytest.approx(2 * MESSAGE_S + 3 * prefill_s(1500))
    assert row.tpot_s == pytest.approx(3 * decode_s(1500, 10) / 10)


def test_a_slow_fault_affects_only_steps_that_begin_in_it() -> None:
    begun_s = MESSAGE_S + prefill_s(1500)  # While it decodes.
    slow = WorkerFault(
        at_s=begun_s + decode_s(1500, 20) + 1e-3, worker_id="d0", kind=WorkerFaultKind.SLOW, for_s=0.2, factor=5.0
    )
    _, [row] = run([asked(0.0, 1500, 101)], cluster(0, policy="colocated", faults=(slow,)))
    # The 21st step is under way; the next four begin in the slow 0.2 s and last longer than 50 ms each.
    slow_s = decode_s(1521, 4) * 4
    assert row.tpot_s == pytest.approx((decode_s(1500, 100) + slow_s) / 100)


def test_a_stall_delays_later_events() -> None:
    begun_s = MESSAGE_S + prefill_s(1500)
    stall = WorkerFault(at_s=begun_s + decode_s(1500, 20) + 1e-3, worker_id="d0", kind=WorkerFaultKind.STALL, for_s=1.0)
    _, [row] = run([asked(0.0, 1500, 101)], cluster(0, policy="colocated", faults=(stall,)))
    rest_of_step_s = decode_s(1520, 1) - 1e-3
    assert row.tpot_s == pytest.approx((decode_s(1500, 100) + 1.0 - rest_of_step_s) / 100)


def test_a_known_prefix_is_prefilled_once() -> None:
    rows = [asked(0.0, 1500, 2, block_ids=(1, 2, 3)), asked(5.0, 1500, 2, block_ids=(1, 2, 4))]
    _, [first, second] = run(rows, cluster(), block_tokens=512)
    assert (first.cached_tokens, second.cached_tokens) == (0, 1024)
    assert second.ttft_s == pytest.approx(4 * MESSAGE_S + prefill_s(476))
    assert second.transfer_bytes == BLOCK_BYTES, "the decode worker has the other two as well"


def test_a_request_follows_the_end_of_another() -> None:
    rows = [
        asked(0.0, 1500, 100),
        asked(0.5, 1500, 2, follows=0, pause_s=0.5),
        asked(0.6, 1500, 2),
        asked(1.0, 1500, 2, follows=1, pause_s=0.25),
        asked(50.0, 1500, 2, follows=0),
    ]
    _, found = run(rows, cluster())
    by_number = {row.number: row for row in found}
    assert by_number[1].arrival_s == pytest.approx((by_number[0].ended_s or 0.0) + 0.5)
    assert by_number[3].arrival_s == pytest.approx((by_number[1].ended_s or 0.0) + 0.25)
    assert (by_number[2].arrival_s, by_number[4].arrival_s) == (0.6, 50.0)


@pytest.mark.parametrize(("ends_session", "num_routers", "cached"), [(False, 1, 0), (True, 1, 1024), (True, 2, 1024)])
def test_blocks_of_a_session_that_its_client_ends_leave_first(
    ends_session: bool, num_routers: int, cached: int
) -> None:
    """Each prompt leaves two full blocks in a pool of five, and the third needs three."""
    [worker] = cluster(0, 1).workers
    rows = [
        asked(0.0, 1500, 2, block_ids=(1, 2, 3), session="goes on"),
        asked(5.0, 1500, 2, block_ids=(4, 5, 6), session="ends", ends_session=ends_session),
        asked(9.0, 1500, 2, block_ids=(7, 8, 9)),
        asked(13.0, 1500, 2, block_ids=(1, 2, 10), session="goes on"),
    ]
    config = replace(cluster(0, 1), workers=(replace(worker, kv_capacity_tokens=5 * 512),), num_routers=num_routers)
    _, found = run(rows, config, block_tokens=512)
    assert [one.cached_tokens for one in found] == [0, 0, 0, cached]


def test_a_host_tier_is_used_if_it_is_sooner() -> None:
    [worker] = cluster(0, 1).workers
    rows = [
        asked(0.0, 1500, 2, block_ids=(1, 2, 3)),
        asked(5.0, 1500, 2, block_ids=(4, 5, 6)),
        asked(10.0, 1500, 2, block_ids=(1, 2, 7)),
    ]

    def third(host_bytes: int, bytes_per_s: float) -> RequestRow:
        small = replace(worker, kv_capacity_tokens=2048, host_bytes=host_bytes, host_bytes_per_s=bytes_per_s)
        return run(rows, cluster(0, 1, workers=(small,)), block_tokens=512)[1][2]

    without, fast, slow = third(0, 1e10), third(8 * BLOCK_BYTES, 1e10), third(8 * BLOCK_BYTES, 5e8)
    assert (without.cached_tokens, fast.cached_tokens, slow.cached_tokens) == (512, 1024, 512)
    without_s, fast_s, slow_s = (one.ttft_s or 0.0 for one in (without, fast, slow))
    assert 0.0 < fast_s < without_s - 0.03, "51 ms less to compute, and 7 ms for each copy"
    assert slow_s == pytest.approx(without_s), "a tier whose copies take longer than computing is off"


def test_concurrent_transfers_share_bandwidth() -> None:
    _, rows = run([asked(0.0, 1024, 2), asked(0.0, 1024, 2)], cluster(2))
    assert {row.prefill_worker for row in rows} == {"p0", "p1"}
    for row in rows:
        assert row.transfer_s == pytest.approx(4 * BLOCK_BYTES / LINK.bytes_per_s + LINK.latency_s)


def test_a_pairs_latency_is_the_longer_one() -> None:
    config = cluster()
    far = replace(config.workers[1], link=NetworkLink(latency_s=0.05, bytes_per_s=2e9))
    _, [row] = run([asked(0.0, 1024, 2)], replace(config, workers=(config.workers[0], far)))
    assert row.transfer_s == pytest.approx(2 * BLOCK_BYTES / 1e9 + 0.05)


def test_held_and_stranded_memory_is_counted() -> None:
    world, [row] = run([asked(0.0, 1500, 101)], cluster())
    sender, receiver = world.stations["p0"].tally.finish(), world.stations["d0"].tally.finish()
    # Three blocks: from the start of the prefill until the receiver's message is back.
    held_s = prefill_s(1500) + row.transfer_s + LINK.latency_s
    assert sender.kv_token_s == pytest.approx(3 * 512 * held_s)
    assert (sender.busy_s, sender.prefill_tokens) == (pytest.approx(prefill_s(1500)), 1500)
    # On the decode worker, from the grant on, and stranded until the first byte comes. A fourth block has later tokens.
    waits_s = 2 * MESSAGE_S + prefill_s(1500)
    whole_s = waits_s + row.transfer_s + decode_s(1500, 100)
    fourth_s = decode_s(1536, 64)
    assert receiver.stranded_token_s == pytest.approx(3 * 512 * waits_s)
    assert receiver.kv_token_s == pytest.approx(512 * (3 * whole_s + fourth_s))
    assert (receiver.steps, receiver.decode_tokens, receiver.mean_rows) == (100, 100, 1.0)


def test_true_costs_time_a_worker_with_a_wrong_model() -> None:
    wrong = replace(COST, prefill_per_token_s=1e-6)
    config = cluster()
    shapes = tuple(replace(one, prior=wrong) for one in config.workers)
    _, [row] = run([asked(0.0, 1500, 2)], replace(config, workers=shapes))
    assert row.ttft_s == pytest.approx(4 * MESSAGE_S + prefill_s(1500))
    assert row.predicted_ttft_s is not None
    assert row.predicted_ttft_s < 0.5 * row.ttft_s


def test_without_prefill_workers_everything_is_local() -> None:
    shape = WorkerShape(worker_id="d0", role=Role.DECODE, cost=COST)
    _, rows = run([asked(0.1 * i, 700, 9) for i in range(20)], replace(cluster(), workers=(shape,)))
    assert {row.path for row in rows} == {Path.LOCAL}
    assert {row.outcome for row in rows} == {"served"}


def test_the_deadline_of_a_task_sets_the_targets_of_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second turn extends the prompt of the first. The third prompt is of no task, and the last comes too late."""
    monkeypatch.setattr("router.state.conversations.LEAST_SEEN", 0.0)
    rows = [
        asked(0.0, 1024, 10, max_tokens=10, block_ids=(9, 10)),
        asked(1.0, 1024, 10, max_tokens=10, block_ids=(1, 2), slo_task_s=1000.0),
        asked(80.0, 1536, 10, max_tokens=10, block_ids=(1, 2, 3)),
        asked(80.0, 1024, 10, max_tokens=10, block_ids=(7, 8)),
        asked(1002.0, 2048, 10, max_tokens=10, block_ids=(1, 2, 3, 4)),
    ]
    _, found = run(rows, cluster(), block_tokens=512)
    assert [one.slo.ttft_s / EASY.ttft_s for one in found] == [1.0, 4.0, 4.0, 1.0, 1.0]
