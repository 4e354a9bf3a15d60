"""The transfer benchmark itself: it moves the bytes that it reports, names missing peers, and checks its bars."""

from __future__ import annotations

import pytest

from benchmarks.transfer.__main__ import BARS, Rounds, measure, plain, table
from benchmarks.transfer.ways import Ways

pytest.importorskip("numba")


def test_every_way_moves_the_bytes_and_a_missing_peer_is_named() -> None:
    said: list[str] = []
    ways = Ways(2**18, 2**14, "")
    try:
        rounds = measure(ways, 2**18, [1, 4], 2, said.append)
    finally:
        ways.close()
    assert {len(took) for took in rounds.seconds.values()} == {2}
    assert ("shm", True, 4) in rounds.seconds
    assert said[-1] == "0.25 MiB: round 4 of 4"
    text = table([rounds], ways.missing)
    assert "| nixl | missing: no --nixl-python was given |" in text
    assert "not judged: nixl is missing" in text


def test_a_bar_is_judged_by_the_median_of_the_rounds_ratios() -> None:
    seconds = {bar.way: [1.0, 1.0, 1.0] for bar in BARS}
    seconds |= {bar.against: [1.0, 1.0, 1.0] for bar in BARS}
    seconds[plain("shm")], seconds[plain("memcpy")] = [1.0, 2.0, 1.0], [0.5, 4.0, 0.9]
    rounds = Rounds(10**9, seconds)
    assert rounds.ratio(plain("shm"), plain("memcpy"))[0] == 0.9
    assert rounds.rate(plain("memcpy")) == pytest.approx(1 / 0.9)
    assert "| shm, of one memcpy >= 0.8 | 0.90 (0.50..2.00) met |" in table([rounds], {})
    seconds[plain("memcpy")] = [0.5, 1.0, 0.7]
    assert "0.50 (0.50..0.70) missed" in table([rounds], {})
