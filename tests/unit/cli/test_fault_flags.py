"""Flags that inject worker faults."""

from __future__ import annotations

import argparse
import math

import pytest

from pdserve.core.errors import ConfigError
from simulator.commands.flags import add_fault_flags, faults
from simulator.model import WorkerFault, WorkerFaultKind


def parsed(*flags: str) -> tuple[WorkerFault, ...]:
    parser = argparse.ArgumentParser()
    add_fault_flags(parser)
    return faults(parser.parse_args(flags), ["p0", "d0"])


def test_fault_flags_are_parsed() -> None:
    assert parsed("--kill", "d0@10:5", "--slow", "p0@2.5x3", "--stall", "d0@1:2", "--kill", "p0@20") == (
        WorkerFault(at_s=1.0, worker_id="d0", kind=WorkerFaultKind.STALL, for_s=2.0),
        WorkerFault(at_s=2.5, worker_id="p0", kind=WorkerFaultKind.SLOW, factor=3.0),
        WorkerFault(at_s=10.0, worker_id="d0", kind=WorkerFaultKind.DIE, for_s=5.0),
        WorkerFault(at_s=20.0, worker_id="p0", kind=WorkerFaultKind.DIE, for_s=math.inf),
    )


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--kill", "d0"),
        ("--kill", "@3"),
        ("--kill", "d0@3x2"),
        ("--kill", "d0@1.2.3"),
        ("--kill", "d0@-3"),
        ("--slow", "d0@3"),
        ("--slow", "d0@3x0"),
        ("--slow", "d0@3:."),
        ("--stall", "d0@3"),
        ("--stall", "d0@3:0"),
    ],
)
def test_an_invalid_fault_flag_shows_the_right_form(flag: str, text: str) -> None:
    with pytest.raises(ConfigError, match=r"WORKER@AT.*such as") as caught:
        parsed(flag, text)
    assert caught.value.field == flag


def test_an_unknown_worker_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="worker: got d7, expected one of p0, d0"):
        parsed("--kill", "d7@1")
