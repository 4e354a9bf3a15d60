"""Reported transfer times: how long chunks took, and how much of that was not hidden by prefill."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.protocol.frames import tag_of
from kvtransfer.protocol.transfers import LinkBusyTime
from tests.unit.kvtransfer.harness import BLOCK_BYTES, Clock, Pair, wait_for


def busy(*chunks: tuple[float, float]) -> float:
    one = LinkBusyTime()
    for begin_s, end_s in chunks:
        one.begin(begin_s)
        one.end(end_s)
    return one.total_s


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([], 0.0),
        ([(1.0, 3.0)], 2.0),
        ([(1.0, 3.0), (3.5, 4.0)], 3.0),  # The sender's own pause, which is shorter than the chunk before it.
        ([(1.0, 3.0), (9.0, 10.0)], 3.0),  # The sender waited for more KV.
        ([(3.0, 1.0)], 0.0),  # The clock has gone back during the chunk,
        ([(1.0, 3.0), (2.0, 4.0)], 4.0),  # or after it.
    ],
)
def test_waits_for_kv_do_not_count_as_link_time(chunks: list[tuple[float, float]], expected: float) -> None:
    assert busy(*chunks) == pytest.approx(expected)


def test_chunks_at_once_count_once() -> None:
    one = LinkBusyTime()
    for at_s, call in ((0.0, one.begin), (1.0, one.begin), (2.0, one.end), (5.0, one.end)):
        call(at_s)
    assert one.total_s == 5.0


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=20))
def test_the_link_is_never_busy_for_longer_than_the_transfer_lasts(pairs: list[tuple[float, float]]) -> None:
    chunks, now_s = [], 0.0
    for pause_s, took_s in pairs:
        chunks.append((now_s + pause_s, now_s + pause_s + took_s))
        now_s += pause_s + took_s
    last_s = chunks[-1][1] - chunks[0][0] if chunks else 0.0
    assert sum(end - begin for begin, end in chunks) <= busy(*chunks) * (1 + 1e-9) + 1e-9
    assert busy(*chunks) <= last_s * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_kv_pushed_early_is_not_exposed(transport: str, make_pair: Callable[..., Pair], clock: Clock) -> None:
    rest_s = 30.0  # While the rest of the prompt is computed.
    pair = make_pair(transport, clock=clock)
    grant = pair.grant((5, 6, 7, 8))
    received, sent = pair.begin(grant)
    pair.sender.push(grant.key, [(0, 1), (1, 2), (2, 3)], False)
    [outbound] = pair.sender.plain._pairs.values()
    transferred = pair.receiver._table._open[tag_of(grant.key)].session.checked
    wait_for(lambda: pair.sender.stats.chunks > 0 and transferred.count == 3, "the first blocks")
    assert outbound._channel is not None
    wait_for(lambda: outbound._channel.unacknowledged_bytes == 0, "the network to say so")
    clock.added_s += rest_s
    pair.sender.push(grant.key, [(3, 4)], True)
    seen, done = received.wait(), sent.wait()
    assert done.early_bytes == 3 * BLOCK_BYTES
    assert done.num_bytes == seen.num_bytes == 4 * BLOCK_BYTES
    assert 0.0 < done.exposed_s < rest_s < seen.transfer_s, "only the last block was waited for"
    assert 0.0 < seen.busy_s < rest_s
    assert done.busy_s == pytest.approx(seen.busy_s, abs=1e-6), "the receiver's word, on the wire in microseconds"


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_kv_pushed_at_the_end_is_fully_exposed(transport: str, make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(transport)
    _, done = pair.move(pair.grant((5, 6, 7, 8)), (1, 2, 3, 4))
    assert done.early_bytes == 0
    assert done.exposed_s >= done.busy_s > 0.0
