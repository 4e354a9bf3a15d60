"""What the launcher says of a process that starts slowly, and of a drain."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.launch import supervisor
from pdserve.launch.local import open_requests
from pdserve.launch.spec import ClusterSpec
from pdserve.launch.supervisor import drain_text


def test_the_drain_says_what_it_waits_for() -> None:
    rest = "at most 70 s; a second signal ends everything at once"
    assert drain_text(0, 70.2) == f"draining: 0 requests, {rest}"
    assert drain_text(1, 70.2) == f"draining: 1 request, {rest}"
    assert drain_text(None, 70.2) == f"draining: {rest}"


async def test_a_router_that_is_gone_has_no_count() -> None:
    assert await open_requests(ClusterSpec(model="toy", port=1)) is None


def test_the_first_start_is_named_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "first start on a machine" in supervisor.slow_start(is_worker=True)
    supervisor._note_first_start()
    assert supervisor.slow_start(is_worker=True) == "still loading"
    assert supervisor.slow_start(is_worker=False) == "still starting"
