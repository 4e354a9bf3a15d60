"""When a connection sends heartbeats, when its peer counts as lost, and which leases are possible."""

from __future__ import annotations

import pytest

from kvtransfer.protocol.lease import Heartbeat, Lease
from pdserve.core.durations import DAY_S
from pdserve.core.errors import ConfigError

LEASE = Lease(beat_s=1.0, silence_s=5.0)


def test_any_byte_ends_the_silence_of_a_peer() -> None:
    heartbeat = Heartbeat(LEASE, 10.0)
    assert [heartbeat.is_silent(now_s) for now_s in (10.0, 14.9, 15.0)] == [False, False, True]
    heartbeat.heard(14.0)
    assert [heartbeat.is_silent(now_s) for now_s in (18.9, 19.0)] == [False, True]


def test_a_heartbeat_is_due_once_per_interval() -> None:
    heartbeat = Heartbeat(LEASE, 10.0)
    assert [heartbeat.is_due(now_s) for now_s in (10.9, 11.0, 11.1, 11.9, 12.0)] == [False, True, False, False, True]


def test_the_next_check_is_the_earlier_of_both() -> None:
    heartbeat = Heartbeat(LEASE, 10.0)
    assert (heartbeat.left_s(10.0), heartbeat.left_s(10.75), heartbeat.left_s(12.0)) == (1.0, 0.25, 0.0)
    late = Heartbeat(Lease(beat_s=2.0, silence_s=4.0), 10.0)
    for now_s in (12.0, 13.5):
        late.is_due(now_s)
    assert late.left_s(13.5) == 0.5, "the peer's silence comes before the next beat at 14"
    late.heard(13.5)
    assert late.left_s(13.5) == 0.5


@pytest.mark.parametrize("name", Lease.__slots__)
@pytest.mark.parametrize("value", [0.0, -1.0, DAY_S + 1.0, float("nan")])
def test_an_invalid_duration_is_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError) as raised:
        Lease(**{name: value})
    assert raised.value.field == f"lease.{name}"


def test_a_peer_may_miss_one_beat() -> None:
    assert Lease(beat_s=2.5, silence_s=5.0, grace_s=DAY_S).grace_s == DAY_S
    with pytest.raises(ConfigError) as raised:
        Lease(beat_s=2.5, silence_s=4.9)
    assert (raised.value.field, raised.value.expected) == ("lease.silence_s", "at least 5.0, two beats")
