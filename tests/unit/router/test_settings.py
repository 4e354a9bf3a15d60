"""Checks of settings, the error of each kind of failure, and the snapshot for operators."""

from __future__ import annotations

import pytest

from pdserve.core import errors
from pdserve.core.errors import ConfigError
from pdserve.core.types import Role
from router.state.interface import FailKind, FailRequest, Outcome, RouterSettings
from tests.unit.router.given import Given


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_queue", -1),
        ("max_attempts", 0),
        ("max_worker_deaths", 0),
        ("local_max_uncached_tokens", -1),
        ("explain_capacity", -1),
        ("worker_silence_s", -0.1),
        ("workers_grace_s", float("nan")),
    ],
)
def test_a_setting_out_of_range_is_rejected_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError) as raised:
        RouterSettings(**{field: value})  # type: ignore[arg-type]
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (FailKind.OVERLOADED, errors.Overloaded),
        (FailKind.NO_WORKERS, errors.NoWorkers),
        (FailKind.UNAVAILABLE, errors.Unavailable),
        (FailKind.DEADLINE, errors.DeadlineExceeded),
        (FailKind.INVALID, errors.InvalidRequest),
        (FailKind.TRANSFER, errors.TransferFailed),
        (FailKind.KV_LOST, errors.KvLost),
        (FailKind.INTERNAL, errors.InternalError),
    ],
)
def test_every_kind_of_failure_is_one_error_of_the_tree(kind: FailKind, error: type[errors.PdserveError]) -> None:
    failed = FailRequest(
        request_id="a", kind=kind, message="why", outcome=Outcome.FAILED, stage="queued", role="decode"
    )
    assert type(failed.to_error()) is error
    assert {one.value for one in FailKind} == {one.name.lower() for one in FailKind}


def test_the_snapshot_lists_workers_and_reservations(given: Given) -> None:
    given.decoding()
    given.lost("p0")
    topology = given.state.snapshot()
    assert (topology.queued, topology.running, topology.releasing) == (0, 1, 0)
    decode, prefill = topology.workers
    assert (decode.worker_id, decode.role, decode.is_connected, decode.is_usable) == ("d0", Role.DECODE, True, True)
    assert (decode.booked_requests, decode.booked_blocks) == (1, 7)
    assert (prefill.worker_id, prefill.is_connected, prefill.is_usable) == ("p0", False, False)
