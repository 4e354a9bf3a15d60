"""Settings of all tests."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.launch.spec import waiting_env
from tests.support.examples import register_profiles

ROOT = Path(__file__).parent
#: Folders with files that take half a minute: they go first, or one process would be left alone with one at the end.
FIRST = ("cluster", "unit/worker", "unit/launch", "unit/engine", "unit/kvtransfer")

register_profiles()

#: Threads of an engine wait as those of a worker do. libgomp reads this when torch is imported, which is later.
os.environ |= waiting_env(os.environ)

#: What was imported and collected stays until the end: the garbage collector need not look at it again and again.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine", choices=("own", "vllm"), default="own", help="of the tests that use open_either")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _place(item.path.relative_to(ROOT).as_posix()))  # stable
    if config.getoption("--engine") != "own":
        others = [item for item in items if "open_either" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


@pytest.fixture
def new_threads() -> Callable[[], list[threading.Thread]]:
    """Lists the threads that began after this fixture. Clusters of other tests may run in this process."""
    former = set(threading.enumerate())
    return lambda: [one for one in threading.enumerate() if one not in former]


def _place(path: str) -> int:
    return next((place for place, folder in enumerate(FIRST) if path.startswith(f"{folder}/")), len(FIRST))
