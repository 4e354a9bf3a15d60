import random

import pytest

from pdserve.core.results import Timings
from pdserve.core.types import Slo
from pdserve.telemetry.trace_context import is_in_share, is_notable

SLO = Slo(ttft_s=1.0, tpot_s=0.1)


def timings(ttft_s: float = 0.5, tpot_s: float = 0.05, total_s: float = 2.0, attempts: int = 1) -> Timings:
    return Timings(ttft_s=ttft_s, tpot_s=tpot_s, total_s=total_s, attempts=attempts)


@pytest.mark.parametrize(
    ("ended", "is_kept"),
    [
        (timings(), False),
        (timings(ttft_s=1.5), True),
        (timings(tpot_s=0.2), True),
        (timings(attempts=2), True),  # a failure that the client did not see
        (timings(ttft_s=0.0, tpot_s=0.0, total_s=0.5), False),  # the client left before its first token
        (timings(ttft_s=0.0, tpot_s=0.0, total_s=1.5), True),  # and had waited too long
    ],
)
def test_slow_and_retried_requests_are_notable(ended: Timings, is_kept: bool) -> None:
    assert is_notable(ended, SLO) is is_kept


def test_the_share_is_chosen_by_trace_id() -> None:
    rng = random.Random(1)
    ids = [rng.getrandbits(128) for _ in range(4000)]
    assert all(is_in_share(one, 1.0) for one in ids)
    assert not any(is_in_share(one, 0.0) for one in ids)
    assert 0.22 < sum(is_in_share(one, 0.25) for one in ids) / len(ids) < 0.28
    assert all(is_in_share(one, 0.5) for one in ids if is_in_share(one, 0.25))
