"""The durations that a decode worker reports add up to the time of the attempt on the worker."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.core.protocol import TokenRow
from tests.unit.decode_worker.test_scheduler import PROMPT


def reported(effects: list[Any], name: str) -> dict[str, float]:
    rows = [one for one in effects if isinstance(one, TokenRow) and one.key.request_id == name]
    fields = ("queue_s", "prefill_s", "decode_queue_s", "decode_s", "preempted_s")
    return {field: sum(getattr(row, field) for row in rows) for field in fields}


def test_a_remote_attempts_wait_starts_when_it_is_complete(bench: Any) -> None:
    bench.offer("busy", PROMPT, max_tokens=20)
    for _ in range(4):
        bench.step()
    first = bench.reserve_and_write("a", [7, 8, 9])
    ready_s = bench.now_s - 0.25  # Both arrived during the last step.
    bench.scheduler.received(bench.key("a"), transfer_s=0.5, busy_s=0.25, num_bytes=64, now_s=ready_s - 0.5)
    bench.scheduler.admit(bench.key("a"), first, ready_s)
    begin_s = bench.now_s
    effects = []
    while "a" not in {one.key.request_id for one in effects if isinstance(one, TokenRow) and one.finish}:
        effects += bench.step()
    assert reported(effects, "a") == {
        "queue_s": 0.0,
        "prefill_s": 0.0,
        "decode_queue_s": 0.25,
        "decode_s": bench.now_s - begin_s,
        "preempted_s": 0.0,
    }


def test_the_wait_is_reported_with_the_first_row(bench: Any) -> None:
    first = bench.reserve_and_write("a", PROMPT)
    bench.receive("a")
    bench.scheduler.admit(bench.key("a"), first, bench.now_s)
    rows = [one for one in bench.run() if isinstance(one, TokenRow)]
    assert [row.decode_s for row in rows[:-1]] == [0.0] * (len(rows) - 1)
    assert rows[-1].decode_s == len(rows)


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("is_async", [False, True])
def test_decoding_and_preemptions_add_up(make_bench: Any, is_local: bool, is_async: bool) -> None:
    bench = make_bench(num_blocks=9)
    bench.is_async = is_async
    for number, name in enumerate("abc"):
        prompt = [number + 11, number + 12, number + 13]
        if is_local:
            bench.offer(name, prompt, max_tokens=20)
        else:
            first = bench.reserve_and_write(name, prompt, max_tokens=20)
            bench.receive(name)
            bench.scheduler.admit(bench.key(name), first, bench.now_s)
    begin_s, ends_s, effects = bench.now_s, {}, []
    while bench.scheduler.has_work or bench.flight is not None:
        new = bench.step()
        effects += new
        ends_s.update({one.key.request_id: bench.now_s for one in new if isinstance(one, TokenRow)})
    assert bench.scheduler.num_preemptions > 0
    assert any(reported(effects, name)["preempted_s"] > 0.0 for name in "abc")
    for name in "abc":
        assert sum(reported(effects, name).values()) == pytest.approx(ends_s[name] - begin_s), name
