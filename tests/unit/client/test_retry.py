from __future__ import annotations

import pytest

from pdserve.client.retries import Retries
from pdserve.core.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    NoWorkers,
    Overloaded,
    PdserveError,
    Unavailable,
)

GONE = Unavailable("gone")


def test_waits_grow_from_half_a_second_and_are_jittered() -> None:
    retries = Retries(limit=9)
    assert [retries.delay_s(GONE, tries, 600.0, noise=1.0) for tries in (1, 2, 3, 6)] == [0.5, 1.0, 2.0, 8.0]
    assert retries.delay_s(GONE, 1, 600.0, noise=0.0) == 0.25


def test_the_default_is_two_retries() -> None:
    assert [Retries().delay_s(GONE, tries, 600.0, 0.5) is None for tries in (1, 2, 3)] == [False, False, True]


def test_the_wait_is_at_least_the_servers_retry_time() -> None:
    assert Retries().delay_s(Overloaded("full", 3.0), 1, 600.0, noise=0.0) == 3.0
    assert Retries().delay_s(Overloaded("full", 4.0), 1, 600.0, noise=1.0) == 5.0


def test_a_retry_time_beyond_the_limit_is_not_waited_for() -> None:
    assert Retries(longest_wait_s=30.0).delay_s(Overloaded("full", 31.0), 1, 600.0, 0.0) is None


def test_a_wait_longer_than_the_timeout_is_not_begun() -> None:
    assert Retries().delay_s(Overloaded("full", 3.0), 1, remaining_s=2.9, noise=0.0) is None


@pytest.mark.parametrize("error", [InvalidRequest("top_p", 2, "less"), DeadlineExceeded("queued"), PdserveError("?")])
def test_a_permanent_error_is_not_retried(error: PdserveError) -> None:
    assert Retries().delay_s(error, 1, 600.0, 0.0) is None


def test_a_missing_role_is_retried() -> None:
    assert Retries().delay_s(NoWorkers("decode"), 1, 600.0, 0.0) == 1.0


@pytest.mark.parametrize("asked_s", [-1.0, -1e300])
def test_a_past_retry_time_is_ignored(asked_s: float) -> None:
    assert Retries().delay_s(Overloaded("full", asked_s), 1, 600.0, noise=1.0) == 0.5


def test_the_wait_is_bounded() -> None:
    assert Retries(limit=1000).delay_s(GONE, 1000, 600.0, noise=1.0) == 8.0


@pytest.mark.parametrize("name", ["first_backoff_s", "longest_backoff_s", "longest_wait_s"])
@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_waits_outside_their_bounds_are_named(name: str, seconds: float) -> None:
    with pytest.raises(ConfigError, match=f"retries.{name}: got .*, expected between 0 and 86400 seconds"):
        Retries(**{name: seconds})


@pytest.mark.parametrize("limit", [-1, 1001])
def test_a_number_of_retries_is_bounded(limit: int) -> None:
    with pytest.raises(ConfigError, match=r"retries\.limit: got -?\d+, expected between 0 and 1000"):
        Retries(limit=limit)
