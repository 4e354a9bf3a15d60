"""The measurements of `doctor` between two processes: each transport has a result or a reason."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from kvtransfer import pair_probe
from kvtransfer.pair_probe import AUTO, ProbeResult, probe


@pytest.fixture(autouse=True)
def one_child(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[pair_probe._Child]]:
    """The receiving processes that were started; all of them have ended."""
    made: list[pair_probe._Child] = []
    begin = pair_probe._Child.__init__

    def init(self: pair_probe._Child, device: str) -> None:
        begin(self, device)
        made.append(self)

    monkeypatch.setattr(pair_probe._Child, "__init__", init)
    yield made
    assert all(child._process.poll() is not None for child in made)


def test_each_transport_has_a_result_or_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_probe, "SINGLE_TRIES", 2)
    monkeypatch.setattr(pair_probe, "TRIES", 1)
    found = {one.asked: one for one in probe()}
    assert {"shm", "tcp", "nixl", AUTO} <= set(found)
    assert all(bool(one.error) != (one.block_s > 0.0 and one.bytes_per_s > 0.0) for one in found.values())
    assert (found["tcp"].transport, found["tcp"].error) == ("tcp", "")
    assert (found[AUTO].transport, found[AUTO].reason) == ("shm", "the sender's first choice")


def test_a_dead_receiving_process_is_reported(one_child: list[pair_probe._Child]) -> None:
    """Each remaining transport has the error, and nothing hangs."""
    found: list[ProbeResult] = []
    for one in probe():
        found.append(one)
        os.kill(one_child[0]._process.pid, signal.SIGKILL)
    assert found[0].error == ""
    assert all(one.error for one in found[1:])
    assert "has ended, or was too slow (60 s)" in found[-1].error
