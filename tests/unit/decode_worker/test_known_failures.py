"""Known failures of other systems in the tables of a decode worker. Each test names the report."""

from __future__ import annotations

from pdserve.core.attempt import FailureKind
from pdserve.core.effects import KvCommitted, ReceiveAborted, TransferCancelled, TransferLost
from pdserve.core.protocol import AttemptFailed, Refused, Released
from tests.unit.decode_worker.conftest import BLOCK_SIZE, Bench

PROMPT = list(range(1, 3 * BLOCK_SIZE + 2))


def test_blocks_of_a_cancelled_transfer_are_kept_until_its_end(bench: Bench) -> None:
    """sglang#24527, PR#35049: the pages of an aborted request were reused while a transfer still wrote to them."""
    bench.offer("old", PROMPT, is_local=False)
    granted = set(bench.grants[bench.key("old")].blocks)
    assert bench.scheduler.cancel(bench.key("old")) == [ReceiveAborted(key=bench.key("old"))]
    taken = bench.scheduler.blocks.allocate(bench.scheduler.blocks.num_available)
    assert taken is not None
    assert not granted & set(taken)
    bench.scheduler.blocks.release(taken)
    assert bench.scheduler.lost(bench.key("old"), "drained") == [
        TransferCancelled(key=bench.key("old")),
        Released(key=bench.key("old")),
    ]
    assert bench.scheduler.blocks.num_referenced == 0


def test_a_failed_transfer_leaves_no_cached_block(bench: Bench) -> None:
    """vllm#49250: the recompute after a failed load read blocks that had never been filled."""
    bench.offer("lost", PROMPT, is_local=False)
    bench.write("lost")  # All but the last bytes arrived, so the contents look right.
    effects = bench.scheduler.lost(bench.key("lost"), "checksum mismatch")
    assert effects == [
        TransferLost(key=bench.key("lost"), error="checksum mismatch"),
        Released(key=bench.key("lost")),
    ]
    bench.offer("again", PROMPT, is_local=False)
    assert bench.grants[bench.key("again")].num_cached_blocks == 0


def test_only_committed_blocks_are_found_by_the_next_prompt(bench: Bench) -> None:
    """sglang#23020: pages whose bytes had not arrived yet were shared, and the error spread."""
    bench.offer("first", PROMPT, is_local=False)
    bench.offer("early", PROMPT, is_local=False)
    assert bench.grants[bench.key("early")].num_cached_blocks == 0
    bench.write("first")
    assert isinstance(bench.receive("first")[0], KvCommitted)
    bench.offer("late", PROMPT, is_local=False)
    assert bench.grants[bench.key("late")].num_cached_blocks == 3


def test_ends_of_unknown_transfers_are_ignored(bench: Bench) -> None:
    """vllm#43226, #46240, PR#48821: a completion for a freed request was asserted on, and the engine died."""
    key = bench.key("gone")
    assert bench.receive("gone") == []
    assert bench.scheduler.lost(key, "late") == []
    bench.offer("gone", PROMPT, is_local=False)
    bench.scheduler.cancel(key)
    assert bench.receive("gone") == [
        TransferCancelled(key=key),
        Released(key=key),
    ]  # It was verified at the same time.
    assert bench.receive("gone") == []
    assert bench.scheduler.lost(key, "drained") == []
    assert bench.scheduler.blocks.num_referenced == 0


def test_a_second_end_of_a_transfer_is_ignored(bench: Bench) -> None:
    """vllm PR#48616: the completion signal was delivered twice."""
    bench.offer("one", PROMPT, is_local=False)
    first = bench.write("one")
    bench.receive("one")
    assert bench.receive("one") == []
    assert bench.scheduler.lost(bench.key("one"), "late") == []
    bench.admit("one", first)
    bench.run()
    assert len(bench.sampled["one"]) == 8


def test_an_unfilled_reservation_ends_at_its_deadline(bench: Bench) -> None:
    """vllm#46283: blocks of a load that the prefill side never finished were held for ever."""
    bench.offer("late", PROMPT, is_local=False, deadline_at_s=5.0)
    key = bench.key("late")
    effects = bench.scheduler.expire(5.0)
    assert [type(one) for one in effects] == [AttemptFailed, ReceiveAborted]
    assert isinstance(effects[0], AttemptFailed)
    assert effects[0].kind is FailureKind.DEADLINE
    assert bench.scheduler.lost(key, "drained") == [TransferCancelled(key=key), Released(key=key)]
    assert bench.scheduler.blocks.num_referenced == 0


def test_a_declined_reservation_holds_nothing(bench: Bench) -> None:
    """sglang#9266: entries of requests that failed early used the pool of requests up."""
    for turn in range(50):
        effects = bench.offer(f"huge{turn}", list(range(1, 40 * BLOCK_SIZE)), is_local=False)
        assert isinstance(effects[0], Refused)
    assert bench.scheduler.live() == []
    assert bench.scheduler.blocks.num_referenced == 0
