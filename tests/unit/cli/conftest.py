from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdserve.launch.running import Running


@pytest.fixture(scope="package")
def target() -> Iterator[str]:
    """A real cluster on the toy engine, for all tests of the command line."""
    with Running.start("--model", "toy", "--set", "worker.toy_step_s=0.001") as cluster:
        yield cluster.target
