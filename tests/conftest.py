"""Settings of all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).parent
#: Folders with files that take half a minute: they go first, or one process would be left alone with one at the end.
FIRST = ("cluster", "unit/worker", "unit/launch", "unit/engine", "unit/kvtransfer")

# A busy machine may be many times slower than a quiet one: no example fails because it took long.
settings.register_profile("pdserve", deadline=None)
if settings.get_current_profile_name() == "default":
    settings.load_profile("pdserve")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _place(item.path.relative_to(ROOT).as_posix()))  # stable


def _place(path: str) -> int:
    return next((place for place, folder in enumerate(FIRST) if path.startswith(f"{folder}/")), len(FIRST))
