"""The exposed part of a transfer: the closed forms, compared with a link that sends one part after the other."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.cost.latency import LinkModel
from pdserve.core.cost.overlap import chunked_exposed_s, exposed_s, grouped_s, hidden_share

LINK = LinkModel(latency_s=0.01, bandwidth_bytes_s=100.0)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([], 0.0),
        ([(1.0, 0.0)], 0.0),
        ([(1.0, 100.0)], 1.01),  # One part, which nothing can hide.
        ([(1.0, 50.0), (2.0, 50.0)], 0.51),  # The first part is sent before the second is ready.
        ([(1.0, 200.0), (2.0, 50.0)], 1.51),  # The link is slower than the computation.
        ([(0.0, 100.0), (5.0, 0.0)], 0.01),  # All parts were ready before.
    ],
)
def test_exposed_time_matches_a_simulated_link(parts: list[tuple[float, float]], expected: float) -> None:
    assert exposed_s(parts, LINK) == pytest.approx(expected)


@given(
    num_chunks=st.integers(1, 40),
    chunk_bytes=st.floats(1.0, 1e4),
    last_share=st.floats(0.01, 1.0),
    first_s=st.floats(0.001, 10.0),
    grows_s=st.floats(0.0, 2.0),
    last_s=st.floats(0.001, 100.0),
)
def test_equal_chunks_match_the_general_formula(
    num_chunks: int, chunk_bytes: float, last_share: float, first_s: float, grows_s: float, last_s: float
) -> None:
    steps = [first_s + index * grows_s for index in range(num_chunks - 1)] + [last_s]
    sizes = [chunk_bytes] * (num_chunks - 1) + [chunk_bytes * last_share]
    ready = list(accumulate(steps))
    expected = exposed_s(zip(ready, sizes, strict=True), LINK)
    seen = chunked_exposed_s(
        LINK,
        num_bytes=sum(sizes),
        chunk_bytes=chunk_bytes,
        last_bytes=sizes[-1],
        chunks_s=ready[-1] - ready[0],
        last_s=last_s,
    )
    assert seen == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(num_bytes=st.floats(1.0, 1e6), computing_s=st.floats(0.0, 100.0), groups=st.integers(1, 32))
def test_groups_of_layers_are_parts_of_equal_size_and_time(num_bytes: float, computing_s: float, groups: int) -> None:
    parts = [(computing_s * (one + 1) / groups, num_bytes / groups) for one in range(groups)]
    expected = exposed_s(parts, LINK) - LINK.latency_s
    assert grouped_s(num_bytes, computing_s, groups, LINK.bandwidth_bytes_s) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("busy_s", "exposed_s", "expected"),
    [(2.0, 0.5, 0.75), (2.0, 0.0, 1.0), (2.0, 2.0, 0.0), (2.0, 3.0, 0.0), (0.0, 1.0, 0.0)],
)
def test_the_hidden_share_is_relative_to_busy_time(busy_s: float, exposed_s: float, expected: float) -> None:
    assert hidden_share(busy_s, exposed_s) == expected
