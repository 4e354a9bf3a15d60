"""The line before one prefill worker: order of joining, and sums that policies read."""

from __future__ import annotations

from router.line import Line


def test_a_line_keeps_the_order_of_joining_and_the_sums_of_who_is_left() -> None:
    line = Line()
    line.join("a", 100, 0.1)
    line.join("b", 20, 0.02)
    line.join("c", 3, 0.003)
    assert line.leave("b")
    line.check()
    assert (list(line), line.first(), len(line)) == (["a", "c"], "a", 2)
    assert line.uncached_tokens == 103
    assert "b" not in line
    assert not line.leave("b"), "it left before"


def test_an_empty_line_has_no_rounding_left() -> None:
    line = Line()
    for number in range(10):
        line.join(f"r{number}", 1, 0.1)
    for number in range(10):
        line.leave(f"r{number}")
    assert (line.prefill_s, line.uncached_tokens, line.first()) == (0.0, 0, None)


def test_clearing_tells_who_waited() -> None:
    line = Line()
    line.join("b", 1, 0.1)
    line.join("a", 1, 0.1)
    assert line.clear() == ["b", "a"]
    assert len(line) == 0
    line.check()
