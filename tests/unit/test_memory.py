"""What the test of a cluster's memory makes of its samples."""

from __future__ import annotations

import os
import threading

import pytest

from tests.cluster.memory import MemorySample, growing, rises, sample, slope


def series(
    private: list[int], descriptors: list[int] | None = None, threads: int = 3, every: int = 100
) -> list[MemorySample]:
    return [
        MemorySample(
            requests=number * every,
            private_bytes=size,
            resident_bytes=size,
            descriptors=10 if descriptors is None else descriptors[number],
            threads=threads,
            segments=0,
        )
        for number, size in enumerate(private)
    ]


def test_the_slope_of_a_line_is_exact() -> None:
    found = slope(series([1000 + 300 * 100 * number for number in range(9)]))
    assert found.bytes_per_request == pytest.approx(300.0)
    assert found.standard_error == pytest.approx(0.0, abs=1e-6)


def test_noise_widens_the_error() -> None:
    found = slope(series([5000, 7000, 5000, 7000, 5000, 7000, 5000, 7000]))
    assert abs(found.bytes_per_request) < 2 * found.standard_error


@pytest.mark.parametrize(
    ("descriptors", "rising"),
    [
        ([10, 10, 10, 10, 10, 10], ()),
        ([10, 14, 12, 10, 14, 11], ()),
        ([10, 11, 12, 13, 14, 15], ("descriptors",)),
    ],
)
def test_a_count_rises_if_it_never_falls_back(descriptors: list[int], rising: tuple[str, ...]) -> None:
    assert rises(series([0] * 6, descriptors)) == rising


def test_a_process_that_grows_by_300_bytes_per_request_is_named() -> None:
    flat, grown = series([10**6] * 9), series([10**6 + 30_000 * number for number in range(9)])
    assert growing({"router": grown, "d0": flat}) == ["router: 300 bytes per request"]
    more = series([10**6] * 6, [10, 11, 12, 13, 14, 15])
    assert growing({"router": flat, "p0": more}) == ["p0: descriptors"]


def test_a_process_is_measured_by_the_kernels_counts() -> None:
    before = sample(os.getpid(), 0)
    reader, writer = os.pipe()
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)
    thread.start()
    segment = os.memfd_create("test-segment")
    try:
        after = sample(os.getpid(), 1)
    finally:
        is_over.set()
        thread.join()
        for descriptor in (reader, writer, segment):
            os.close(descriptor)
    assert after.descriptors == before.descriptors + 3
    assert after.threads == before.threads + 1
    assert 0 < before.private_bytes <= before.resident_bytes
