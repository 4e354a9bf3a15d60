"""The queue of one prefill worker: its order, and the sums that policies read."""

from __future__ import annotations

from router.state.load import WorkerQueue


def test_a_worker_queue_keeps_order_and_sums() -> None:
    line = WorkerQueue()
    line.join("a", 100, 0.1, (1, 0, 1))
    line.join("b", 20, 0.02, (1, 0, 2))
    line.join("c", 3, 0.003, (1, 0, 3))
    assert line.leave("b")
    line.check()
    assert (list(line), line.first(), len(line)) == (["a", "c"], ((1, 0, 1), "a"), 2)
    assert line.uncached_tokens == 103
    assert "b" not in line
    assert not line.leave("b"), "it left before"


def test_resumed_and_prioritised_requests_go_first() -> None:
    line = WorkerQueue()
    line.join("early", 1, 0.1, (1, 0, 1))
    line.join("high", 1, 0.1, (1, -5, 2))
    line.join("begun", 1, 0.1, (0, 0, 3))
    assert list(line) == ["begun", "high", "early"]
    line.check()


def test_an_empty_worker_queue_has_exact_sums() -> None:
    line = WorkerQueue()
    for number in range(10):
        line.join(f"r{number}", 1, 0.1, (1, 0, number))
    for number in range(10):
        line.leave(f"r{number}")
    assert (line.prefill_s, line.uncached_tokens, len(line)) == (0.0, 0, 0)
