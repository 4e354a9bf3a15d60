"""The end of an answer on the wire: the SDK reads the values that the router wrote."""

from __future__ import annotations

import dataclasses

import pytest

from pdserve.core.results import Phases, Timings, Usage
from pdserve.core.types import Path
from pdserve.v1 import inference_pb2
from pdserve.wire.protocol import TIMINGS, USAGE

PHASES = Phases(**{one.name: 0.25 * number for number, one in enumerate(dataclasses.fields(Phases), 1)})
DAYS_S = 3 * 86_400.0


@pytest.mark.parametrize("path", [*Path, None])
def test_timings_survive_the_wire(path: Path | None) -> None:
    timings = Timings(
        ttft_s=0.5,
        tpot_s=0.125,
        total_s=DAYS_S,
        phases=PHASES,
        transfer_s=1.0,
        transfer_busy_s=0.75,
        transfer_exposed_s=0.25,
        path=path,
        prefill_worker="p0",
        decode_worker="d0",
        attempts=2,
        transfer_bytes=2**40,
        transfer_saved_bytes=2**33,
        preemptions=3,
    )
    data = TIMINGS.encode(timings).SerializeToString()
    assert TIMINGS.decode(inference_pb2.Timings.FromString(data)) == timings


def test_an_unknown_path_is_none() -> None:
    message = inference_pb2.Timings(ttft_s=1.0, total_s=2.0)
    message.path = 99  # type: ignore[assignment]
    assert TIMINGS.decode(message) == Timings(ttft_s=1.0, tpot_s=0.0, total_s=2.0)


def test_usage_survives_the_wire() -> None:
    usage = Usage(prompt_tokens=7, completion_tokens=3, cached_prompt_tokens=4)
    assert USAGE.decode(USAGE.encode(usage)) == usage
    assert usage.total_tokens == 10
