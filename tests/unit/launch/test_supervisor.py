"""What the launcher says of a process that starts slowly."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.launch import supervisor


def test_the_first_start_is_named_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "first start on a machine" in supervisor.slow_start(is_worker=True)
    supervisor._note_first_start()
    assert supervisor.slow_start(is_worker=True) == "still loading"
    assert supervisor.slow_start(is_worker=False) == "still starting"
