"""Expected lengths of answers."""

from __future__ import annotations

import pytest

from router.state.fleet import FIRST_GUESS, OutputLengths


def test_without_answers_the_limit_caps_the_prior() -> None:
    lengths = OutputLengths()
    assert lengths.expected(4096) == FIRST_GUESS
    assert lengths.expected(16) == 16.0


def test_each_class_has_its_own_mean() -> None:
    lengths = OutputLengths()
    for _ in range(10):
        lengths.observe(1000, 300)
        lengths.observe(30, 20)
    assert lengths.expected(1000) == pytest.approx(300.0)
    assert lengths.expected(31) == pytest.approx(20.0)
    assert lengths.expected(100) == pytest.approx(100.0)  # The mean over all classes, limited by max_tokens.
    assert lengths.expected(100_000) == pytest.approx(160.0)


def test_received_tokens_reduce_the_expected_rest() -> None:
    lengths = OutputLengths()
    lengths.observe(1000, 300)
    assert lengths.expected(1000, answered=100) == pytest.approx(200.0)
    assert lengths.expected(1000, answered=400) == 1.0


def test_the_mean_follows_changing_traffic() -> None:
    lengths = OutputLengths()
    for _ in range(1000):
        lengths.observe(1000, 300)
    for _ in range(200):
        lengths.observe(1000, 30)
    assert lengths.expected(1000) == pytest.approx(30.0, rel=0.25)
